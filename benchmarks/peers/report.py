"""Tables, JSON and plots of records (bench.py)."""

import json
import os
import platform
import sys
from pathlib import Path

from peers.bench import OWN
from peers.session import now

RESULTS = Path(__file__).resolve().parent.parent / "results"
LIMIT = "limit:"


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_bytes() -> int:
    """Of the last level; 32 MiB if the system does not say."""
    sizes = [32 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index3/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return sizes[-1]


def machine(versions: dict[str, str]) -> dict:
    return {
        "date": now(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "last_level_cache_bytes": cache_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        "versions": dict(sorted(versions.items())),
    }


def first(records: list[dict], **wanted: object) -> dict | None:
    """The first timed record with these values."""
    for record in records:
        if record["seconds"] is not None and all(record[key] == value for key, value in wanted.items()):
            return record
    return None


def value(record: dict) -> str:
    """Milliseconds, and times w4a8's time in the same run."""
    text = f"{record['seconds'] * 1e3:.4g}"
    if record["entry"] != OWN and record["own_seconds"]:
        text += f" ({record['seconds'] / record['own_seconds']:.2f}×)"
    return text


def tables(records: list[dict]) -> str:
    """A table per problem, group and number of threads: entries × rows, and what could not be measured."""
    lines: list[str] = []
    keys = dict.fromkeys((r["problem"], r["group"], r["threads"], r["copies"]) for r in records)
    for problem, group, threads, copies in keys:
        part = [
            r
            for r in records
            if (r["problem"], r["group"], r["threads"], r["copies"]) == (problem, group, threads, copies)
        ]
        rows = list(dict.fromkeys(r["m"] for r in part))
        source = "one copy of the weights" if copies == 1 else f"{copies} copies in turn"
        lines += ["", f"{problem}, group {group}, {threads} thread{'s' * (threads > 1)}, {source}"]
        lines += [
            "",
            "| ms (× w4a8) | " + " | ".join(f"M={m}" for m in rows) + " | error |",
            "|---|" + "---|" * (len(rows) + 1),
        ]
        notes = []
        for entry in dict.fromkeys(r["entry"] for r in part):
            found = [first(part, entry=entry, m=m) for m in rows]
            errors = [r["error"] for r in part if r["entry"] == entry and r["error"] is not None]
            notes += dict.fromkeys(f"{entry}: {r['note']}" for r in part if r["entry"] == entry and r["note"])
            if not any(found):
                continue
            cells = [value(r) if r else "–" for r in found]
            lines.append(f"| {entry} | " + " | ".join(cells) + f" | {f'{max(errors):.4f}' if errors else ''} |")
        lines += ["", *notes] if notes else []
    return "\n".join(lines)


class Collected:
    """The records of a run, printed as they come and saved each time: a run that is cut short has what it measured."""

    def __init__(self, name: str):
        self.path = RESULTS / f"{name}.json"
        self.records: list[dict] = []
        self.versions: dict[str, str] = {}

    def add(self, records: list[dict], versions: dict[str, str]) -> None:
        self.records += records
        self.versions.update(versions)
        print(tables(records), flush=True)
        self.save()

    def save(self, **more: object) -> Path:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps({**machine(self.versions), **more, "records": self.records}, indent=1))
        return self.path

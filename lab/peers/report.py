"""Records of runs (bench.py) as tables, JSON and Markdown."""

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from folders import LAB, RECORDS, RESULTS

from peers.bench import OWN
from peers.session import now

LIMIT = "limit:"
UNITS = """Milliseconds, in brackets times those of w4a8 in the same batch of processes. Of several batches w4a8 and
the limits are those of the first one. The last column is the largest error."""


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
        lines += ["", f"## {problem}, group {group}, {threads} thread{'s' * (threads > 1)}, {source}"]
        lines += [
            "",
            "| ms (× w4a8) | " + " | ".join(f"M={m}" for m in rows) + " | error |",
            "|---|" + "---|" * (len(rows) + 1),
        ]
        notes = []
        for entry in dict.fromkeys(r["entry"] for r in part):
            found = [first(part, entry=entry, m=m) for m in rows]
            errors = [r["error"] for r in part if r["entry"] == entry and r["error"] is not None]
            notes += dict.fromkeys(f"- {entry}: {r['note']}" for r in part if r["entry"] == entry and r["note"])
            if not any(found):
                continue
            cells = [value(r) if r else "–" for r in found]
            lines.append(f"| {entry} | " + " | ".join(cells) + f" | {f'{max(errors):.4f}' if errors else ''} |")
        lines += ["", *notes] if notes else []
    return "\n".join(lines)


def goals_table(found: list[dict]) -> str:
    """Markdown of what goals() and goal_line() of goals.py gave."""
    lines = ["", "| goal | group | threads | goal | reached | reached / goal | |", "|---|---|---|---|---|---|---|"]
    problem = None
    for line in found:
        if line["problem"] != problem:
            problem = line["problem"]
            lines.append(f"| **{problem}** | | | | | | |")
        ratio = line["reached"] / line["goal"]
        cells = [
            line["what"],
            line["group"],
            line["threads"],
            f"{line['goal']:.2f}",
            f"{line['reached']:.2f}",
            f"{ratio:.2f}",
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + f" | {'reached' if ratio >= 1 else 'missed'} |")
    if not found:
        return "\nNo goal is stated for what was measured."
    reached = sum(line["reached"] >= line["goal"] for line in found)
    return "\n".join([*lines, "", f"{reached} of {len(found)} reached"])


def heading(found: dict, title: str, target: str, anchor: str, folder: Path = RESULTS) -> list[str]:
    """The first lines of a document in `folder`. target: of make; anchor: of the section in lab/README.md."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    readme = os.path.relpath(LAB / "README.md", folder)
    written = f"Written by `make {target}` ([what rows and columns are]({readme}#{anchor}))"
    where = f"{found['date'][:10]}, {found['cpu']}, Python {found['python']}, {versions}"
    return [f"# {title}", "", f"{written}: {where}."]


def command_lines(found: dict) -> list[str]:
    return ["", "The command, and the number of cores:", "", f"    {found['command']}    # {found['cores']} cores"]


def goal_lines(found: dict) -> list[str]:
    """The goals, once a run has ended."""
    return ["", "## Goals", goals_table(found["goals"])] if "goals" in found else []


def document(found: dict) -> str:
    """Markdown of a run of bench_peers.py or bench_linear.py."""
    linear = {record["kind"] for record in found["records"]} == {"linear"}
    title = "Linear layers beside other libraries" if linear else "The fused operator beside other libraries"
    lines = heading(found, title, "bench-linear" if linear else "bench-peers", "other-libraries")
    lines += [*command_lines(found), "", UNITS]
    lines += [tables(found["records"]), *goal_lines(found)]
    for what, printed in found.get("programs", {}).items():
        lines += ["", f"## {what}", "", *(f"    {line}" for line in printed)]
    return "\n".join(lines) + "\n"


class Collected:
    """The records of a run, printed as they come and saved each time: a run that is cut short has what it measured.

    name: of the files, NAME.json in RECORDS and NAME.md in RESULTS; document: makes Markdown of what the first one has.
    """

    def __init__(self, name: str, document: Callable[[dict], str] = document):
        self.path = RESULTS / f"{name}.md"
        self.json = RECORDS / f"{name}.json"
        self.document = document
        self.records: list[dict] = []
        self.versions: dict[str, str] = {}

    def add(self, records: list[dict], versions: dict[str, str]) -> None:
        self.records += records
        self.versions.update(versions)
        print(tables(records), flush=True)
        self.save()

    def save(self, **more: object) -> Path:
        found = {**machine(self.versions), **more, "records": self.records}
        self.json.parent.mkdir(parents=True, exist_ok=True)
        self.json.write_text(json.dumps(found, indent=1))
        self.path.write_text(self.document(found))
        return self.path

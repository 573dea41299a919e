"""What a run reached of the goals in lab/goals.json.

A row of "moe" or "linear" has the numbers of rows it is for (m; without it every one that was measured), the goal (of
each group, or one for all) and what is compared: the share of a limit that w4a8 (or `entry`) reaches, how many times as
fast as a peer w4a8 is, or its time per token beside that with fewer tokens. With "amx" a row is for CPUs that have
AMX, or for those that do not. More is better in all of them.
"""

import json
from collections.abc import Callable, Iterator

from bench_vllm import has_amx
from folders import LAB

from peers.report import first

FIGURES = json.loads((LAB / "goals.json").read_text())
GROUPS = ("32", "128", "channel")
Line = tuple[str, str, float, float]  # what, where, goal, reached


def is_peer(record: dict) -> bool:
    return not record["entry"].startswith(("w4a8", "limit:"))


def has_weights(*kinds: str) -> Callable[[dict], bool]:
    return lambda record: is_peer(record) and record["weights"] in kinds


def is_entry(name: str) -> Callable[[dict], bool]:
    return lambda record: record["entry"] == name


PEERS: dict[str, Callable[[dict], bool]] = {
    "the fastest peer": is_peer,
    "the fastest int4 peer": has_weights("int4"),
    "the fastest peer with 4- or 16-bit weights": has_weights("int4", "bf16"),
    # 8-bit weights need no unpacking, and twice the memory: a line of their own.
    "the fastest peer with 8-bit weights": has_weights("int8"),
    "vLLM's int4": is_entry("vllm INT4_W4A8"),
    "vLLM's int8": is_entry("vllm INT8_W8A8"),
}
LIMITS: dict[str, Callable[[dict], float]] = {  # seconds that the limit alone takes
    "reading": lambda record: record["reading_seconds"],
    "the multiply peak": lambda record: record["multiply_seconds"],
    "the longer of reading and half of the multiply peak": lambda record: max(
        record["reading_seconds"], 2 * record["multiply_seconds"]
    ),
}


def share_of(records: list[dict], limit: str, m: int, entry: str) -> float | None:
    """The share of a limit that `entry` reaches with m rows; None if one of them was not measured."""
    record = first(records, entry=entry, m=m)
    if limit == "its multiply peak":  # an instruction of its own: an entry of its own
        peak = first(records, entry=f"limit: multiply {entry.removeprefix('w4a8 ')}", m=m)
        return peak["seconds"] / record["seconds"] if record and peak else None
    if not record or not record["reading_seconds"] or not record["multiply_seconds"]:
        return None
    return LIMITS[limit](record) / record["seconds"]


def fastest(records: list[dict], m: int, fits: Callable[[dict], bool]) -> tuple[float, str] | None:
    """How many times as long as w4a8 the fastest peer that fits takes, and its name."""
    found = [
        (record["seconds"] / record["own_seconds"], record["entry"])
        for record in records
        if record["m"] == m and record["seconds"] and record["own_seconds"] and fits(record)
    ]
    return min(found) if found else None


def reached(row: dict, records: list[dict], m: int, rows: str) -> tuple[str, float] | None:
    """What a row of goals.json compares, in words, and what was reached. rows: m and its unit."""
    if "share of" in row:
        entry = row.get("entry", "w4a8")
        share = share_of(records, row["share of"], m, entry)
        return None if share is None else (f"{entry}, {rows}, share of {row['share of']}", share)
    if "beside" in row:
        what = row["beside"]
        found = fastest(records, m, PEERS.get(what) or is_entry(what))
        named = f" ({found[1]})" if found and what in PEERS else ""
        return found and (f"{rows}, times as fast as {what}{named}", found[0])
    fewer = row["time per token beside"]
    many = first(records, entry="w4a8", m=m)
    few = many and first(records, entry="w4a8", m=fewer, copies=many["copies"])  # of the same run
    if not many or not few:
        return None
    return f"time per token, {fewer} tokens / {m}", few["seconds"] / fewer * m / many["seconds"]


def lines_of(kind: str, group: str, records: list[dict], place: str, amx: bool) -> Iterator[Line]:
    """place: where the weights of linear layers are, "cache" or "memory"; else empty."""
    where = f"{group}, weights in {place}" if place else group
    for row in FIGURES[kind]:
        goal = row["goal"].get(group) if isinstance(row["goal"], dict) else row["goal"]
        if goal is None or row.get("amx", amx) != amx or row.get("weights in", place) != place:
            continue
        for m in row.get("m") or dict.fromkeys(r["m"] for r in records):
            found = reached(row, records, m, f"M={m}" if kind == "linear" else f"{m} tokens")
            if found:
                yield found[0], where, goal, found[1]


def goal_line(problem: str, threads: int, line: Line) -> dict:
    what, where, goal, found = line
    return {"problem": problem, "threads": threads, "what": what, "group": where, "goal": goal, "reached": found}


def goals(records: list[dict], amx: bool | None = None) -> list[dict]:
    """The lines of every shape that was measured. amx: those of a CPU with AMX; default: whether this one has it."""
    amx = has_amx() if amx is None else amx
    parts: dict[tuple, list[dict]] = {}
    for record in records:
        place = ("cache" if record["copies"] == 1 else "memory") if record["kind"] == "linear" else ""
        key = (record["problem"], record["kind"], record["group"], record["threads"], place)
        parts.setdefault(key, []).append(record)
    return [
        goal_line(problem, threads, line)
        for (problem, kind, group, threads, place), part in parts.items()
        if group in GROUPS
        for line in lines_of(kind, group, part, place, amx)
    ]

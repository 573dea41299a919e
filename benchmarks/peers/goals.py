"""What this project wants to reach on a CPU with AVX-512 VNNI, or AMX, beside what a run reached of it."""

from collections.abc import Callable
from functools import partial

from peers import goals_amx
from peers.report import first

INT4_PEER, INT8_PEER = "vllm INT4_W4A8", "vllm INT8_W8A8"
AVX2 = "w4a8 x86_avx2"
Line = tuple[str, str, float, float]  # what, where, goal, reached: more is better in all of them


def of_reading(record: dict) -> float:
    return record["reading_seconds"] / record["seconds"]


def of_peak(record: dict) -> float:
    return record["multiply_seconds"] / record["seconds"]


class Run:
    """The records of one kind of problem, shape, group and number of threads."""

    def __init__(self, records: list[dict]):
        self.records = records

    def own(self, m: int, entry: str = "w4a8", **wanted: object) -> dict | None:
        return first(self.records, entry=entry, m=m, **wanted)

    def against(self, m: int, fits: Callable[[dict], bool]) -> tuple[float, str] | None:
        """How many times as long as w4a8 the fastest peer that fits takes, and its name."""
        found = [
            (record["seconds"] / record["own_seconds"], record["entry"])
            for record in self.records
            if record["m"] == m and record["seconds"] and record["own_seconds"] and fits(record)
        ]
        return min(found) if found else None


def is_peer(record: dict) -> bool:
    return not record["entry"].startswith(("w4a8", "limit:"))


def is_int4_peer(record: dict) -> bool:
    return is_peer(record) and record["weights"] == "int4"


def has_weights(kinds: tuple[str, ...], record: dict) -> bool:
    return is_peer(record) and record["weights"] in kinds


def is_entry(name: str, record: dict) -> bool:
    return record["entry"] == name


def moe_goals(run: Run, group: str, amx: bool) -> list[Line]:
    lines: list[Line] = []

    def limit(m: int, goal: float, share: Callable[[dict], float], what: str, entry: str = "w4a8") -> None:
        record = run.own(m, entry)
        if record and record["reading_seconds"] and record["multiply_seconds"]:
            lines.append((f"{entry}, {m} tokens, share of {what}", group, goal, share(record)))

    def beside(m: int, goal: float, fits: Callable[[dict], bool], what: str) -> None:
        found = run.against(m, fits)
        if found:
            lines.append((f"{m} tokens, times as fast as {what} ({found[1]})", group, goal, found[0]))

    decode = goals_amx.DECODE[group]
    limit(1, decode, of_reading, "reading")
    limit(1, decode, of_reading, "reading", AVX2)
    beside(1, 1.0, is_peer, "the fastest peer")
    if group == "32":
        beside(1, 1.4, partial(is_entry, INT4_PEER), "vLLM's int4")
        beside(16, 1.4, is_int4_peer, "the fastest int4 peer")
    limit(16, decode if amx else 0.92, of_reading, "reading")
    if amx:
        for m in (512, 2048):
            beside(m, goals_amx.FUSED_INT8[group], partial(is_entry, INT8_PEER), "vLLM's int8")
        beside(512, goals_amx.FUSED_INT4, partial(is_entry, INT4_PEER), "vLLM's int4")
        limit(512, goals_amx.LIMITS, goals_amx.of_limits, "the longer of reading and half of the multiply peak")
    else:
        for m, int4, int8 in ((128, 1.5, 1.25), (512, 1.5, 1.15)):
            if group != "channel" or m == 512:
                beside(m, int4, is_int4_peer, "the fastest int4 peer")
            beside(m, int8, partial(is_entry, INT8_PEER), "vLLM's int8")
        limit(512, {"channel": 0.85, "128": 0.82, "32": 0.74}[group], of_peak, "the multiply peak")
    many = run.own(8192)
    few = many and run.own(512, copies=many["copies"])  # of the same run
    if few and many:
        lines.append(("time per token, 512 tokens / 8192", group, 0.95, few["seconds"] * 16 / many["seconds"]))
    return lines


def amx_linear_goals(run: Run, group: str, where: str) -> list[Line]:
    wanted = [(m, goal, "vllm int4 W4A8") for m, goal in goals_amx.LINEAR_INT4.items() if group == "128"]
    wanted += [(m, goal, "vllm int8 W8A8") for m, goal in goals_amx.LINEAR_INT8.items() if group == "128"]
    wanted.append((512, goals_amx.LINEAR_BFLOAT16[group], "torch bf16 linear"))
    found = [(m, goal, run.against(m, partial(is_entry, name))) for m, goal, name in wanted]
    return [(f"M={m}, times as fast as {reached[1]}", where, goal, reached[0]) for m, goal, reached in found if reached]


def linear_goals(run: Run, group: str, amx: bool) -> list[Line]:
    lines: list[Line] = []
    for copies in dict.fromkeys(r["copies"] for r in run.records):
        where = f"{group}, weights in {'cache' if copies == 1 else 'memory'}"
        part = Run([r for r in run.records if r["copies"] == copies])
        if amx and copies == 1:
            lines += amx_linear_goals(part, group, where)
        for m in dict.fromkeys(r["m"] for r in part.records):
            # 8-bit weights need no unpacking, and twice the memory: a line of their own.
            for width, wanted in (("4- or 16-bit", ("int4", "bf16")), ("8-bit", ("int8",))):
                found = part.against(m, partial(has_weights, wanted))
                if found:
                    what = f"M={m}, times as fast as the fastest peer with {width} weights ({found[1]})"
                    lines.append((what, where, 1.0, found[0]))
        goal = {"channel": 0.95, "32": 0.80}.get(group)
        avx2, peak = part.own(128, AVX2), first(part.records, entry="limit: multiply x86_avx2", m=128)
        if goal and avx2 and peak:
            reached = peak["seconds"] / avx2["seconds"]
            lines.append((f"{AVX2}, M=128, share of its multiply peak", where, goal, reached))
    return lines


def goal_line(problem: str, threads: int, line: Line) -> dict:
    what, where, goal, reached = line
    return {"problem": problem, "threads": threads, "what": what, "group": where, "goal": goal, "reached": reached}


def goals(records: list[dict], amx: bool | None = None) -> list[dict]:
    """The lines of every shape that was measured. amx: those of a CPU with AMX; default: whether this one has it."""
    found = []
    amx = goals_amx.has_amx() if amx is None else amx
    keys = dict.fromkeys((r["problem"], r["kind"], r["group"], r["threads"]) for r in records)
    for problem, kind, group, threads in keys:
        key = (problem, kind, group, threads)
        run = Run([r for r in records if (r["problem"], r["kind"], r["group"], r["threads"]) == key])
        if group not in ("32", "128", "channel"):
            continue
        for line in (moe_goals if kind == "moe" else linear_goals)(run, group, amx):
            found.append(goal_line(problem, threads, line))
    return found


def goals_table(found: list[dict]) -> str:
    """Of what goals() and goal_line() gave."""
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

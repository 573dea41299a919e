"""Measures one problem with all entries: a record (a flat dictionary) per entry, number of rows and batch."""

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from peers import problem as problems
from peers.base import Entry
from peers.environments import FOLDER
from peers.limits import weight_bytes
from peers.problem import Problem
from peers.session import Session, batches

OWN, READING, MULTIPLY = "w4a8", "limit: reading", "limit: multiply"


@dataclass
class Plan:
    """How long and with what to measure."""

    rounds: int
    seconds: float  # of each entry in each round
    most_bytes: float  # of memory
    slowest: float = 8.0  # seconds a call may be expected to take


def measure(
    problem: Problem, entries: list[type[Entry]], rows: list[int], threads: int, plan: Plan
) -> tuple[list[dict], dict[str, str]]:
    """Returns the records, and versions of what was measured."""
    records: list[dict] = []
    versions: dict[str, str] = {}
    FOLDER.mkdir(parents=True, exist_ok=True)
    remove_left_over()
    folder = Path(tempfile.mkdtemp(prefix=f"data-{os.getpid()}-", dir=FOLDER))
    try:
        files = problems.write(problem, folder, rows)
        expected = {m: problems.reference(files, m) for m in rows}
        for batch in batches(entries, problems.weight_count(problem), problem.copies, plan.most_bytes):
            with Session(files, threads) as session:
                for entry in batch:
                    session.start(entry)
                too_slow: dict[str, str] = {}
                for m in rows:
                    records += measure_rows(session, batch, m, expected[m], plan, too_slow)
                versions.update(session.versions)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return records, versions


def remove_left_over() -> None:
    """The files of runs that were killed."""
    for folder in FOLDER.glob("data-*-*"):
        try:
            os.kill(int(folder.name.split("-")[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            pass  # it is alive, and another user's


def measure_rows(
    session: Session, batch: list[type[Entry]], m: int, expected: tuple, plan: Plan, too_slow: dict[str, str]
) -> list[dict]:
    problem = session.files.problem
    errors = session.inputs(m, expected, set(too_slow))
    wrong = {entry.name for entry in batch if entry.checked and not is_right(entry, errors.get(entry.name))}
    times = session.measure(plan.rounds, plan.seconds, wrong | set(too_slow))
    used = problems.experts_used(session.files, m) if problem.kind == "moe" else 1
    common = {
        "model": problem.model,
        "kind": problem.kind,
        "problem": problem.title,
        "group": problems.group_name(problem.group),
        "threads": session.threads,
        "m": m,
        "copies": problem.copies,
        "macs": problem.macs(m),
        "bytes": used * sum(weight_bytes(problem)),
        "own_seconds": middle(times.get(OWN)),
        "reading_seconds": middle(times.get(READING)),
        "multiply_seconds": middle(times.get(MULTIPLY)),
    }
    records = []
    for entry in batch:
        error, name = errors.get(entry.name), entry.name
        note = session.notes.get(name) or too_slow.get(name)
        if note is None and name in wrong:
            note = (
                "wrong result: not finite or of another shape" if error is None else f"wrong result: error {error:.3f}"
            )
        seconds = middle(times.get(name))
        record = {**common, "entry": name, "weights": entry.weights, "error": error, "note": note, "seconds": seconds}
        record["best"] = min(min(r) for r in times[name]) if seconds is not None else None
        record["round_seconds"] = [median(r) for r in times.get(name, [])]
        records.append(record)
        # The next number of rows is larger: what takes this long now would take minutes then.
        if seconds is not None and seconds * 4 > plan.slowest:
            too_slow[name] = f"not run: {seconds:.1f} s with {m} rows"
    print(progress(records), file=sys.stderr, flush=True)
    return records


def progress(records: list[dict]) -> str:
    """One line about what was just measured."""
    r = records[0]
    times = [f"{r['entry']} {r['seconds'] * 1e3:.3g}" for r in records if r["seconds"] is not None]
    return f"{r['problem']}, group {r['group']}, {r['threads']} threads, M={r['m']}, ms: {', '.join(times)}"


def middle(rounds: list[list[float]] | None) -> float | None:
    """The median of the rounds' medians."""
    return median(median(r) for r in rounds) if rounds else None


def is_right(entry: type[Entry], error: float | None) -> bool:
    return error is not None and error <= entry.most_error

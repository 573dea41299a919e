"""Entries in processes of their own, of which one runs at a time: all others are stopped (SIGSTOP), so that no pool of
threads that spins disturbs another's time."""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from folders import LAB

from peers.base import Entry
from peers.environments import FOLDER, Unavailable, python_of
from peers.problem import Files


class Failed(Exception):
    """The process ended, took too long, or reported an error."""


class Worker:
    def __init__(self, entry: type[Entry], folder: Path, threads: int, patience: float = 600):
        self.entry = entry
        self.patience = patience
        python = python_of(entry.environment)
        log = FOLDER / "log" / f"{entry.__module__.split('.')[-1]}-{entry.__name__}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(LAB), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            **entry.environment.variables,
        }
        command = [python, "-m", "peers.worker", entry.__module__, entry.__name__, str(folder), str(threads)]
        with open(log, "w") as errors:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, env=variables, cwd=FOLDER, start_new_session=True
            )
        try:
            self.versions = self.wait()["versions"]
        except Failed:
            self.close()
            raise

    def ask(self, **command: object) -> dict:
        """Lets the process run for one command."""
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write((json.dumps(command) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self.ending()) from None
        return self.wait()

    def wait(self) -> dict:
        ready, _, _ = select.select([self.process.stdout], [], [], self.patience)
        if not ready:
            self.close()
            raise Failed(f"no answer within {self.patience:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise Failed(self.ending())
        self.signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def ending(self) -> str:
        code = self.process.wait()
        return f"its process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"

    def signal(self, number: signal.Signals) -> None:
        """To the process and those that it started: vLLM computes in one of these."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)  # ends stopped processes too
        self.process.wait()


class Session:
    """A problem, and the workers that are up for it."""

    def __init__(self, files: Files, threads: int):
        self.files = files
        self.threads = threads
        self.workers: list[Worker] = []
        self.notes: dict[str, str] = {}  # entry -> why it is not (or no longer) here
        self.versions: dict[str, str] = {}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *unused: object) -> None:
        for worker in self.workers:
            worker.close()

    def start(self, entry: type[Entry]) -> None:
        reason = entry.refuse(self.files.problem)
        if reason is None and self.threads > entry.most_threads:
            reason = f"{entry.most_threads} thread only"
        if reason is None:
            try:
                self.workers.append(Worker(entry, self.files.folder, self.threads))
                self.versions.update(self.workers[-1].versions)
                return
            except (Failed, Unavailable) as error:
                reason = str(error)
        self.notes[entry.name] = reason

    def drop(self, worker: Worker, reason: str) -> None:
        self.notes[worker.entry.name] = reason
        worker.close()
        self.workers.remove(worker)

    def inputs(self, m: int, expected: tuple[np.ndarray, np.ndarray], skip: set[str]) -> dict[str, float | None]:
        """Gives all workers the inputs of m rows and checks their outputs. Returns the relative errors."""
        errors: dict[str, float | None] = {}
        for worker in list(self.workers):
            if worker.entry.name in skip:
                continue
            try:
                worker.ask(do="inputs", m=m)
                if worker.entry.checked:
                    errors[worker.entry.name] = self.error(worker, expected)
            except Failed as failure:
                self.drop(worker, str(failure))
        return errors

    def error(self, worker: Worker, expected: tuple[np.ndarray, np.ndarray]) -> float | None:
        from peers.problem import relative_error

        rows, outputs = expected
        with tempfile.TemporaryDirectory(dir=self.files.folder) as folder:
            path = str(Path(folder) / "output.npy")
            worker.ask(do="output", path=path)
            result = np.load(path)
        if result.ndim != 2 or len(result) <= rows[-1]:
            return None
        return relative_error(result[rows], outputs)

    def measure(self, rounds: int, seconds: float, skip: set[str]) -> dict[str, list[list[float]]]:
        """Times of all workers, taking turns: `rounds` rounds, in each of which a worker repeats its call for about
        `seconds`. Returns the times of each worker's rounds."""
        times: dict[str, list[list[float]]] = {}
        plan = {}
        for worker in list(self.workers):
            if worker.entry.name in skip:
                continue
            try:
                first = min(worker.ask(do="run", calls=2)["seconds"])
            except Failed as failure:
                self.drop(worker, str(failure))
                continue
            # A call that takes many times its share is not repeated in all rounds.
            repeats = 1 if first > 20 * seconds else rounds
            least = 3 if first < 2 * seconds else 1
            plan[worker] = (worker.entry.calls or max(least, min(400, round(seconds / first))), repeats)
            times[worker.entry.name] = []
        for turn in range(rounds):
            for worker, (calls, repeats) in list(plan.items()):
                if turn >= repeats:
                    continue
                try:
                    # The first call after others ran finds cold caches and sleeping threads: not counted.
                    more = 1 if repeats > 1 else 0
                    measured = worker.ask(do="run", calls=calls + more)["seconds"][more:]
                    times[worker.entry.name].append(measured)
                except Failed as failure:
                    del plan[worker]
                    times.pop(worker.entry.name, None)
                    self.drop(worker, str(failure))
        return times


def batches(entries: list[type[Entry]], weights: int, copies: int, most_bytes: float) -> list[list[type[Entry]]]:
    """Entries that run at the same time within `most_bytes` of memory. The limits and w4a8 are in each batch."""
    size = {entry: weights * copies * entry.bytes_per_weight + 0.35e9 for entry in entries}
    always = [entry for entry in entries if entry.always]
    left = most_bytes - sum(size[entry] for entry in always)
    found: list[list[type[Entry]]] = []
    room = 0.0
    for entry in entries:
        if entry in always:
            continue
        if not found or size[entry] > room:
            found.append(list(always))
            room = left
        found[-1].append(entry)
        room -= size[entry]
    return found or [always]


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC"

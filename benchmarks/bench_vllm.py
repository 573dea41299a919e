"""Tokens per second in the real vLLM: stock bfloat16 beside W4A8 with the plugin, on one model's shapes.

    .venv-vllm/bin/python benchmarks/bench_vllm.py [--layers 4] [--rounds 5]

The model has the layers of Qwen3-30B-A3B (hidden 2048, 128 experts of 768, top-8) but few of them, and random weights
made in memory; nothing is read from disk. Each way is one engine as a user starts it: vLLM's scheduler and its rank
have processes of their own, and the rank has all CPUs, as with `w4a8 serve`. All are loaded first, then take turns, so
that a change of the machine's clock or load meets all of them. Memory at the default of 4 layers: about
9 GB, and 2 more where stock vLLM runs W4A16 experts (with AMX); elsewhere that column is left out. What stock vLLM
refuses is shown with its reason. See benchmarks/README.md.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qwen3_moe import Shapes

from w4a8.command.timing import START, Case, TimedEngine

# name: (scheme of qwen3_moe.py, plugin)
WAYS = {
    "bf16 (stock)": ("bfloat16", False),
    "W4A8 g128 (plugin)": ("w4a8", True),
    "W4A16 g128 (stock)": ("w4a16", False),
    "W4A8 g128 (stock)": ("w4a8", False),
}
CANDIDATE = "W4A8 g128 (plugin)"
QUESTIONS = {
    "decode, batch 1": ("decode", 1, 32),
    "decode, batch 8": ("decode", 8, 16),
    "prefill, 512 tokens": ("prefill", 512),
    "prefill, 2048 tokens": ("prefill", 2048),
}
# On a CPU with AMX: how many times as fast as another way the plugin is to be, question by question.
AMX_GOALS = {"bf16 (stock)": (2.7, 3.3, 2.2, 1.6), "W4A16 g128 (stock)": (1.2, 1.4, 2.0, 2.0)}


def has_amx() -> bool:
    """Whether the CPU has the tiles that x86_amx multiplies with."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "amx_tile" in flags and "amx_int8" in flags


# ---- one engine, and the process that asks it ----


class Engine(TimedEngine):
    """An engine with few questions at a time, whose weights are random unless ``load_format`` is another."""

    def __init__(
        self,
        model: str,
        load_format: str = "dummy",
        max_model_len: int = 2560,
        load_strategy: str | None = None,
        **more: object,
    ) -> None:
        super().__init__(model, max_model_len, load_format=load_format, safetensors_load_strategy=load_strategy, **more)

    def decode(self, batch: int, tokens: int, prompt: int = START) -> float:
        """Tokens per second of the steps after the first."""
        return self.run(Case("", batch, prompt, tokens))

    def prefill(self, tokens: int) -> float:
        """Tokens per second of one prompt."""
        return self.run(Case("", 1, tokens, 0))


def serve(model: str, answers: int) -> None:
    """Reads {"method", "arguments"} lines and answers with numbers, on a pipe that vLLM's output does not go to."""
    with os.fdopen(answers, "w") as pipe:

        def answer(content: object) -> None:
            pipe.write(json.dumps(content) + "\n")
            pipe.flush()

        try:
            engine = Engine(model)
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            return
        answer({"ready": True})
        for line in sys.stdin:
            question = json.loads(line)
            answer(getattr(engine, question["method"])(*question["arguments"]))


class Process:
    """The process that asks an engine."""

    def __init__(self, name: str, layers: int, directory: Path) -> None:
        scheme, plugin = WAYS[name]
        model = directory / "".join(c if c.isalnum() else "_" for c in name)
        model.mkdir()
        shapes = Shapes.cut(layers, scheme=scheme, positions=4096)
        (model / "config.json").write_text(json.dumps(shapes.config()))
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # as `w4a8 serve` starts it
            "W4A8_VLLM": "1" if plugin else "0",
        }
        ours, theirs = os.pipe()
        self.log = directory / f"{model.name}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--serve", str(model), "--answers", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env=environment,
                pass_fds=(theirs,),
                start_new_session=True,  # vLLM's scheduler and its rank are processes of the same group
            )
        os.close(theirs)
        self.answers = os.fdopen(ours)
        line = self.answers.readline()
        self.error = json.loads(line).get("error") if line else f"ended early, see {self.log}"

        self._pause()

    def _pause(self) -> None:
        """An engine that waits has threads that spin for a while, on the CPUs of the next one."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def ask(self, method: str, *arguments: int) -> float:
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.answers.readline())
        self._pause()
        return answer

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.close()  # which ends it
        self.process.wait(60)


def measure(processes: dict[str, Process], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Tokens per second in each round, by question and way."""
    for process in processes.values():  # compilation, pages, caches
        for question in QUESTIONS.values():
            process.ask(*question)
    print("measuring", flush=True)
    figures = {(q, name): [] for q in QUESTIONS for name in processes}
    for _ in range(rounds):
        for title, question in QUESTIONS.items():
            for name, process in processes.items():
                figures[title, name].append(process.ask(*question))
    return figures


def report(figures: dict[tuple[str, str], list[float]], amx: bool) -> list[str]:
    """A table of rates, then how many times as fast as each other way the plugin is."""
    names = list(dict.fromkeys(name for _, name in figures))
    lines = ["", f"{'tokens per second':22}" + "".join(f"{name:>28}" for name in names)]
    for title in QUESTIONS:
        cells = ""
        for name in names:
            rates = figures[title, name]
            cells += f"{f'{statistics.median(rates):.1f} ({min(rates):.1f}..{max(rates):.1f})':>28}"
        lines.append(f"{title:22}{cells}")
    for other in names:
        if other == CANDIDATE or CANDIDATE not in names:
            continue
        lines += ["", f"{CANDIDATE} beside {other}: {'times':>8}{'of the rounds':>18}" + amx * f"{'goal':>8}"]
        for title, goal in zip(QUESTIONS, AMX_GOALS.get(other, (None,) * len(QUESTIONS))):
            ratios = sorted(a / b for a, b in zip(figures[title, CANDIDATE], figures[title, other]))
            line = f"{title:{len(CANDIDATE) + len(other) + 9}}{statistics.median(ratios):>9.2f}"
            line += f"{f'{ratios[0]:.2f}..{ratios[-1]:.2f}':>18}"
            if amx and goal is not None:
                line += f"{goal:>8.1f}  {'reached' if statistics.median(ratios) >= goal else 'missed'}"
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="4: 1.2 GB of int4 experts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--logs", type=Path, help="keep the logs of the engines in this folder")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.answers)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.logs or Path(temporary)
        processes = {}
        try:
            for name in WAYS:
                started = time.monotonic()
                process = Process(name, args.layers, directory)
                if process.error is None:
                    processes[name] = process
                    print(f"{name}: loaded in {time.monotonic() - started:.0f} s", flush=True)
                else:
                    print(f"{name}: {process.error.splitlines()[0]}", flush=True)
                    process.stop()
            print("\n".join(report(measure(processes, args.rounds), has_amx())))
        finally:
            for process in processes.values():
                process.stop()


if __name__ == "__main__":
    main()

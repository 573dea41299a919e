"""What every way of running a model answers."""

import os
from pathlib import Path
from typing import Any

from peers.base import Entry

POSITIONS_VARIABLE = "W4A8_BENCH_POSITIONS"
POSITIONS = int(os.environ.get(POSITIONS_VARIABLE, 2304))  # prompt and answer of the longest question
PROMPT = 8  # tokens in front of an answer, where nothing else is said


def memory(name: str) -> int:
    """Bytes of a line of /proc/self/status: VmHWM is the peak of what was in memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))


class Model(Entry):
    """A model in memory. The folder of the process is that of the model's files."""

    kind = "model"
    format: str  # of lab/real_size
    checked = False

    @staticmethod
    def open(folder: str) -> Any:
        return Path(folder)

    @classmethod
    def refuses(cls, layers: int, gigabytes: float) -> str | None:
        """Why so many layers cannot be run in so much memory, or None."""
        return None

    def loading(self) -> dict[str, float]:
        """Seconds until it could answer, those of reading weights where they are known, and the peak so far."""
        raise NotImplementedError

    def peak(self) -> int:
        """Bytes, of all the process has done."""
        return memory("VmHWM")

    def prefill(self, tokens: int) -> float:
        """Tokens per second of one prompt."""
        raise NotImplementedError

    def decode(self, batch: int, tokens: int, prompt: int = PROMPT) -> float:
        """Tokens per second of all sequences together, of the steps after the first, behind prompts of so many."""
        raise NotImplementedError

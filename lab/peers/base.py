"""What a peer's module fills in."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from peers.problem import Files, Problem


@dataclass(frozen=True)
class Environment:
    """A virtual environment in build/peers/<name>."""

    name: str
    requirements: tuple[str, ...] = ()
    torch: str = ""  # this version of torch is taken from the benchmark's own environment; "any": whatever it has
    variables: dict[str, str] = field(default_factory=dict)  # of its processes
    build_variables: dict[str, str] = field(default_factory=dict)  # of pip, for what is built from source
    python: str = ""  # an interpreter that a script has made; nothing is installed then
    packages: str = ""  # a folder of packages that serve here too, besides the requirements
    machines: tuple[str, ...] = ()  # platform.machine() it has wheels for; empty: any


OWN = Environment("own", torch="any")  # the interpreter that runs the benchmark


class Entry:
    """One way of computing a kind of problem. The benchmark imports it too: libraries are imported in __init__."""

    name: str  # in tables
    kind: str  # linear | moe | any
    weights: str = "int4"  # as they are kept; another type than int4 is made from the dequantized ones
    environment: Environment = OWN
    bytes_per_weight: float = 0.6  # resident memory, for planning what runs at the same time
    most_threads: int = 1 << 30
    always: bool = False  # what the others are compared with: in every batch, whatever --peers says
    checked: bool = True
    calls: int = 0  # of a round; 0: as many as fit its time
    most_error: float = 0.08  # relative; int8 activations give 0.008 to 0.04

    @staticmethod
    def open(folder: str) -> Any:
        """What the constructor takes, of the folder that the process was given."""
        return Files(folder)

    @classmethod
    def refuse(cls, problem: Problem) -> str | None:
        """Why this problem cannot be computed, or None."""
        return None

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Versions of what is measured, told by the worker."""
        return {}

    def __init__(self, files: Files, threads: int):
        self.files = files
        self.problem = files.problem
        self.threads = threads

    def inputs(self, m: int) -> None:
        """Takes inputs of m rows for the calls that follow."""
        raise NotImplementedError

    def call(self, i: int) -> Any:
        """Computes the i-th call: the copy of the weights and the routing change with i."""
        raise NotImplementedError

    def to_numpy(self, output: Any) -> np.ndarray:
        """float32 [m, features]."""
        return output

    def timed(self, i: int) -> float:
        """Seconds of the i-th call."""
        start = time.perf_counter()
        self.call(i)
        return time.perf_counter() - start


class TorchEntry(Entry):
    """x: bfloat16 [m, features]; for experts also ids and gates, one routing per call."""

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        import torch

        self.torch = torch
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def inputs(self, m: int) -> None:
        self.x = self.bfloat16(self.files[f"x-{m}"])
        if self.problem.kind == "moe":
            self.ids = [self.tensor(ids) for ids in self.files[f"ids-{m}"]]
            self.gates = [self.tensor(gates) for gates in self.files[f"gates-{m}"]]

    def tensor(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(np.array(array))

    def bfloat16(self, bits: np.ndarray) -> Any:
        return self.tensor(np.array(bits).view(np.int16)).view(self.torch.bfloat16)

    def scales(self, name: str) -> Any:
        """float32 [E, N, groups]"""
        return self.tensor(self.files["s" + name[1:]])

    def int8_weights(self, name: str, expert: int) -> tuple[Any, Any]:
        """int8 [N, K] and a float32 scale for each row."""
        w = self.tensor(self.files.float_weights(name, expert))
        scale = w.abs().amax(1) / 127
        return (w / scale[:, None]).round().to(self.torch.int8), scale

    def copies(self, *tensors: Any) -> list[tuple]:
        """The tensors, and as many clones at other addresses as the problem asks for."""
        more = [tuple(t.clone() if t is not None else None for t in tensors) for _ in range(self.problem.copies - 1)]
        return [tensors, *more]

    def to_numpy(self, output: Any) -> np.ndarray:
        return output.float().numpy()

    @classmethod
    def versions(cls) -> dict[str, str]:
        import torch

        return {"torch": torch.__version__}

"""What is computed: one layer, with weights, inputs and routings that all peers read from the same files.

Needs numpy only, so that it runs in every peer's environment. bfloat16 is kept as its bits (uint16).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from folders import LAB

SHAPES = LAB / "shapes"

# 16 equally likely weights: near-symmetric, both ends used.
VALUES = np.array([-8, -6, -5, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 5, 6, 7], np.int8)
_NIBBLES = (VALUES + 8).astype(np.uint8)
PAIRS = (_NIBBLES[None, :] | (_NIBBLES[:, None] << 4)).reshape(-1)  # uint8 [256]: two weights of a random byte


@dataclass(frozen=True)
class Linear:
    """y = x @ W.T, W [n, k] int4 with one scale per `group` values of k (-1: per row)."""

    model: str
    layer: str
    n: int
    k: int
    group: int
    copies: int = 1  # matrices that take turns
    kind: str = "linear"

    @property
    def title(self) -> str:
        return f"{self.model} {self.layer} (N {self.n}, K {self.k})"

    def matrices(self) -> dict[str, tuple[int, int, int]]:
        return {"w": (1, self.n, self.k)}

    def macs(self, rows: int) -> int:
        return rows * self.n * self.k


@dataclass(frozen=True)
class Moe:
    """sum over top_k of weight * w2[e](SiLU(g) * u), [g; u] = w13[e](x)."""

    model: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    group: int
    copies: int = 1  # layers that take turns
    kind: str = "moe"

    @property
    def title(self) -> str:
        return f"{self.model} (H {self.hidden}, I {self.intermediate}, {self.experts} experts, top-{self.top_k})"

    def matrices(self) -> dict[str, tuple[int, int, int]]:
        return {
            "w13": (self.experts, 2 * self.intermediate, self.hidden),
            "w2": (self.experts, self.hidden, self.intermediate),
        }

    def macs(self, rows: int) -> int:
        return rows * self.top_k * 3 * self.hidden * self.intermediate


Problem = Linear | Moe


def group_name(group: int) -> str:
    return "channel" if group == -1 else str(group)


def load_shapes(names: list[str], kind: str) -> list[dict]:
    """The files of lab/shapes that have layers of this kind; all of them if no names are given."""
    files = [SHAPES / f"{name}.json" for name in names] if names else sorted(SHAPES.glob("*.json"))
    shapes = [json.loads(file.read_text()) for file in files]
    return [shape for shape in shapes if kind in shape]


def weight_count(problem: Problem) -> int:
    return sum(e * n * k for e, n, k in problem.matrices().values())


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def unpacked(packed: np.ndarray) -> np.ndarray:
    """int8 [rows, columns] of uint8 [rows, columns / 2] or int32 [rows, columns / 8], low nibble first, value + 8."""
    pairs = np.ascontiguousarray(packed).view(np.uint8)
    values = np.empty((*pairs.shape, 2), np.int8)
    values[..., 0], values[..., 1] = pairs & 15, pairs >> 4
    values -= 8
    return values.reshape(pairs.shape[0], -1)


def dequantized(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] of what `unpacked` takes and scales [rows, groups]."""
    values = unpacked(packed)
    return (values.reshape(*scales.shape, -1) * scales[..., None]).reshape(values.shape)


class Files:
    """The arrays of a problem in a folder. The benchmark writes them; every worker maps them into memory.

    w*.npy   uint8 [E, N, K/2], low nibble = even k, value + 8
    s*.npy   float32 [E, N, K/g], exact in bfloat16 and in float16
    x-M.npy  bfloat16 bits [M, K or H];  ids-M.npy int32 [calls, M, top_k];  gates-M.npy float32 [calls, M, top_k]
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        settings = json.loads((self.folder / "problem.json").read_text())
        self.problem: Problem = {"linear": Linear, "moe": Moe}[settings["kind"]](**settings)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")

    def group(self, k: int) -> int:
        return k if self.problem.group == -1 else self.problem.group

    def int_weights(self, name: str, expert: int) -> np.ndarray:
        """int8 [N, K] in [-8, 7]."""
        return unpacked(self[name][expert])

    def float_weights(self, name: str, expert: int) -> np.ndarray:
        """float32 [N, K], dequantized."""
        return dequantized(self[name][expert], self["s" + name[1:]][expert])


def write(problem: Problem, folder: Path, rows: list[int], calls: int = 8) -> Files:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "problem.json").write_text(json.dumps(asdict(problem)))
    random = np.random.default_rng(1)
    features = 0
    for name, (e, n, k) in problem.matrices().items():
        groups = 1 if problem.group == -1 else k // problem.group
        raw = np.frombuffer(random.bytes(e * n * k // 2), np.uint8)
        np.save(folder / f"{name}.npy", PAIRS[raw].reshape(e, n, k // 2))
        # Around 2^-8 with three mantissa bits; rows of w2 or w13 need no other size for an honest error.
        steps = random.integers(0, 8, (e, n, groups), np.uint8)
        np.save(folder / f"s{name[1:]}.npy", (1 + steps.astype(np.float32) / 8) / 256)
        features = features or k
    for m in rows:
        np.save(folder / f"x-{m}.npy", to_bfloat16(random.standard_normal((m, features), np.float32)))
        if isinstance(problem, Moe):
            write_routing(problem, folder, m, calls, random)
    return Files(folder)


def write_routing(problem: Moe, folder: Path, m: int, calls: int, random: np.random.Generator) -> None:
    """Random routing: top_k distinct experts per token, softmax weights; another one for each call."""
    order = random.random((calls * m, problem.experts)).argsort(1)[:, : problem.top_k].astype(np.int32)
    gates = np.exp(random.standard_normal((calls * m, problem.top_k))).astype(np.float32)
    gates /= gates.sum(1, keepdims=True)
    np.save(folder / f"ids-{m}.npy", order.reshape(calls, m, problem.top_k))
    np.save(folder / f"gates-{m}.npy", gates.reshape(calls, m, problem.top_k))


def experts_used(files: Files, m: int) -> float:
    """Mean number of different experts of a call."""
    ids = files[f"ids-{m}"]
    return float(np.mean([len(np.unique(call)) for call in ids]))


def reference(files: Files, m: int, most_rows: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """(rows, float32 outputs of those rows) of the first call, computed with dequantized weights in float32."""
    problem = files.problem
    rows = np.unique(np.linspace(0, m - 1, min(m, most_rows)).astype(int))
    x = from_bfloat16(files[f"x-{m}"][rows])
    if isinstance(problem, Linear):
        return rows, x @ files.float_weights("w", 0).T
    ids, gates = files[f"ids-{m}"][0][rows], files[f"gates-{m}"][0][rows]
    out = np.zeros_like(x)
    for expert in np.unique(ids):
        token, slot = np.nonzero(ids == expert)
        gate, up = np.split(x[token] @ files.float_weights("w13", expert).T, 2, axis=1)
        hidden = gate / (1 + np.exp(-gate)) * up
        out[token] += gates[token, slot, None] * (hidden @ files.float_weights("w2", expert).T)
    return rows, out


def relative_error(output: np.ndarray, expected: np.ndarray) -> float | None:
    """Frobenius norm of the difference, relative; None if the output is not finite."""
    if output.shape != expected.shape or not np.isfinite(output).all():
        return None
    return float(np.linalg.norm(output - expected) / np.linalg.norm(expected))

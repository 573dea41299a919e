"""AMD's zentorch."""

from importlib.metadata import version
from typing import Any

from peers.base import Environment, TorchEntry
from peers.problem import Files

ENVIRONMENT = Environment(
    "zentorch", ("--no-deps zentorch==2.13.0.1", "deprecated==1.3.1"), torch="2.13.0", machines=("x86_64",)
)


class Zentorch(TorchEntry):
    environment = ENVIRONMENT
    bytes_per_weight = 1.2  # it keeps copies in an order of its own

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        import zentorch  # noqa: F401 - registers the operators

        self.ops = self.torch.ops.zentorch

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {**super().versions(), "zentorch": version("zentorch")}

    def pack(self, name: str, expert: int) -> tuple[Any, Any]:
        q = self.tensor(self.files.int_weights(name, expert))
        scales = self.scales(name)[expert].t().bfloat16().contiguous()  # [K/g, N]
        return self.ops.zentorch_woq_repack_weight(q), scales


class Linear(Zentorch):
    name = "zentorch W4A8"
    kind = "linear"

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        packed, scales = self.pack("w", 0)
        self.layers = self.copies(packed.view(self.torch.int8), scales)

    def call(self, i: int) -> Any:
        packed, scales = self.layers[i % len(self.layers)]
        return self.ops.zentorch_dynamic_qlinear(self.x, packed, scales, None)


class Moe(Zentorch):
    name = "zentorch W4A8"
    kind = "moe"

    def __init__(self, files: Files, threads: int):
        super().__init__(files, threads)
        stacks = []
        for name in ("w13", "w2"):
            packed = [self.pack(name, e) for e in range(self.problem.experts)]
            stacks += [self.torch.stack(part) for part in zip(*packed)]
        self.layers = self.copies(*stacks)
        self.warm_up()

    def warm_up(self) -> None:
        """Its first call of each expert arranges that expert's weights."""
        p, torch = self.problem, self.torch
        ids = torch.arange(p.experts, dtype=torch.int32).repeat(p.top_k).reshape(p.top_k, p.experts).t().contiguous()
        ids = (ids + torch.arange(p.top_k, dtype=torch.int32)) % p.experts
        x = torch.ones(p.experts, p.hidden, dtype=torch.bfloat16)
        for layer in range(len(self.layers)):
            self.run(layer, x, ids, torch.full(ids.shape, 1 / p.top_k), torch.empty_like(x))

    def run(self, layer: int, x: Any, ids: Any, gates: Any, out: Any) -> Any:
        w13, s13, w2, s2 = self.layers[layer]
        self.ops.zentorch_fused_moe(out, x, w13, w2, None, None, gates, ids, False, "silu", s13, s2)
        return out

    def inputs(self, m: int) -> None:
        super().inputs(m)
        self.out = self.torch.empty_like(self.x)

    def call(self, i: int) -> Any:
        ids, gates = self.ids[i % len(self.ids)], self.gates[i % len(self.gates)]
        return self.run(i % len(self.layers), self.x, ids, gates, self.out)


ENTRIES = [Linear, Moe]

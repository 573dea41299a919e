"""Expert parallelism: each process holds some of a layer's experts, and an all-reduce adds their outputs.

    python expert_parallel.py                                  # a random layer, 2 processes, checked against 1 process
    python expert_parallel.py --ranks 4 --experts 64
    python expert_parallel.py --checkpoint DIR --dtype bfloat16  # the first layer of a compressed-tensors checkpoint

Every rank routes every token (routing is a small matrix product), runs the experts it holds and skips the others. The
outputs of the ranks are summands of the layer's output, so one all-reduce finishes it.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import w4a8
from w4a8.checkpoint import open_source
from w4a8.core.packer import pack_experts
from w4a8.core.weight import ExpertWeights
from w4a8.nn import W4A8Experts, determine_expert_map

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GROUP = 32


def random_matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """A packed int4 matrix [rows, columns]."""
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = (0.5 + torch.rand(rows, columns // GROUP, generator=generator)) * 0.3 / columns**0.5
    return w4a8.dyn_quant_pack_4bit_weight(codes, scales.to(torch.bfloat16), None, GROUP, columns, rows)


def random_expert(args: argparse.Namespace, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [2I, H] and w2 [H, I] of one expert, packed: the same whichever process makes them."""
    generator = torch.Generator().manual_seed(expert)
    w13 = random_matrix(2 * args.intermediate, args.hidden, generator)
    return w13, random_matrix(args.hidden, args.intermediate, generator)


class Layer:
    """This rank's experts, and the router, which chooses among those of all ranks."""

    def __init__(self, experts: W4A8Experts, top_k: int, expert_map: torch.Tensor) -> None:
        """Takes them; expert_map: int32 [experts of all ranks], the number of an expert here, or -1."""
        self.experts, self.top_k, self.expert_map = experts, top_k, expert_map

    def route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, E] to weights float32 [T, k], and the numbers of the experts among those of all ranks [T, k]."""
        return w4a8.topk_routing(logits, self.top_k, True)

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The sum of the chosen experts that are here, [T, H]."""
        return self.experts(x, self.expert_map[ids.long()], weights)

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The part of the layer's output that is from experts here."""
        return self.run(x, *self.route(logits))


def experts_of_checkpoint(path: str) -> ExpertWeights:
    """The experts of the first layer that has some; nothing of them is read."""
    return next(layer for layer in open_source(path).layers().values() if isinstance(layer, ExpertWeights))


def random_stacks(args: argparse.Namespace, mine: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed w13 and w2 of some experts of a random layer: only these are ever made."""
    return tuple(torch.stack(matrices) for matrices in zip(*(random_expert(args, expert) for expert in mine)))


def make_layer(args: argparse.Namespace, rank: int, ranks: int) -> Layer:
    """This rank's part of the layer: of a checkpoint (only its experts are read), or random."""
    source = None if args.checkpoint is None else experts_of_checkpoint(args.checkpoint)
    count = args.experts if source is None else source.experts
    _, expert_map = determine_expert_map(ranks, rank, count)
    expert_map = torch.arange(count, dtype=torch.int32) if expert_map is None else expert_map
    mine = torch.nonzero(expert_map != -1).flatten().tolist()
    if source is None:
        stacks, sizes = random_stacks(args, mine), (args.hidden, args.intermediate, GROUP)
    else:
        found, packed, _ = pack_experts(source, mine, activation_group=None)
        stacks, sizes = (packed["w13"], packed["w2"]), (found.hidden, found.intermediate, found.group_size)
    return Layer(W4A8Experts(*stacks, *sizes), args.top_k, expert_map)


def make_input(args: argparse.Namespace, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] and router logits [T, E], the same in every process."""
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(args.tokens, layer.experts.hidden_size, generator=generator).to(DTYPES[args.dtype])
    return x, torch.randn(args.tokens, len(layer.expert_map), generator=generator)


def addition_bound(layer: Layer, x: torch.Tensor, logits: torch.Tensor, ranks: int) -> torch.Tensor:
    """How far two orders of addition may be apart: float64 [T, H].

    On either side a token's k weighted expert outputs are added in float32, one rounding each; the sums of the ranks
    are added in float32 too. A type below float32 is rounded to three times: each rank's share (together at most once
    the sum of absolute values), their sum, and the output of one process. No rounding exceeds u times that sum.
    """
    weights, ids = layer.route(logits)
    size = torch.zeros(x.shape, dtype=torch.float64)
    for slot in range(layer.top_k):
        one = layer.run(x.float(), weights[:, slot : slot + 1], ids[:, slot : slot + 1])
        size += one.abs().double()
    u = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[x.dtype]
    return size * ((2 * layer.top_k + ranks) * 2.0**-24 + 3 * u) * (1 + 3 * u + 1e-5)


def run_rank(rank: int, args: argparse.Namespace, port: int) -> None:
    """One process: its experts, one all-reduce; rank 0 compares with the whole layer."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    try:
        layer = make_layer(args, rank, args.ranks)
        x, logits = make_input(args, layer)
        # In float32: rounded once at the end instead of at every addition, and gloo has no bfloat16 before torch 2.
        total = layer(x, logits).float()
        dist.all_reduce(total)
        out = total.to(x.dtype)
        bytes_ = sum(stack.numel() for stack in layer.experts.buffers())
        here = f"{layer.experts.num_experts} of {len(layer.expert_map)} experts"
        print(f"rank {rank}: {here}, {bytes_ / 2**20:.1f} MiB packed", flush=True)
        dist.barrier()
        if rank == 0:
            whole = make_layer(args, 0, 1)
            difference = (out.double() - whole(x, logits).double()).abs()
            bound = addition_bound(whole, x, logits, args.ranks)
            print(f"largest difference from one process: {float(difference.max()):.3g}", flush=True)
            print(f"largest part of what the order of additions allows: {float((difference / bound).max()):.2f}")
            if bool((difference > bound).any()):
                raise SystemExit("the sum over ranks is not the layer")
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Starts the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", help="directory of a compressed-tensors checkpoint")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, args=(args, port), nprocs=args.ranks)


if __name__ == "__main__":
    main()

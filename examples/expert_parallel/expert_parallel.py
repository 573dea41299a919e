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

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import w4a8
from w4a8.moe import (
    CompressedTensorsW4A8Int8MoEMethod,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    QuantizationArgs,
    QuantizationStrategy,
    RoutedExperts,
    determine_expert_map,
    kernel_activation_kind,
    route,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = QuantizationArgs(num_bits=4, strategy=QuantizationStrategy.GROUP, group_size=32)
TOKENS = QuantizationArgs(num_bits=8, strategy=QuantizationStrategy.TOKEN, dynamic=True)


def random_expert(args: argparse.Namespace, expert: int) -> dict[str, torch.Tensor]:
    """The tensors of one expert, the same whichever process makes them.

    Returns:
        int8 gate [I, H], up [I, H], down [H, I] under w1, w3, w2, and their bfloat16 scales under w1_scale, ...
    """
    generator = torch.Generator().manual_seed(expert)
    shapes = {"w1": (args.intermediate, args.hidden), "w3": (args.intermediate, args.hidden)}
    shapes["w2"] = (args.hidden, args.intermediate)
    tensors = {}
    for shard, (rows, columns) in shapes.items():
        tensors[shard] = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=generator)
        scale = (0.5 + torch.rand(rows, columns // 32, generator=generator)) * 0.3 / columns**0.5
        tensors[f"{shard}_scale"] = scale.to(torch.bfloat16)
    return tensors


def random_layer(args: argparse.Namespace, rank: int, ranks: int) -> RoutedExperts:
    """This rank's part of a random layer: only its own experts are ever made."""
    local, expert_map = determine_expert_map(ranks, rank, args.experts)
    moe = FusedMoEConfig(
        num_experts=args.experts,
        experts_per_token=args.top_k,
        hidden_dim=args.hidden,
        intermediate_size=args.intermediate,
        num_local_experts=local,
        in_dtype=DTYPES[args.dtype],
        moe_parallel_config=FusedMoEParallelConfig(ep_size=ranks, ep_rank=rank, use_ep=ranks > 1),
    )
    method = CompressedTensorsW4A8Int8MoEMethod(WEIGHTS, TOKENS, moe)
    layer = RoutedExperts(moe, method, expert_map=expert_map)
    for expert in range(args.experts):
        if layer.weight_loader.local_expert(expert) == -1:
            continue
        tensors = random_expert(args, expert)
        for shard in ("w1", "w3", "w2"):
            name = "w2" if shard == "w2" else "w13"
            weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            layer.weight_loader(weight, tensors[shard], f"{expert}.{shard}", shard, expert)
            layer.weight_loader(scale, tensors[f"{shard}_scale"], f"{expert}.{shard}_scale", shard, expert)
    layer.process_weights_after_loading()
    return layer


def make_layer(args: argparse.Namespace, rank: int, ranks: int) -> RoutedExperts:
    """This rank's part of the layer: of a checkpoint (only its experts are read), or random."""
    if args.checkpoint is None:
        return random_layer(args, rank, ranks)
    from w4a8.checkpoint import load

    return next(iter(load(args.checkpoint, ep_rank=rank, ep_size=ranks, quantize_w4a16=True).values()))


def make_input(args: argparse.Namespace, layer: RoutedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] and router logits [T, E], the same in every process."""
    generator = torch.Generator().manual_seed(args.seed)
    moe = layer.moe_config
    x = torch.randn(args.tokens, moe.hidden_dim, generator=generator).to(DTYPES[args.dtype])
    return x, torch.randn(args.tokens, moe.num_experts, generator=generator)


def addition_bound(layer: RoutedExperts, x: torch.Tensor, logits: torch.Tensor, ranks: int) -> torch.Tensor:
    """How far two orders of addition may be apart: float64 [T, H].

    On either side a token's k weighted expert outputs are added in float32, one rounding each; the sums of the ranks
    are added in float32 too. A type below float32 is rounded to three times: each rank's share (together at most once
    the sum of absolute values), their sum, and the output of one process. No rounding exceeds u times that sum.
    """
    routing = {
        "num_expert_group": layer.num_expert_group,
        "topk_group": layer.topk_group,
        "e_score_correction_bias": layer.e_score_correction_bias,
        "routed_scaling_factor": layer.routed_scaling_factor,
    }
    weights, ids = route(layer.moe_config.routing_method, x, logits, layer.top_k, **routing)
    size = torch.zeros(x.shape, dtype=torch.float64)
    for slot in range(layer.top_k):
        one = w4a8.dynamic_4bit_int_moe(
            x.float(),
            ids[:, slot : slot + 1],
            weights[:, slot : slot + 1],
            layer.w13_weight_packed,
            layer.w2_weight_packed,
            layer.w2_out_features,
            layer.w2_in_features,
            layer.w13_out_features,
            layer.group_size,
            layer.apply_router_weight_on_input,
            kernel_activation_kind(layer.activation),
        )
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
        held = layer.moe_config.num_local_experts
        bytes_ = layer.w13_weight_packed.numel() + layer.w2_weight_packed.numel()
        print(f"rank {rank}: {held} of {layer.global_num_experts} experts, {bytes_ / 2**20:.1f} MiB packed", flush=True)
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

"""Train a byte-level Qwen3-MoE on the Python standard library, from scratch, on a CPU.

    python -m training.train    # in lab/

writes to examples/tiny_moe/build: ``float32.pt`` (weights) and ``training.json`` (how they came about). The state is
saved every few minutes and an interrupted run is continued by ``--resume``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import data
import numpy as np
import torch
from folders import EXAMPLE
from modeling import load_dequantized
from peers.report import cpu_name
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from training.muon import HAS_BFLOAT16, Muon

WARMUP = 0.02  # share of the run
WEIGHT_DECAY = 0.1
SAVE_MINUTES = 3.0


def model_config(args: argparse.Namespace) -> Qwen3MoeConfig:
    """The architecture: every quantized matrix has a multiple of 32 input features."""
    return Qwen3MoeConfig(
        vocab_size=data.VOCAB_SIZE,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,  # only read by dense layers, of which there are none
        moe_intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=args.experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        hidden_act="silu",
        max_position_embeddings=2048,
        rope_theta=10000.0,
        router_aux_loss_coef=0.01,
        output_router_logits=False,
        tie_word_embeddings=False,
        bos_token_id=data.SEPARATOR,
        eos_token_id=data.SEPARATOR,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine down to 1 % of the peak; ``progress`` runs from 0 to 1."""
    if progress < WARMUP:
        return peak * progress / WARMUP
    x = (progress - WARMUP) / (1 - WARMUP)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(x, 1.0))))


def batches(text: np.ndarray, args: argparse.Namespace, step: int) -> torch.Tensor:
    """Random windows of the text for one step: int64 [batch, context + 1]. Depends on seed and step only."""
    rng = np.random.default_rng((args.seed, step))
    starts = rng.integers(0, text.size - args.context - 1, size=args.batch)
    return torch.from_numpy(np.stack([text[s : s + args.context + 1] for s in starts]).astype(np.int64))


def make_optimizers(model: torch.nn.Module, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, output layer, routers and norms."""
    halves, matrices, others, vectors = [], [], [], []
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            halves.append(parameter)
        elif name.endswith(("_proj.weight", "experts.down_proj")):
            matrices.append(parameter)
        elif parameter.ndim >= 2:
            others.append(parameter)
        else:
            vectors.append(parameter)
    muon = Muon([{"params": halves, "halves": True}, {"params": matrices}], lr=args.lr, weight_decay=WEIGHT_DECAY)
    groups = [{"params": others, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return [muon, torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)]


def save(path: Path, payload: Any) -> None:
    """Write through a temporary file, so that an interruption never leaves half a checkpoint."""
    temporary = path.with_suffix(".tmp")
    torch.save(payload, temporary)
    os.replace(temporary, path)


def processor() -> str:
    """The CPU and the number of threads."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=EXAMPLE / "build", help="output directory")
    parser.add_argument("--start", type=Path, help="begin with the dequantized weights of a checkpoint")
    parser.add_argument("--steps", type=int, default=4800)
    parser.add_argument("--max-minutes", type=float, default=33.0, help="the schedule ends here if steps do not first")
    parser.add_argument("--batch", type=int, default=4, help="windows per step")
    parser.add_argument("--context", type=int, default=512, help="bytes per window")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=256, help="width of one expert")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="continue from the state in the output directory")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    state_path = args.out / "state.pt"

    torch.manual_seed(args.seed)
    text = data.training_bytes()
    config = model_config(args)
    model = Qwen3MoeForCausalLM(config).float().train()
    if args.start is not None:
        model.load_state_dict(load_dequantized(args.start).state_dict())
    optimizers = make_optimizers(model, args)
    parameter_count = sum(p.numel() for p in model.parameters())
    tqdm.write(f"{parameter_count:,} parameters, {text.size:,} bytes of text, {processor()}")

    step, seconds_before = 0, 0.0
    if args.resume and state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seconds_before = state["step"], state["seconds"]

    started = last_saved = time.monotonic()
    smooth = None
    progress = 0.0
    bar = tqdm(total=args.steps, initial=step, unit="step", desc="train", dynamic_ncols=True)
    while progress < 1.0:
        seconds = seconds_before + time.monotonic() - started
        # Whichever budget is nearer its end drives the schedule: a busy machine still anneals fully.
        progress = max((step + 1) / args.steps, seconds / 60 / args.max_minutes)
        rate = learning_rate(min(progress, 1.0), args.lr)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

        window = batches(text, args, step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=HAS_BFLOAT16):
            output = model(input_ids=window[:, :-1], use_cache=False, output_router_logits=True)
            loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), window[:, 1:].reshape(-1))
            total = loss + config.router_aux_loss_coef * balance_loss(output.router_logits, config)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        step += 1

        bits = loss.item() / math.log(2)
        smooth = bits if smooth is None else 0.98 * smooth + 0.02 * bits
        bar.set_postfix_str(f"{smooth:.3f} bits/byte, lr {rate:.1e}", refresh=False)
        bar.update()
        if time.monotonic() - last_saved > 60 * SAVE_MINUTES:
            last_saved = time.monotonic()
            seconds = seconds_before + last_saved - started
            save(
                state_path,
                {
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "step": step,
                    "seconds": seconds,
                },
            )
    bar.close()

    seconds = seconds_before + time.monotonic() - started
    save(args.out / "float32.pt", model.state_dict())
    config.save_pretrained(args.out)
    record = {
        "parameters": parameter_count,
        "training_seconds": round(seconds, 1),
        "training_steps": step,
        "training_bytes_seen": step * args.batch * args.context,
        "training_text_bytes": int(text.size),
        "final_training_bits_per_byte": round(smooth or float("nan"), 4),
        "start": None if args.start is None else args.start.name,
        "seed": args.seed,
        "batch": args.batch,
        "context": args.context,
        "learning_rate": args.lr,
        "weight_decay": WEIGHT_DECAY,
        "cpu": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def balance_loss(router_logits: tuple[torch.Tensor, ...], config: Qwen3MoeConfig) -> torch.Tensor:
    """Switch-style load balance, averaged over layers: 1 when every expert of a layer is used alike.

    ``router_logits`` holds one [tokens, experts] tensor per layer. Each layer is balanced by itself: pooled over
    layers, an expert index that starves in one layer could hide behind the same index in another.
    """
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1)
        chosen = probabilities.topk(config.num_experts_per_tok, dim=-1).indices
        used = torch.nn.functional.one_hot(chosen, config.num_experts).float().mean(dim=(0, 1))
        losses.append(config.num_experts * (used * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()


if __name__ == "__main__":
    main()

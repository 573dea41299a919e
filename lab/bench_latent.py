#!/usr/bin/env python3
"""Layers of DeepSeek-V2-Lite (latent attention) in vLLM: in one call beside one by one (lab/README.md).

    .venv-vllm/bin/python lab/bench_latent.py [--layers 9] [--rounds 2]

Weights are random, int4 in groups of 32. Each round starts an engine of each way, in a process of its own, in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import folders  # noqa: F401, which puts benchmarks/ on the path
from bench_vllm import Engine
from qwen3_moe import quantization_config

# config.json of deepseek-ai/DeepSeek-V2-Lite.
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "intermediate_size": 10944, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "vocab_size": 102400, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
    "quantization_config": quantization_config(32),
}  # fmt: skip
WAYS = {"in one call": "1", "one by one": "0"}


def questions(model: str, repeats: int) -> dict[str, float]:
    """Tokens/s, medians."""
    engine = Engine(model, gpu_memory_utilization=0.6)
    asked = {
        "one answer": lambda: engine.decode(1, 48),
        "eight answers": lambda: engine.decode(8, 32),
        "one answer behind 1,024": lambda: engine.decode(1, 32, 1024),
        "prompt of 512": lambda: engine.prefill(512),
        "prompt of 2,048": lambda: engine.prefill(2048),
    }
    engine.decode(1, 8)
    return {name: statistics.median(ask() for _ in range(repeats)) for name, ask in asked.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=9, help="of 27 (default: 9)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="of a question, in each round")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        (args.engine / "answers.json").write_text(json.dumps(questions(str(args.engine), args.repeats)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": args.layers}))
        for _ in range(args.rounds):
            for way, decoder in WAYS.items():
                given = {"W4A8_VLLM_DECODER": decoder, "VLLM_CPU_KVCACHE_SPACE": "1"}
                command = [sys.executable, __file__, "--engine", folder, "--repeats", str(args.repeats)]
                subprocess.run(command, env=os.environ | given, check=True, stdout=subprocess.DEVNULL)
                found[way].append(json.loads((Path(folder) / "answers.json").read_text()))
    print(f"{args.layers} layers, tokens/s of each round")
    for name in found["in one call"][0]:
        rates = "   ".join(f"{way}: {', '.join(f'{each[name]:.1f}' for each in found[way])}" for way in WAYS)
        print(f"{name:25} {rates}")


if __name__ == "__main__":
    main()

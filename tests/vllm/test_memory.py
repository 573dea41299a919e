"""How much memory a process takes while it loads a model of a few hundred megabytes: a checkpoint whose tensors are
shuffled, and a GGUF file."""

import gguf_files
import meter
import numpy as np
import pytest
import shuffled_model
import torch
from conftest import environment

LOAD = """
import os
from vllm import LLM
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

load_model, found = BaseModelLoader.load_model, []

def measured(self, *args, **kwargs):
    before = begin()
    model = load_model(self, *args, **kwargs)
    found.extend((sum(p.numel() * p.element_size() for p in model.parameters()), memory("VmHWM") - before))
    return model

BaseModelLoader.load_model = measured
LLM(sys.argv[1], enforce_eager=True, max_model_len=64, max_num_seqs=1, skip_tokenizer_init=True)
print(flush=True)
print(*found, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "in order"])
def test_peak_while_loading(shuffled, tmp_path):
    """What is packed, the tensors that are not quantized, one file, and little more; the int8 weights are 500 MB."""
    checkpoint = shuffled_model.write(tmp_path / "model", shuffled)
    variables = environment(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    weights, peak = meter.run(LOAD, checkpoint, **variables)
    assert weights > 280e6
    assert peak < 1.10 * weights + shuffled_model.largest_file(checkpoint) + (32 << 20)


def write_gguf(path):
    """Two layers of experts, as a Q4_K_M file has them, 370 MB; embeddings of 54 MB, which are 131 MB in bfloat16."""
    hidden, inner, experts, vocab, layers = 2048, 768, 64, 32000, 2
    generator, tensors = np.random.default_rng(0), {}

    def put(name, kind, *shape):
        tensors[f"{name}.weight"] = kind, gguf_files.random_blocks(kind, shape, generator, 0.001)

    put("token_embd", "Q6_K", vocab, hidden)
    put("output", "Q6_K", vocab, hidden)
    tensors["output_norm.weight"] = torch.ones(hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        for name, rows, columns in (
            ("q", 2048, hidden),
            ("k", 512, hidden),
            ("v", 512, hidden),
            ("output", hidden, 2048),
        ):
            put(f"{block}.attn_{name}", "Q6_K" if name == "v" else "Q4_K", rows, columns)
        put(f"{block}.ffn_gate_exps", "Q4_K", experts, inner, hidden)
        put(f"{block}.ffn_up_exps", "Q4_K", experts, inner, hidden)
        put(f"{block}.ffn_down_exps", "Q6_K" if layer else "Q4_K", experts, hidden, inner)
        tensors[f"{block}.ffn_gate_inp.weight"] = torch.zeros(experts, hidden)
        for name, size in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", 128), ("attn_k_norm", 128)):
            tensors[f"{block}.{name}.weight"] = torch.ones(size)
    keys = {
        "context_length": 128, "embedding_length": hidden, "block_count": layers, "feed_forward_length": 4096,
        "attention.head_count": 16, "attention.head_count_kv": 4, "attention.key_length": 128, "vocab_size": vocab,
        "attention.layer_norm_rms_epsilon": 1e-6, "expert_count": experts, "expert_used_count": 8,
        "expert_feed_forward_length": inner,
    }  # fmt: skip
    return gguf_files.write(path, "qwen3moe", {f"qwen3moe.{key}": value for key, value in keys.items()}, tensors)


def test_peak_while_loading_a_gguf_file(tmp_path):
    """What is packed, embeddings too, and what is unpacked of a matrix at once: 2^25 codes of a byte, and their copy
    where they wait."""
    path = write_gguf(tmp_path / "model.gguf")
    variables = environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    weights, peak = meter.run(LOAD, path, **variables)
    print(f"{weights / 1e6:.0f} MB of weights, peak {peak / 1e6:.0f} MB")
    assert 480e6 < weights < 530e6
    assert peak < weights + 6 * (1 << 25)

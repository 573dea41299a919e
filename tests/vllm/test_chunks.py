"""Llama 4 in engines: attention in chunks, factors of queries, and experts whose inputs are multiplied."""

import compare
import pytest
import torch
from conftest import DEFAULT_HEAD, TOKENS, Job, prompts, run_engines
from gguf_architectures import EXPERTS, LAYERS, VOCAB, model_of, write
from test_decoder_architectures import check

CHUNK = 16


class OfChunks:
    """What compare.check reads."""

    model = name = "llama4"
    compiled, inputs, attention, dtype, lm_head = False, "none", "w4a8", "float32", True
    share_of_an_expert = 1 / EXPERTS


@pytest.fixture(scope="module")
def chunks(tmp_path_factory):
    """Llama 4 with chunks shorter than prompts, and factors of queries from position 6 on: prompts, folder, and results
    by how the tokens come.
    """
    folder, fields = tmp_path_factory.mktemp("chunks"), {"floor_scale": 7, "attn_scale": 0.5}
    model = model_of("llama4", attention_chunk_size=CHUNK, max_position_embeddings=256, **fields)
    model.save_pretrained(folder / "reference")
    keys = {"llama4.attention.sliding_window": CHUNK, "llama4.context_length": 256}
    path = write("llama4", model, folder, True, **keys)
    plain = {"enforce_eager": True, "dtype": "float32", "max_model_len": 256, "hf_overrides": fields}
    # Otherwise vLLM has factors for engines of more than 32,768 tokens alone.
    plain["override_generation_config"] = {"attn_temperature_tuning": True}
    few = [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in (*prompts(), prompts()[2] * 4)]
    in_parts = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    ways = {
        "on": ({}, {}),
        "off": ({}, {"W4A8_VLLM_DECODER": "0"}),
        "bfloat16": ({"kv_cache_dtype": "bfloat16"}, {}),
        "parts": ({**in_parts, "enable_prefix_caching": False}, {}),
        "alone": ({"max_num_seqs": 1}, {}),
        "cached": ({}, {}),
        "hybrid": (in_parts, {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"}),
    }
    jobs = [
        Job(path, {**plain, **more}, few * (2 if way == "cached" else 1), environment=DEFAULT_HEAD | variables,
            prompt_logprobs=way in ("on", "off", "bfloat16"))
        for way, (more, variables) in ways.items()
    ]  # fmt: skip
    found, log = run_engines(jobs, folder / "engines", 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    for way, each in zip(ways, found):
        assert "error" not in each, (way, each["error"])
    assert log.count(f"w4a8: all {LAYERS} layers run in one call") == len(ways) - 1
    return few, folder, dict(zip(ways, found))


def test_in_one_call(chunks):
    """In one call beside layer by layer; with a cache of bfloat16 beside transformers."""
    few, folder, found = chunks
    check(found["on"], found["off"])
    compare.check(OfChunks, folder, few, found["bfloat16"], size=32, few_layers=False)


@pytest.mark.parametrize("way", ["parts", "alone", "cached", "hybrid"])
def test_bits_do_not_depend_on_steps(way, chunks):
    found = chunks[2]
    count = len(chunks[0])
    for part in (slice(0, count), slice(-count, None)):
        assert found["on"]["outputs"] == found[way]["outputs"][part]
        for a, b in zip(found["on"]["logprobs"], found[way]["logprobs"][part]):
            assert torch.equal(a[-TOKENS:], b)

"""Attention by this package's operators in engines: beside vLLM's own, several sequences, chunks, cached prefixes, and
latent attention."""

from types import SimpleNamespace

import pytest
import torch
from compare import assert_same, kl_divergences
from conftest import NGRAM, Job, arguments, run_engines
from models import Case

from w4a8.integrations.vllm import attention, latent_attention, settings

QWEN = Case("qwen3_moe", 32, "int-quantized", "float32", "symmetric")
GPT_OSS = Case("gpt_oss", 32, "int-quantized", "bfloat16", "symmetric")  # a window in every second layer, and sinks
MLA = [Case("deepseek_v2", 32, "int-quantized", dtype, "symmetric") for dtype in ("float32", "bfloat16")]
OFF = {"W4A8_VLLM_ATTENTION": "0"}
BLOCKS_OF_16 = "blocks of 16 tokens, which are no multiple of 64"
CHUNKS = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True, "max_num_seqs": 4}


def long_prompts():
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(2, 160, (150,), generator=generator).tolist()
    return [shared + torch.randint(2, 160, (n,), generator=generator).tolist() for n in (3, 40, 1)]


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    """name -> result, and the log."""
    found, logs = {}, {}
    for case in (QWEN, GPT_OSS):
        path = checkpoints(case) / "checkpoint"
        one = arguments(case)
        plain = {**one, "enable_prefix_caching": False}
        jobs = {
            "off": Job(path, one, environment=OFF),
            "int8": Job(path, one),
            "bfloat16": Job(path, {**one, "kv_cache_dtype": "bfloat16"}),
            "long": Job(path, plain, long_prompts(), prompt_logprobs=False),
            "cached": Job(path, {**one, "enable_prefix_caching": True}, long_prompts() * 2, prompt_logprobs=False),
            "chunks": Job(path, {**plain, **CHUNKS}, long_prompts(), prompt_logprobs=False),
            "blocks": Job(path, {**one, "block_size": 32}),
        }
        made, log = run_engines(
            list(jobs.values()), tmp_path_factory.mktemp(case.model), 900, VLLM_ENABLE_V1_MULTIPROCESSING="0",
            W4A8_VLLM_DECODER="0",
        )  # fmt: skip
        for name, result in zip(jobs, made):
            assert "error" not in result, (case.model, name, result["error"])
            found[case.model, name] = result
        logs[case.model] = log
    return found, logs


def divergence(a, b):
    """The median over all positions with the same tokens before them.

    Not the mean: random routers send a token to another expert for the smallest difference, and one such token was seen
    to be 1.06 where the median was 0.0019.
    """
    return float(kl_divergences(a, b).median())


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_beside_vllms_own(model, results):
    found, logs = results
    # Seen: 0.0007 and 0.0016, 0.0004 and 0.0003.
    assert 0 < divergence(found[model, "off"], found[model, "int8"]) < 0.004
    assert 0 < divergence(found[model, "off"], found[model, "bfloat16"]) < 0.002
    assert "attention runs here, with a KV cache of int8" in logs[model]
    assert "attention runs here, with a KV cache of bfloat16" in logs[model]
    assert "attention is vLLM's: W4A8_VLLM_ATTENTION=0" in logs[model]
    assert "attention is vLLM's: blocks of 32 tokens, which are no multiple of 64" in logs[model]
    assert_same(found[model, "off"], found[model, "blocks"])


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_chunks_and_cached_prefixes_change_no_bit(model, results):
    """Sequences that begin alike share pages already in the step that computes them."""
    found, _ = results
    cached = found[model, "cached"]
    for part in (slice(0, 3), slice(3, 6)):
        assert_same(found[model, "long"], {key: cached[key][part] for key in ("logprobs", "outputs")})
    assert_same(found[model, "long"], found[model, "chunks"])


@pytest.fixture(scope="module")
def latent(checkpoints, tmp_path_factory):
    """dtype -> name -> result, and the log."""
    found = {}
    repeated = [prompt[:60] * 3 for prompt in long_prompts()]
    for case in MLA:
        path = checkpoints(case) / "checkpoint"
        one = {**arguments(case), "attention_backend": "CPU_MLA"}  # where there is AMX, vLLM would take AMX_MLA
        guessing = {**one, "speculative_config": NGRAM}
        cut = {**one, "long_prefill_token_threshold": 64, "max_num_seqs": 4}
        jobs = {
            "off": Job(path, one, long_prompts(), prompt_logprobs=False, environment=OFF),
            "on": Job(path, one, long_prompts(), prompt_logprobs=False),
            "large": Job(path, {**one, "block_size": 192}, long_prompts(), prompt_logprobs=False),
            "small": Job(path, {**one, "block_size": 32}, long_prompts(), prompt_logprobs=False),
            "cut": Job(path, cut, long_prompts(), prompt_logprobs=False),
            "guessing off": Job(path, guessing, repeated, prompt_logprobs=False, environment=OFF),
            "guessing": Job(path, guessing, repeated, prompt_logprobs=False),
        }
        # vLLM's guesses from a prompt fail in the second engine of a process.
        made, log = [], ""
        for part in (list(jobs.values())[:-1], list(jobs.values())[-1:]):
            directory = tmp_path_factory.mktemp(case.dtype)
            results, text = run_engines(part, directory, 900, VLLM_ENABLE_V1_MULTIPROCESSING="0")
            made, log = made + results, log + text
        for name, result in zip(jobs, made):
            assert "error" not in result, (name, result["error"])
        found[case.dtype] = dict(zip(jobs, made)), log
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_attention(dtype, latent):
    """Sequences of 151 to 190 tokens, the longest of which begins a page while it decodes. Prompts that vLLM reads in
    parts, and guessed tokens, attend to cached tokens by vLLM's operators."""
    found, log = latent[dtype]
    assert 0 < divergence(found["off"], found["on"]) < 0.004
    assert 0 < divergence(found["off"], found["cut"]) < 0.004
    assert 0 < divergence(found["guessing off"], found["guessing"]) < 0.004
    assert_same(found["on"], found["large"])
    assert_same(found["off"], found["small"])
    assert "attention runs here, with a KV cache of bfloat16 latents" in log
    assert "attention is vLLM's: W4A8_VLLM_ATTENTION=0" in log
    assert f"attention is vLLM's: {BLOCKS_OF_16}" in log


def asked(**changes):
    usual = dict.fromkeys(
        ("use_mla", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales", "use_kv_connector", "use_dcp"), False
    )
    return SimpleNamespace(**{**usual, "attn_type": "decoder", "head_size": 128, "kv_cache_dtype": "auto", **changes})


attention.register_attention()
latent_attention.register_latent_attention()


def engine(block_size=128, user=False, backend=None):
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend and SimpleNamespace(name=backend)),
        cache_config=SimpleNamespace(block_size=block_size, user_specified_block_size=user),
    )


@pytest.mark.parametrize(
    ("layer", "config", "reason"),
    [
        ({}, {}, None),
        ({"kv_cache_dtype": "bfloat16", "head_size": 80}, {}, None),
        ({"kv_cache_dtype": None}, {"block_size": 64, "user": True}, None),
        ({"use_mla": True, "head_size": 576}, {"backend": "CPU_MLA"}, None),
        ({"use_mla": True, "head_size": 592}, {"backend": "CPU_MLA"}, "heads of 592"),
        ({"use_mla": True, "head_size": 576}, {"backend": "CPU_MLA", "block_size": 16}, BLOCKS_OF_16),
        (
            {"use_mla": True, "head_size": 576, "kv_cache_dtype": "int8_per_token_head"},
            {"backend": "CPU_MLA"},
            "a KV cache of int8_per_token_head",
        ),
        ({"use_sparse": True}, {}, "sparse attention"),
        ({"attn_type": "encoder_only"}, {}, "attention of type encoder_only"),
        ({"head_size": 528}, {}, "heads of 528"),
        ({"head_size": 72}, {}, "heads of 72"),
        ({"kv_cache_dtype": "fp8"}, {}, "a KV cache of fp8"),
        ({}, {"block_size": 32, "user": True}, "blocks of 32 tokens, which are no multiple of 64"),
        ({"use_mm_prefix": True}, {}, "mm_prefix"),
        ({"use_dcp": True}, {}, "dcp"),
    ],
)
def test_what_is_left_to_vllm(layer, config, reason):
    assert attention.reason_against(asked(**layer), engine(**config)) == reason


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"block_size": 256}, False),  # DeepSeek-V4
        ({"use_mla": False}, False),
        ({"cache_dtype": "bfloat16"}, True),
        ({"cache_dtype": "fp8"}, False),
        ({"head_size": 592}, False),
        ({"kv_lora_rank": 576}, False),
        ({"kv_lora_rank": 500}, False),
        ({"connector": object()}, False),
        ({"method": "ngram"}, True),
        ({"method": "draft_model"}, False),
        ({"quant_config": None}, False),
    ],
)
def test_pages_of_latent_attention(change, taken, monkeypatch):
    monkeypatch.setattr(latent_attention, "is_ours", lambda config: config is not None)
    given = {"block_size": 16, "use_mla": True, "cache_dtype": "auto", "head_size": 576, "kv_lora_rank": 512,
             "connector": None, "method": None, "quant_config": object(), **change}  # fmt: skip
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=given["use_mla"],
            hf_text_config=SimpleNamespace(kv_lora_rank=given["kv_lora_rank"]),
            get_head_size=lambda: given["head_size"],
        ),
        cache_config=SimpleNamespace(block_size=given["block_size"], cache_dtype=given["cache_dtype"]),
        speculative_config=given["method"] and SimpleNamespace(method=given["method"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(backend=SimpleNamespace(name="CPU_MLA")),
        kv_transfer_config=given["connector"],
        quant_config=given["quant_config"],
    )
    assert latent_attention._takes(config) is taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prompts_of_latent_attention(dtype):
    """Sequences of several lengths at once, beside attention in float32 over the same keys and values of bfloat16. The
    weights of the softmax are rounded to bfloat16: 2^-9 of values up to 4, and the output once more."""
    lengths, heads = [5, 130, 64, 1], 3
    query, key = (torch.randn(sum(lengths), heads, 48).to(dtype) for _ in range(2))
    value = torch.randn(sum(lengths), heads, 32).clamp(-4, 4).to(dtype)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    got = latent_attention.attend_once(query, key, value, starts, 0.3)
    assert got.dtype == dtype
    parts = ([part.float() for part in rows.split(lengths)] for rows in (query, key.bfloat16(), value.bfloat16(), got))
    for q, k, v, out in zip(*parts):
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        torch.testing.assert_close(out, want.transpose(0, 1), rtol=2.0**-8, atol=4 * 2.0**-8)


BY_AMX = "latent attention, which vLLM computes by AMX"


@pytest.mark.parametrize(("backend", "reason"), [(None, BY_AMX), ("CPU_MLA", None)])
def test_amx_computes_latent_attention(backend, reason, monkeypatch):
    """Where there is AMX, vLLM has an operator of its own for it."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert attention.reason_against(asked(use_mla=True, head_size=576), engine(backend=backend)) == reason


def test_switched_off(monkeypatch):
    monkeypatch.setenv(settings.ATTENTION, "0")
    assert attention.reason_against(asked(), engine()) == "W4A8_VLLM_ATTENTION=0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head", "int8"), [(128, 268), (64, 138), (256, 528)])
def test_bytes_of_a_token(head, int8, dtype):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=head, dtype=dtype)
    whole = attention.Int8Backend.customize_spec(spec)
    content = -(-int8 // dtype.itemsize) * dtype.itemsize
    assert whole.page_size_bytes == 128 * 4 * content
    assert attention.Int8Backend.customize_spec(whole) == whole
    assert attention.BFloat16Backend.customize_spec(spec).page_size_bytes == 128 * 4 * 4 * head

"""KV caches that checkpoints ask for: what vLLM can have here stays, of what it cannot have the plugin says so."""

import copy
from types import SimpleNamespace

import pytest
from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

from w4a8.integrations.vllm import kv_cache
from w4a8.integrations.vllm.configs import W4A8CompressedTensorsConfig, W4A8ModelOptConfig

EIGHT = {"dynamic": False, "num_bits": 8, "type": "float"}
FOUR = {"dynamic": False, "num_bits": 4, "type": "float"}
PLAIN = SimpleNamespace(hidden_size=256, num_attention_heads=4, head_dim=None)
MLA = SimpleNamespace(hidden_size=256, num_attention_heads=4, kv_lora_rank=512)


@pytest.fixture
def said(monkeypatch):
    found = []
    log = SimpleNamespace(warning=lambda message, *args: found.append(message % args))
    monkeypatch.setattr(kv_cache, "logger", lambda: log)
    return found


def set_cpu(monkeypatch, avx512=True, amx=False):
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: avx512)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)


@pytest.mark.parametrize(
    ("asked", "model", "avx512", "reason"),
    [
        (EIGHT, PLAIN, True, None),
        ("FP8", PLAIN, True, None),
        (EIGHT, PLAIN, False, "it needs AVX-512"),
        ("FP8", SimpleNamespace(hidden_size=320, num_attention_heads=4), True, "heads of 80 are no multiple of 32"),
        (EIGHT, SimpleNamespace(text_config=SimpleNamespace(head_dim=48)), True, "heads of 48 are no multiple of 32"),
        (EIGHT, MLA, True, "latent attention (MLA) has none"),
        (FOUR, PLAIN, True, "it is not of 8 bits"),
        ("NVFP4", PLAIN, True, "it is not of 8 bits"),
    ],
)
@pytest.mark.parametrize("key", kv_cache._KEYS)
@pytest.mark.parametrize("nested", [False, True])
def test_modelopt(asked, model, avx512, reason, key, nested, monkeypatch, said):
    """By what vLLM itself makes of the configuration afterwards."""
    set_cpu(monkeypatch, avx512)
    config = {"quant_algo": "NVFP4", key: copy.deepcopy(asked)}
    config = {"quant_method": "modelopt", **({"quantization": config} if nested else config)}
    wanted = get_kv_cache_quant_algo_string(config)
    assert wanted in ("fp8", "fp8_e4m3", "nvfp4")
    model = SimpleNamespace(**vars(model), quantization_config=copy.deepcopy(config))  # vLLM hands over a copy
    assert W4A8ModelOptConfig.override_quantization_method(config, None, hf_config=model) == "modelopt_fp4"
    for read in (config, model.quantization_config):
        assert get_kv_cache_quant_algo_string(read) == (wanted if reason is None else None)
    assert len(said) == (reason is not None) and all(f"does not have here ({reason})" in line for line in said)


@pytest.mark.parametrize("asked", ["INT8", {**EIGHT, "type": "int"}, {**EIGHT, "num_bits": 16}])
def test_what_vllm_knows_nowhere(asked, said):
    """It says so itself."""
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": asked}
    W4A8ModelOptConfig.override_quantization_method(config, None, hf_config=MLA)
    assert config["kv_cache_scheme"] == asked and not said


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("avx512", [True, False])
def test_compressed_tensors(strategy, avx512, monkeypatch, said):
    """A scheme with scales for each head stays, since it says how they are loaded."""
    set_cpu(monkeypatch, avx512)
    scheme = {**EIGHT, "strategy": strategy, "symmetric": True}
    config = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    text = SimpleNamespace(**vars(PLAIN), quantization_config=copy.deepcopy(config))
    model = SimpleNamespace(text_config=text, compression_config=copy.deepcopy(config))
    assert W4A8CompressedTensorsConfig.override_quantization_method(config, None, hf_config=model) is None
    stays = avx512 or strategy == "attn_head"
    for read in (config, text.quantization_config, model.compression_config):
        assert read["kv_cache_scheme"] == (scheme if stays else None)
    assert len(said) == (not stays)


def test_amx_is_enough(monkeypatch, said):
    set_cpu(monkeypatch, avx512=False, amx=True)
    assert kv_cache.kv_cache_problem(EIGHT, PLAIN) is None


@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_models_of_others(method, monkeypatch, said):
    """And what the plugin is told to leave alone."""
    set_cpu(monkeypatch, avx512=False)
    config = {"quant_method": method, "kv_cache_scheme": EIGHT}
    W4A8CompressedTensorsConfig.override_quantization_method(config, None, hf_config=PLAIN)
    W4A8ModelOptConfig.override_quantization_method(config, None, hf_config=PLAIN)
    assert config["kv_cache_scheme"] == EIGHT
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": EIGHT}
    assert W4A8ModelOptConfig.override_quantization_method(config, None, hf_config=PLAIN) == "modelopt_fp4"
    assert config["kv_cache_scheme"] == EIGHT and not said

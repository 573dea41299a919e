"""Keys of a GGUF file's architecture: one verdict of all readers, and the table of keys beside what the code reads."""

import json
import math

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("transformers 5 is needed", allow_module_level=True)

from w4a8.checkpoint import read_layers  # noqa: E402
from w4a8.checkpoint.gguf_architectures import ARCHITECTURES  # noqa: E402
from w4a8.checkpoint.gguf_config import config_of  # noqa: E402
from w4a8.checkpoint.gguf_key_table import EQUAL, HARMLESS, NEUTRAL, check_keys  # noqa: E402
from w4a8.checkpoint.gguf_keys import pooling_of  # noqa: E402
from w4a8.checkpoint.routers import router_in_config, router_in_file  # noqa: E402
from w4a8.command import main  # noqa: E402
from w4a8.integrations.vllm.gguf_folder import folder_of  # noqa: E402

IN_FILES = {"mixtral": "llama", "deepseek3": "deepseek2", "olmo3": "olmo2", "granitemoeshared": "granitemoe"}
WITH_EXPERTS = [name for name, known in ARCHITECTURES.items() if known.routing is not None]
# Of a key: a value, and another one.
VALUES = {
    "context_length": (4096, 8192),
    "embedding_length": (512, 1024),
    "block_count": (7, 8),
    "nextn_predict_layers": (1, 2),
    "vocab_size": (96, 97),
    "feed_forward_length": (64, 128),
    "attention.head_count": (8, 4),
    "attention.head_count_kv": (4, 2),
    "attention.key_length": (96, 128),
    "attention.value_length": (96, 128),
    "attention.key_length_mla": (96, 128),
    "attention.value_length_mla": (96, 128),
    "attention.q_lora_rank": (128, 64),
    "attention.kv_lora_rank": (128, 64),
    "attention.layer_norm_rms_epsilon": (1e-5, 1e-6),
    "attention.sliding_window": (16, 32),
    "attention.sliding_window_pattern": (2, 3),
    "final_logit_softcapping": (30.0, 20.0),
    "rope.dimension_count": (96, 64),
    "rope.freq_base": (5000.0, 10000.0),
    "rope.freq_base_swa": (5000.0, 10000.0),
    "rope.scaling.type": ("yarn", "linear"),
    "rope.scaling.factor": (4.0, 8.0),
    "rope.scale_linear": (4.0, 8.0),
    "rope.scaling.attn_factor": (1.0, 2.0),
    "rope.scaling.original_context_length": (1024, 2048),
    "rope.scaling.yarn_beta_fast": (16.0, 32.0),
    "rope.scaling.yarn_beta_slow": (2.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.1, 0.0707),
    "expert_count": (8, 16),
    "expert_used_count": (2, 3),
    "expert_feed_forward_length": (64, 128),
    "expert_shared_count": (1, 2),
    "expert_shared_feed_forward_length": (64, 128),
    "leading_dense_block_count": (1, 2),
    "expert_gating_func": (None, 4),
    "expert_weights_norm": (None, None),
    "expert_weights_scale": (1.0, 2.5),
    "expert_group_count": (None, 4),
    "expert_group_used_count": (1, 2),
    "pooling_type": (1, 4),
    "attn_logit_softcapping": (50.0, 40.0),
    "attention.key_length_swa": (96, 64),
    "attention.value_length_swa": (96, 64),
    "attention.shared_kv_layers": (0, 2),
    "embedding_length_per_layer_input": (0, 16),
    "rope.dimension_count_swa": (96, 64),
    "rope.dimension_sections": ([4, 2, 2, 0], [2, 2, 4, 0]),
    "rope.scaling.finetuned": (False, True),
    "attention.recurrent_layers": ([True, False] * 3, [False, True] * 3),
    "full_attention_interval": (4, 3),
    "ssm.conv_kernel": (4, 3),
    "ssm.state_size": (32, 64),
    "ssm.group_count": (2, 4),
    "ssm.time_step_rank": (8, 4),
    "ssm.inner_size": (512, 256),
    "shortconv.l_cache": (3, 4),
    "moe_latent_size": (32, 64),
    "attention.indexer.head_count": (2, 4),
    "attention.indexer.key_length": (32, 64),
    "attention.indexer.top_k": (8, 16),
    "attention.indexer.types": ([True, False] * 3, [True] * 6),
    "attention.layer_norm_epsilon": (1e-5, 1e-6),
    "attention.scale": (0.1, 0.2),
    "embedding_scale": (12.0, 6.0),
    "residual_scale": (0.2, 0.3),
    "logit_scale": (8.0, 0.5),
    "interleave_moe_layer_step": (1, 2),
    "attention.temperature_scale": (0.1, 0.2),
}


def read_json_list(path):
    return json.loads(path.read_text()) if path.exists() else []


def keys_of(name, values):
    """All keys of a file."""
    in_file = IN_FILES.get(name, name)
    found = {f"{in_file}.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": in_file, **found}


def values_of(name):
    """Of every key that is applied."""
    routing = ARCHITECTURES[name].routing
    found = {key: VALUES[key][0] for key in ARCHITECTURES[name].reads}
    found |= dict.fromkeys(ARCHITECTURES[name].told_by, 0)
    if name.startswith(("deepseek", "glm-dsa")):
        found["rope.dimension_count"] = 32
    if routing is not None:
        found |= {"expert_gating_func": routing.gating, "expert_weights_norm": routing.renormalize}
        found["expert_group_count"] = 2 if "expert_group_count" in routing.follows else 1
    return found


# ---- the router ----

ROUTER = {
    "expert_gating_func": [1, 2, 3, 4],
    "expert_weights_norm": [False, True],
    "expert_weights_scale": [0.0, 1.0, 2.5, math.inf],
    "expert_group_count": [0, 1, 2, 3, 8],
    "expert_group_used_count": [1, 3],
}


def of_keys(keys, has_bias):
    """The router of the file, or the error."""
    try:
        return router_in_file(keys, has_bias)
    except ValueError as error:
        return str(error)


def of_transformers(keys, has_bias):
    """What the model of transformers computes, by what w4a8 knows of its config.json; or the error."""
    try:
        config = config_of(keys, ["blk.1.exp_probs_b.bias"] if has_bias else [])
    except ValueError as error:
        return str(error)
    found = router_in_config(config["model_type"], config)
    if found.has_correction_bias != has_bias:
        return f"the GGUF file lacks a correction bias (exp_probs_b), but {config['model_type']} has one"
    return found


@pytest.mark.parametrize("key", ROUTER)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_one_router(name, key):
    """The same verdict of both readers, and the same values."""
    verdicts = set()
    for value in ROUTER[key]:
        for has_bias in (False, True):
            keys = keys_of(name, values_of(name) | {key: value})
            mine, theirs = of_keys(keys, has_bias), of_transformers(keys, has_bias)
            assert mine == theirs, (key, value, has_bias)
            verdicts.add(mine)
            if isinstance(mine, str) and "exp_probs_b" not in mine:
                assert key in mine or "expert_group_count" in mine
    assert any(isinstance(each, str) for each in verdicts)
    assert any(not isinstance(each, str) for each in verdicts) or key == "expert_group_used_count"


# ---- the table of keys ----

# What is read if other keys are not there.
WITHOUT = [
    (),
    ("rope.scaling.factor",),
    ("attention.recurrent_layers",),
    ("attention.key_length_mla", "attention.value_length_mla"),
]


class Noting(dict):
    """Keys of a file, and which of them were asked for."""

    def __init__(self, keys):
        super().__init__(keys)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)


def made(keys):
    """All that is made of keys; the error, if there is one."""
    try:
        return config_of(keys, ["blk.0.attn_q.weight"]), pooling_of(keys)
    except ValueError as error:
        return str(error)


def variants(name):
    values = values_of(name)
    return [{key: value for key, value in values.items() if key not in without} for without in WITHOUT]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_read_is_in_the_table(name):
    """Both ways."""
    asked = set()
    for values in variants(name):
        keys = Noting(keys_of(name, values))
        assert not isinstance(made(keys), str), made(keys)
        prefix = f"{IN_FILES.get(name, name)}."
        asked |= {key.removeprefix(prefix) for key in keys.asked if key.startswith(prefix)}
    assert asked == ARCHITECTURES[name].reads


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_applied_matters_and_what_is_harmless_does_not(name):
    for key in ARCHITECTURES[name].reads:
        of_gating = {"expert_gating_func": (4,), "expert_weights_norm": (False, True)}
        others = of_gating.get(key, VALUES[key][1:])
        found = {str(made(keys_of(name, values | {key: other}))) != str(made(keys_of(name, values)))
                 for values in variants(name) if key in values for other in others}  # fmt: skip
        assert True in found, key
    values = values_of(name)
    for key in HARMLESS.keys() - ARCHITECTURES[name].reads:
        assert made(keys_of(name, values | {key: 3})) == made(keys_of(name, values)), key


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_ignored_is_refused(name):
    """By every reader, with the name of the key, unless its value changes nothing."""
    values, prefix = values_of(name), IN_FILES.get(name, name)
    neutral = {key: (allowed[0], 7) for key, allowed in NEUTRAL.items()}
    neutral |= {"rope.dimension_sections": ([0, 0, 0, 0], [8, 12, 12, 0]), "swiglu_clamp_exp": ([0.0] * 3, [0.0, 7.0])}
    neutral |= {key: (values.get(other), 7) for key, other in EQUAL.items()}
    neutral |= {"attention.sliding_window": (values["context_length"], 7), "attention.indexer.top_k": (None, 7)}
    for key in neutral.keys() - ARCHITECTURES[name].reads:
        nothing, something = neutral[key]
        assert made(keys_of(name, values | {key: nothing})) == made(keys_of(name, values)), key
        keys = keys_of(name, values | {key: something})
        for reader in (check_keys, lambda keys: config_of(keys, [])):
            with pytest.raises(ValueError, match=rf"^{prefix}\.{key} is "):
                reader(keys)


@pytest.mark.parametrize("changes, expected", [
    ({}, "deepseek_v2"),
    ({"vocab_size": 154880}, "deepseek_v3"),
    ({"vocab_size": 154880, "expert_gating_func": 1}, "deepseek_v2"),
])  # fmt: skip
def test_the_first_files_of_glm_flash(changes, expected):
    """They do not say how their router computes; llama.cpp knows it (llama_model_deepseek2::load_arch_hparams)."""
    values = values_of("deepseek2") | {"block_count": 47, "nextn_predict_layers": 0, "expert_gating_func": None}
    assert config_of(keys_of("deepseek2", values | changes), [])["model_type"] == expected


@pytest.mark.parametrize("kind, expected", [(1, "mean_tokens"), (2, "cls_token"), (3, "lasttoken"), (0, None)])
def test_pooling_in_the_folder_for_vllm(kind, expected, tmp_path):
    """As sentence-transformers writes it: vLLM looks for it there (get_pooling_config)."""
    gguf_models = pytest.importorskip("gguf_models")
    tiny = gguf_models.TinyModel("qwen3")
    tiny.keys["qwen3.pooling_type"] = kind
    folder = folder_of(tiny.write(tmp_path), tmp_path / "cache", False)
    layers = read_json_list(folder / "modules.json")
    assert [each["type"] for each in layers] == [f"sentence_transformers.models.{name}" for name in
                                                 (("Pooling", "Normalize") if kind else ())]  # fmt: skip
    if kind:
        path = folder / layers[0]["path"] / "config.json"
        assert json.loads(path.read_text()) == {f"pooling_mode_{expected}": True}


@pytest.mark.parametrize("name", ["gpt-oss", "gemma3"])
def test_what_vllm_does_not_apply(name, tmp_path):
    """Its rope has no attention_factor."""
    gguf_models = pytest.importorskip("gguf_models")
    tiny = gguf_models.TinyModel(name)
    rope = {"type": "yarn", "original_context_length": 32, "attn_factor": 2.0}
    tiny.keys |= {f"{name}.rope.scaling.{key}": value for key, value in rope.items()}
    with pytest.raises(ValueError, match=r"model.gguf: rope.scaling.attn_factor is not 1, which vLLM does not apply"):
        folder_of(tiny.write(tmp_path), tmp_path / "cache", False)


def test_files_with_a_key_that_is_ignored(tmp_path, capsys):
    """Linear layers and `inspect` have the same verdict."""
    gguf_models = pytest.importorskip("gguf_models")
    tiny = gguf_models.TinyModel("qwen3")
    tiny.keys["qwen3.final_logit_softcapping"] = 30.0
    path = tiny.write(tmp_path)
    message = "qwen3.final_logit_softcapping is 30.0 in the GGUF file, but 0 is expected: it is not applied"
    with pytest.raises(ValueError, match=message):
        read_layers(path)
    assert main(["inspect", str(path)]) == 1
    assert message in capsys.readouterr().err

"""What a quantization_config says of a module, when a value of it is anything: rules, or a CheckpointError."""

import pytest
from damaged_json import damaged
from format_checkpoints import LAYER

from w4a8.core.json_fields import CheckpointError
from w4a8.formats import NotRead, Scheme, rules_of

FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
QUERY = "model.layers.0.self_attn.q_proj"
METHODS = [
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "checkpoint_format": "gptq",
     "dynamic": {"-:.*gate": {}, ".*down.*": {"bits": 8}}, "modules_in_block_to_quantize": [["up_proj"]]},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "modules_to_not_convert": ["gate"]},
    {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq",
     "extra_config": {".*down.*": {"bits": 8}, "lm_head": {"bits": 16}}, "block_name_to_quantize": "model.layers",
     "modules_to_not_convert": ["gate"]},
    {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "group_size": 32,
     "packing_format": "auto_round:llm_compressor"},
    {"quant_method": "auto-round", "data_type": "nv_fp", "bits": 4, "group_size": 16,
     "packing_format": "auto_round:llm_compressor"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
     "config_groups": {"group_0": {"weights": {"group_size": 16}}}},
    {"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"],
     "quantized_layers": {"model.layers.0": {"quant_algo": "NVFP4", "group_size": 16}}}},
    {"quant_method": "quark", "global_quant_config": {"weight": FP4}, "exclude": ["lm_head", "re:.*gate"],
     "export": {"weight_format": "real_quantized", "kv_cache_group": ["*k_proj"]}, "algo_config": [{"name": "awq"}],
     "layer_quant_config": {"*down_proj": {"weight": [FP4]}, "re:.*gate": {}}, "layer_type_quant_config": {}},
    {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
     "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4}}},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*gate"],
     "config_groups": {
         "group_0": {"targets": ["re:.*down_proj"], "format": "int-quantized", "weights": INT4,
                     "input_activations": INT8},
         "group_1": {"targets": ["Linear"], "weights": {**INT4, "num_bits": 8}},
     }},
]  # fmt: skip

JUNK = [None, 7, -1, 0, True, "x", "(", [], [1], [[["a"]]], {}, {"x": 1}, {"(": {}}, 1.5, 10**5000]
# Of any method, also where it does not have them.
KEYS = [
    "bits", "group_size", "sym", "desc_act", "checkpoint_format", "pack_dtype", "dynamic", "lm_head", "version",
    "modules_in_block_to_quantize", "modules_to_not_convert", "zero_point", "extra_config", "data_type",
    "packing_format", "act_bits", "block_name_to_quantize", "config_groups", "ignore", "format", "quant_algo",
    "exclude_modules", "quantization", "quantized_layers", "exclude", "export", "global_quant_config",
    "layer_quant_config", "layer_type_quant_config", "algo_config",
]  # fmt: skip
methods = pytest.mark.parametrize("method", METHODS, ids=lambda method: method["quant_method"])


@methods
@pytest.mark.parametrize("key", KEYS)
def test_values_of_any_type(method, key):
    """Rules, or an error that names the key."""
    for value in JUNK:
        try:
            found = rules_of({**method, key: value}).of(f"{LAYER}.7.up_proj")
        except CheckpointError as error:
            assert key in str(error)
            continue
        assert isinstance(found, (Scheme, NotRead))


@methods
def test_rules_of_anything(method):
    """They say how a module is stored, in integers, or why they cannot."""
    modules = ("lm_head", "model.layers.0.mlp.gate", f"{LAYER}.3.down_proj", QUERY)
    read = 0
    for config in (method, *damaged(method)):
        try:
            rules = rules_of(config)
            found = [rules.of(name) for name in modules]
        except CheckpointError as error:
            assert 0 < len(str(error)) < 4000
            assert config is not method
            continue
        for stored in found:
            if isinstance(stored, Scheme):
                read += 1
                assert type(stored.bits) is int and stored.bits in (4, 8)
                assert type(stored.group_size) is int and stored.groups(64) >= 0
    assert read > 0

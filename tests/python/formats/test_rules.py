"""What a quantization_config says of a module, as the tools that write it mean it."""

import json
import random
import re

import pytest
import torch
from format_checkpoints import GPT_OSS as MXFP4

from w4a8.core.json_fields import CheckpointError
from w4a8.formats import NotRead, Scheme, find_config, rules_of, scheme_of

Q, UP, HEAD = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.experts.7.up_proj", "lm_head"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": False, "data_type": "int"}
ROUND_MX = {**ROUND, "group_size": 32, "sym": True, "data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"}
ROUND_NV = {**ROUND_MX, "group_size": 16, "data_type": "nv_fp"}
MXFP4_PACK, NVFP4_PACK, FLOATS = "mxfp4-pack-quantized", "nvfp4-pack-quantized", {"type": "float", "group_size": 32}
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [HEAD, "model.layers.3.self_attn*"],
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
}  # fmt: skip

QUARK_WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": QUARK_WEIGHT}, "exclude": [HEAD]}


def in_hf_quant_config(**changes):
    """As modelopt's file of its own has it; ``quant_method`` is put there by its reader."""
    skipped = ["lm_head", "model.layers.3.self_attn*"]
    stated = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": skipped,
        **changes,
    }
    return {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": stated}


def gptq(group=128, symmetric=True, version=1, ordered=False, bits=4):
    return Scheme("gptq", group, symmetric, version, ordered, "quantization_config.quant_method is 'gptq'", bits)


def awq(group=64, symmetric=False):
    return Scheme("awq", group, symmetric, weight_only="quantization_config.quant_method is 'awq'")


def modelopt(stated="quant_algo is 'NVFP4'"):
    return Scheme("modelopt-nvfp4", 16, True, weight_only=f"quantization_config.{stated}")


def auto_round(format_="gptq", group=128, symmetric=False, version=1, bits=4):
    return Scheme(format_, group, symmetric, version, weight_only="quantization_config.act_bits is 16", bits=bits)


def compressed(inputs=True, **changes):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **changes}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations if inputs else None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [HEAD],
        "config_groups": {"group_0": group},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTQ, gptq()),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(version=2)),
        ({**GPTQ, "format": "GPTQ_V2"}, gptq(version=2)),
        ({**GPTQ, "checkpoint_format": "gptq", "sym": False}, gptq(symmetric=False)),
        ({**GPTQ, "desc_act": True}, gptq(ordered=True)),
        ({**GPTQ, "bits": 8}, gptq(bits=8)),
        ({**GPTQ, "group_size": 16}, gptq(group=16)),
        ({**GPTQ, "group_size": None}, gptq(group=128)),
        ({**GPTQ, "desc_act": True, "group_size": -1}, gptq(group=-1)),
        (AWQ, awq()),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": False}, awq(32, True)),
        (ROUND, auto_round()),
        ({**ROUND, "quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq"}, auto_round("awq")),
        ({**ROUND, "quant_method": "auto_round", "packing_format": "auto_round:gptq"}, auto_round()),
        ({**ROUND, "packing_format": "auto_round"}, auto_round(version=2)),
        ({**ROUND, "packing_format": "auto_round:gptqmodel", "sym": True}, auto_round(symmetric=True, version=2)),
        (compressed(), Scheme("pack-quantized", 32, True)),
        (compressed(strategy="channel", group_size=None), Scheme("pack-quantized", -1, True)),
        (
            compressed(inputs=False, symmetric=False),
            Scheme("pack-quantized", 32, False,
                   weight_only="quantization_config.config_groups.group_0.input_activations is missing"),
        ),
        (
            compressed(inputs=False, num_bits=8),
            Scheme("pack-quantized", 32, True, bits=8,
                   weight_only="quantization_config.config_groups.group_0.input_activations is missing"),
        ),
        (
            {**compressed(**FLOATS), "format": MXFP4_PACK},
            Scheme(MXFP4_PACK, 32, True,
                   weight_only="quantization_config.config_groups.group_0.input_activations is not int8"),
        ),
        (
            {**compressed(type="float", group_size=16, strategy="tensor_group"), "format": NVFP4_PACK},
            Scheme(NVFP4_PACK, 16, True,
                   weight_only="quantization_config.config_groups.group_0.input_activations is not int8"),
        ),
        (ROUND_NV, Scheme(NVFP4_PACK, 16, True, weight_only="quantization_config.data_type is 'nv_fp'")),
        (MODELOPT, modelopt()),
        ({**MODELOPT, "quant_algo": "w4a16_nvfp4"}, modelopt("quant_algo is 'W4A16_NVFP4'")),
        (in_hf_quant_config(), modelopt("quantization.quant_algo is 'NVFP4'")),
        (ROUND_MX, Scheme(MXFP4_PACK, 32, True, weight_only="quantization_config.data_type is 'mx_fp'")),
        (MXFP4, Scheme("mxfp4", 32, True, weight_only="quantization_config.quant_method is 'mxfp4'")),
    ],
)  # fmt: skip
def test_of_all_modules(config, expected):
    assert rules_of(config).of(UP) == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**GPTQ, "bits": 3}, "quantization_config.bits is 3, but 4 or 8 is expected"),
        ({**GPTQ, "bits": None}, "quantization_config.bits is None, but 4 or 8 is expected"),
        (
            {**GPTQ, "group_size": 24},
            "quantization_config.group_size is 24, but -1, 16 or a multiple of 32 is expected",
        ),
        ({**GPTQ, "checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin', but 'gptq' or"),
        ({**GPTQ, "pack_dtype": "int16"}, "quantization_config.pack_dtype is 'int16', but 'int32' is expected"),
        ({**GPTQ, "sym": "yes"}, "quantization_config.sym is 'yes', but true or false is expected"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version is 'gemv', but 'gemm' is expected"),
        ({**AWQ, "bits": 8}, "quantization_config.bits is 8, but 4 is expected"),
        ({**ROUND, "bits": 8, "packing_format": "auto_round:auto_awq"}, "quantization_config.bits is 8, but 4 is exp"),
        (
            {**ROUND, "packing_format": "auto_round:llm_compressor"},
            "packing_format is 'auto_round:llm_compressor', but",
        ),
        ({**ROUND, "data_type": "nv_fp"}, "quantization_config.group_size is 128, but 16 is expected"),
        ({**ROUND_NV, "bits": 8}, "quantization_config.bits is 8, but 4 is expected"),
        ({**ROUND_NV, "packing_format": "auto_round"}, "but 'auto_round:llm_compressor' is expected"),
        ({**ROUND, "data_type": "fp8"}, "quantization_config.data_type is 'fp8', but 'int' is expected"),
        ({**ROUND, "data_type": "mx_fp"}, "quantization_config.group_size is 128, but 32 is expected"),
        ({**ROUND_MX, "bits": 8}, "quantization_config.bits is 8, but 4 is expected"),
        ({**ROUND_MX, "packing_format": "auto_round:auto_gptq"}, "but 'auto_round:llm_compressor' is expected"),
        ({**compressed(**FLOATS), "format": "pack-quantized"}, "weights.type is 'float', but 'int' is expected"),
        ({**compressed(**FLOATS, num_bits=8), "format": MXFP4_PACK}, "weights.num_bits is 8, but 4 is expected"),
        ({**compressed(**FLOATS, num_bits=4.0), "format": MXFP4_PACK}, "weights.num_bits is 4.0, but 4 is expected"),
        ({**compressed(type="float", group_size=16), "format": MXFP4_PACK}, "group_size is 16, but 32 is expected"),
        ({**compressed(), "format": MXFP4_PACK}, "weights.type is 'int', but 'float' is expected"),
        ({**compressed(), "format": NVFP4_PACK}, "weights.type is 'int', but 'float' is expected"),
        ({**compressed(**FLOATS), "format": NVFP4_PACK}, "group_size is 32, but 16 is expected"),
        ({**compressed(), "format": "naive-quantized"}, "is 'naive-quantized', but one of 'int-quantized', 'pack-quan"),
        (
            {
                **MODELOPT,
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.layers.3": {"quant_algo": "FP8"}},
            },
            "quantized_layers['model.layers.3'].quant_algo is 'FP8', but 'NVFP4' or 'W4A16_NVFP4' is expected",
        ),
        ({**MODELOPT, "quant_algo": "FP8"}, "quant_algo is 'FP8', but 'NVFP4' or 'W4A16_NVFP4' is expected"),
        ({**MODELOPT, "quant_algo": None}, "quant_algo is None, but 'NVFP4' or 'W4A16_NVFP4' is expected"),
        (in_hf_quant_config(quant_algo="NVFP4_AWQ"), "quantization_config.quantization.quant_algo is 'NVFP4_AWQ', but"),
        (in_hf_quant_config(group_size=32), "quantization_config.quantization.group_size is 32, but 16 is expected"),
        (
            {**MODELOPT, "config_groups": {"group_0": {"weights": {"group_size": 32}}}},
            "quantization_config.config_groups.group_0.weights.group_size is 32, but 16 is expected",
        ),
        ({**ROUND, "act_bits": 4}, "quantization_config.act_bits is 4, but 16, or 8 is expected"),
        (compressed(num_bits=8), "quantization_config.config_groups.group_0.weights.num_bits is 8, but 4 is expected"),
        (compressed(actorder="group"), "weights.actorder is 'group': reordered input features"),
        (compressed(actorder="dynamic"), "weights.actorder is 'dynamic': reordered input features"),
    ],
)
def test_quantized_otherwise(config, reason):
    found = rules_of(config).of(UP)
    assert isinstance(found, NotRead) and found.quantized
    assert reason in found.reason


def test_int8_activations_of_auto_round():
    assert rules_of({**ROUND, "act_bits": 8, "act_dynamic": True}).of(UP).weight_only is None


def test_dynamic_rules_of_gptq():
    """Patterns match from the start, the first one wins."""
    rules = rules_of({
        **GPTQ,
        "dynamic": {
            r"-:.*\.layers\.0\.": {},
            r"+:.*\.self_attn\.": {"bits": 8},
            r".*\.layers\.1\.mlp\.experts\.\d+\.down_proj": {"group_size": 32, "sym": False},
            r"+:layers\.2": {"bits": 8},
        },
    })  # fmt: skip
    skipped = rules.of("model.layers.0.self_attn.q_proj")
    assert not skipped.quantized and r"dynamic['-:.*\\.layers\\.0\\.'] leaves it out" in skipped.reason
    assert rules.of(Q) == gptq(bits=8)
    three = rules_of({**GPTQ, "dynamic": {r"+:.*": {"bits": 3}}}).of(Q)
    assert three.quantized and three.reason.startswith("quantization_config.bits is 3, but 4 or 8 is expected (by qu")
    assert rules.of("model.layers.1.mlp.experts.5.down_proj") == gptq(32, False)
    assert rules.of("model.layers.2.mlp.experts.5.down_proj") == gptq()


def test_named_modules_of_gptq():
    rules = rules_of({**GPTQ, "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.q_proj"]]})
    assert rules.of(Q) == gptq()
    assert "modules_in_block_to_quantize does not name it" in rules.of(UP).reason


@pytest.mark.parametrize("config", [GPTQ, AWQ, ROUND])
def test_head(config):
    found = rules_of(config).of(HEAD)
    assert not found.quantized and found.reason == "lm_head is not quantized: quantization_config.lm_head is not true"
    assert isinstance(rules_of({**config, "lm_head": True}).of(HEAD), Scheme)
    # A file that has codes of it says more.
    assert isinstance(scheme_of(rules_of(config), HEAD, ["qweight", "qzeros", "scales"]), Scheme)


def test_what_awq_leaves_out():
    rules = rules_of({**AWQ, "modules_to_not_convert": ["mlp.gate", "self_attn"]})
    assert rules.of(UP) == awq()
    for name in (Q, "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"):
        assert not rules.of(name).quantized
        assert "modules_to_not_convert has '" in rules.of(name).reason
    # By parts of names, this is left out as well; by its tensors it is not.
    assert scheme_of(rules, "model.layers.0.mlp.gate_proj", ["qweight", "qzeros", "scales"]) == awq()
    assert not scheme_of(rules, "model.layers.0.mlp.gate", ["weight"]).quantized


def test_extra_config_of_auto_round():
    rules = rules_of({
        **ROUND,
        "block_name_to_quantize": "model.layers,other.blocks.1",
        "extra_config": {
            "model.layers.3.mlp.gate": {"bits": 16},
            "model.layers.3.self_attn.q_proj": {"group_size": 32, "sym": True},
            r".*\.shared_expert\..*": {"bits": 8},
            r".*\.dense\..*": {"bits": 2},
            "lm_head": {"bits": 4},
            "model.layers.4": {"bits": 2},
        },
    })  # fmt: skip
    assert rules.of(UP) == auto_round()
    assert rules.of("model.layers.4.mlp.up_proj") == auto_round()  # no pattern, and not its whole name
    assert rules.of(Q) == auto_round(group=32, symmetric=True)
    assert rules.of("language_model.lm_head") == auto_round()
    assert "block_name_to_quantize does not name its block" in rules.of("model.my_lm_head").reason  # no end of its name
    gate = rules.of("model.layers.3.mlp.gate")
    assert not gate.quantized and "bits is 16: not quantized" in gate.reason
    shared = "model.layers.3.mlp.shared_expert.up_proj"
    assert rules.of(shared) == auto_round(bits=8)
    suffixes = ["qweight", "qzeros", "scales"]
    assert scheme_of(rules, shared, suffixes) == auto_round(bits=8)
    dense = rules.of("model.layers.3.mlp.dense.up_proj")
    assert (
        dense.quantized and "bits is 2, but 4 or 8 is expected (by quantization_config.extra_config['" in dense.reason
    )
    assert "block_name_to_quantize does not name its block" in rules.of("vision.blocks.1.fc1").reason
    assert "does not name its block" in rules.of("other.blocks.10.fc1").reason
    assert rules.of("other.blocks.1.fc1") == auto_round()


def test_only_experts_are_mxfp4():
    rules = rules_of(MXFP4)
    assert isinstance(rules.of("model.layers.0.mlp.experts"), Scheme)
    assert isinstance(rules.of("model.layers.0.mlp.experts.gate_up_proj"), Scheme)
    for name in (Q, HEAD, "model.layers.0.mlp.router"):
        assert rules.of(name).reason == f"{name} is not quantized: MXFP4 is for experts"
    skipped = rules_of({**MXFP4, "modules_to_not_convert": ["model.layers.0.mlp.experts"]})
    assert "modules_to_not_convert names it" in skipped.of("model.layers.0.mlp.experts.down_proj").reason


@pytest.mark.parametrize("config", [MODELOPT, in_hf_quant_config()])
def test_what_modelopt_leaves_out(config):
    """Entries are patterns of whole names; what is inside of a module that one matches is left out too."""
    rules = rules_of(config)
    assert rules.of(UP) == modelopt(rules.default.weight_only.partition(".")[2])
    for name in (Q, HEAD, "model.layers.3.self_attn"):
        assert not rules.of(name).quantized and " has 'model.layers.3.self_attn*'" in rules.of(Q).reason
    assert isinstance(rules.of("model.layers.13.self_attn.q_proj"), Scheme)
    assert isinstance(rules.of("model.lm_head_norm"), Scheme)
    # A file that has codes of it says more.
    assert scheme_of(rules, Q, ["weight", "weight_scale", "weight_scale_2"]) == rules.default
    assert not scheme_of(rules, Q, ["weight"]).quantized
    # Named by nothing, and not quantized all the same.
    assert scheme_of(rules, "model.embed_tokens", ["weight"]).reason.endswith("it has weights without scales")


@pytest.mark.parametrize("inside", [True, False])
def test_mixed_precision_of_modelopt(inside):
    layers = {
        "model.layers.3.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.3.mlp.experts.1.up_proj": {"quant_algo": "w4a16_nvfp4"},
        "model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.3.self_attn.k_proj": {"quant_algo": "NVFP4", "group_size": 32},
    }
    stated = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    rules = rules_of({"quant_method": "modelopt", **({"quantization": stated} if inside else stated)})
    where = f"{'quantization.' if inside else ''}quantized_layers"
    assert rules.of(UP) == modelopt(f"{where}['model.layers.3.mlp.experts'].quant_algo is 'NVFP4'")
    other = rules.of("model.layers.3.mlp.experts.1.up_proj")
    assert other == modelopt(f"{where}['model.layers.3.mlp.experts.1.up_proj'].quant_algo is 'W4A16_NVFP4'")
    assert rules.of(Q).quantized and f"{where}['{Q}'].quant_algo is 'FP8', but 'NVFP4' or" in rules.of(Q).reason
    keys = rules.of("model.layers.3.self_attn.k_proj")
    assert keys.quantized and "k_proj'].group_size is 32, but 16 is expected" in keys.reason
    for name in ("model.layers.3.self_attn.v_proj", "model.layers.33.mlp.experts", HEAD):
        found = rules.of(name)
        assert found.reason == f"{name} is not quantized: quantization_config.{where} does not name it"
        assert not found.quantized and scheme_of(rules, name, ["weight", "weight_scale", "weight_scale_2"]) == found


def test_patterns_of_modelopt():
    rules = rules_of({**MODELOPT, "ignore": ["model.layers.?.gate", "*.experts.1"]})
    assert not rules.of("model.layers.3.gate").quantized
    assert isinstance(rules.of("model.layers.3.gate_proj"), Scheme)
    assert isinstance(rules.of("model.layers.33.gate"), Scheme)
    assert not rules.of("model.layers.3.mlp.experts.1.up_proj").quantized
    assert isinstance(rules.of("model.layers.3.mlp.experts.11.up_proj"), Scheme)


def test_files_without_codes():
    found = scheme_of(rules_of(GPTQ), UP, ["weight", "bias"])
    assert found == NotRead(f"{UP} is not quantized: it has weights without scales", quantized=False)
    assert scheme_of(rules_of({**GPTQ, "bits": 8}), UP, ["qweight"]).bits == 8
    assert scheme_of(rules_of({**GPTQ, "bits": 3}), UP, ["qweight"]).quantized


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quant_method is None, but one of auto-round, awq, compressed-tensors, gptq, modelopt, mxfp4, quark is"),
        ({"quant_method": ["gptq"]}, "quant_method is ['gptq'], but one of"),
        ({**GPTQ, "dynamic": 5}, "quantization_config.dynamic is 5, but an object is expected"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, "dynamic['+:('] is '(', but a regular expression is expected"),
        ({**GPTQ, "dynamic": {"x": 3}}, "dynamic['x'] is 3, but an object is expected"),
        ({**GPTQ, "modules_in_block_to_quantize": [[7]]}, "modules_in_block_to_quantize is 7, but a name is expected"),
        ({**AWQ, "modules_to_not_convert": {"a": 1}}, "modules_to_not_convert is {'a': 1}, but a list is expected"),
        ({**ROUND, "extra_config": {"x(": {}}}, "extra_config['x('] is 'x(', but a regular expression is expected"),
        ({**MODELOPT, "ignore": [3]}, "an entry of quantization_config.ignore is 3, but a name is expected"),
        (
            {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 3}},
            "quantization_config.quantized_layers['a'] is 3, but an object is expected",
        ),
        ({**QUARK, "exclude": ["re:("]}, "an entry of quantization_config.exclude is 're:(', but a name or a regular"),
        ({**QUARK, "layer_quant_config": {"re:(": {}}}, "a key of quantization_config.layer_quant_config is 're:('"),
        ({**QUARK, "layer_quant_config": {"a": 3}}, "quantization_config.layer_quant_config['a'] is 3, but an object"),
        (
            {**QUARK, "export": {"weight_format": "fake_quantized"}},
            "quantization_config.export.weight_format is 'fake_quantized', but 'real_quantized' is expected",
        ),
        ({**MODELOPT, "quantization": 5}, "quantization_config.quantization is 5, but an object is expected"),
        ({**ROUND, "extra_config": []}, "extra_config is [], but an object is expected"),
    ],
)
def test_damaged(config, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        rules_of(config)


def test_where_the_config_is():
    assert find_config({"quantization_config": GPTQ}) is GPTQ
    assert find_config({"text_config": {"compression_config": GPTQ}}) is GPTQ
    with pytest.raises(CheckpointError, match=r"config\.json has no quantization_config"):
        find_config({"text_config": {}})


@pytest.mark.parametrize(("name", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_a_file_of_its_own(name, method, tmp_path):
    """As AutoGPTQ and AutoAWQ once wrote it; config.json comes first."""
    (tmp_path / name).write_text(json.dumps({"bits": 4}))
    assert find_config({}, tmp_path) == {"quant_method": method, "bits": 4}
    assert find_config({"quantization_config": GPTQ}, tmp_path) is GPTQ
    (tmp_path / name).write_text(json.dumps({"bits": 4, "quant_method": "auto-round"}))
    assert find_config({}, tmp_path)["quant_method"] == "auto-round"
    (tmp_path / name).write_text("[]")
    with pytest.raises(CheckpointError, match=r"\.json is not a JSON object"):
        find_config({}, tmp_path)


def test_targets_of_compressed_tensors():
    """Which group a module is of, or none, is what compressed_tensors.utils says, in whatever order targets are."""
    match = pytest.importorskip("compressed_tensors.utils.match")
    linear, draw = torch.nn.Linear(2, 2), random.Random(0)
    modules = [Q, HEAD, "a.up_proj", "a.down_proj"]
    entries = [*modules[:3], "re:.*", "re:model.*", "re:.*q_proj", "re:a[.](up|down)", "Linear", "Module", "Embedding"]
    for _ in range(500):
        targets = [draw.sample(entries, draw.randint(1, 3)) for _ in range(3)]
        ignore = draw.sample(entries, draw.choice([0, 0, 1]))
        config, groups = {**compressed(), "ignore": ignore}, {}
        for index, target in enumerate(targets):
            weights = {**config["config_groups"]["group_0"]["weights"], "group_size": 32 * (index + 1)}
            groups[f"g{index}"] = {**config["config_groups"]["group_0"], "targets": target, "weights": weights}
        rules = rules_of({**config, "config_groups": groups})
        size_of = {each: 32 * (index + 1) for index, target in enumerate(targets) for each in target}
        for name in modules:
            found = rules.of(name)
            expected = match.match_targets(name, linear, size_of)
            if not expected or match.is_match(name, linear, ignore):
                assert isinstance(found, NotRead) and not found.quantized, (name, targets, ignore)
            else:
                assert found == Scheme("pack-quantized", size_of[expected[0]], True), (name, targets)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"config_groups": None}, "quantization_config.config_groups is missing"),
        ({"ignore": ["re:.*up_proj"]}, "quantization_config.ignore has 're:.*up_proj'"),
        ({"config_groups": {"g": {"targets": [HEAD]}}}, "no target in quantization_config.config_groups matches it"),
    ],
)
def test_why_compressed_tensors_leaves_out(changes, why):
    found = rules_of({**compressed(), **changes}).of(UP)
    assert found == NotRead(f"{UP} is not quantized: {why}", quantized=False)

"""w4a8.load: what it reads, how much memory it takes, and what config.json means."""

import dataclasses
import itertools
import json
import logging
import sys

import meter
import moe_checkpoint
import pytest
import torch
from common import least_scales
from moe_build import Stack, assert_packed, config_of, interleaved, op_moe, part_of_rank

import w4a8.checkpoint
from w4a8 import formats
from w4a8.checkpoint import CheckpointError, MoESettings, load, read_settings
from w4a8.checkpoint.folder import find_layers
from w4a8.checkpoint.settings import _MODELS as MODEL_TYPES
from w4a8.checkpoint.settings import settings_from_config
from w4a8.nn import GateNumbers, MoEActivation, RoutingMethodType

LAYER = moe_checkpoint.FIRST
FORMATS = ["int-quantized", "pack-quantized"]


def assert_parts(path, w13, w2, group_size=32, **options):
    """What each of two tensor-parallel ranks loads."""
    for rank in range(2):
        layer = load(path, tp_rank=rank, tp_size=2, **options)[LAYER]
        assert_packed(layer, *part_of_rank(w13, w2, rank, 2), group_size)


# ---- reading ----


@pytest.mark.parametrize("form", formats.FORMATS)
def test_tensors_of_every_format_are_found(form):
    suffixes = {part.suffix for part in formats.FORMATS[form].parts} | {"bias"}
    (layer,) = find_layers([f"{LAYER}.3.up_proj.{suffix}" for suffix in suffixes], None)
    assert layer.tensors == suffixes


def test_layers_in_the_order_of_the_model(checkpoint):
    for index in (10, 2):
        layer = moe_checkpoint.LAYER.format(index)
        checkpoint.tensors.update(
            moe_checkpoint.tensors_of_layer(checkpoint.w13, checkpoint.w2, "int-quantized", layer)
        )
    path = checkpoint.write()
    assert list(load(path)) == [moe_checkpoint.LAYER.format(i) for i in (0, 2, 10)]
    assert list(load(path, only=lambda name: ".2." in name)) == [moe_checkpoint.LAYER.format(2)]


@pytest.mark.parametrize("format_", FORMATS)
def test_interleaved_gate_up(checkpoint, format_):
    """gpt-oss: rows of gate_up_proj alternate gate and up, and there are biases."""
    checkpoint.reset(bias=True)
    w13, w2 = checkpoint.w13, checkpoint.w2
    rows, names = interleaved(w13), ("gate_up_proj", "down_proj")
    checkpoint.tensors = moe_checkpoint.tensors_of_layer(rows, w2, format_, names=names)
    quantization = moe_checkpoint.quantization_config(32, format_)
    checkpoint.config = moe_checkpoint.model_config(quantization, model_type="gpt_oss", intermediate_size=256)
    path = checkpoint.write()
    for options in ({}, {"w13_interleaved": True}):  # right by default, as the model type says
        layer = load(path, **options)[LAYER]
        assert layer.activation is MoEActivation.SWIGLUOAI
        assert_packed(layer, w13, w2)
    assert_packed(load(path, w13_interleaved=False)[LAYER], rows, w2)
    assert_parts(path, w13, w2)


@pytest.mark.parametrize("options", [{}, {"w13_interleaved": True}])
def test_separate_gate_and_up_are_not_interleaved(checkpoint, options):
    """Whatever is said of fused tensors: these come apart."""
    checkpoint.config.update(model_type="gpt_oss", intermediate_size=256)
    path = checkpoint.write()
    assert_packed(load(path, **options)[LAYER], checkpoint.w13, checkpoint.w2)
    assert_parts(path, checkpoint.w13, checkpoint.w2, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scales_of_mixed_types(checkpoint, dtype):
    """The first tensor says nothing of the others: a stack is of the least type that holds all its scales."""
    key = f"{LAYER}.5.down_proj.weight_scale"
    checkpoint.tensors[key] = (checkpoint.tensors[key].float() * 1.01).to(dtype)
    exact = f"{LAYER}.2.up_proj.weight_scale"
    checkpoint.tensors[exact] = checkpoint.tensors[exact].float()  # the same values in a wider type
    layer = load(checkpoint.write())[LAYER]
    scales = checkpoint.w2.scales.float()
    scales[5] = checkpoint.tensors[key].float()
    assert_packed(layer, checkpoint.w13, Stack(checkpoint.w2.values, least_scales(scales), None))


@pytest.mark.parametrize("intermediate", [256, None])
def test_a_rank_with_a_part_of_the_files(checkpoint, intermediate):
    """Rank 1 of 2 has experts 4 to 7, in a file of their own, or in shards whose index names more."""
    own = MoESettings(128, 3, RoutingMethodType.Renormalize, num_experts=8, intermediate_size=intermediate)
    mine = {key: tensor for key, tensor in checkpoint.tensors.items() if int(key.split(".experts.")[1][0]) >= 4}
    parts = [stack.experts(slice(4, None)) for stack in (checkpoint.w13, checkpoint.w2)]
    everything, checkpoint.tensors = checkpoint.tensors, mine
    path = checkpoint.write()
    assert_packed(load(path, settings=own, ep_rank=1, ep_size=2)[LAYER], *parts)

    (path / "model.safetensors").unlink()
    safetensors_torch = pytest.importorskip("safetensors.torch")
    safetensors_torch.save_file(mine, path / "model-2.safetensors")
    weight_map = {key: "model-2.safetensors" if key in mine else "model-1.safetensors" for key in everything}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_packed(load(path, settings=own, ep_rank=1, ep_size=2)[LAYER], *parts)
    for options in ({}, {"ep_rank": 0, "ep_size": 2}):
        with pytest.raises(CheckpointError, match=r"names 'model-1.safetensors', which is no file of .*gate_proj"):
            load(path, settings=own, **options)


@pytest.mark.parametrize("how", ["ignored", "without scales"])
def test_unquantized_layers_are_left_out(checkpoint, how, caplog):
    """An ignored first layer, or a layer for predicting several tokens that was copied as it was."""
    other = moe_checkpoint.LAYER.format(1)
    for expert in range(8):
        for name, shape in (("gate_proj", (256, 128)), ("up_proj", (256, 128)), ("down_proj", (128, 256))):
            checkpoint.tensors[f"{other}.{expert}.{name}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)
    if how == "ignored":
        checkpoint.config["quantization_config"]["ignore"].append("re:.*layers.1.*")
    layers = load(checkpoint.write())
    assert list(layers) == [LAYER]
    assert_packed(layers[LAYER], checkpoint.w13, checkpoint.w2)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{other} is left out: {other}.0.gate_proj is not quantized")
    with pytest.raises(CheckpointError, match=rf"{other}.0.gate_proj is not quantized"):
        load(checkpoint.write(), only=lambda name: name == other)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("group_size", [-1, 32])
def test_tensor_parallel(checkpoint, group_size, format_):
    path = checkpoint.reset(format_, group_size, bias=True).write()
    assert_parts(path, checkpoint.w13, checkpoint.w2, group_size)


@pytest.mark.parametrize("format_", FORMATS)
def test_biases_of_some_experts(checkpoint, format_):
    """Zeros, as older tools wrote them where a model has no biases, are none; others want one of every matrix."""
    checkpoint.reset(format_)
    want = load(checkpoint.write())[LAYER]
    key = f"{LAYER}.2.up_proj.bias"
    checkpoint.tensors[key] = torch.zeros(256)
    layer = load(checkpoint.write())[LAYER]
    assert_packed(layer, checkpoint.w13, checkpoint.w2)
    assert torch.equal(layer.w13_packed, want.w13_packed) and torch.equal(layer.w2_packed, want.w2_packed)
    for value in (1e-3, float("nan")):
        checkpoint.tensors[key][255] = value
        with pytest.raises(CheckpointError, match=rf"tensor '{LAYER}.0.gate_proj.bias' is missing"):
            load(checkpoint.write())
        other = load(checkpoint.write(), ep_rank=1, ep_size=2)[LAYER]  # experts 4 to 7
        assert torch.equal(other.w13_packed, want.w13_packed[4:])
    checkpoint.tensors[key] = torch.zeros(255)
    with pytest.raises(CheckpointError, match=rf"tensor {key}: shape \(255,\), but 256"):
        load(checkpoint.write())


def test_correction_bias(checkpoint):
    checkpoint.config.update(model_type="deepseek_v3", n_routed_experts=8, n_group=4, topk_group=2)
    checkpoint.config.update(routed_scaling_factor=2.5)
    key = "model.layers.0.mlp.gate.e_score_correction_bias"
    with pytest.raises(CheckpointError, match=f"tensor '{key}' is missing"):
        load(checkpoint.write())
    checkpoint.tensors[key] = torch.randn(8)
    layer = load(checkpoint.write())[LAYER]
    assert torch.equal(layer.e_score_correction_bias, checkpoint.tensors[key])
    assert (layer.num_expert_group, layer.topk_group, layer.routed_scaling_factor) == (4, 2, 2.5)
    assert layer.routing_method is RoutingMethodType.DeepSeekV3
    assert layer(torch.randn(2, 128), torch.randn(2, 8)).shape == (2, 128)
    checkpoint.tensors[key] = torch.randn(7)
    with pytest.raises(CheckpointError, match=rf"tensor '{key}' has shape \(7,\), but \(8,\) is expected"):
        load(checkpoint.write())


def test_zero_points_of_zero_are_none(checkpoint):
    """Older versions write them for symmetric weights too."""
    checkpoint.tensors[f"{LAYER}.0.up_proj.weight_zero_point"] = torch.zeros(256, 4, dtype=torch.int8)
    assert_packed(load(checkpoint.write())[LAYER], checkpoint.w13, checkpoint.w2)


def test_progress_and_log(checkpoint, capfd, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "w4a8")
    path = checkpoint.write()
    load(path)
    assert capfd.readouterr() == ("", "")
    assert f"packed 1 layers of {path}" in caplog.messages
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    load(path, progress=True)
    assert capfd.readouterr() == ("", "")
    assert "no progress bar: tqdm is not installed" in caplog.messages


def test_progress_bar_counts_experts(checkpoint, capfd):
    pytest.importorskip("tqdm")
    load(checkpoint.write(), progress=True)
    assert "8/8" in capfd.readouterr().err


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "config.json").write_text(
        json.dumps(moe_checkpoint.model_config(moe_checkpoint.quantization_config(32, "int-quantized")))
    )
    with pytest.raises(ImportError, match="reading checkpoints needs the safetensors package: pip install safetensors"):
        load(tmp_path)


MEASURE_PEAK = """
import torch
import w4a8.checkpoint

small, big = sys.argv[1:]
w4a8.checkpoint.load(small)  # imports, thread pool and allocator are warm
before = memory("RssAnon")
layers = w4a8.checkpoint.load(big)
packed = sum(p.numel() for layer in layers.values() for p in layer.buffers())
print(packed, len(layers), memory("VmHWM") - memory("VmRSS"), memory("RssAnon") - before)
"""


@meter.needs_proc
def test_memory_is_bounded(tmp_path):
    """A layer's raw weights are gone before the next is read: the peak exceeds the end by one layer, not by all."""
    small, big = tmp_path / "small", tmp_path / "big"
    layers, experts, hidden, inner = 4, 8, 1024, 512
    for path, count in ((small, 1), (big, layers)):
        quantization = moe_checkpoint.quantization_config(32, "int-quantized")
        config = moe_checkpoint.model_config(quantization, hidden_size=hidden, moe_intermediate_size=inner)
        tensors = {}
        for index in range(count):
            w13, w2 = (
                Stack(torch.ones(experts, n, k, dtype=torch.int8), torch.ones(experts, n, k // 32), None)
                for n, k in ((2 * inner, hidden), (hidden, inner))
            )
            name = moe_checkpoint.LAYER.format(index)
            tensors.update(moe_checkpoint.tensors_of_layer(w13, w2, "int-quantized", name))
        moe_checkpoint.write(path, tensors, config)
    packed, count, above_end, kept = meter.run(MEASURE_PEAK, small, big)
    raw_layer = experts * 3 * hidden * inner * (1 + 2 / 32)
    assert count == layers
    assert kept <= 1.1 * packed, "something but the packed layers is kept"
    # One layer's tensors, once as pages of the file and once as nibbles and float32 scales.
    staged = experts * 3 * hidden * inner * (1 / 2 + 4 / 32)
    assert above_end <= 1.1 * (raw_layer + staged)


# ---- the layer ----


def test_state_dict(checkpoint):
    """What was packed loads into a layer with other weights (what is refused: test_moe_loader.py)."""
    key = "model.layers.0.mlp.gate.e_score_correction_bias"
    layers = []
    for _ in range(2):
        checkpoint.reset()
        checkpoint.config.update(model_type="minimax_m2", intermediate_size=256)
        checkpoint.tensors[key] = torch.randn(8)
        layers.append(load(checkpoint.write())[LAYER])
    layer, other = layers
    x, logits = torch.randn(5, 128), torch.randn(5, 8)
    want = layer(x, logits)
    assert not torch.equal(other(x, logits), want)
    assert sorted(layer.state_dict()) == ["e_score_correction_bias", "w13_packed", "w2_packed"]
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, logits), want)


def test_a_router_outside(checkpoint):
    """``run`` takes its choice, by the experts of the model, on each rank; ``forward`` cannot guess it."""
    own = MoESettings(128, 3, RoutingMethodType.Custom, dtype=torch.float32)
    path = checkpoint.write()
    x = torch.randn(5, 128)
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(5)])
    weights = torch.rand(5, 3)
    layer = load(path, settings=own)[LAYER]
    with pytest.raises(ValueError, match="does not say how to select experts"):
        layer(x, torch.randn(5, 8))
    got = layer.run(x, weights, ids)
    assert torch.equal(got, op_moe(config_of(layer), 32, x, ids, weights, checkpoint.w13, checkpoint.w2))
    parts = [load(path, settings=own, ep_rank=rank, ep_size=2)[LAYER].run(x, weights, ids) for rank in range(2)]
    # Additions in another order: of three weighted outputs, and of the two parts.
    size = sum(layer.run(x, weights[:, k : k + 1], ids[:, k : k + 1]).abs() for k in range(3))
    assert ((parts[0] + parts[1] - got).abs() <= (2 * 3 + 2) * 2.0**-24 * size).all()


def test_logits_of_other_experts(checkpoint):
    layer = load(checkpoint.write(), ep_rank=0, ep_size=2)[LAYER]
    with pytest.raises(ValueError, match=r"router_logits is \[5, 4\], expected \[..., 8\]"):
        layer(torch.randn(5, 128), torch.randn(5, 4))


def test_repr(checkpoint):
    layer = load(checkpoint.write(), ep_rank=0, ep_size=2)[LAYER]
    assert repr(layer) == (
        "W4A8MoE(experts=4/8, top_k=3, hidden=128, intermediate=256, group_size=32, activation=silu)"
    )


def test_an_expert_that_cannot_be_cut(checkpoint):
    with pytest.raises(ValueError, match="intermediate_size 256 cannot be cut for 3 tensor-parallel ranks"):
        load(checkpoint.write(), tp_size=3)


# ---- config.json ----

EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
BASE = {"hidden_size": 64, "num_experts_per_tok": 2}


def settings(**config):
    return settings_from_config({**BASE, **config})


def test_settings_of_models():
    renormalize, default = RoutingMethodType.Renormalize, RoutingMethodType.Default
    for model_type in ("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe"):
        assert settings(model_type=model_type, norm_topk_prob=True).routing_method is renormalize
        assert settings(model_type=model_type, norm_topk_prob=False).routing_method is default
        assert settings(model_type=model_type, norm_topk_prob=None).routing_method is default
    found = settings(model_type="mixtral", num_local_experts=8, intermediate_size=96, torch_dtype="float16")
    assert found == MoESettings(64, 2, renormalize, num_experts=8, intermediate_size=96, dtype=torch.float16)
    found = settings(model_type="gpt_oss", hidden_act="silu", intermediate_size=96)
    assert (found.routing_method, found.activation) == (renormalize, MoEActivation.SWIGLUOAI)
    assert found.numbers == (None, None, None)
    assert settings(model_type="gpt_oss", swiglu_limit=5, swiglu_alpha=1.702).numbers == (5, None, None)
    found = settings(model_type="deepseek_v2", n_routed_experts=64, n_group=1, topk_group=1, routed_scaling_factor=1.0)
    assert (found.num_expert_group, found.routing_method, found.num_experts) == (None, default, 64)
    grouped = {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
    found = settings(model_type="deepseek_v2", **grouped)
    assert (found.num_expert_group, found.topk_group, found.routed_scaling_factor) == (8, 3, 16.0)
    for model_type in ("deepseek_v3", "kimi_k2", "glm4_moe"):
        found = settings(model_type=model_type, n_group=8, topk_group=4, norm_topk_prob=True)
        assert (found.routing_method, found.has_correction_bias) == (RoutingMethodType.DeepSeekV3, True)
        assert (found.num_expert_group, found.topk_group) == (8, 4)
    found = settings(model_type="minimax_m2")
    assert (found.routing_method, found.has_correction_bias) == (RoutingMethodType.MiniMax2, True)
    found = settings_from_config({"text_config": {**BASE, "model_type": "llama4_text"}, "model_type": "llama4"})
    assert (found.routing_method, found.apply_router_weight_on_input) == (RoutingMethodType.Llama4, True)


def configs_of_transformers():
    """Class of the config by model_type, of those that are read and that this transformers has."""
    mapping = pytest.importorskip("transformers", reason="transformers is not installed").CONFIG_MAPPING
    found = {model_type: mapping[model_type] for model_type in MODEL_TYPES if model_type in mapping}
    assert found.keys() >= {"qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "mixtral", "gpt_oss", "deepseek_v2"}
    assert found.keys() >= {"deepseek_v3", "glm4_moe", "minimax_m2"}
    return found


def test_defaults_are_those_of_transformers():
    """A config.json that does not say how experts are chosen means what the class of its model_type says."""
    for model_type, cls in configs_of_transformers().items():
        sizes = {"num_experts_per_tok": 2, **dict.fromkeys(EXPERTS, 16)}
        told = settings_from_config({**cls().to_dict(), **sizes})
        sizes["hidden_size"] = told.hidden_size
        found = settings_from_config({"model_type": model_type, **sizes})
        for field in dataclasses.fields(MoESettings):
            if field.name not in ("intermediate_size", "dtype"):  # of the tensors; of this package
                assert getattr(found, field.name) == getattr(told, field.name), (model_type, field.name)


def test_numbers_of_experts_are_those_of_transformers():
    """Where a config.json has two that differ, the class of its model_type takes one, whichever comes first."""
    read = set()
    for model_type, cls in configs_of_transformers().items():
        (own,) = EXPERTS & cls.__dataclass_fields__.keys()
        others = {name for name, same in cls.attribute_map.items() if same == own} | {cls.attribute_map.get(own)}
        for names in itertools.permutations(EXPERTS & {own, *others}, 2):
            stated = dict(zip(names, (8, 16)))
            assert settings(model_type=model_type, **stated).num_experts == getattr(cls(**stated), own), stated
            read.add(model_type)
        unknown = dict.fromkeys(EXPERTS - {own, *others}, 16)
        assert settings(model_type=model_type, **{own: 8}, **unknown).num_experts == 8
    assert read >= {"qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2"}


def test_settings_errors(tmp_path):
    for name in ("norm_topk_prob", "routed_scaling_factor"):
        with pytest.raises(CheckpointError, match=f"{name} is 'no', but (true or false|a number) is expected"):
            settings(model_type="deepseek_v3", **{name: "no"})
    with pytest.raises(CheckpointError, match=r"routing of model_type 'phimoe' is not known \(known: deepseek_v2, "):
        settings(model_type="phimoe")
    for limit in (0, float("inf"), float("nan")):
        with pytest.raises(CheckpointError, match=f"swiglu_limit is {limit}, but a finite number above 0 is expected"):
            settings(model_type="gpt_oss", swiglu_limit=limit)
    with pytest.raises(CheckpointError, match="hidden_size is None, but an integer is expected"):
        settings(model_type="mixtral", hidden_size=None)
    with pytest.raises(CheckpointError, match="num_experts_per_tok is None, but an integer is expected"):
        settings(model_type="mixtral", num_experts_per_tok=None)
    with pytest.raises(CheckpointError, match="dtype is 'float64', but one of float32, bfloat16, float16 is expected"):
        settings(model_type="mixtral", torch_dtype="float64")
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "model_type": "mixtral"}))
    assert read_settings(tmp_path) == settings(model_type="mixtral")


def test_settings_beat_config_json(checkpoint):
    checkpoint.config["model_type"] = "something_new"
    own = MoESettings(128, 2, RoutingMethodType.Sigmoid, activation=MoEActivation.GELU, dtype=torch.float32)
    layer = load(checkpoint.write(), settings=own)[LAYER]
    assert (layer.num_experts, layer.sizes.intermediate, layer.top_k) == (8, 256, 2)  # from the tensors
    assert layer.activation is MoEActivation.GELU and layer.routing_method is RoutingMethodType.Sigmoid
    assert_packed(layer, checkpoint.w13, checkpoint.w2)
    numbers = GateNumbers(limit=0.5, alpha=1.5, beta=0.25)
    limited = load(
        checkpoint.write(), settings=dataclasses.replace(own, activation=MoEActivation.SILU, numbers=numbers)
    )
    x, weights, ids = torch.randn(3, 128), torch.rand(3, 2), torch.tensor([[0, 7]] * 3)
    out = limited[LAYER].run(x, weights, ids)
    sizes, packed = layer.sizes, (layer.w13_packed, layer.w2_packed)
    how = (sizes.hidden, sizes.intermediate, sizes.w13_rows, sizes.operator_group_size, False, w4a8.Activation.SILU)
    assert torch.equal(out, w4a8.dynamic_4bit_int_moe(x, ids, weights, *packed, *how, **numbers._asdict()))
    assert "activation=silu, limit=0.5, alpha=1.5, beta=0.25" in repr(limited[LAYER])
    with pytest.raises(CheckpointError, match=r"gate_proj.weight' has shape \(256, 128\), but \(256, 64\) is expected"):
        load(checkpoint.write(), settings=dataclasses.replace(own, hidden_size=64))


def test_load_is_exported():
    assert w4a8.load is load

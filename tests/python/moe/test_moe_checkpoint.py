"""w4a8.load: what it reads, how much memory it takes, and every way a checkpoint can be wrong."""

import dataclasses
import json
import logging
import subprocess
import sys

import moe_checkpoint
import pytest
import torch
from moe_build import Stack, op_pack

import w4a8.checkpoint
from w4a8.checkpoint import CheckpointError, MoESettings, load, read_settings
from w4a8.checkpoint.settings import settings_from_config
from w4a8.moe import MoEActivation, RoutingMethodType

LAYER = moe_checkpoint.FIRST
FORMATS = ["int-quantized", "pack-quantized"]
safetensors = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("safetensors") is None,
    reason="the safetensors package is not installed",
)


@pytest.fixture
def checkpoint(tmp_path):
    """A correct checkpoint (g32), as parts that a test can spoil before `write`."""

    class Parts:
        def __init__(self):
            self.format = "int-quantized"
            self.reset()

        def reset(self, format_="int-quantized", group_size=32, bias=False):
            self.w13, self.w2 = moe_checkpoint.random_layer(group_size, bias)
            self.tensors = moe_checkpoint.tensors_of_layer(self.w13, self.w2, format_)
            self.config = moe_checkpoint.model_config(moe_checkpoint.quantization_config(group_size, format_))
            return self

        @property
        def group(self):
            return self.config["quantization_config"]["config_groups"]["group_0"]

        def write(self, **args):
            return moe_checkpoint.write(tmp_path / "checkpoint", self.tensors, self.config, **args)

    return Parts()


def assert_packed(layer, w13, w2, group_size=32):
    assert torch.equal(layer.w13_weight_packed, op_pack(w13, group_size))
    assert torch.equal(layer.w2_weight_packed, op_pack(w2, group_size))


def float_scales(stack, group_size):
    return Stack(stack.values, stack.scales.float(), stack.bias) if group_size == -1 else stack


# ---- reading ----


@safetensors
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("group_size", [-1, 32])
def test_single_file_and_index(checkpoint, group_size, format_, files):
    path = checkpoint.reset(format_, group_size, bias=True).write(files=files)
    layers = load(path)
    assert list(layers) == [LAYER]
    assert_packed(
        layers[LAYER], float_scales(checkpoint.w13, group_size), float_scales(checkpoint.w2, group_size), group_size
    )


@safetensors
def test_layers_in_the_order_of_the_model(checkpoint):
    for index in (10, 2):
        layer = moe_checkpoint.LAYER.format(index)
        checkpoint.tensors.update(
            moe_checkpoint.tensors_of_layer(checkpoint.w13, checkpoint.w2, "int-quantized", layer)
        )
    path = checkpoint.write()
    assert list(load(path)) == [moe_checkpoint.LAYER.format(i) for i in (0, 2, 10)]
    assert list(load(path, only=lambda name: ".2." in name)) == [moe_checkpoint.LAYER.format(2)]


@safetensors
@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_up_proj", "down_proj")])
def test_other_names_of_projections(checkpoint, names):
    checkpoint.tensors = moe_checkpoint.tensors_of_layer(checkpoint.w13, checkpoint.w2, "pack-quantized", names=names)
    checkpoint.config["quantization_config"] = moe_checkpoint.quantization_config(32, "pack-quantized")
    assert_packed(load(checkpoint.write())[LAYER], checkpoint.w13, checkpoint.w2)


@safetensors
@pytest.mark.parametrize("format_", FORMATS)
def test_interleaved_gate_up(checkpoint, format_):
    """gpt-oss: rows of gate_up_proj alternate gate and up, and there are biases."""
    checkpoint.reset(bias=True)
    w13, w2 = checkpoint.w13, checkpoint.w2
    order = torch.arange(2 * moe_checkpoint.INTER).view(2, -1).t().flatten()
    rows = Stack(w13.values[:, order], w13.scales[:, order], w13.bias[:, order])
    names = ("gate_up_proj", "down_proj")
    checkpoint.tensors = moe_checkpoint.tensors_of_layer(rows, w2, format_, names=names)
    quantization = moe_checkpoint.quantization_config(32, format_)
    checkpoint.config = moe_checkpoint.model_config(quantization, model_type="gpt_oss", intermediate_size=256)
    layer = load(checkpoint.write(), w13_interleaved=True)[LAYER]
    assert layer.activation is MoEActivation.SWIGLUOAI
    assert_packed(layer, w13, w2)


@safetensors
def test_scales_that_bfloat16_would_round_are_kept_in_float32(checkpoint):
    for dtype in (torch.float16, torch.float32):
        for key in list(checkpoint.tensors):
            if key.endswith("weight_scale"):
                checkpoint.tensors[key] = (checkpoint.tensors[key].float() * 1.01).to(dtype)
        w13, w2 = checkpoint.w13, checkpoint.w2
        w13 = Stack(w13.values, (w13.scales.float() * 1.01).to(dtype).float(), None)
        w2 = Stack(w2.values, (w2.scales.float() * 1.01).to(dtype).float(), None)
        assert_packed(load(checkpoint.write())[LAYER], w13, w2)
        checkpoint.reset()


@safetensors
@pytest.mark.parametrize("format_", FORMATS)
def test_expert_parallel(checkpoint, format_):
    path = checkpoint.reset(format_).write()
    for rank in range(2):
        layer = load(path, ep_rank=rank, ep_size=2)[LAYER]
        mine = slice(4 * rank, 4 * rank + 4)
        parts = [Stack(s.values[mine], s.scales[mine], None) for s in (checkpoint.w13, checkpoint.w2)]
        assert_packed(layer, *parts)
        assert (layer.expert_map >= 0).nonzero().flatten().tolist() == list(range(8))[mine]


@safetensors
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("group_size", [-1, 32])
def test_tensor_parallel(checkpoint, group_size, format_):
    path = checkpoint.reset(format_, group_size, bias=True).write()
    w13, w2 = float_scales(checkpoint.w13, group_size), float_scales(checkpoint.w2, group_size)
    for rank in range(2):
        layer = load(path, tp_rank=rank, tp_size=2)[LAYER]
        mine = torch.arange(128 * rank, 128 * rank + 128)
        rows = torch.cat([mine, 256 + mine])
        groups = slice(None) if group_size == -1 else slice(4 * rank, 4 * rank + 4)
        bias = w2.bias if rank == 0 else torch.zeros_like(w2.bias)
        assert_packed(
            layer,
            Stack(w13.values[:, rows], w13.scales[:, rows], w13.bias[:, rows]),
            Stack(w2.values[:, :, mine], w2.scales[:, :, groups], bias),
            group_size,
        )


@safetensors
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
    assert layer.moe_config.routing_method is RoutingMethodType.DeepSeekV3
    assert layer(torch.randn(2, 128), torch.randn(2, 8)).shape == (2, 128)
    checkpoint.tensors[key] = torch.randn(7)
    with pytest.raises(CheckpointError, match=rf"tensor '{key}' has shape \(7,\), but \(8,\) is expected"):
        load(checkpoint.write())


@safetensors
def test_zero_points_of_zero_are_none(checkpoint):
    """Older versions write them for symmetric weights too."""
    checkpoint.tensors[f"{LAYER}.0.up_proj.weight_zero_point"] = torch.zeros(256, 4, dtype=torch.int8)
    assert_packed(load(checkpoint.write())[LAYER], checkpoint.w13, checkpoint.w2)


@safetensors
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


@safetensors
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
import sys
from pathlib import Path
import torch
import w4a8.checkpoint

def kib(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))

small, big = sys.argv[1:]
w4a8.checkpoint.load(small)  # imports, thread pool and allocator are warm
before = kib("RssAnon")
layers = w4a8.checkpoint.load(big)
packed = sum(p.numel() for layer in layers.values() for p in layer.parameters())
print(packed, len(layers), 1024 * (kib("VmHWM") - kib("VmRSS")), 1024 * (kib("RssAnon") - before))
"""


@safetensors
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded(tmp_path, child_environment):
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
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK, str(small), str(big)],
        env=child_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    packed, count, above_end, kept = map(int, done.stdout.split())
    raw_layer = experts * 3 * hidden * inner * (1 + 2 / 32)
    assert count == layers
    assert kept <= 1.1 * packed, "something but the packed layers is kept"
    # One layer's tensors, once as pages of the file and once as parameters.
    assert above_end <= 1.1 * 2 * raw_layer


# ---- wrong checkpoints ----


def spoil_missing(c):
    del c.tensors[f"{LAYER}.3.up_proj.weight"]


def spoil_missing_scale(c):
    del c.tensors[f"{LAYER}.7.down_proj.weight_scale"]


def spoil_missing_bias(c):
    c.tensors[f"{LAYER}.0.up_proj.bias"] = torch.zeros(256)


def spoil_missing_expert(c):
    for key in [key for key in c.tensors if key.startswith(f"{LAYER}.5.")]:
        del c.tensors[key]


def spoil_rows(c):
    c.tensors[f"{LAYER}.3.up_proj.weight"] = torch.zeros(255, 128, dtype=torch.int8)


def spoil_columns(c):
    c.tensors[f"{LAYER}.0.down_proj.weight"] = torch.zeros(128, 128, dtype=torch.int8)


def spoil_rank(c):
    c.tensors[f"{LAYER}.0.down_proj.weight"] = torch.zeros(128, dtype=torch.int8)


def spoil_scale_shape(c):
    c.tensors[f"{LAYER}.2.gate_proj.weight_scale"] = torch.ones(256, 1)


def spoil_scale_value(c):
    c.tensors[f"{LAYER}.2.gate_proj.weight_scale"][3, 1] = float("nan")


def spoil_scale_dtype(c):
    c.tensors[f"{LAYER}.2.gate_proj.weight_scale"] = torch.ones(256, 4, dtype=torch.int8)


def spoil_range(c):
    c.tensors[f"{LAYER}.1.gate_proj.weight"][5, 7] = 8


def spoil_dtype(c):
    c.tensors[f"{LAYER}.1.gate_proj.weight"] = torch.zeros(256, 128)


def spoil_order(c):
    c.tensors[f"{LAYER}.1.gate_proj.weight_g_idx"] = torch.arange(128)


def spoil_zero_point(c):
    c.tensors[f"{LAYER}.1.gate_proj.weight_zero_point"] = torch.ones(256, 4, dtype=torch.int8)


def spoil_extra_expert(c):
    c.tensors[f"{LAYER}.8.gate_proj.weight"] = torch.zeros(256, 128, dtype=torch.int8)


def key(name):
    return f"tensor '{LAYER}.{name}'"


WRONG_TENSORS = [
    (spoil_missing, f"{key('3.up_proj.weight')} is missing"),
    (spoil_missing_scale, f"{key('7.down_proj.weight_scale')} is missing"),
    (spoil_missing_bias, f"{key('0.gate_proj.bias')} is missing"),
    (spoil_missing_expert, f"{key('5.gate_proj.weight')} is missing"),
    (spoil_rows, f"tensor {LAYER}.3.up_proj.weight: dimension 0 is 255, but 1 tensor-parallel rank of 256 make 256"),
    (spoil_columns, f"tensor {LAYER}.0.down_proj.weight: dimension 1 is 128, but"),
    (spoil_rank, f"{key('0.down_proj.weight')} has shape (128,), but two dimensions are expected"),
    (spoil_scale_shape, f"tensor {LAYER}.2.gate_proj.weight_scale: shape (256, 1), but (256, 4) is expected"),
    (spoil_scale_value, f"{key('2.gate_proj.weight_scale')} holds a NaN or an infinity"),
    (spoil_scale_dtype, f"tensor {LAYER}.2.gate_proj.weight_scale: dtype torch.int8, but a float is expected"),
    (spoil_range, f"{key('1.gate_proj.weight')} holds values in [-8, 8], but int4 values are in [-8, 7]"),
    (spoil_dtype, f"{key('1.gate_proj.weight')} is torch.float32, but int8 is expected"),
    (spoil_order, f"{key('1.gate_proj.weight_g_idx')}: only symmetric weights in their original order are supported"),
    (spoil_zero_point, f"{key('1.gate_proj.weight_zero_point')}: only symmetric weights"),
    (spoil_extra_expert, f"{LAYER} has an expert 8, but config.json says 8 experts"),
]


@safetensors
@pytest.mark.parametrize(("spoil", "message"), WRONG_TENSORS, ids=lambda v: getattr(v, "__name__", ""))
def test_wrong_tensor(checkpoint, spoil, message):
    spoil(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint.write())
    assert message in str(caught.value)


@safetensors
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("weight_packed", torch.zeros(256, 15, dtype=torch.int32), "shape (256, 15), but 128 columns make 16 words"),
        ("weight_packed", torch.zeros(256, 16, dtype=torch.int64), "is torch.int64, but int32 is expected"),
        ("weight_shape", torch.tensor([256, 120]), "says [256, 120], but [256, 128] is expected"),
        ("weight_shape", None, "is missing"),
        ("weight_packed", None, "is missing"),
    ],
)
def test_wrong_packed_tensor(checkpoint, name, tensor, message):
    checkpoint.reset("pack-quantized")
    full = f"{LAYER}.4.up_proj.{name}"
    if tensor is None:
        del checkpoint.tensors[full]
    else:
        checkpoint.tensors[full] = tensor
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint.write())
    assert full in str(caught.value) and message in str(caught.value)


WEIGHTS = "quantization_config.config_groups.group_0.weights"
INPUT = "quantization_config.config_groups.group_0.input_activations"
WRONG_SCHEMES = [
    ("weights", {"symmetric": False}, f"{WEIGHTS}.symmetric is False, but true (int4 weights without zero points)"),
    ("weights", {"num_bits": 8}, f"{WEIGHTS}.num_bits is 8, but 4 is expected"),
    ("weights", {"type": "float"}, f"{WEIGHTS}.type is 'float', but 'int' is expected"),
    ("weights", {"strategy": "tensor"}, f"{WEIGHTS}.strategy is 'tensor', but 'group' or 'channel' is expected"),
    ("weights", {"group_size": 48}, f"{WEIGHTS}.group_size is 48, but a multiple of 32 is expected"),
    ("weights", {"dynamic": True}, f"{WEIGHTS}.dynamic is True, but false is expected"),
    ("weights", {"actorder": "group"}, f"{WEIGHTS}.actorder is 'group': reordered input features"),
    ("input_activations", {"num_bits": 4}, f"{INPUT}.num_bits is 4, but 8 is expected"),
    ("input_activations", {"type": "float"}, f"{INPUT}.type is 'float', but 'int' is expected"),
    ("input_activations", {"strategy": "tensor"}, f"{INPUT}.strategy is 'tensor', but 'token' is expected"),
    ("input_activations", {"dynamic": False}, f"{INPUT}.dynamic is False, but true is expected"),
]


@safetensors
@pytest.mark.parametrize(("part", "changes", "message"), WRONG_SCHEMES)
def test_wrong_scheme(checkpoint, part, changes, message):
    checkpoint.group[part].update(changes)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint.write())
    assert message in str(caught.value)


@safetensors
def test_wrong_quantization_config(checkpoint):
    def message_of(change):
        checkpoint.reset()
        change(checkpoint.config, checkpoint.group)
        with pytest.raises(CheckpointError) as caught:
            load(checkpoint.write())
        return str(caught.value)

    def no_quantization(config, group):
        del config["quantization_config"]

    def other_method(config, group):
        config["quantization_config"]["quant_method"] = "gptq"

    def other_format(config, group):
        group["format"] = "marlin-24"

    def no_weights(config, group):
        group["weights"] = None

    def ignored(config, group):
        config["quantization_config"]["ignore"].append("re:.*experts.3.*")

    def untargeted(config, group):
        group["targets"] = ["re:.*self_attn.*"]

    def outputs(config, group):
        group["output_activations"] = {"num_bits": 8}

    def rotated(config, group):
        config["quantization_config"]["transform_config"] = {"config_groups": {"u": {}}}

    def sparse(config, group):
        config["quantization_config"]["sparsity_config"] = {"format": "sparse-24-bitmask"}

    def mixed(config, group):
        other = json.loads(json.dumps(group))
        other["targets"], other["weights"]["group_size"] = ["re:.*experts.3.up_proj"], 64
        config["quantization_config"]["config_groups"]["group_1"] = other

    assert message_of(no_quantization) == "config.json has no quantization_config: this is not a quantized checkpoint"
    assert "quant_method is 'gptq', but 'compressed-tensors' is expected" in message_of(other_method)
    assert "group_0 is 'marlin-24', but 'int-quantized' or 'pack-quantized' is expected" in message_of(other_format)
    assert "group_0.weights is missing" in message_of(no_weights)
    not_quantized = "is not quantized: no target matches it, or it is ignored"
    assert message_of(ignored) == f"{LAYER}.3.gate_proj {not_quantized}"
    assert message_of(untargeted) == f"{LAYER}.0.gate_proj {not_quantized}"
    assert "group_0.output_activations is set" in message_of(outputs)
    assert "quantization_config.transform_config is set: rotated weights are not supported" in message_of(rotated)
    assert "quantization_config.sparsity_config is set: sparse weights are not supported" in message_of(sparse)
    assert message_of(mixed) == f"{LAYER}.3.up_proj is quantized differently from {LAYER}.0.gate_proj"


@safetensors
def test_scheme_found_by_name_beats_the_class(checkpoint):
    """Attention in W8A8 and experts in W4A8, whichever comes first."""
    quantization = checkpoint.config["quantization_config"]
    eight = json.loads(json.dumps(checkpoint.group))
    eight["weights"].update(num_bits=8)
    checkpoint.group["targets"] = ["re:.*experts.*"]
    quantization["config_groups"] = {"group_a": eight, "group_0": checkpoint.group}
    assert_packed(load(checkpoint.write())[LAYER], checkpoint.w13, checkpoint.w2)


@safetensors
def test_weight_only_must_be_asked_for(checkpoint):
    checkpoint.reset("pack-quantized")
    checkpoint.group["input_activations"] = None
    path = checkpoint.write()
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(caught.value) == (
        f"quantization_config.config_groups.group_0.input_activations is missing: {LAYER} is W4A16; pass "
        "quantize_w4a16=True to run it with activations quantized to int8"
    )
    assert_packed(load(path, quantize_w4a16=True)[LAYER], checkpoint.w13, checkpoint.w2)


@safetensors
def test_wrong_files(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        load(tmp_path / "file")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config.json is not a JSON object"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        load(tmp_path)

    path = checkpoint.write(files=2)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], f"{LAYER}.0.up_proj.weight": "../other"}}))
    with pytest.raises(CheckpointError, match=r"names '../other', which is no file of"):
        load(path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(path)
    swapped = dict(good["weight_map"])
    names = sorted(set(swapped.values()))
    swapped[f"{LAYER}.0.up_proj.weight"] = names[1 - names.index(swapped[f"{LAYER}.0.up_proj.weight"])]
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(CheckpointError, match=f"tensor '{LAYER}.0.up_proj.weight' cannot be read from"):
        load(path)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"holds 2 \*.safetensors files, but no model.safetensors.index.json"):
        load(path)


@safetensors
def test_no_experts(checkpoint):
    checkpoint.tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match="three-dimensional experts must be linearized before they are quantized"):
        load(checkpoint.write())


def test_either_cut_or_distributed(tmp_path):
    with pytest.raises(ValueError, match=r"experts are either cut \(tp_size\) or distributed \(ep_size\), not both"):
        load(tmp_path, tp_size=2, ep_size=2)


@safetensors
def test_groups_that_tensor_parallelism_cuts(checkpoint):
    checkpoint.reset(group_size=128)
    with pytest.raises(NotImplementedError, match="No W4A8 Int8 MoE backend supports the deployment"):
        load(checkpoint.write(), tp_size=4)


# ---- config.json ----

BASE = {"hidden_size": 64, "num_experts_per_tok": 2}


def settings(**config):
    return settings_from_config({**BASE, **config})


def test_settings_of_models():
    renormalize, default = RoutingMethodType.Renormalize, RoutingMethodType.Default
    for model_type in ("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe"):
        assert settings(model_type=model_type, norm_topk_prob=True).routing_method is renormalize
        assert settings(model_type=model_type).routing_method is default
    found = settings(model_type="mixtral", num_local_experts=8, intermediate_size=96, torch_dtype="float16")
    assert found == MoESettings(64, 2, renormalize, num_experts=8, intermediate_size=96, dtype=torch.float16)
    found = settings(model_type="gpt_oss", hidden_act="silu", intermediate_size=96)
    assert (found.routing_method, found.activation) == (renormalize, MoEActivation.SWIGLUOAI)
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


def test_settings_errors(tmp_path):
    with pytest.raises(CheckpointError, match=r"routing of model_type 'phimoe' is not known \(known: deepseek_v2, "):
        settings(model_type="phimoe")
    with pytest.raises(CheckpointError, match="hidden_size is None, but an integer is expected"):
        settings(model_type="mixtral", hidden_size=None)
    with pytest.raises(CheckpointError, match="num_experts_per_tok is None, but an integer is expected"):
        settings(model_type="mixtral", num_experts_per_tok=None)
    with pytest.raises(CheckpointError, match="dtype is 'float64', but one of float32, bfloat16, float16 is expected"):
        settings(model_type="mixtral", torch_dtype="float64")
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "model_type": "mixtral"}))
    assert read_settings(tmp_path) == settings(model_type="mixtral")


@safetensors
def test_settings_beat_config_json(checkpoint):
    checkpoint.config["model_type"] = "something_new"
    own = MoESettings(128, 2, RoutingMethodType.Sigmoid, activation=MoEActivation.GELU, dtype=torch.float32)
    layer = load(checkpoint.write(), settings=own)[LAYER]
    moe = layer.moe_config
    assert (moe.num_experts, moe.intermediate_size, moe.experts_per_token) == (8, 256, 2)  # from the tensors
    assert moe.activation is MoEActivation.GELU and moe.routing_method is RoutingMethodType.Sigmoid
    assert_packed(layer, checkpoint.w13, checkpoint.w2)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight: shape \(256, 128\), but \(256, 64\) is expected"):
        load(checkpoint.write(), settings=dataclasses.replace(own, hidden_size=64))


def test_load_is_exported():
    assert w4a8.load is load

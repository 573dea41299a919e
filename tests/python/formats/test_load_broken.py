"""Checkpoints that are fake or broken: an error that names the tensor, in every format; nothing is computed of them."""

import math

import pytest
import torch
from format_checkpoints import (
    ALL_FORMATS,
    FLOATS,
    FORMATS,
    LAYER,
    QUERY,
    Checkpoint,
    damages,
    experts_checkpoint,
    gpt_oss_checkpoint,
    model_config,
)
from wrong_checkpoints import FLOAT_CHANGES, MXFP4_CHANGES, NVFP4_CHANGES, OF_ALL

from w4a8.checkpoint import CheckpointError, load, load_linear
from w4a8.formats import rules_of

pytest.importorskip("safetensors", reason="the safetensors package is not installed")

UP, DOWN = f"{LAYER}.1.up_proj", f"{LAYER}.2.down_proj"
HIDDEN, INTER = 64, 64
GPTQ = ["GPTQ", "GPTQ asymmetric", "GPTQ 2", "GPTQ 2 asymmetric"]
WORDS = [*GPTQ, "AWQ", "AWQ zero_point false", "AutoRound", "AutoRound asymmetric", "AutoRound as AWQ"]
WITH_ZEROS = [name for name, form in FORMATS.items() if not form.symmetric]


@pytest.fixture(scope="module")
def good():
    torch.manual_seed(3)
    made = {name: experts_checkpoint(form, HIDDEN, INTER, 32) for name, form in (FORMATS | FLOATS).items()}
    made["MXFP4"] = gpt_oss_checkpoint(HIDDEN, INTER)
    return made


def message_of(made, path, **options):
    """What load says, with w4a16 asked for."""
    with pytest.raises(CheckpointError) as caught:
        load(made.write(path), quantize_w4a16=True, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("suffix", ["qweight", "scales"])
def test_missing(good, name, suffix, tmp_path):
    found = message_of(good[name].changed(f"{UP}.{suffix}"), tmp_path)
    assert found.startswith(f"tensor '{UP}.{suffix}' is missing from ")


@pytest.mark.parametrize("name", WITH_ZEROS)
def test_missing_zero_points(good, name, tmp_path):
    suffix = "qzeros" if f"{UP}.qzeros" in good[name].tensors else "weight_zero_point"
    assert f"tensor '{UP}.{suffix}' is missing" in message_of(good[name].changed(f"{UP}.{suffix}"), tmp_path)


@pytest.mark.parametrize(
    ("name", "suffix"), [("W4A8 int", "weight_scale"), ("GPTQ", "qweight"), ("AWQ", "qweight"), ("AutoRound", "scales")]
)
def test_a_tensor_that_no_expert_has(good, name, suffix, tmp_path):
    """The layer is quantized all the same: none of its experts is taken for a float one."""
    made = good[name].changed()
    made.tensors = {key: tensor for key, tensor in made.tensors.items() if not key.endswith(f".{suffix}")}
    assert message_of(made, tmp_path).startswith(f"tensor '{LAYER}.0.gate_proj.{suffix}' is missing from ")


@pytest.mark.parametrize("name", [name for name in WORDS if name in FORMATS])
@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("dim", [0, 1])
def test_truncated(good, name, suffix, dim, tmp_path):
    key = f"{DOWN}.{suffix}"
    whole = good[name].tensors[key]
    short = whole.narrow(dim, 0, whole.shape[dim] - 1).contiguous()
    found = message_of(good[name].changed(key, short), tmp_path)
    assert key in found and str(tuple(short.shape)) in found


@pytest.mark.parametrize("name", ["GPTQ", "GPTQ asymmetric", "AutoRound asymmetric"])
def test_a_zero_point_of_16(good, name, tmp_path):
    """Version 1 stores it less one."""
    key = f"{UP}.qzeros"
    words = good[name].tensors[key].clone()
    words[1, 3] |= 0xF000
    found = message_of(good[name].changed(key, words), tmp_path)
    assert f"tensor {key}: zero points in [" in found and "16], but [0, 15] is expected" in found


@pytest.mark.parametrize("name", [name for name in WITH_ZEROS if "int" in name])
def test_a_zero_point_beyond_int4(good, name, tmp_path):
    key = f"{UP}.weight_zero_point"
    for value, zero in ((8, 16), (-9, -1)):
        zeros = good[name].tensors[key].clone()
        zeros[5, 1] = value
        found = message_of(good[name].changed(key, zeros), tmp_path)
        assert f"tensor {key}: zero points in [" in found and str(zero) in found


@pytest.mark.parametrize("name", ["GPTQ", "GPTQ 2", "AWQ zero_point false", "AutoRound"])
def test_zero_points_of_a_symmetric_checkpoint(good, name, tmp_path):
    """Stock would not look at them and compute something else."""
    key = f"{UP}.qzeros"
    words = good[name].tensors[key].clone()
    words[0, 0] ^= 1
    found = message_of(good[name].changed(key, words), tmp_path)
    assert f"tensor {key}: zero points in [" in found and "the configuration says symmetric, which is 8" in found


def test_the_other_version_of_gptq(good, tmp_path):
    """A symmetric checkpoint says by its zero points which one it is; an asymmetric one only at the ends."""
    found = message_of(good["GPTQ"].changed(checkpoint_format="gptq_v2"), tmp_path / "1")
    assert f"tensor {LAYER}.0.gate_proj.qzeros: zero points in [7, 7], but the configuration says symmetric" in found
    found = message_of(good["GPTQ 2"].changed(checkpoint_format="gptq"), tmp_path / "2")
    assert f"tensor {LAYER}.0.gate_proj.qzeros: zero points in [9, 9], but the configuration says symmetric" in found
    key = f"{LAYER}.0.gate_proj.qzeros"
    words = good["GPTQ 2 asymmetric"].tensors[key] | 15
    found = message_of(good["GPTQ 2 asymmetric"].changed(key, words, checkpoint_format="gptq"), tmp_path / "3")
    assert f"tensor {key}: zero points in [" in found and "16], but [0, 15]" in found


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("group", [64, -1])
def test_another_group_in_the_config(good, name, group, tmp_path):
    found = message_of(good[name].changed(group_size=group), tmp_path)
    assert f"tensor {LAYER}.0.gate_proj." in found
    assert "groups of" in found


@pytest.mark.parametrize("name", WORDS)
def test_a_group_that_divides_nothing(good, name, tmp_path):
    found = message_of(good[name].changed(group_size=96), tmp_path)
    assert found == f"tensor {LAYER}.0.gate_proj.qweight: 64 input features are not groups of 96"


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if "config_groups" in form.config])
def test_another_group_in_config_groups(good, name, tmp_path):
    made = good[name].changed()
    made.config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    assert f"tensor {LAYER}.0.gate_proj.weight_scale: shape (64, 2), but" in message_of(made, tmp_path)


@pytest.mark.parametrize("name", GPTQ)
def test_activation_order(good, name, tmp_path):
    """A g_idx that is not the identity, whatever desc_act says."""
    key = f"{UP}.g_idx"
    order = good[name].tensors[key].flip(0).contiguous()
    for number, said in enumerate((True, False)):
        found = message_of(good[name].changed(key, order, desc_act=said), tmp_path / str(number))
        assert f"tensor {key}: groups are not consecutive input features (activation order, desc_act)" in found
    assert f"tensor '{key}' is missing" in message_of(good[name].changed(key, desc_act=True), tmp_path / "missing")
    short = good[name].tensors[key][:-1].contiguous()
    assert f"tensor {key}: shape (63,)" in message_of(good[name].changed(key, short), tmp_path / "short")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(good, name, value, tmp_path):
    suffix = "scales" if f"{UP}.scales" in good[name].tensors else "weight_scale"
    scales = good[name].tensors[f"{UP}.{suffix}"].clone()
    scales[1, 1] = value
    found = message_of(good[name].changed(f"{UP}.{suffix}", scales), tmp_path)
    assert f"tensor {UP}.{suffix}: not all scales are finite" in found


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_other_dtypes(good, name, suffix, tmp_path):
    other = good[name].tensors[f"{UP}.{suffix}"].to(torch.int64)
    found = message_of(good[name].changed(f"{UP}.{suffix}", other), tmp_path)
    assert f"tensor {UP}.{suffix}: dtype torch.int64, but " in found


@pytest.mark.parametrize("name", WORDS)
def test_another_size_of_the_model(good, name, tmp_path):
    made = good[name].changed()
    made.config["moe_intermediate_size"] = 96
    found = message_of(made, tmp_path)
    assert f"tensor '{LAYER}.0.gate_proj.qweight' has shape " in found
    assert "which is (64, 64), but (96, 64) is expected for hidden_size 64 and intermediate_size 96" in found


@pytest.mark.parametrize("name", WORDS)
def test_linear_layers(name, tmp_path):
    """load_linear says the same."""
    layer = QUERY
    made = Checkpoint(config=model_config(FORMATS[name].quantization_config(32), HIDDEN, INTER, 3))
    made.add(layer, FORMATS[name], 24, HIDDEN, 32)
    whole = dict(made.tensors)
    wrong = {
        "qweight": whole[f"{layer}.qweight"][:-1],
        "qzeros": whole[f"{layer}.qzeros"][:, :-1],
        "scales": whole[f"{layer}.scales"] * float("nan"),
    }
    for suffix, tensor in wrong.items():
        made.tensors = {**whole, f"{layer}.{suffix}": tensor.contiguous()}
        with pytest.raises(CheckpointError, match=rf"tensor {layer}\."):
            load_linear(made.write(tmp_path), quantize_w4a16=True)
    for suffix in ("scales", "qweight"):
        made.tensors = {key: tensor for key, tensor in whole.items() if not key.endswith(suffix)}
        with pytest.raises(CheckpointError, match=rf"tensor '{layer}\.{suffix}' is missing"):
            load_linear(made.write(tmp_path), quantize_w4a16=True)
    made.tensors = whole
    with pytest.raises(CheckpointError, match=f"{layer} is W4A16; pass quantize_w4a16=True"):
        load_linear(made.write(tmp_path), quantize_w4a16=False)


def without(tensors, axis, parts):
    """The tensors of a matrix that has no output features (axis n), or no input features (k and their groups)."""
    axes = {part.suffix: part.axes for part in parts}
    made = {}
    for suffix, tensor in tensors.items():
        for dim, name in enumerate(axes[suffix]):
            if name == axis or (axis == "k" and name == "g"):
                tensor = tensor.narrow(dim, 0, 0)
        made[suffix] = tensor.contiguous()
    if "weight_shape" in made:
        made["weight_shape"][0 if axis == "n" else 1] = 0
    return made


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", ["n", "k"])
def test_features_that_are_none(name, axis, tmp_path):
    """A linear layer of nothing, and experts of nothing where config.json leaves their size to the tensors."""
    form, layer = FORMATS[name], QUERY
    config = model_config(form.quantization_config(32), HIDDEN, INTER, 3)
    del config["moe_intermediate_size"]
    stored = rules_of(config["quantization_config"]).of(layer)
    tensors = without(form.random(64, HIDDEN, 32), axis, stored.parts)
    made = Checkpoint({f"{layer}.{suffix}": tensor for suffix, tensor in tensors.items()}, config)
    with pytest.raises(CheckpointError, match=rf"tensor {layer}\.\w+: shape \(.*\), which holds nothing"):
        load_linear(made.write(tmp_path / "linear"), quantize_w4a16=True)
    with pytest.raises(ValueError, match=r"^m\.\w+: shape \(.*\), which holds nothing"):
        stored.read(tensors, "m")
    names = [f"{LAYER}.{expert}.{part}" for expert in range(3) for part in ("gate_proj", "up_proj", "down_proj")]
    experts = {f"{name}.{suffix}": tensor.clone() for name in names for suffix, tensor in tensors.items()}
    with pytest.raises(
        CheckpointError, match=rf"tensor '{LAYER}\.0\.gate_proj\.\w+' has shape .*, which holds nothing"
    ):
        load(Checkpoint(experts, config).write(tmp_path / "experts"), quantize_w4a16=True)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (torch.tensor([[64, 64]]), r"weight_shape: shape \(1, 2\), but 1 dimensions are expected"),
        (torch.tensor([64, 64, 1]), r"weight_shape: shape \(3,\), but rows and columns make \(2,\)"),
        (torch.tensor([64.0, math.nan]), "weight_shape: dtype torch.float32, but int64 or int32 is expected"),
        (torch.tensor([64, -64]), r"'.*weight_shape' says \[64, -64\], but \[64, 64\] is expected"),
        (torch.tensor([2**62, 64]), r"'.*weight_shape' says \[4611686018427387904, 64\], but \[64, 64\] is expected"),
        (torch.zeros(0, dtype=torch.int64), r"weight_shape: shape \(0,\), which holds nothing"),
    ],
)
def test_weight_shape(good, shape, message, tmp_path):
    with pytest.raises(CheckpointError, match=f"tensor .*{message}"):
        load(good["W4A8 pack"].changed(f"{UP}.weight_shape", shape).write(tmp_path))


@pytest.mark.parametrize("name", ["GPTQ asymmetric", "AWQ"])
def test_no_expert_of_a_number(good, name, tmp_path):
    made = good[name].changed()
    for key in [key for key in made.tensors if f"{LAYER}.1." in key]:
        del made.tensors[key]
    assert f"tensor '{LAYER}.1.gate_proj.qweight' is missing: of 3 experts there are 2" in message_of(made, tmp_path)


def test_a_bias_that_only_some_have(good, tmp_path):
    made = good["GPTQ"].changed()
    made.tensors[f"{UP}.bias"] = torch.ones(64)
    assert f"tensor '{LAYER}.0.gate_proj.bias' is missing" in message_of(made, tmp_path)


def test_groups_of_two_sizes_in_a_layer(good, tmp_path):
    made = good["GPTQ"].changed(dynamic={".*down_proj": {"group_size": 64}})
    found = message_of(made, tmp_path)
    assert found == f"{LAYER}.0.down_proj is quantized differently from {LAYER}.0.gate_proj"


def test_an_expert_of_another_width(good, tmp_path):
    """A stack is of one kind."""
    made = good["GPTQ"].changed(dynamic={r".*\.1\.down_proj": {"bits": 8}})
    found = message_of(made, tmp_path)
    assert found == f"{LAYER}.1.down_proj is quantized differently from {LAYER}.0.down_proj"


def test_weight_only_may_be_refused(good, tmp_path):
    for name, key in (("GPTQ", "quant_method is 'gptq'"), ("AutoRound", "act_bits is 16"), ("MXFP4", "is 'mxfp4'")):
        with pytest.raises(CheckpointError, match=rf"{key}: {LAYER} is W4A16; pass quantize_w4a16=True to run it with"):
            load(good[name].write(tmp_path / name), quantize_w4a16=False)


@pytest.mark.parametrize(("suffix", "change", "message"), MXFP4_CHANGES)
def test_mxfp4(good, suffix, change, message, tmp_path):
    key = f"{LAYER}.{suffix}"
    tensor = None if change is None else change(good["MXFP4"].tensors[key]).contiguous()
    found = message_of(good["MXFP4"].changed(key, tensor), tmp_path)
    assert key in found and message in found


@pytest.mark.parametrize("name", FLOATS)
def test_floats(good, name, tmp_path):
    changes = FLOAT_CHANGES + (NVFP4_CHANGES if name in OF_ALL else [])
    for index, (which, change, message) in enumerate(changes):
        key = f"{UP}.{which if isinstance(which, str) else which[name]}"
        tensor = None if change is None else change(good[name].tensors[key])
        found = message_of(good[name].changed(key, tensor), tmp_path / str(index))
        assert key in found and message in found


@pytest.mark.parametrize(
    ("name", "suffix", "tensor", "message"),
    [
        ("NVFP4 modelopt", "pre_quant_scale", torch.ones(64), "inputs that are scaled"),  # of NVFP4_AWQ
        ("MXFP4 Quark", "input_rotation", torch.ones(64, 64).double(), "inputs that are rotated"),  # an online rotation
    ],
)
def test_what_inputs_would_be_multiplied_by(good, name, suffix, tensor, message, tmp_path):
    made = good[name].changed()
    made.add(QUERY, ALL_FORMATS[name], 16, 64)
    for module in (UP, QUERY):
        made.tensors[f"{module}.{suffix}"] = tensor.clone()
    path = made.write(tmp_path)
    for read in (load, load_linear):
        with pytest.raises(CheckpointError, match=rf"_proj\.{suffix}: {message}"):
            read(path, quantize_w4a16=True)


@pytest.mark.parametrize("name", [*FORMATS, *FLOATS, "MXFP4"])
def test_tensors_of_anything(good, name, tmp_path):
    """One tensor of another shape or dtype, or with other bits: it loads, or an error of the right class says why."""
    refused = 0
    for key, tensor in damages(good[name].tensors, 40):
        made = good[name].changed(key, tensor)
        try:
            load(made.write(tmp_path), quantize_w4a16=True)
        except (CheckpointError, NotImplementedError) as error:
            refused += 1
            assert LAYER in str(error)
    assert refused >= 10

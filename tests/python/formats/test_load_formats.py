"""w4a8.load and load_linear on checkpoints in every format: the packed matrices mean what the tools say, exactly."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from common import default_activation_group, exact_rows
from format_checkpoints import (
    EIGHT_BITS,
    FORMATS,
    LAYER,
    Checkpoint,
    experts_checkpoint,
    gpt_oss_checkpoint,
    model_config,
    random_matrix,
    random_mxfp4,
)
from format_writers import dequantized_gptq, dequantized_mxfp4, multiplied_out

import w4a8
from w4a8.checkpoint import CheckpointError, load, load_linear
from w4a8.formats import Matrix
from w4a8.nn import W4A8Linear, W8A8Linear

safetensors_torch = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")

TOOL_WRITTEN = Path(__file__).parents[2] / "tool_written"
QUERY = "model.layers.0.self_attn.q_proj"
each_format = pytest.mark.parametrize("name", FORMATS)


def meaning(packed):
    """float64 [N, K] of a packed matrix, and its bias."""
    header = w4a8.read_header(packed)
    found = w4a8.dyn_quant_unpack_any_4bit_weight(packed, header["group"], header["k"], header["n"])
    codes, scales, zeros, bias, values, channels = found
    zeros = zeros if header["has_zero_points"] else None
    if header["scale_dtype"] == "e8m0":
        scales = torch.pow(2.0, scales.double() - 127)
    channels = channels if channels.numel() > 0 else None
    matrix = Matrix(codes, scales, zeros, values, None, channels)
    return multiplied_out(matrix), bias if header["has_bias"] else None


def assert_read(path, meant):
    """Experts and linear layers of a model that a tool has written; meant: of the name of a matrix."""
    (layer,) = load(path, quantize_w4a16=True).values()
    for expert in range(4):
        name = f"model.layers.0.mlp.experts.{expert}"
        w13 = torch.cat([meant(f"{name}.gate_proj"), meant(f"{name}.up_proj")])
        assert torch.equal(meaning(layer.w13_packed[expert])[0], w13)
        assert torch.equal(meaning(layer.w2_packed[expert])[0], meant(f"{name}.down_proj"))
    linear = load_linear(path, quantize_w4a16=True)
    assert sorted(name.rpartition(".")[2] for name in linear) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    for name, module in linear.items():
        assert torch.equal(meaning(module.packed)[0], meant(name))


def assert_meant(layer, made, experts=None, names=("gate_proj", "up_proj", "down_proj"), rows=slice(None)):
    """Every expert of a layer: the files' matrices, cut to some features of the intermediate size."""
    for index, expert in enumerate(range(3) if experts is None else experts):
        parts = [made.meant[f"{LAYER}.{expert}.{name}"] for name in names]
        w13, bias13 = meaning(layer.w13_packed[index])
        w2, bias2 = meaning(layer.w2_packed[index])
        assert torch.equal(w13, torch.cat([part[rows] for part in parts[:-1]]))
        assert torch.equal(w2, parts[-1][:, rows])
        assert (bias13 is None) == (bias2 is None) == (not made.biases)
        if made.biases:
            biases = [made.biases[f"{LAYER}.{expert}.{name}"].float() for name in names]
            assert torch.equal(bias13, torch.cat([bias[rows] for bias in biases[:-1]]))
            assert torch.equal(bias2, biases[-1])


@pytest.mark.parametrize("name", [*FORMATS, *EIGHT_BITS])
@pytest.mark.parametrize(("hidden", "inter", "group"), [(96, 64, 32), (64, 40, -1), (64, 48, 16)])
def test_experts(name, hidden, inter, group, tmp_path):
    form = (FORMATS | EIGHT_BITS)[name]
    made = experts_checkpoint(form, hidden, inter, group)
    layers = load(made.write(tmp_path), quantize_w4a16=form.weight_only)
    assert list(layers) == [LAYER]
    assert_meant(layers[LAYER], made)
    for packed in (layers[LAYER].w13_packed[0], layers[LAYER].w2_packed[0]):
        header = w4a8.read_header(packed)
        assert header["values"] == f"int{form.bits}"
        assert header["has_zero_points"] == (not form.symmetric)
    x = torch.randn(5, hidden)
    assert torch.isfinite(layers[LAYER](x, torch.randn(5, 3))).all()


@pytest.mark.parametrize("name", [*FORMATS, *EIGHT_BITS])
def test_biases_and_shards_and_names(name, tmp_path):
    form = (FORMATS | EIGHT_BITS)[name]
    made = experts_checkpoint(form, 64, 32, 32, bias=True, names=("w1", "w3", "w2"))
    layer = load(made.write(tmp_path / "shards", files=4), quantize_w4a16=True)[LAYER]
    assert_meant(layer, made, names=("w1", "w3", "w2"))
    made = experts_checkpoint(form, 64, 32, 32, names=("gate_up_proj", "down_proj"))
    layer = load(made.write(tmp_path / "fused"), quantize_w4a16=True)[LAYER]
    assert_meant(layer, made, names=("gate_up_proj", "down_proj"))


@pytest.mark.skipif(not hasattr(torch.device, "__enter__"), reason="torch.device is no context manager before torch 2")
@pytest.mark.parametrize("name", [*FORMATS, *EIGHT_BITS])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_under_another_default_device(name, bias, tmp_path):
    """What a model is built under, say: layers of files are on the CPU, and the default is what it was afterwards."""
    form = (FORMATS | EIGHT_BITS)[name]
    made = experts_checkpoint(form, 64, 32, 32, bias=bias)
    made.add(QUERY, form, 64, 64, 32)
    path = made.write(tmp_path)
    with torch.device("meta"):
        layer = load(path, quantize_w4a16=True)[LAYER]
        linear = load_linear(path, quantize_w4a16=True)[QUERY]
        assert torch.empty(1).is_meta
    assert all(tensor.device.type == "cpu" for tensor in (*layer.state_dict().values(), linear.packed))
    assert_meant(layer, made)
    assert torch.equal(meaning(linear.packed)[0], made.meant[QUERY])


@pytest.mark.parametrize("name", ["W4A8 int", "W4A8 pack", "W4A8 pack asymmetric", "W4A16 int asymmetric"])
def test_odd_sizes(name, tmp_path):
    """Sizes that are no words of 8."""
    made = experts_checkpoint(FORMATS[name], 34, 18, -1)
    assert_meant(load(made.write(tmp_path), quantize_w4a16=True)[LAYER], made)


@pytest.mark.parametrize("name", ["GPTQ asymmetric", "AWQ", "W4A8 pack asymmetric", *EIGHT_BITS])
def test_ranks(name, tmp_path):
    """A cut of w2 takes the zero points of its groups; a rank of expert parallelism has experts of its own."""
    made = experts_checkpoint((FORMATS | EIGHT_BITS)[name], 64, 64, 32)
    path = made.write(tmp_path)
    for rank in range(2):
        layer = load(path, tp_rank=rank, tp_size=2, quantize_w4a16=True)[LAYER]
        assert_meant(layer, made, rows=slice(32 * rank, 32 * rank + 32))
    layer = load(path, ep_rank=1, ep_size=3, quantize_w4a16=True)[LAYER]
    assert_meant(layer, made, experts=[1])
    with pytest.raises(NotImplementedError, match="intermediate size per partition 16, which is not a multiple of the"):
        load(path, tp_rank=0, tp_size=4, quantize_w4a16=True)


def test_gpt_oss(tmp_path):
    """MXFP4 experts of one tensor each, rows in turns, biases; whole, cut, distributed, and in several files."""
    made = gpt_oss_checkpoint(64, 64)
    path = made.write(tmp_path, files=3)
    meant = Checkpoint()
    for expert in range(3):
        for values, target in ((made.meant, meant.meant), (made.biases, meant.biases)):
            both = values[f"{LAYER}.{expert}.gate_up_proj"]
            target[f"{LAYER}.{expert}.gate_proj"], target[f"{LAYER}.{expert}.up_proj"] = both[0::2], both[1::2]
            target[f"{LAYER}.{expert}.down_proj"] = values[f"{LAYER}.{expert}.down_proj"]
    layer = load(path, quantize_w4a16=True)[LAYER]
    assert_meant(layer, meant)
    header = w4a8.read_header(layer.w2_packed[0])
    assert (header["values"], header["scale_dtype"]) == ("e2m1", "e8m0")
    assert_meant(load(path, tp_size=2, quantize_w4a16=True)[LAYER], meant, rows=slice(0, 32))
    assert_meant(load(path, ep_rank=2, ep_size=3, quantize_w4a16=True)[LAYER], meant, experts=[2])


@pytest.mark.parametrize(
    "name", ["GPTQ asymmetric", "AWQ", "AutoRound as AWQ", "W4A16 pack asymmetric", "GPTQ 2 asymmetric, 8 bits"]
)
def test_scales_stay_exact(name, tmp_path):
    """In the type of the file."""
    for dtype, kept in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        made = experts_checkpoint((FORMATS | EIGHT_BITS)[name], 64, 32, 32, dtype=dtype)
        layer = load(made.write(tmp_path / kept), quantize_w4a16=True)[LAYER]
        assert w4a8.read_header(layer.w13_packed[0])["scale_dtype"] == kept


def test_matrices_with_and_without_zero_points(tmp_path):
    """AutoRound's rules for single modules: gate symmetric, up not; w2 not; every group is the same."""
    asymmetric, symmetric = FORMATS["AutoRound asymmetric"], FORMATS["AutoRound"]
    made = Checkpoint(config=model_config(asymmetric.quantization_config(32), 64, 32, 3))
    extra = {}
    for expert in range(3):
        for name, form in (("gate_proj", symmetric), ("up_proj", asymmetric if expert == 1 else symmetric),
                           ("down_proj", asymmetric)):  # fmt: skip
            rows, columns = (64, 32) if name == "down_proj" else (32, 64)
            made.add(f"{LAYER}.{expert}.{name}", form, rows, columns, 32)
            if form is symmetric:
                extra[f"{LAYER}.{expert}.{name}"] = {"sym": True}
    made.config["quantization_config"]["extra_config"] = extra
    layer = load(made.write(tmp_path), quantize_w4a16=True)[LAYER]
    assert_meant(layer, made)
    assert all(w4a8.read_header(packed)["has_zero_points"] for packed in layer.w13_packed)


@pytest.mark.parametrize(
    ("name", "file", "keys"),
    [
        ("GPTQ asymmetric", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
        ("AWQ", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_configuration_in_a_file_of_its_own(name, file, keys, tmp_path):
    """Directories from before config.json had it; they name no method."""
    made = experts_checkpoint(FORMATS[name], 64, 32, 32)
    made.add("model.layers.0.self_attn.q_proj", FORMATS[name], 16, 64, 32)
    whole = made.write(tmp_path / "new")
    del made.config["quantization_config"]
    path = made.write(tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"config\.json has no quantization_config"):
        load(path, quantize_w4a16=True)
    (path / file).write_text(json.dumps(keys))
    old, new = (load(directory, quantize_w4a16=True)[LAYER] for directory in (path, whole))
    assert torch.equal(old.w13_packed, new.w13_packed)
    assert torch.equal(old.w2_packed, new.w2_packed)
    old, new = (load_linear(directory, quantize_w4a16=True) for directory in (path, whole))
    assert old.keys() == new.keys() and all(torch.equal(old[key].packed, new[key].packed) for key in new)


def test_mixed_bits_are_left_out_and_named(tmp_path, caplog):
    """The experts of layer 1 and a projection of the attention have 3 bits."""
    form = FORMATS["GPTQ"]
    made = experts_checkpoint(form, 64, 32, 32)
    other = LAYER.replace(".0.", ".1.")
    for key in [key for key in made.tensors if key.startswith(LAYER)]:
        made.tensors[key.replace(LAYER, other)] = made.tensors[key].clone()
    made.add("model.layers.0.self_attn.q_proj", form, 16, 64, 32)
    made.add("model.layers.0.self_attn.k_proj", form, 16, 64, 32)
    made.config["quantization_config"]["dynamic"] = {r"+:.*\.layers\.1\.": {"bits": 3}, r"+:.*k_proj": {"bits": 3}}
    path = made.write(tmp_path)
    with caplog.at_level(logging.WARNING, logger="w4a8.checkpoint"):
        assert list(load(path, quantize_w4a16=True)) == [LAYER]
        assert list(load_linear(path, quantize_w4a16=True)) == ["model.layers.0.self_attn.q_proj"]
    reason = "quantization_config.bits is 3, but 4 or 8 is expected (by quantization_con"
    assert f"{other} is left out: {reason}" in caplog.text
    assert f"model.layers.0.self_attn.k_proj is left out: {reason}" in caplog.text


def test_a_layer_that_is_left_out_by_name(tmp_path, caplog):
    """AWQ, with float experts in layer 1, which modules_to_not_convert names."""
    made = experts_checkpoint(FORMATS["AWQ"], 64, 32, 32)
    other = LAYER.replace(".0.", ".1.")
    for expert in range(3):
        for name, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            made.tensors[f"{other}.{expert}.{name}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)
    made.config["quantization_config"]["modules_to_not_convert"] = ["layers.1.", "mlp.gate"]
    with caplog.at_level(logging.WARNING, logger="w4a8.checkpoint"):
        assert list(load(made.write(tmp_path), quantize_w4a16=True)) == [LAYER]
    assert f"{other} is left out: {other}.0.gate_proj is not quantized" in caplog.text


@each_format
def test_linear(name, tmp_path):
    form = FORMATS[name]
    made = Checkpoint(config=model_config(form.quantization_config(32), 64, 32, 3))
    query, down = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"
    made.add(query, form, 24, 64, 32, bias=True)
    made.add(down, form, 64 if form.words else 13, 96, 32)
    made.add(f"{LAYER}.0.up_proj", form, 32, 64, 32)
    made.tensors["lm_head.weight"] = torch.zeros(8, 64)
    layers = load_linear(made.write(tmp_path), quantize_w4a16=form.weight_only)
    assert sorted(layers) == [down, query]
    for layer_name, layer in layers.items():
        found, bias = meaning(layer.packed)
        assert torch.equal(found, made.meant[layer_name])
        assert (bias is None) == (layer_name not in made.biases)
        assert layer(torch.randn(2, layer.in_features)).shape == (2, layer.out_features)
    assert torch.equal(meaning(layers[query].packed)[1], made.biases[query].float())


def _mixed(rules, four, eight, group=32):
    """Two layers of experts of GPTQ; ``eight`` are the projections of 8 bits, by regular expression."""
    made = Checkpoint(config=model_config(four.quantization_config(group), 96, 64, 3))
    for layer in (0, 1):
        for expert in range(3):
            for name, shape in (("gate_proj", (64, 96)), ("up_proj", (64, 96)), ("down_proj", (96, 64))):
                module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                form = eight if any(re.match(rule, module) for rule in rules) else four
                made.add(module, form, *shape, group)
    return made


@pytest.mark.parametrize("rule", [r".*layers\.0\.mlp\.experts", r".*down_proj", r".*0\.mlp\..*(gate|up)_proj"])
@pytest.mark.parametrize("name", ["GPTQ asymmetric", "GPTQ 2", "AutoRound", "W4A16 pack asymmetric"])
def test_experts_of_4_and_of_8_bits(name, rule, tmp_path):
    """By layers, and in one, w13 of 8 bits or w2: what they are, and what they compute."""
    four, eight = FORMATS[name], EIGHT_BITS[name.replace("W4A16", "W8A16") if "pack" in name else f"{name}, 8 bits"]
    made = _mixed([rule], four, eight)
    config = made.config["quantization_config"]
    if "pack" in name:
        (group,) = config["config_groups"].values()
        weights = {**group["weights"], "num_bits": 8}
        config["config_groups"]["group_1"] = {**group, "targets": [f"re:{rule}"], "weights": weights}
    else:
        config["dynamic" if "GPTQ" in name else "extra_config"] = {rule: {"bits": 8}}
    layers = load(made.write(tmp_path), quantize_w4a16=True)
    assert len(layers) == 2
    for layer_name, layer in layers.items():
        meant = {key.replace(layer_name, LAYER): value for key, value in made.meant.items() if layer_name in key}
        assert_meant(layer, Checkpoint(meant=meant))
        for stack, part in (("w13", "gate_proj"), ("w2", "down_proj")):
            packed = getattr(layer, f"{stack}_packed")
            bits = 8 if re.match(rule, f"{layer_name}.0.{part}") else 4
            assert {w4a8.read_header(matrix)["values"] for matrix in packed} == {f"int{bits}"}
        x, logits = torch.randn(7, 96), torch.randn(7, 3)
        assert_computes(layer(x, logits), x, logits, meant)


def assert_computes(found, x, logits, meant):
    """Beside the files' matrices in float64: at most what int8 inputs of both products cost, which is 1 part in 50."""
    weights, ids = torch.topk(torch.softmax(logits.double(), 1), 2)
    weights = weights / weights.sum(1, keepdim=True)
    expected = torch.zeros(len(x), x.shape[1], dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token], ids[token].tolist()):
            gate, up, down = (meant[f"{LAYER}.{expert}.{name}"] for name in ("gate_proj", "up_proj", "down_proj"))
            expected[token] += weight * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    assert (found.double() - expected).norm() <= 0.02 * expected.norm()


def test_gate_and_up_of_two_kinds(tmp_path):
    made = _mixed([".*up_proj"], FORMATS["GPTQ"], EIGHT_BITS["GPTQ, 8 bits"])
    made.config["quantization_config"]["dynamic"] = {".*up_proj": {"bits": 8}}
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.0\.up_proj is quantized differently from {LAYER}\.0\.gate_"):
        load(made.write(tmp_path), quantize_w4a16=True)


def test_8_bits_of_sizes_that_the_operators_do_not_have(tmp_path):
    """Rows of one group whose products would not sum up in int32."""
    form = EIGHT_BITS["GPTQ, 8 bits"]
    hidden, query = (1 << 16) + 8, "model.layers.0.self_attn.q_proj"
    made = experts_checkpoint(form, hidden, 8, -1)
    made.add(query, form, 4, hidden, -1)
    path = made.write(tmp_path)
    problem = rf"is {hidden} \(channelwise\), expected at most 65536 for int8"
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.0\.\w+: .*{problem}"):
        load(path, quantize_w4a16=True)
    with pytest.raises(CheckpointError, match=rf"{query}: .*{problem}"):
        load_linear(path, quantize_w4a16=True)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_linear_of_8_bits(name, tmp_path):
    """What the packed matrix means, and what the layer computes."""
    form = EIGHT_BITS[name]
    made = Checkpoint(config=model_config(form.quantization_config(32), 64, 32, 3))
    query, down = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"
    made.add(query, form, 24, 64, 32, bias=True)
    made.add(down, form, 12 if form.words else 13, 96, 32)
    layers = load_linear(made.write(tmp_path), quantize_w4a16=True)
    assert sorted(layers) == [down, query]
    for layer_name, layer in layers.items():
        assert isinstance(layer, W8A8Linear)
        weight, bias = meaning(layer.packed)
        assert torch.equal(weight, made.meant[layer_name])
        assert (bias is None) == (layer_name not in made.biases)
        expected = made.biases.get(layer_name, torch.zeros(layer.out_features))
        assert bias is None or torch.equal(bias, expected.float())
        activation_group = default_activation_group(32, layer.in_features)
        assert w4a8.read_header(layer.packed)["activation_group"] == activation_group
        x = exact_rows(3, layer.in_features, activation_group)  # nothing is rounded but sums of floats
        exact = x.double() @ weight.T + expected.double()
        allowed = 1e-5 * (x.double().abs() @ weight.abs().T)
        assert ((layer(x).double() - exact).abs() <= allowed + 1e-6 * exact.abs()).all()


def from_tensors(name, made, group):
    """W4A8Linear by the function of a format."""
    config = FORMATS[name].config
    more = {"symmetric": FORMATS[name].symmetric}
    if "GPTQ" in name:
        return W4A8Linear.from_gptq(made, group, version=2 if " 2" in name else 1, **more)
    if name.startswith("AutoRound"):
        return W4A8Linear.from_auto_round(made, group, packing=config["packing_format"], **more)
    if name.startswith("AWQ"):
        return W4A8Linear.from_awq(made, group, **more)
    weight = made["weight"] if "weight" in made else made["weight_packed"]
    rest = made.get("weight_shape"), made.get("bias")
    zeros = made.get("weight_zero_point")
    return W4A8Linear.from_compressed_tensors(weight, made["weight_scale"], *rest, weight_zero_point=zeros)


@each_format
@pytest.mark.parametrize("group", [32, -1])
def test_from_tensors(name, group):
    form = FORMATS[name]
    n = 24 if form.words else 21
    made = random_matrix(form, n, 96, group)
    made["bias"] = torch.randn(n)
    layer = from_tensors(name, made, group)
    found, bias = meaning(layer.packed)
    assert torch.equal(found, form.dequantized(made)) and torch.equal(bias, made["bias"])
    # Of tensors alone, int-quantized ones are taken for W4A8's.
    activation_group = -1 if " int" in name else 32
    assert w4a8.read_header(layer.packed)["activation_group"] == activation_group
    x = exact_rows(3, 96, activation_group)
    exact = x.double() @ found.T + bias.double()
    # A few roundings to float32 for each of at most 3 groups, of a product, a sum and the bias.
    terms = x.double().abs() @ found.abs().T + 128 * found.abs().sum(1) + bias.double().abs()
    assert ((layer(x).double() - exact).abs() <= 16 * 2.0**-24 * terms).all()


def test_from_mxfp4():
    made = random_mxfp4(21, 96)
    layer = W4A8Linear.from_mxfp4({**made, "bias": torch.ones(21)})
    assert torch.equal(meaning(layer.packed)[0], dequantized_mxfp4(made))
    assert layer(torch.randn(2, 96)).shape == (2, 21)
    del made["scales"]
    with pytest.raises(ValueError, match=r"the layer\.scales is missing"):
        W4A8Linear.from_mxfp4(made, name="the layer")


@pytest.mark.parametrize("folder", ["mxfp4_compressed_tensors", "mxfp4_auto_round"])
def test_mxfp4_of_a_tool(folder):
    """Experts and linear layers (tests/tool_written)."""
    path = TOOL_WRITTEN / folder
    tensors = safetensors_torch.load_file(path / "model.safetensors")

    def meant(name):
        parts = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
        return dequantized_mxfp4({"blocks": parts[0].unflatten(1, (-1, 16)), "scales": parts[1]})

    with pytest.raises(CheckpointError, match=r"input_activations is not int8|data_type is 'mx_fp'"):
        load(path, quantize_w4a16=False)
    assert_read(path, meant)


@pytest.mark.parametrize("folder", ["auto_round_mixed", "auto_round_experts", "gptq_experts"])
def test_mixed_bits_of_a_tool(folder):
    """Attention of 8 bits and experts of 4, and the other way round (tests/tool_written)."""
    path = TOOL_WRITTEN / folder
    tensors = safetensors_torch.load_file(path / "model.safetensors")

    def meant(name):
        bits = 8 if ("experts" in name) == folder.endswith("experts") else 4
        return dequantized_gptq({part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")}, 1, bits)

    assert_read(path, meant)


def test_wrong_zero_points_of_compressed_tensors():
    made = random_matrix(FORMATS["W4A16 pack asymmetric"], 24, 96, 32)
    with pytest.raises(ValueError, match=r"layer\.weight_zero_point: shape \(2, 3\), but"):
        W4A8Linear.from_compressed_tensors(
            made["weight_packed"], made["weight_scale"], weight_zero_point=made["weight_zero_point"][:2]
        )


def test_a_quantized_head(tmp_path):
    """Its codes say that it is quantized, whether the configuration does or not."""
    for name in ("GPTQ", "AWQ", "AutoRound"):
        made = Checkpoint(config=model_config(FORMATS[name].quantization_config(32), 64, 32, 3))
        made.add("lm_head", FORMATS[name], 40, 64, 32)
        layers = load_linear(made.write(tmp_path / name), quantize_w4a16=True)
        assert torch.equal(meaning(layers["lm_head"].packed)[0], made.meant["lm_head"])


def test_activation_order_in_name_only(tmp_path):
    """desc_act with groups in order (static groups), or with one group, changes nothing."""
    for group in (32, -1):
        made = experts_checkpoint(FORMATS["GPTQ"], 64, 32, group)
        made.config["quantization_config"]["desc_act"] = True
        assert_meant(load(made.write(tmp_path / str(group)), quantize_w4a16=True)[LAYER], made)

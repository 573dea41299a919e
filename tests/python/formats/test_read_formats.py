"""`read_layers` on checkpoints in every format: the packed matrices mean what the tools say, exactly."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import default_activation_group, exact_rows
from format_checkpoints import (
    ALL_FORMATS,
    EIGHT_BITS,
    FLOATS,
    FORMATS,
    LAYER,
    PROJECTIONS,
    QUARK,
    QUERY,
    Checkpoint,
    experts_checkpoint,
    gpt_oss_checkpoint,
    model_config,
    numbers_of,
)
from tool_formats import form_of, multiplied_out

import w4a8
from w4a8.checkpoint import CheckpointError, open_source, read_layers
from w4a8.core.packer import pack_experts
from w4a8.formats import Matrix, rules_of
from w4a8.nn import W4A8Linear, W8A8Linear

pytest.importorskip("safetensors", reason="the safetensors package is not installed")

TOOL_WRITTEN = Path(__file__).parents[2] / "tool_written"
MLP = "model.layers.0.mlp.gate_proj"
every_format = pytest.mark.parametrize("name", ALL_FORMATS)


def meaning(packed):
    """float64 [N, K] of a packed matrix, and its bias."""
    header = w4a8.read_header(packed)
    found = w4a8.dyn_quant_unpack_any_4bit_weight(packed, header["group"], header["k"], header["n"])
    codes, scales, zeros, bias, values, channels, *_ = found
    zeros = zeros if header["has_zero_points"] else None
    if header["scale_dtype"] == "e8m0":
        scales = torch.pow(2.0, scales.double() - 127)
    channels = channels if channels.numel() > 0 else None
    matrix = Matrix(codes, scales, zeros, values, None, channels)
    return numbers_of(matrix), bias if header["has_bias"] else None


def assert_read(path, meant):
    """Experts and linear layers of a model that a tool has written; meant: of the name of a matrix."""
    layers = read_layers(path)
    experts = layers.pop("model.layers.0.mlp.experts")
    for expert in range(4):
        name = f"model.layers.0.mlp.experts.{expert}"
        w13 = torch.cat([meant(f"{name}.gate_proj"), meant(f"{name}.up_proj")])
        assert torch.equal(meaning(experts.w13_packed[expert])[0], w13)
        assert torch.equal(meaning(experts.w2_packed[expert])[0], meant(f"{name}.down_proj"))
    assert sorted(name.rpartition(".")[2] for name in layers) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    for name, module in layers.items():
        assert torch.equal(meaning(module.packed)[0], meant(name))


def assert_meant(layer, made, experts=None, names=PROJECTIONS, rows=slice(None)):
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


# H, I and the group, by the block size of the format.
SIZES = {
    None: [(96, 64, 32), (64, 40, -1), (64, 48, 16)],
    32: [(64, 32, 32), (96, 64, 32), (32, 96, 32)],
    16: [(64, 32, 16), (48, 80, 16), (16, 16, 16), (16, 32, 16), (112, 16, 16)],
}


@every_format
def test_experts(name, tmp_path):
    """Gate and up have different scales, and so has every expert."""
    form = ALL_FORMATS[name]
    for hidden, inter, group in SIZES[form.block]:
        made = experts_checkpoint(form, hidden, inter, group)
        path = made.write(tmp_path / f"{hidden}-{inter}")
        layers = read_layers(path)
        assert list(layers) == [LAYER]
        assert_meant(layers[LAYER], made)
        for packed in (layers[LAYER].w13_packed[0], layers[LAYER].w2_packed[1]):
            header = w4a8.read_header(packed)
            assert header["values"] == ("e2m1" if form.block else f"int{form.bits}")
            assert header["has_zero_points"] == (not form.symmetric)
            assert header["group"] == (header["k"] if group == -1 else group)
            if form.block == 16:  # one group has one level
                assert header["scale_dtype"] == ("e5m3" if header["k"] > 16 else "float32")
        chosen = torch.randint(3, (5, 2)), torch.rand(5, 2)
        assert torch.isfinite(layers[LAYER](torch.randn(5, hidden), *chosen)).all()


@every_format
def test_biases_and_shards_and_names(name, tmp_path):
    form = ALL_FORMATS[name]
    made = experts_checkpoint(form, 64, 32, 32, bias=True, names=("w1", "w3", "w2"))
    layer = read_layers(made.write(tmp_path / "shards", files=4))[LAYER]
    assert_meant(layer, made, names=("w1", "w3", "w2"))
    made = experts_checkpoint(form, 64, 32, 32, names=("gate_up_proj", "down_proj"))
    made.add(QUERY, form, 64, 64, 32)
    path = made.write(tmp_path / "fused")
    with pytest.raises(CheckpointError, match=f"^{LAYER}: .*whether its rows alternate gate and up is not known"):
        read_layers(path)
    assert list(read_layers(path, only=lambda name: name == QUERY)) == [QUERY]


@every_format
def test_experts_without_a_gate(name, tmp_path):
    made = experts_checkpoint(ALL_FORMATS[name], 64, 32, 32)
    made.tensors = {key: tensor for key, tensor in made.tensors.items() if "gate_proj" not in key}
    layer = read_layers(made.write(tmp_path), activation=w4a8.Activation.RELU2)[LAYER]
    assert_meant(layer, made, names=("up_proj", "down_proj"))
    assert layer(torch.randn(5, 64), torch.randint(3, (5, 2)), torch.rand(5, 2)).shape == (5, 64)


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
        layers = read_layers(path)
        assert torch.empty(1).is_meta
    layer, linear = layers[LAYER], layers[QUERY]
    assert all(tensor.device.type == "cpu" for tensor in (*layer.state_dict().values(), linear.packed))
    assert_meant(layer, made)
    assert torch.equal(meaning(linear.packed)[0], made.meant[QUERY])


@pytest.mark.parametrize("name", ["W4A8 int", "W4A8 pack", "W4A8 pack asymmetric", "W4A16 int asymmetric"])
def test_odd_sizes(name, tmp_path):
    """Sizes that are no words of 8."""
    made = experts_checkpoint(FORMATS[name], 34, 18, -1)
    assert_meant(read_layers(made.write(tmp_path))[LAYER], made)


def stacks_of(path, local=range(3), rank=0, ranks=1):
    """What a rank packs of the experts, as a layer has it."""
    _, packed, _ = pack_experts(open_source(path).layers()[LAYER], local, None, rank, ranks)
    return SimpleNamespace(w13_packed=packed["w13"], w2_packed=packed["w2"])


@pytest.mark.parametrize("name", ["GPTQ asymmetric", "AWQ", *(n for n in FORMATS if "W4A8" in n), *EIGHT_BITS, *FLOATS])
def test_ranks(name, tmp_path):
    """A cut of w2 takes the zero points of its groups; a rank of expert parallelism has experts of its own."""
    form = ALL_FORMATS[name]
    made, group = experts_checkpoint(form, 64, 64, 32, bias=True), form.block or 32
    path = made.write(tmp_path)
    assert_meant(stacks_of(path, [1]), made, experts=[1])
    for ranks in {2, 64 // group}:
        for module in [module for module in made.meant if module.endswith("down_proj") and 64 // ranks == 16]:
            parts = {key.rpartition(".")[2]: tensor for key, tensor in made.tensors.items() if key.startswith(module)}
            made.meant[module] = multiplied_out(parts, form.form, one_level=True)  # one block is one group
        for rank in range(ranks):
            if rank > 0:  # only the first has the bias of w2
                made.biases |= {key: 0 * bias for key, bias in made.biases.items() if key.endswith("down_proj")}
            rows = slice(64 // ranks * rank, 64 // ranks * (rank + 1))
            assert_meant(stacks_of(path, rank=rank, ranks=ranks), made, rows=rows)
        made.biases = {key: made.tensors[f"{key}.bias"] for key in made.biases}
    problem = f"intermediate size per partition {group // 2}: group .block_size. is {group}, expected k"
    with pytest.raises(ValueError, match=problem):
        stacks_of(path, ranks=128 // group)
    with pytest.raises(ValueError, match="intermediate_size 64 cannot be cut for 3 tensor-parallel ranks"):
        stacks_of(path, ranks=3)


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
    layer = read_layers(path)[LAYER]
    assert_meant(layer, meant)
    header = w4a8.read_header(layer.w2_packed[0])
    assert (header["values"], header["scale_dtype"]) == ("e2m1", "e8m0")
    assert_meant(stacks_of(path, ranks=2), meant, rows=slice(0, 32))
    assert_meant(stacks_of(path, [2]), meant, experts=[2])
    # The same bytes expert by expert, as Quark has them, make the same layer.
    each = Checkpoint(config={**made.config, "quantization_config": QUARK})
    names = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}
    for key, tensor in made.tensors.items():
        projection, _, what = key.rpartition(".")[2].rpartition("_")
        for expert, part in enumerate(tensor.flatten(2) if what == "blocks" else tensor):
            each.tensors[f"{LAYER}.{expert}.{projection}.{names[what]}"] = part.clone()
    other = read_layers(each.write(tmp_path / "each"))[LAYER]
    for stack in ("w13_packed", "w2_packed"):
        assert torch.equal(getattr(other, stack), getattr(layer, stack))


@pytest.mark.parametrize(
    "name",
    ["GPTQ asymmetric", "AWQ", "AutoRound as AWQ", "W4A16 pack asymmetric", "W4A8 int", "GPTQ 2 asymmetric, 8 bits"],
)
def test_scales_stay_exact(name, tmp_path):
    """In the type of the file."""
    for dtype, kept in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        made = experts_checkpoint((FORMATS | EIGHT_BITS)[name], 64, 32, 32, dtype=dtype)
        layer = read_layers(made.write(tmp_path / kept))[LAYER]
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
    layer = read_layers(made.write(tmp_path))[LAYER]
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
    made.add(QUERY, FORMATS[name], 16, 64, 32)
    whole = made.write(tmp_path / "new")
    del made.config["quantization_config"]
    path = made.write(tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"config\.json has no quantization_config"):
        read_layers(path)
    (path / file).write_text(json.dumps(keys))
    old, new = (read_layers(directory) for directory in (path, whole))
    assert old.keys() == new.keys() == {LAYER, QUERY}
    for key, layer in new.items():
        assert all(map(torch.equal, old[key].buffers(), layer.buffers()))


def test_mixed_bits_are_left_out_and_named(tmp_path, caplog):
    """The experts of layer 1 and a projection of the attention have 3 bits."""
    form = FORMATS["GPTQ"]
    made = experts_checkpoint(form, 64, 32, 32)
    other = LAYER.replace(".0.", ".1.")
    for key in [key for key in made.tensors if key.startswith(LAYER)]:
        made.tensors[key.replace(LAYER, other)] = made.tensors[key].clone()
    made.add(QUERY, form, 16, 64, 32)
    made.add("model.layers.0.self_attn.k_proj", form, 16, 64, 32)
    made.config["quantization_config"]["dynamic"] = {r"+:.*\.layers\.1\.": {"bits": 3}, r"+:.*k_proj": {"bits": 3}}
    path = made.write(tmp_path)
    with caplog.at_level(logging.WARNING, logger="w4a8.checkpoint"):
        assert sorted(read_layers(path)) == [LAYER, QUERY]
    reason = "quantization_config.bits is 3, but 4 or 8 is expected (by quantization_con"
    assert f"{other} is left out: {reason}" in caplog.text
    assert f"model.layers.0.self_attn.k_proj is left out: {reason}" in caplog.text
    with pytest.raises(CheckpointError, match=rf"^{other}: quantization_config\.bits is 3, but 4 or 8 is expected"):
        read_layers(path, only=lambda name: name == other)


def test_a_layer_that_is_left_out_by_name(tmp_path):
    """AWQ, with float experts in layer 1, which modules_to_not_convert names."""
    made = experts_checkpoint(FORMATS["AWQ"], 64, 32, 32)
    other = LAYER.replace(".0.", ".1.")
    for expert in range(3):
        for name, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            made.tensors[f"{other}.{expert}.{name}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)
    made.config["quantization_config"]["modules_to_not_convert"] = ["layers.1.", "mlp.gate"]
    assert list(read_layers(made.write(tmp_path))) == [LAYER]


@every_format
def test_linear(name, tmp_path):
    """What the packed matrix means, and what the layer computes; any N, where the format has no words of them."""
    form = ALL_FORMATS[name]
    n, k, group = 24 if form.words else 13, {16: 176, 32: 160}.get(form.block, 96), form.block or 32
    made = Checkpoint(config=model_config(form.quantization_config(32), 64, 32, 3))
    made.add(QUERY, form, n, k, 32, bias=True)
    made.add(MLP, form, 64, 32, 32)
    made.tensors.update({f"{module}.weight": torch.zeros(8, 64) for module in ("lm_head", "model.embed_tokens")})
    path = made.write(tmp_path)
    layers = read_layers(path)
    assert sorted(layers) == [MLP, QUERY]
    for layer_name, layer in layers.items():
        assert isinstance(layer, W8A8Linear if form.bits == 8 else W4A8Linear)
        weight, bias = meaning(layer.packed)
        assert torch.equal(weight, made.meant[layer_name])
        assert (bias is None) == (layer_name not in made.biases)
        check_layer(layer, weight, bias, default_activation_group(group, layer.in_features) if form.weight_only else -1)
    assert torch.equal(meaning(layers[QUERY].packed)[1], made.biases[QUERY].float())


def check_layer(layer, weight, bias, activation_group):
    """With integers that are their own quantization: only products and sums of floats are rounded."""
    assert w4a8.read_header(layer.packed)["activation_group"] == activation_group
    x = exact_rows(3, layer.in_features, activation_group)
    bias = torch.zeros(len(weight)) if bias is None else bias
    exact = x.double() @ weight.T + bias.double()
    terms = x.double().abs() @ weight.abs().T + 128 * weight.abs().sum(1) + bias.double().abs()
    header = w4a8.read_header(layer.packed)
    roundings = 4 * (header["k"] // min(header["group"], activation_group if activation_group > 0 else header["k"])) + 8
    assert ((layer(x).double() - exact).abs() <= roundings * 2.0**-24 * terms).all()


def _mixed(rules, four, eight):
    """Two layers of experts of GPTQ; ``eight`` are the projections of 8 bits, by regular expression."""
    made = Checkpoint(config=model_config(four.quantization_config(32), 96, 64, 3))
    for layer in (0, 1):
        for expert in range(3):
            for name, shape in zip(PROJECTIONS, ((64, 96), (64, 96), (96, 64))):
                module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                form = eight if any(re.match(rule, module) for rule in rules) else four
                made.add(module, form, *shape, 32)
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
    layers = read_layers(made.write(tmp_path))
    assert len(layers) == 2
    for layer_name, layer in layers.items():
        meant = {key.replace(layer_name, LAYER): value for key, value in made.meant.items() if layer_name in key}
        assert_meant(layer, Checkpoint(meant=meant))
        for stack, part in (("w13", "gate_proj"), ("w2", "down_proj")):
            packed = getattr(layer, f"{stack}_packed")
            bits = 8 if re.match(rule, f"{layer_name}.0.{part}") else 4
            assert {w4a8.read_header(matrix)["values"] for matrix in packed} == {f"int{bits}"}
        x, logits = torch.randn(7, 96), torch.randn(7, 3)
        weights, ids = torch.topk(torch.softmax(logits, 1), 2)
        weights = weights / weights.sum(1, keepdim=True)
        assert_computes(layer(x, ids, weights), x, ids, weights, meant)


def assert_computes(found, x, ids, weights, meant):
    """Beside the files' matrices in float64: at most what int8 inputs of both products cost, which is 1 part in 50."""
    expected = torch.zeros(len(x), x.shape[1], dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist()):
            gate, up, down = (meant[f"{LAYER}.{expert}.{name}"] for name in PROJECTIONS)
            expected[token] += weight * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    assert (found.double() - expected).norm() <= 0.02 * expected.norm()


def test_gate_and_up_of_two_kinds(tmp_path):
    made = _mixed([".*up_proj"], FORMATS["GPTQ"], EIGHT_BITS["GPTQ, 8 bits"])
    made.config["quantization_config"]["dynamic"] = {".*up_proj": {"bits": 8}}
    with pytest.raises(CheckpointError, match=rf"^{LAYER}: {LAYER}\.0\.up_proj: .*a stack is of one kind"):
        read_layers(made.write(tmp_path))


def test_8_bits_of_sizes_that_the_operators_do_not_have(tmp_path):
    """Rows of one group whose products would not sum up in int32."""
    form = EIGHT_BITS["GPTQ, 8 bits"]
    hidden = (1 << 16) + 8
    made = experts_checkpoint(form, hidden, 8, -1)
    made.add(QUERY, form, 4, hidden, -1)
    path = made.write(tmp_path)
    problem = rf"is {hidden} \(channelwise\), expected at most 65536 for int8"
    for layer in (LAYER, QUERY):
        with pytest.raises(CheckpointError, match=rf"^{layer}: .*{problem}"):
            read_layers(path, only=lambda name, layer=layer: name == layer)


@pytest.mark.parametrize("name", [*FORMATS, *FLOATS])
@pytest.mark.parametrize("group", [32, -1])
def test_a_layer_of_a_matrix(name, group):
    """Of tensors without a checkpoint, by :meth:`W4A8Linear.from_matrix`."""
    form = ALL_FORMATS[name]
    n = 24 if form.words else 21
    made = {**form.random(n, 96, group), "bias": torch.randn(n)}
    matrix = rules_of(form.quantization_config(group)).of(QUERY).read(made, QUERY)
    layer = W4A8Linear.from_matrix(matrix)
    found, bias = meaning(layer.packed)
    assert torch.equal(found, form.dequantized(made)) and torch.equal(bias, made["bias"])
    check_layer(layer, found, bias, 32)


def read_file(path):
    """Every tensor of a safetensors file, those of float8_e4m3fn as bytes, in any torch."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    dtypes = {
        "F8_E4M3": "uint8",
        "I8": "int8",
        "U8": "uint8",
        "BF16": "bfloat16",
        "F16": "float16",
        "F32": "float32",
        "I32": "int32",
        "I64": "int64",
    }
    found = {}
    for key, entry in json.loads(data[8:start]).items():
        if key != "__metadata__":
            begin, end = entry["data_offsets"]
            part = torch.frombuffer(bytearray(data[start + begin : start + end]), dtype=torch.uint8)
            found[key] = part.view(getattr(torch, dtypes[entry["dtype"]])).view(entry["shape"])
    return found


MIXED = (
    "auto_round_mixed",
    "auto_round_experts",
    "gptq_experts",
)  # attention of 8 bits, experts of 4; the other way round
TOOLS = sorted(path.parent.name for path in TOOL_WRITTEN.glob("*/config.json"))


@pytest.mark.parametrize("folder", TOOLS)
def test_files_of_tools(folder, tmp_path):
    """Experts and linear layers (tests/tool_written); modelopt's also where only its other file says how they are."""
    path = TOOL_WRITTEN / folder
    tensors = read_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    quantization = config.pop("quantization_config")

    def meant(name):
        parts = {key.removeprefix(f"{name}."): part for key, part in tensors.items() if key.startswith(f"{name}.")}
        if not parts:  # a tensor has all experts
            expert, leaf = name.split(".")[-2:]
            parts = {part: tensors[f"{LAYER}.{leaf}_{part}"][int(expert)] for part in ("blocks", "scales")}
        bits = 8 if folder in MIXED and ("experts" in name) == folder.endswith("experts") else 4
        return multiplied_out(parts, form_of(quantization), bits)

    if folder == "nvfp4_modelopt":
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name in ("model.safetensors", "hf_quant_config.json"):
            (tmp_path / name).symlink_to(path / name)
        path = tmp_path
    if folder not in ("mxfp4", "mxfp4_quark_gpt_oss"):
        assert_read(path, meant)
        return
    (layer,) = read_layers(path).values()
    for expert in range(4):
        w13 = meant(f"{LAYER}.{expert}.gate_up_proj")
        assert torch.equal(meaning(layer.w13_packed[expert])[0], torch.cat([w13[::2], w13[1::2]]))
        assert torch.equal(meaning(layer.w2_packed[expert])[0], meant(f"{LAYER}.{expert}.down_proj"))


def test_a_quantized_head(tmp_path):
    """Its codes say that it is quantized, whether the configuration does or not (but for compressed-tensors)."""
    for name in ("GPTQ", "AWQ", "AutoRound", "MXFP4 Quark", "NVFP4 modelopt"):
        made = Checkpoint(config=model_config(ALL_FORMATS[name].quantization_config(32), 64, 32, 3))
        made.add("lm_head", ALL_FORMATS[name], 40, 64, 32)
        layers = read_layers(made.write(tmp_path / name))
        assert torch.equal(meaning(layers["lm_head"].packed)[0], made.meant["lm_head"])


def test_activation_order_in_name_only(tmp_path):
    """desc_act with groups in order (static groups), or with one group, changes nothing."""
    for group in (32, -1):
        made = experts_checkpoint(FORMATS["GPTQ"], 64, 32, group)
        made.config["quantization_config"]["desc_act"] = True
        assert_meant(read_layers(made.write(tmp_path / str(group)))[LAYER], made)

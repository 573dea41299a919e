"""NVFP4 checkpoints of both kinds: load, load_linear and W4A8Linear; files that are odd, and files that are broken."""

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from common import default_activation_group, exact_rows
from format_checkpoints import LAYER, Checkpoint, damages, model_config
from format_writers import dequantized_nvfp4, write_nvfp4
from test_load_formats import assert_meant, assert_read, meaning

import w4a8
from w4a8.checkpoint import CheckpointError, load, load_linear
from w4a8.nn import W4A8Linear

pytest.importorskip("safetensors", reason="the safetensors package is not installed")
E4M3 = getattr(torch, "float8_e4m3fn", torch.uint8)  # of old, the files of these tests have bytes

TOOL_WRITTEN = Path(__file__).parents[2] / "tool_written"
QUERY = "model.layers.0.self_attn.q_proj"
SKIPPED = ["lm_head", "model.layers.*.mlp.gate"]
ARGS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
CONFIGS = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": SKIPPED},
    "pack": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": SKIPPED,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": ARGS, "input_activations": None}},
    },
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", CONFIGS)
NAMES = {"modelopt": ("weight", "weight_scale_2"), "pack": ("weight_packed", "weight_global_scale")}


def add(made, kind, name, n, k, bias=False):
    """One matrix, with a scale of its own for all, in powers of ten around what tools write."""
    random = np.random.default_rng(len(made.tensors))
    of_all = float(10 ** random.uniform(-6, 0))
    codes, scales = random.integers(0, 16, (n, k)), random.integers(0, 127, (n, k // 16))
    tensors = write_nvfp4(codes, scales, 1 / of_all if kind == "pack" else of_all, kind == "pack")
    made.meant[name] = dequantized_nvfp4(tensors, one_level=k == 16)
    tensors["input_global_scale" if kind == "pack" else "input_scale"] = torch.ones(1)  # that nothing reads
    if bias:
        tensors["bias"] = made.biases[name] = torch.randn(n).to(torch.bfloat16)
    made.tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()})


def experts_of(kind, hidden, inter, names=("gate_proj", "up_proj", "down_proj"), bias=False):
    made = Checkpoint(config=model_config(copy.deepcopy(CONFIGS[kind]), hidden, inter, 3))
    for expert in range(3):
        for name in names:
            rows, columns = (hidden, inter) if name == names[-1] else (inter * (4 - len(names)), hidden)
            add(made, kind, f"{LAYER}.{expert}.{name}", rows, columns, bias)
    return made


@each_kind
@pytest.mark.parametrize(("hidden", "inter"), [(64, 32), (48, 80), (16, 16), (16, 32), (112, 16)])
def test_experts(kind, hidden, inter, tmp_path):
    """gate and up have different scales for all, and so has every expert."""
    made = experts_of(kind, hidden, inter)
    path = made.write(tmp_path)
    layer = load(path, quantize_w4a16=True)[LAYER]
    assert_meant(layer, made)
    header = w4a8.read_header(layer.w2_packed[1])
    assert (header["values"], header["group"]) == ("e2m1", 16)
    assert header["scale_dtype"] == ("e5m3" if inter > 16 else "float32")
    assert torch.isfinite(layer(torch.randn(5, hidden), torch.randn(5, 3))).all()


@each_kind
def test_biases_and_shards_and_names(kind, tmp_path):
    made = experts_of(kind, 64, 32, ("w1", "w3", "w2"), bias=True)
    assert_meant(
        load(made.write(tmp_path / "shards", files=4), quantize_w4a16=True)[LAYER], made, names=("w1", "w3", "w2")
    )
    made = experts_of(kind, 64, 32, ("gate_up_proj", "down_proj"))
    layer = load(made.write(tmp_path / "fused"), quantize_w4a16=True)[LAYER]
    assert_meant(layer, made, names=("gate_up_proj", "down_proj"))


@each_kind
def test_ranks(kind, tmp_path):
    """Cuts of w2 by blocks of 16, down to one block; a rank of expert parallelism has experts of its own."""
    made = experts_of(kind, 64, 64)
    path = made.write(tmp_path)
    assert_meant(load(path, ep_rank=1, ep_size=3, quantize_w4a16=True)[LAYER], made, experts=[1])
    for ranks in (2, 4):
        for expert in range(3) if ranks == 4 else ():  # one block is one group, for which there is one level
            name = f"{LAYER}.{expert}.down_proj"
            parts = {key.rpartition(".")[2]: made.tensors[key] for key in made.tensors if key.startswith(name)}
            made.meant[name] = dequantized_nvfp4(parts, one_level=True)
        for rank in range(ranks):
            layer = load(path, tp_rank=rank, tp_size=ranks, quantize_w4a16=True)[LAYER]
            assert_meant(layer, made, rows=slice(64 // ranks * rank, 64 // ranks * (rank + 1)))
    with pytest.raises(
        NotImplementedError, match="intermediate size per partition 8, which is not a multiple of the gr"
    ):
        load(path, tp_rank=0, tp_size=8, quantize_w4a16=True)


def check_layer(layer, weight, bias):
    """With integers that are their own quantization."""
    activation_group = default_activation_group(16, layer.in_features)
    assert w4a8.read_header(layer.packed)["activation_group"] == activation_group
    x = exact_rows(3, layer.in_features, activation_group)
    exact = x.double() @ weight.T + bias
    terms = x.double().abs() @ weight.abs().T + 128 * weight.abs().sum(1) + bias.abs()
    roundings = 4 * (layer.in_features // 16) + 8
    assert ((layer(x).double() - exact).abs() <= roundings * 2.0**-24 * terms).all()


@each_kind
def test_linear(kind, tmp_path):
    """Any N; a head that is quantized though the configuration leaves it out; 16 input features."""
    made = Checkpoint(config=model_config(CONFIGS[kind], 64, 32, 3))
    add(made, kind, QUERY, 13, 176, bias=True)
    add(made, kind, "model.layers.0.mlp.up_proj", 21, 16)
    add(made, kind, "lm_head", 40, 64)
    add(made, kind, f"{LAYER}.0.up_proj", 32, 64)
    made.tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(8, 64)
    made.tensors["model.embed_tokens.weight"] = torch.zeros(8, 64)
    with pytest.raises(CheckpointError, match=r"quant_algo is 'NVFP4'|input_activations is not int8: "):
        load_linear(made.write(tmp_path), quantize_w4a16=False)
    layers = load_linear(tmp_path, quantize_w4a16=True)
    # compressed-tensors' rules are followed by name, as everywhere.
    expected = ["lm_head"] if kind == "modelopt" else []
    assert sorted(layers) == [*expected, "model.layers.0.mlp.up_proj", QUERY]
    for name, layer in layers.items():
        found, bias = meaning(layer.packed)
        assert torch.equal(found, made.meant[name])
        assert (bias is None) == (name not in made.biases)
        check_layer(layer, found, torch.zeros(len(found)) if bias is None else bias.double())
    assert torch.equal(meaning(layers[QUERY].packed)[1], made.biases[QUERY].float())


@each_kind
def test_from_nvfp4(kind):
    made = Checkpoint()
    add(made, kind, "a", 21, 96)
    tensors = {key[2:]: tensor for key, tensor in made.tensors.items()}
    layer = W4A8Linear.from_nvfp4({**tensors, "bias": torch.ones(21)})
    assert torch.equal(meaning(layer.packed)[0], made.meant["a"])
    check_layer(layer, made.meant["a"], torch.ones(21).double())
    del tensors["weight_scale"]
    with pytest.raises(ValueError, match=r"the layer\.weight_scale is missing"):
        W4A8Linear.from_nvfp4(tensors, name="the layer")


def read_file(path):
    """Every tensor of a safetensors file, those of float8_e4m3fn as bytes, in any torch."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    dtypes = {"F8_E4M3": torch.uint8, "U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32}
    found = {}
    for key, entry in json.loads(data[8:start]).items():
        if key != "__metadata__":
            begin, end = entry["data_offsets"]
            part = torch.tensor(list(data[start + begin : start + end]), dtype=torch.uint8)
            found[key] = part.view(dtypes[entry["dtype"]]).view(entry["shape"])
    return found


@pytest.mark.parametrize("folder", ["nvfp4_modelopt", "nvfp4_llmcompressor", "nvfp4_auto_round"])
def test_files_of_tools(folder, tmp_path):
    """Experts and linear layers; modelopt's also where only its other file says how they are."""
    path = TOOL_WRITTEN / folder
    tensors = read_file(path / "model.safetensors")

    def meant(name):
        parts = {key.removeprefix(f"{name}."): part for key, part in tensors.items() if key.startswith(f"{name}.")}
        return dequantized_nvfp4(parts)

    with pytest.raises(CheckpointError, match=r"input_activations is not int8|data_type is 'nv_fp'|quant_algo is 'NVF"):
        load(path, quantize_w4a16=False)
    if folder == "nvfp4_modelopt":
        config = json.loads((path / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name in ("model.safetensors", "hf_quant_config.json"):
            (tmp_path / name).symlink_to(path / name)
        path = tmp_path
    assert_read(path, meant)


@pytest.fixture(scope="module")
def good():
    return {kind: experts_of(kind, 64, 64) for kind in CONFIGS}


def changed(made, key, tensor):
    """With another tensor, or without it."""
    other = copy.copy(made)
    other.tensors = {name: part for name, part in made.tensors.items() if name != key}
    assert len(other.tensors) == len(made.tensors) - 1
    if tensor is not None:
        other.tensors[key] = tensor
    return other


def with_nan(scales):
    scales = scales.clone()
    scales.view(torch.uint8)[5, 1] = 0xFF
    return scales


CHANGES = [
    (0, None, "is missing"),
    (0, lambda t: t[:, :16].contiguous(), "which is (64, 32), but (64, 64) is expected"),
    (0, lambda t: t.to(torch.int32), "dtype torch.int32, but uint8 is expected"),
    ("weight_scale", None, "is missing"),
    (
        "weight_scale",
        lambda t: t[:, ::2].contiguous(),
        "shape (64, 2), but 64 x 64 features in blocks of 16 make (64, 4)",
    ),
    ("weight_scale", lambda t: t[:7].contiguous(), "shape (7, 4), but"),
    ("weight_scale", lambda t: t.float(), "dtype torch.float32, but "),
    ("weight_scale", lambda t: t.view(torch.int8), "dtype torch.int8, but "),
    ("weight_scale", with_nan, "not all scales are numbers"),
    (1, None, "is missing"),
    (1, lambda t: t.to(torch.bfloat16), "dtype torch.bfloat16, but float32 is expected"),
    (1, lambda t: torch.ones(64), "shape (64,), but one number is expected"),
    (1, lambda t: torch.tensor(float("nan")), "is nan, of which no finite scales can be made"),
]


@each_kind
@pytest.mark.parametrize(("which", "change", "message"), CHANGES)
def test_broken_files(good, kind, which, change, message, tmp_path):
    key = f"{LAYER}.1.up_proj.{which if isinstance(which, str) else NAMES[kind][which]}"
    tensor = None if change is None else change(good[kind].tensors[key])
    with pytest.raises(CheckpointError) as caught:
        load(changed(good[kind], key, tensor).write(tmp_path), quantize_w4a16=True)
    assert key in str(caught.value) and message in str(caught.value)


def test_scaled_inputs(good, tmp_path):
    """What modelopt's NVFP4_AWQ leaves beside the weights."""
    made = copy.copy(good["modelopt"])
    made.tensors = {**made.tensors, f"{LAYER}.0.up_proj.pre_quant_scale": torch.ones(64)}
    made.tensors[f"{QUERY}.weight"] = torch.zeros(16, 32, dtype=torch.uint8)
    made.tensors[f"{QUERY}.weight_scale"] = torch.zeros(16, 4).to(E4M3)
    made.tensors[f"{QUERY}.weight_scale_2"] = torch.tensor(1.0)
    made.tensors[f"{QUERY}.pre_quant_scale"] = torch.ones(64)
    path = made.write(tmp_path)
    for read in (load, load_linear):
        with pytest.raises(CheckpointError, match=r"_proj\.pre_quant_scale: inputs that are scaled"):
            read(path, quantize_w4a16=True)


@pytest.mark.parametrize(
    "changes",
    [{"quant_algo": "NVFP4_SVD"}, {"quant_algo": "W4A8_NVFP4_FP8"}, {"quant_algo": "FP8"}, {"group_size": 32}],
)
def test_other_algorithms_are_refused_by_name(good, changes, tmp_path):
    made = copy.copy(good["modelopt"])
    made.config = {**made.config, "quantization_config": {**CONFIGS["modelopt"], **changes}}
    (key, value), *_ = changes.items()
    with pytest.raises(CheckpointError, match=re.escape(f"quantization_config.{key} is {value!r}, but ")):
        load(made.write(tmp_path), quantize_w4a16=True)


def test_mixed_precision(good, tmp_path, caplog):
    """What modelopt says layer by layer: NVFP4 beside FP8, which is left out and named."""
    made = copy.copy(good["modelopt"])
    made.tensors, made.meant = dict(made.tensors), dict(made.meant)
    add(made, "modelopt", QUERY, 16, 64)
    other = QUERY.replace("q_proj", "k_proj")
    made.tensors[f"{other}.weight"] = torch.zeros(16, 64, dtype=E4M3)
    made.tensors[f"{other}.weight_scale"] = torch.tensor(1.0)
    layers = {LAYER: {"quant_algo": "NVFP4", "group_size": 16}, QUERY: {"quant_algo": "W4A16_NVFP4"}}
    layers[other] = {"quant_algo": "FP8"}
    stated = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    made.config = {**made.config, "quantization_config": stated}
    path = made.write(tmp_path)
    assert_meant(load(path, quantize_w4a16=True)[LAYER], made)
    with caplog.at_level("WARNING", logger="w4a8.checkpoint"):
        linear = load_linear(path, quantize_w4a16=True)
    assert list(linear) == [QUERY] and torch.equal(meaning(linear[QUERY].packed)[0], made.meant[QUERY])
    assert (
        f"{other} is left out: quantization_config.quantized_layers['{other}'].quant_algo is 'FP8', but" in caplog.text
    )


@each_kind
def test_tensors_of_anything(good, kind, tmp_path):
    """One tensor of another shape or dtype, or with other bits: it loads, or an error of the right class says why."""
    refused = 0
    for key, tensor in damages(good[kind].tensors, 48):
        try:
            load(changed(good[kind], key, tensor).write(tmp_path), quantize_w4a16=True)
        except (CheckpointError, NotImplementedError) as error:
            refused += 1
            assert LAYER in str(error)
    assert refused >= 10

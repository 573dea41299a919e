"""FP8 checkpoints loaded with W4A8Config: the bits that quantize_ makes of the numbers that they stand for."""

import json
import math
import re

import float8_files
import pytest
import torch
from common import assert_same_bits
from test_quantize_transformers import make_model

import w4a8
from w4a8.formats.float8 import Float8Scheme
from w4a8.nn import W4A8Experts, W4A8Linear, W8A8Linear
from w4a8.quantization import DEFAULT_SKIP

transformers = pytest.importorskip("transformers", minversion="5.0")

import test_transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from w4a8.command import main  # noqa: E402
from w4a8.integrations.transformers import W4A8Config  # noqa: E402

TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(0))
BLOCK = {"quant_method": "fp8", "weight_block_size": [24, 40], "activation_scheme": "dynamic", "fmt": "e4m3"}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}


def _compressed(strategy, **more):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "float"}}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
    }  # fmt: skip


# quantization_config, name of the scales, rows and columns that share one.
FORMATS = {
    "blocks": (BLOCK, "weight_scale_inv", (24, 40)),
    "blocks of 128": ({**BLOCK, "weight_block_size": [128, 128]}, "weight_scale_inv", (128, 128)),
    "one": (TENSOR, "weight_scale", None),
    "one, inv": (TENSOR, "weight_scale_inv", None),
    "compressed, tensor": (_compressed("tensor"), "weight_scale", None),
    "compressed, channel": (_compressed("channel"), "weight_scale", "channel"),
    "compressed, block": (_compressed("block", block_structure=[24, 40]), "weight_scale", (24, 40)),
}


def write(directory, family, name, skip=DEFAULT_SKIP, **options):
    """A checkpoint at directory / "theirs"; the model that it must become."""
    make_model(family).bfloat16().save_pretrained(directory / "floats")
    float8_files.write(directory / "floats", directory / "theirs", *FORMATS[name])
    model = AutoModelForCausalLM.from_pretrained(directory / "floats", dtype=torch.float32)
    w4a8.quantize_(model, skip=skip, **options)
    return model


def load(directory, config=None, **options):
    return test_transformers.load(directory, quantization_config=config or W4A8Config(), **options)


def check(model, want):
    kinds = (W4A8Linear, W8A8Linear, W4A8Experts)
    packed = {name for name, module in want.named_modules() if isinstance(module, kinds)}
    assert set(model.hf_quantizer.report.replaced) == packed and packed
    for name in packed:
        for leaf, bits in want.get_submodule(name).named_buffers():
            assert torch.equal(model.get_submodule(name).get_buffer(leaf), bits), name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen3", "Qwen2"])
def test_the_bits_of_quantize(name, family, tmp_path):
    """Of float32, whatever the type of the model; with experts, biases, and blocks that are smaller at the end."""
    want = write(tmp_path, family, name)
    model = load(tmp_path / "theirs")
    check(model, want)
    assert model.dtype == torch.bfloat16
    report = model.hf_quantizer.report
    assert {"model.embed_tokens", "lm_head"} <= set(report.skipped)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        assert_same_bits(again(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("family", ["deepseek 3", "mixtral", "minimax m2"])
def test_other_families(family, tmp_path):
    options = {"values": "int8", "group_size": 16}
    want = write(tmp_path, family, "blocks", **options)
    check(load(tmp_path / "theirs", W4A8Config(**options)), want)


@pytest.mark.parametrize(
    "options", [{"values": "int8", "group_size": -1}, {"symmetric": False}, {"bits": 6.5}], ids=str
)
def test_options_of_floats(options, tmp_path):
    want = write(tmp_path, "qwen3", "blocks", **options)
    check(load(tmp_path / "theirs", W4A8Config(**options)), want)


@pytest.mark.parametrize("codes", [True, False])
def test_what_inspect_advises_for_vllm(codes, tmp_path, capsys):
    """The option rounds 8-bit floats alone; beside codes vLLM runs them without it."""
    write(tmp_path, "Qwen2", "compressed, channel")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    if codes:
        group = {"targets": ["re:none"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
        config["quantization_config"]["config_groups"]["group_1"] = {**group, "format": "pack-quantized"}
        path.write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path / "theirs"), "--json", "--memory-speed", "1"]) == 0
    advice = json.loads(capsys.readouterr().out)["not_in_vllm"]
    unless = "floats stay floats there, unless --quantization w4a8 rounds them"
    assert advice == ("its 8-bit floats are vLLM's own there; leave --quantization w4a8 out" if codes else unless)


def test_modules_to_leave_alone(tmp_path):
    """A linear layer, and experts: the numbers, in the type of the model."""
    skip = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts"]
    want = write(tmp_path, "qwen3", "blocks", skip=[*DEFAULT_SKIP, *skip])
    model = load(tmp_path / "theirs", W4A8Config(skip=skip))
    check(model, want)
    for name in skip:
        assert model.hf_quantizer.report.skipped[name] == "skip"
        for key, parameter in want.get_submodule(name).named_parameters():
            assert_same_bits(model.get_submodule(name).get_parameter(key), parameter.bfloat16())


UP = "model.layers.1.mlp.experts.3.up_proj"
Q = "model.layers.0.self_attn.q_proj"
SCALE = "weight_scale_inv"


def _nan(tensor):
    tensor = tensor.clone()
    tensor.view(torch.uint8).view(-1)[:1] = 0x7F
    return tensor


DEFECTS = [
    ("blocks", f"{UP}.{SCALE}", None, "{key} is missing"),
    ("blocks", f"{Q}.{SCALE}", lambda t: t[:-1], "{key}: shape (2, 2), but 64 x 64 weights in blocks of 24 x 40 make"),
    ("blocks", f"{Q}.{SCALE}", lambda t: t[:, 0], "{key}: shape (3,), but 2 dimensions are expected"),
    ("blocks", f"{UP}.{SCALE}", lambda t: t * math.nan, "{key}: not all scales are finite"),
    ("blocks", f"{UP}.{SCALE}", lambda t: t.int(), "{key}: dtype torch.int32, but float16 or"),
    ("blocks", f"{Q}.weight", lambda t: t.float().to(torch.float8_e5m2), "{key}: dtype torch.float8_e5m2, but"),
    ("blocks", f"{Q}.weight", lambda t: t[:-1], "[63, 64], but [64, 64] is expected"),
    ("blocks", f"{Q}.weight", lambda t: t.float(), "{key}: dtype torch.float32, but float8_e4m3fn is expected"),
    ("blocks", f"{Q}.weight", _nan, f"{Q}: the weight has a NaN"),
    ("blocks", f"{UP}.weight", None, "{key} is missing"),
    ("one", f"{Q}.weight_scale", None, "{key} is missing"),
    ("one", f"{Q}.weight_scale", lambda t: t.repeat(3), "{key}: shape (3,), but one number or (64, 1) is expected"),
    ("compressed, channel", f"{Q}.weight_scale", lambda t: t[1:], "{key}: shape (63, 1), but one number or (64, 1) is"),
    ("compressed, block", f"{UP}.weight_scale", lambda t: t[1:], "{key}: shape (1, 2), but 32 x 64 weights in blocks"),
    ("blocks", "model.layers.0.mlp.experts.gate_up_proj", lambda _: torch.ones(6, 64, 64).to(torch.float8_e4m3fn),
     "'{key}' is of F8_E4M3, which is read of single matrices alone"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "change", "match"), DEFECTS)
def test_defects(name, key, change, match, tmp_path, capsys):
    """Errors name the tensor, what is there and what is expected; inspect says the same, but for values."""
    write(tmp_path, "qwen3", name)
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    changed = {} if change is None else {key: change(tensors.get(key)).clone().contiguous()}
    save_file({**{name: part for name, part in tensors.items() if name != key}, **changed}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(match.format(key=key))):
        load(tmp_path / "theirs")
    if "finite" not in match and "NaN" not in match:
        assert main(["inspect", str(tmp_path / "theirs"), "--memory-speed", "1", "--layers"]) == 1
        said = capsys.readouterr()
        assert match.format(key=key) in said.out + said.err


@pytest.mark.parametrize("value", [128, [128], [128, 0], ["128", 128]], ids=str)
def test_blocks_that_are_none(value, tmp_path):
    write(tmp_path, "Qwen2", "blocks")
    path = tmp_path / "theirs/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["weight_block_size"] = value
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weight_block_size is .* but two positive integers"):
        load(tmp_path / "theirs")


def test_pack_and_inspect(tmp_path, capsys):
    """`w4a8 pack` takes the options of rounding; --calibration needs floats."""
    want = write(tmp_path, "qwen3", "blocks", values="int8")
    theirs, out = str(tmp_path / "theirs"), str(tmp_path / "out")
    assert main(["inspect", theirs, "--memory-speed", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["format"] == "fp8" and "w4a8" in said["not_in_vllm"]
    packed = [module for module in want.modules() if hasattr(module, "packed_shapes")]
    assert sum(each["count"] for each in said["runs"]) == len(packed)
    assert main(["pack", theirs, out, "--calibration", "pydoc"]) != 0
    assert "is quantized already (fp8): leave --calibration out" in capsys.readouterr().err
    assert main(["pack", theirs, out, "--values", "int8"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    for name, module in want.named_modules():
        for leaf, bits in module.named_buffers(recurse=False) if hasattr(module, "packed_shapes") else ():
            assert torch.equal(model.get_submodule(name).get_buffer(leaf), bits)


@pytest.mark.parametrize("shape", [(1, 2), (127, 129), (128, 256), (300, 514), (129, 128)])
@pytest.mark.parametrize("name", FORMATS)
def test_reader(name, shape):
    """Each product of a float8 and its scale, rounded once, of any shape."""
    _, suffix, block = FORMATS[name]
    made, meant = float8_files.float8(torch.randn(shape) / 10, suffix, block)
    scheme = Float8Scheme("float8", -1, True, block=block if isinstance(block, tuple) else None)
    floats, bias = scheme.floats({**made, "bias": torch.ones(shape[0])}, "m")
    assert_same_bits(floats, meant)
    assert torch.equal(bias, torch.ones(shape[0]))

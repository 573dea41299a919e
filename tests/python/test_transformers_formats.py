"""Checkpoints that others have quantized, loaded with W4A8Config: codes of a packed model, written in each format."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from common import assert_same_bits, stated_activation_group
from test_quantize_transformers import make_model

import w4a8
from w4a8.nn import W4A8Experts, W4A8Linear

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("transformers 5 is needed", allow_module_level=True)

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402

TINY = Path(__file__).resolve().parents[2] / "examples/tiny_moe/checkpoints"
TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(0))
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def words(codes):
    """uint8 [..., 8 m] to int32 [..., m]."""
    shifted = codes.unflatten(-1, (-1, 8)).long() << (4 * torch.arange(8))
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def pack_quantized(codes, scales):
    return {
        "weight_packed": words(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }


def int_quantized(codes, scales):
    return {"weight": codes.to(torch.int8) - 8, "weight_scale": scales}


def gptq(codes, scales, zero=7, order=None):
    k, groups = codes.shape[1], scales.shape[1]
    return {
        "qweight": words(codes).T,
        "qzeros": words(torch.full((groups, len(codes)), zero)),
        "scales": scales.T,
        "g_idx": (torch.arange(k) // (k // groups)).int() if order is None else order(k, groups),
    }


def awq(codes, scales, zero=8):
    def in_order(features):
        return words(features.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2))

    zeros = torch.full((scales.shape[1], len(codes)), zero)
    return {"qweight": in_order(codes.T), "qzeros": in_order(zeros), "scales": scales.T}


def compressed(kind, group, inputs=True):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations if inputs else None}
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*gate$"],
    }  # fmt: skip


INT4 = {"bits": 4, "group_size": 32}
# Name: what writes a matrix, and what config.json says.
FORMATS = {
    "W4A8 pack-quantized": (pack_quantized, compressed("pack-quantized", 32)),
    "W4A8 int-quantized": (int_quantized, compressed("int-quantized", 32)),
    "W4A16 pack-quantized": (pack_quantized, compressed("pack-quantized", 32, inputs=False)),
    "GPTQ": (gptq, {"quant_method": "gptq", **INT4, "sym": True}),
    "GPTQ 2": (
        lambda codes, scales: gptq(codes, scales, zero=8),
        {"quant_method": "gptq", **INT4, "sym": True, "checkpoint_format": "gptq_v2"},
    ),
    "AWQ": (awq, {"quant_method": "awq", **INT4, "zero_point": False, "version": "gemm"}),
    "AutoRound": (
        gptq,
        {"quant_method": "auto-round", **INT4, "sym": True, "packing_format": "auto_round:auto_gptq"},
    ),
}  # fmt: skip


def matrices(model, projections):
    """Name in a checkpoint -> codes uint8 [N, K], scales and bias of every packed matrix of a model."""
    for name, module in model.named_modules():
        if isinstance(module, W4A8Linear):
            yield name, *unpacked(module.packed)
        elif isinstance(module, W4A8Experts):
            for expert in range(module.num_experts):
                codes, scales, _ = unpacked(module.w13_packed[expert])
                gate, up, down = (f"{name}.{expert}.{projection}" for projection in projections)
                yield gate, *(half.chunk(2)[0] for half in (codes, scales)), None
                yield up, *(half.chunk(2)[1] for half in (codes, scales)), None
                yield down, *unpacked(module.w2_packed[expert])


def unpacked(packed):
    header = w4a8.read_header(packed)
    nibbles, scales, bias = w4a8.dyn_quant_unpack_4bit_weight(packed, header["group"], header["k"], header["n"])
    return torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(-2), scales, bias if header["has_bias"] else None


def write(directory, name, write_matrix, quantization, group=32):
    """A checkpoint of a tiny model in a format; the packed model that it must become."""
    floats = directory.with_name("floats")
    make_model(name).bfloat16().save_pretrained(floats)
    packed_model = AutoModelForCausalLM.from_pretrained(floats)
    w4a8.quantize_(packed_model, group, activation_group=stated_activation_group(quantization))
    projections = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    tensors = {}
    for module, codes, scales, bias in matrices(packed_model, projections):
        found = write_matrix(codes, scales) | ({} if bias is None else {"bias": bias.bfloat16()})
        tensors.update({f"{module}.{suffix}": tensor.clone().contiguous() for suffix, tensor in found.items()})
    tensors.update({key: value for key, value in packed_model.state_dict().items() if not key.endswith("packed")})
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(packed_model.config.to_json_string())
    config |= {"quantization_config": quantization, "architectures": [type(packed_model).__name__], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    return packed_model


def load(directory):
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=W4A8Config(), output_loading_info=True
    )
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "Qwen2"])
@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind, name, tmp_path):
    """The logits of the codes, none of them changed; saved packed, the same."""
    want = write(tmp_path / "theirs", name, *FORMATS[kind])
    model = load(tmp_path / "theirs")
    assert {n for n, m in model.named_modules() if isinstance(m, (W4A8Linear, W4A8Experts))} == {
        n for n, m in want.named_modules() if isinstance(m, (W4A8Linear, W4A8Experts))
    }
    report = model.hf_quantizer.report
    assert set(report.replaced) == {n for n, m in model.named_modules() if isinstance(m, (W4A8Linear, W4A8Experts))}
    left = {key.rpartition(".")[0] for key, parameter in model.named_parameters() if parameter.dim() > 1}
    assert {"model.embed_tokens", "lm_head"} <= left
    assert report.skipped == dict.fromkeys(left, "it is not quantized in the checkpoint")
    assert report.left_bytes == sum(parameter.numel() * 2 for parameter in model.parameters())
    assert_same_bits(model(TOKENS).logits, want(TOKENS).logits)
    model.save_pretrained(tmp_path / "packed")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_bits(packed(TOKENS).logits, want(TOKENS).logits)


def test_channelwise(tmp_path):
    want = write(tmp_path / "theirs", "deepseek 3", pack_quantized, compressed("pack-quantized", -1), group=-1)
    assert_same_bits(load(tmp_path / "theirs")(TOKENS).logits, want(TOKENS).logits)


@pytest.mark.parametrize("scheme", ["g32", "channelwise"])
def test_checkpoint_of_the_example(scheme):
    """Byte for byte what w4a8.load makes of its experts; it writes text."""
    model = load(TINY / scheme)
    for name, layer in w4a8.load(TINY / scheme).items():
        experts = model.get_submodule(name if name.endswith("experts") else f"{name}.experts")
        assert_same_bits(experts.w13_packed.flatten(), layer.w13_packed.flatten())
        assert_same_bits(experts.w2_packed.flatten(), layer.w2_packed.flatten())
    prompt = torch.tensor([list(b"import ")])
    written = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert bytes(written[0].tolist()).decode("ascii").startswith("import ")


@pytest.mark.parametrize(
    "kind, spelling", [("GPTQ", "GPTQ"), ("AutoRound", "intel/auto-round"), ("AutoRound", "auto_round"), ("AWQ", "Awq")]
)
def test_spellings(kind, spelling, tmp_path):
    """Of the method: those that w4a8.load reads too, which transformers does not know."""
    write_matrix, quantization = FORMATS[kind]
    want = write(tmp_path / "theirs", "qwen3", write_matrix, {**quantization, "quant_method": spelling})
    assert_same_bits(load(tmp_path / "theirs")(TOKENS).logits, want(TOKENS).logits)
    layers = w4a8.load(tmp_path / "theirs", quantize_w4a16=True)
    assert len(layers) == 2


def turned(k, groups):
    return (torch.arange(k) % groups).int()


@pytest.mark.parametrize(
    "write_matrix, quantization, match",
    [
        (gptq, {"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits is 3, but 4 or 8 is expected"),
        (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 24}, "group_size is 24"),
        (awq, {"quant_method": "awq", **INT4, "version": "marlin"}, "'marlin'"),
        (gptq, {"quant_method": "mxfp4"}, "is quantized, but Qwen3MoeForCausalLM has no such weight"),
        (gptq, {"quant_method": "fp8"}, "quantized with 'fp8'"),
        (
            lambda codes, scales: gptq(codes, scales, order=turned),
            {"quant_method": "gptq", **INT4, "desc_act": True},
            r"layers\.0\.\S+_proj.*activation order",
        ),
        (gptq, compressed("pack-quantized", 32), "weight_packed is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(write_matrix, quantization, match, tmp_path):
    write(tmp_path / "theirs", "qwen3", write_matrix, quantization)
    with pytest.raises(ValueError, match=match):
        load(tmp_path / "theirs")


def with_zero_points(packed, zero):
    """The same codes, meaning less a zero point."""
    header = w4a8.read_header(packed[0] if packed.dim() == 2 else packed)
    sizes = header["group"], header["k"], header["n"]
    nibbles, scales, bias = w4a8.dyn_quant_unpack_4bit_weight(packed, *sizes)
    zeros = torch.full(scales.shape, zero, dtype=torch.uint8)
    bias = bias if header["has_bias"] else None
    more = {"zero_points": zeros, "activation_group": header["activation_group"]}
    return w4a8.dyn_quant_pack_4bit_weight(nibbles, scales, bias, *sizes, **more)


@pytest.mark.parametrize("name", ["qwen3", "Qwen2"])
@pytest.mark.parametrize("kind", ["GPTQ", "AWQ", "AutoRound"])
def test_zero_points(kind, name, tmp_path):
    quantization = {**FORMATS[kind][1], "sym": False, "zero_point": True}
    if kind == "AutoRound":
        quantization["packing_format"] = "auto_round:auto_awq"
    write_matrix, stored = (gptq, 4) if kind == "GPTQ" else (awq, 5)
    want = write(
        tmp_path / "theirs", name, lambda codes, scales: write_matrix(codes, scales, zero=stored), quantization
    )
    for module in want.modules():
        for key, packed in module.named_buffers(recurse=False):
            if key.endswith("packed"):
                setattr(module, key, with_zero_points(packed, 5))
    model = load(tmp_path / "theirs")
    assert_same_bits(model(TOKENS).logits, want(TOKENS).logits)
    model.save_pretrained(tmp_path / "packed")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_bits(packed(TOKENS).logits, want(TOKENS).logits)


def test_missing_and_unknown_tensors(tmp_path):
    write(tmp_path / "theirs", "qwen3", *FORMATS["GPTQ"])
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    shutil.copy(file, tmp_path / "whole")
    tensors.pop("model.layers.1.mlp.experts.3.up_proj.scales")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts: .*experts\.3\.up_proj\.scales is missing"):
        load(tmp_path / "theirs")
    tensors.pop("model.layers.1.mlp.experts.3.up_proj.qweight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts: .*experts\.3\.up_proj\.qweight is missing"):
        load(tmp_path / "theirs")
    tensors = {key: tensor for key, tensor in tensors.items() if ".1.mlp.experts.3.up_proj." not in key}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts: matrices of \[6, 5\] experts, expected 6"):
        load(tmp_path / "theirs")
    shutil.copy(tmp_path / "whole", file)
    tensors = load_file(file)
    tensors.pop("model.layers.0.self_attn.q_proj.qweight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: .*q_proj\.qweight is missing"):
        load(tmp_path / "theirs")
    shutil.copy(tmp_path / "whole", file)
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.z_proj.qweight"] = tensors["model.layers.0.self_attn.q_proj.qweight"]
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"z_proj is quantized, but Qwen3MoeForCausalLM has no such weight"):
        load(tmp_path / "theirs")


def test_configuration_in_a_file_of_its_own(tmp_path):
    """As AutoGPTQ once wrote it; transformers alone sees a float checkpoint without its weights."""
    want = write(tmp_path / "theirs", "qwen3", *FORMATS["GPTQ"])
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    stated = config.pop("quantization_config")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    del stated["quant_method"]
    (tmp_path / "theirs" / "quantize_config.json").write_text(json.dumps(stated))
    assert_same_bits(load(tmp_path / "theirs")(TOKENS).logits, want(TOKENS).logits)


def test_int8_without_scales(tmp_path):
    """A linear layer, and a whole layer of experts: nothing else says that they are quantized."""
    write(tmp_path / "theirs", "qwen3", *FORMATS["W4A8 int-quantized"])
    file = tmp_path / "theirs" / "model.safetensors"
    whole = load_file(file)
    for part, match in (
        ("self_attn.q_proj", r"self_attn\.q_proj: .*q_proj\.weight_scale is missing"),
        ("mlp.experts", r"mlp\.experts: .*experts\.0\.\w+\.weight_scale is missing"),
    ):
        there = {key: t for key, t in whole.items() if not (f"layers.0.{part}." in key and key.endswith("_scale"))}
        save_file(there, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=match):
            load(tmp_path / "theirs")


def change_file(directory, change):
    """Changes the tensors of a checkpoint, a dict."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["GPTQ", "W4A8 pack-quantized"])
def test_missing_bias(kind, tmp_path):
    """The model has one, so without it every number is another."""
    write(tmp_path / "theirs", "Qwen2", *FORMATS[kind])
    change_file(tmp_path / "theirs", lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj has no bias, but the model has"):
        load(tmp_path / "theirs")


EXTRA = {
    "linear": ["model.layers.1.self_attn.k_proj"],
    "an expert": ["model.layers.1.mlp.experts.3.up_proj"],
    "experts": [
        f"model.layers.1.mlp.experts.{expert}.{name}_proj" for expert in range(6) for name in ("gate", "up", "down")
    ],
}


@pytest.mark.parametrize("where", EXTRA)
@pytest.mark.parametrize("kind", ["GPTQ", "W4A8 pack-quantized"])
def test_extra_bias(kind, where, tmp_path):
    """One that the model does not have is refused; of zeros, as older tools wrote them everywhere, left out."""
    want = write(tmp_path / "theirs", "qwen3", *FORMATS[kind])

    def add(value):
        def change(tensors):
            for name in EXTRA[where]:
                bias = torch.zeros(32 if "experts" in name and "down" not in name else 64)
                bias[17] = value
                tensors[f"{name}.bias"] = bias

        return change

    change_file(tmp_path / "theirs", add(0.0))
    model = load(tmp_path / "theirs")
    assert_same_bits(model(TOKENS).logits, want(TOKENS).logits)
    assert model.state_dict().keys() == want.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert tensor.shape == want.state_dict()[key].shape, key
    for value in (1e-3, float("nan")):
        change_file(tmp_path / "theirs", add(value))
        name = EXTRA[where][0].replace(".", r"\.")
        with pytest.raises(ValueError, match=f"{name} has a bias, but the model has none"):
            load(tmp_path / "theirs")

"""from_pretrained of checkpoints with zero points and with e2m1: the logits of the same codes packed by hand.

The files are written one code at a time (format_writers.py).
"""

import json

import format_writers
import numpy as np
import pytest
import torch
from common import assert_same_bits, default_activation_group, stated_activation_group
from test_quantize_transformers import make_model

import w4a8
from w4a8.nn import W4A8Experts, W4A8Linear
from w4a8.quantization import DEFAULT_SKIP

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("transformers 5 is needed", allow_module_level=True)

from safetensors.torch import load_file, save_file  # noqa: E402
from test_transformers_formats import INT4, TOKENS, compressed, load  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Codes:
    """A matrix of random codes, as NumPy has them."""

    def __init__(self, rows, columns, group, scale_dtype, zeros, least_zero=0):
        groups = columns // group
        self.codes = torch.randint(16, (rows, columns), dtype=torch.uint8).numpy()
        self.zeros = torch.randint(least_zero, 16, (rows, groups), dtype=torch.uint8).numpy() if zeros else None
        self.scales = (torch.rand(rows, groups) / 40 + 0.01).to(scale_dtype)
        self.exponents = torch.randint(118, 123, (rows, groups)).numpy()  # of MXFP4

    def packed(self, bias, values="int4", activation_group=None):
        """uint8 [bytes], by the operator; for activations as by default, if nothing is asked for."""
        rows, columns = self.codes.shape
        nibbles = torch.from_numpy(self.codes[:, ::2] | self.codes[:, 1::2] << 4)
        zeros = None if self.zeros is None else torch.from_numpy(self.zeros)
        scales = self.scales
        if values == "e2m1":  # one group, which is channelwise, has float scales
            one = self.exponents.shape[1] == 1
            scales = torch.from_numpy(2.0 ** (self.exponents - 127) if one else self.exponents.astype(np.uint8))
            scales = scales.bfloat16() if one else scales
        group = columns // scales.shape[1]
        size = default_activation_group(group, columns) if activation_group is None else activation_group
        more = {"zero_points": zeros, "values": values, "activation_group": size}
        return w4a8.dyn_quant_pack_4bit_weight(nibbles, scales, bias, group, columns, rows, **more)


def joined(*matrices):
    """One below the other."""
    both = Codes(2, 2, 2, torch.float32, False)
    both.codes = np.concatenate([matrix.codes for matrix in matrices])
    both.zeros = None if matrices[0].zeros is None else np.concatenate([matrix.zeros for matrix in matrices])
    both.scales = torch.cat([matrix.scales for matrix in matrices])
    both.exponents = np.concatenate([matrix.exponents for matrix in matrices])
    return both


def save(directory, model, tensors, quantization):
    """A checkpoint of the tensors and of what of the model is not packed."""
    tensors.update({key: value for key, value in model.state_dict().items() if not key.endswith("packed")})
    directory.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    config = json.loads(model.config.to_json_string())
    config |= {"quantization_config": quantization, "architectures": [type(model).__name__], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))


def skeleton(directory, name, **options):
    """A bfloat16 model whose layers are packed modules; what is in them is replaced."""
    make_model(name).bfloat16().save_pretrained(directory / "floats")
    model = AutoModelForCausalLM.from_pretrained(directory / "floats")
    w4a8.quantize_(model, **options)
    return model


def write_per_expert(
    directory, name, write_matrix, quantization, group=32, scale_dtype=torch.bfloat16, least_zero=0, skip=DEFAULT_SKIP
):
    """A checkpoint of random codes and zero points in a format; the model with them."""
    model, tensors = skeleton(directory, name, group_size=group, skip=skip), {}
    activations = {"activation_group": stated_activation_group(quantization)}

    def add(key, rows, columns, bias=None):
        matrix = Codes(rows, columns, columns if group == -1 else group, scale_dtype, True, least_zero)
        found = write_matrix(matrix.codes, matrix.zeros, matrix.scales)
        if bias is not None:
            found["bias"] = bias
        tensors.update({f"{key}.{suffix}": tensor for suffix, tensor in found.items()})
        return matrix

    for key, module in model.named_modules():
        if isinstance(module, W4A8Linear):
            header = w4a8.read_header(module.packed)
            bias = torch.randn(header["n"]).bfloat16() if header["has_bias"] else None
            module.packed = add(key, header["n"], header["k"], bias).packed(bias, **activations)
        elif isinstance(module, W4A8Experts):
            w13, w2 = [], []
            for expert in range(module.num_experts):
                sizes = [(module.intermediate_size, module.hidden_size)] * 2
                sizes.append(sizes[0][::-1])
                gate, up, down = (add(f"{key}.{expert}.{p}", *size) for p, size in zip(PROJECTIONS, sizes))
                w13.append(joined(gate, up).packed(None, **activations))
                w2.append(down.packed(None, **activations))
            module.w13_packed, module.w2_packed = torch.stack(w13), torch.stack(w2)
    save(directory / "theirs", model, tensors, quantization)
    return model


def asymmetric(kind, group, inputs=True):
    config = compressed(kind, group, inputs)
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    return config


def write_gptq_1(codes, zeros, scales):
    return format_writers.write_gptq(codes, zeros, scales, 1)


def write_gptq_2(codes, zeros, scales):
    return format_writers.write_gptq(codes, zeros, scales, 2)


PACKED, INTS = format_writers.write_pack_quantized, format_writers.write_int_quantized
GPTQ = {"quant_method": "gptq", **INT4, "sym": False}
ROUND = {"quant_method": "auto-round", **INT4, "sym": False}
# Name: what writes a matrix, what config.json says, and the type of scales.
FORMATS = {
    "W4A8 pack-quantized": (PACKED, asymmetric("pack-quantized", 32), torch.bfloat16),
    "W4A8 int-quantized": (INTS, asymmetric("int-quantized", 32), torch.float32),
    "W4A16 pack-quantized": (PACKED, asymmetric("pack-quantized", 32, inputs=False), torch.float16),
    "GPTQ": (write_gptq_1, GPTQ, torch.float16),
    "GPTQ 2": (write_gptq_2, {**GPTQ, "checkpoint_format": "gptq_v2"}, torch.float16),
    "AWQ": (
        format_writers.write_awq,
        {"quant_method": "awq", **INT4, "zero_point": True, "version": "gemm"},
        torch.float16,
    ),
    "AutoRound, as GPTQ": (write_gptq_1, {**ROUND, "packing_format": "auto_round:auto_gptq"}, torch.float16),
    "AutoRound, as AWQ": (
        format_writers.write_awq,
        {**ROUND, "packing_format": "auto_round:auto_awq"},
        torch.float16,
    ),
}


def check(directory, want):
    """The logits, and again from where it was saved packed."""
    model = load(directory / "theirs")
    for name, module in want.named_modules():
        assert type(model.get_submodule(name)) is type(module)
    assert_same_bits(model(TOKENS).logits, want(TOKENS).logits)
    model.save_pretrained(directory / "packed")
    packed = AutoModelForCausalLM.from_pretrained(directory / "packed")
    assert_same_bits(packed(TOKENS).logits, want(TOKENS).logits)
    return model


@pytest.mark.parametrize("name", ["qwen3", "Qwen2"])
@pytest.mark.parametrize("kind", FORMATS)
def test_zero_points(kind, name, tmp_path):
    """Every zero point from 0 to 15; scales that bfloat16 would round; biases."""
    write_matrix, quantization, scale_dtype = FORMATS[kind]
    # The first version of GPTQ has no zero point of 0: it stores one less.
    least = 1 if write_matrix is write_gptq_1 else 0
    want = write_per_expert(tmp_path, name, write_matrix, quantization, scale_dtype=scale_dtype, least_zero=least)
    model = check(tmp_path, want)
    headers = [w4a8.read_header(packed.reshape(-1, packed.shape[-1])[0])
               for key, packed in model.named_buffers() if key.endswith("packed")]  # fmt: skip
    assert headers
    assert all(header["has_zero_points"] for header in headers)


def test_zero_points_channelwise(tmp_path):
    want = write_per_expert(tmp_path, "deepseek 3", PACKED, asymmetric("pack-quantized", -1), group=-1)
    check(tmp_path, want)


def test_zero_points_that_the_configuration_denies(tmp_path):
    for kind, quantization in (
        ("W4A8 pack-quantized", compressed("pack-quantized", 32)),
        ("GPTQ", {**GPTQ, "sym": True}),
        ("AWQ", {**FORMATS["AWQ"][1], "zero_point": False}),
    ):
        directory = tmp_path / kind.replace(" ", "-")
        directory.mkdir()
        write_per_expert(directory, "Llama", FORMATS[kind][0], quantization, least_zero=1)
        with pytest.raises(ValueError, match=r"layers\.0\.\S+: .*zero points in \[1, 15\], but the configuration says"):
            load(directory / "theirs")


@pytest.mark.parametrize(
    "kind, rules",
    [
        ("GPTQ", {"dynamic": {r"-:.*\.o_proj": {}, r"-:.*\.experts\.": {}}}),
        ("W4A8 pack-quantized", {"ignore": ["lm_head", "re:.*gate$", "re:.*o_proj$", "re:.*experts.*"]}),
        ("AutoRound, as AWQ", {"extra_config": {".*o_proj": {"bits": 16}, ".*experts.*": {"bits": 16}}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_modules_that_are_left_out(kind, rules, tmp_path):
    """They are floats in the files, and stay so."""
    write_matrix, quantization, scale_dtype = FORMATS[kind]
    skip = [*DEFAULT_SKIP, "re:.*o_proj", "re:.*experts$"]
    want = write_per_expert(tmp_path, "qwen3", write_matrix, {**quantization, **rules}, 32, scale_dtype, 1, skip)
    model = check(tmp_path, want)
    assert isinstance(model.model.layers[0].self_attn.o_proj, torch.nn.Linear)
    assert not isinstance(model.model.layers[0].mlp.experts, W4A8Experts)


def test_other_widths_are_refused_by_name(tmp_path):
    changes = {"dynamic": {r"+:.*layers\.1.*\.v_proj": {"bits": 3}}}
    write_per_expert(tmp_path, "Llama", write_gptq_2, {**FORMATS["GPTQ 2"][1], **changes})
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj: .*bits is 3"):
        load(tmp_path / "theirs")


def write_gpt_oss(directory, method="mxfp4"):
    """As it is on the Hub: experts stacked, gate and up rows in turns; the model with the same codes."""
    model, tensors = skeleton(directory, "gpt-oss", skip=[*DEFAULT_SKIP, "re:.*self_attn"]), {}
    for key, module in model.named_modules():
        if not isinstance(module, W4A8Experts):
            continue
        h, i = module.hidden_size, module.intermediate_size
        for part, rows, columns in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
            bias = torch.randn(module.num_experts, rows).bfloat16()
            matrices = [Codes(rows, columns, 32, torch.float32, False) for _ in range(module.num_experts)]
            found = [format_writers.write_mxfp4(matrix.codes, matrix.exponents) for matrix in matrices]
            for suffix in ("blocks", "scales"):
                tensors[f"{key}.{part}_{suffix}"] = torch.stack([each[suffix] for each in found])
            tensors[f"{key}.{part}_bias"] = bias
            if part == "down_proj":
                packed = [matrix.packed(b, "e2m1") for matrix, b in zip(matrices, bias)]
                module.w2_packed = torch.stack(packed)
                continue
            packed = []
            for matrix, b in zip(matrices, bias):
                order = [*range(0, rows, 2), *range(1, rows, 2)]
                matrix.codes, matrix.exponents = matrix.codes[order], matrix.exponents[order]
                packed.append(matrix.packed(b[order], "e2m1"))
            module.w13_packed = torch.stack(packed)
    save(directory / "theirs", model, tensors, {**format_writers.GPT_OSS, "quant_method": method})
    return model


@pytest.mark.parametrize("method", ["mxfp4", "MXFP4"])
def test_mxfp4_experts_of_gpt_oss(method, tmp_path):
    want = write_gpt_oss(tmp_path, method)
    model = check(tmp_path, want)
    assert w4a8.read_header(model.model.layers[1].mlp.experts.w13_packed[5])["values"] == "e2m1"
    assert w4a8.read_header(model.model.layers[1].mlp.experts.w13_packed[5])["scale_dtype"] == "e8m0"
    assert set(model.hf_quantizer.report.replaced) == {f"model.layers.{i}.mlp.experts" for i in (0, 1)}


def test_mxfp4_in_several_files(tmp_path):
    """Blocks, scales and biases of a layer in files of their own."""
    want = write_gpt_oss(tmp_path)
    directory = tmp_path / "theirs"
    tensors = load_file(directory / "model.safetensors")
    files = {key: f"part-{index % 3}.safetensors" for index, key in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({key: tensors[key] for key in tensors if files[key] == file}, directory / file,
                  metadata={"format": "pt"})  # fmt: skip
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    check(tmp_path, want)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t, key: t.pop(f"{key}.down_proj_scales"), r"layers\.1\.mlp\.experts: .*down_proj.*scales is missing"),
        (lambda t, key: t.pop(f"{key}.down_proj_blocks"), r"layers\.1\.mlp\.experts: .*down_proj"),
        (lambda t, key: t.pop(f"{key}.gate_up_proj_bias"), r"layers\.1\.mlp\.experts: .*bias"),
        (lambda t, key: t.update({f"{key}.gate_up_proj_scales": t[f"{key}.gate_up_proj_scales"] | 255}),
         r"layers\.1\.mlp\.experts: .*255"),
        (lambda t, key: t.update({f"{key}.gate_up_proj_blocks": t[f"{key}.gate_up_proj_blocks"][:4].clone()}),
         r"layers\.1\.mlp\.experts: .*4.* experts, expected 6"),
        (lambda t, key: t.update({f"{key}.down_proj_blocks": t[f"{key}.down_proj_blocks"][:, :32].clone()}),
         r"layers\.1\.mlp\.experts: .*down_proj"),
    ],
    ids=["no scales", "no blocks", "no bias", "not a number", "fewer experts", "fewer rows"],
)  # fmt: skip
def test_damaged_mxfp4(change, match, tmp_path):
    write_gpt_oss(tmp_path)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    change(tensors, "model.layers.1.mlp.experts")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=match):
        load(tmp_path / "theirs")

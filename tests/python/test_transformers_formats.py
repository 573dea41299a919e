"""Checkpoints that others have quantized, loaded with W4A8Config: the logits of the same codes packed by hand."""

import json
from pathlib import Path

import pytest
import torch
from common import assert_same_bits, default_activation_group, stated_activation_group
from format_checkpoints import ALL_FORMATS, FLOATS, FORMATS, NVFP4_ARGS, PROJECTIONS, Format
from test_quantize_transformers import make_model
from tool_formats import pairs, parts_of

import w4a8
from w4a8.checkpoint import read_layers
from w4a8.nn import W4A8Experts, W4A8Linear
from w4a8.nn.linear import linear_class
from w4a8.nn.packed import PackedLinear
from w4a8.quantization import DEFAULT_SKIP

transformers = pytest.importorskip("transformers", minversion="5.0")

import test_transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402

TINY = Path(__file__).resolve().parents[2] / "examples/tiny_moe/checkpoints/g32"
TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(0))
UP = "model.layers.1.mlp.experts.3.up_proj"
pytestmark = pytest.mark.usefixtures("no_gradients")


def packed(form, *stored, bias=None, asked=None):
    """uint8 [bytes] of matrices one below the other, by the operator; and their group."""
    each = [parts_of(tensors, form.form, form.bits) for tensors in stored]
    codes, more = torch.cat([parts.codes for parts in each]), {}
    n, k = codes.shape
    if form.block == 32:
        scales = torch.cat([parts.exponents for parts in each])
        if scales.shape[1] == 1:  # one group, which is channelwise, has float scales
            scales = torch.exp2(scales.float() - 127).bfloat16()
        more["values"] = "e2m1"
    else:
        scales = torch.cat([parts.scales for parts in each])
        if form.block == 16:
            more = {"values": "e2m1", "channel_scales": torch.cat([p.factor.repeat(len(p.codes)) for p in each])}
        elif not form.symmetric:
            more["zero_points"] = torch.cat([parts.zeros for parts in each]).to(torch.uint8)
    group = k // scales.shape[1]
    more["activation_group"] = default_activation_group(group, k) if asked is None else asked
    if form.bits == 8:
        more["values"] = "int8"
    codes = pairs(codes) if form.bits == 4 else codes.to(torch.uint8)
    return w4a8.dyn_quant_pack_4bit_weight(codes, scales, bias, group, k, n, **more), group


def skeleton(directory, name, **options):
    """A bfloat16 model whose layers are packed modules; what is in them is replaced."""
    make_model(name).bfloat16().save_pretrained(directory / "floats")
    model = AutoModelForCausalLM.from_pretrained(directory / "floats")
    w4a8.quantize_(model, **options)
    return model


def save(directory, model, tensors, quantization):
    """A checkpoint of the tensors and of what of the model is not packed."""
    tensors.update({key: value for key, value in model.state_dict().items() if not key.endswith("packed")})
    directory.mkdir()
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string())
    config |= {"quantization_config": quantization, "architectures": [type(model).__name__], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))


def write(directory, name, form, group=32, skip=DEFAULT_SKIP, denied=None, dtype=torch.float16, **config):
    """A checkpoint of random codes in a format, at directory / "theirs"; the packed model that it must become.

    config: other words in its quantization_config. denied: the format that the matrices have, instead of that.
    """
    quantization = {**form.quantization_config(group), **config}
    form = denied or form
    model, tensors = skeleton(directory, name, group_size=32 if group == 16 else group, skip=skip), {}
    asked = stated_activation_group(quantization)

    def add(key, rows, columns, bias=None):
        found = form.random(rows, columns, group, dtype)
        more = {} if bias is None else {"bias": bias}
        tensors.update({f"{key}.{suffix}": tensor for suffix, tensor in {**found, **more}.items()})
        return found

    names = ("w1", "w3", "w2") if name == "mixtral" else PROJECTIONS
    for key, module in list(model.named_modules()):
        if isinstance(module, W4A8Linear):
            n, k = module.out_features, module.in_features
            bias = torch.randn(n).bfloat16() if w4a8.read_header(module.packed)["has_bias"] else None
            matrix, size = packed(form, add(key, n, k, bias), bias=bias, asked=asked)
            new = linear_class(f"int{form.bits}")(matrix, k, n, size)
        elif isinstance(module, W4A8Experts):
            w13, w2, hidden, inter = [], [], module.hidden_size, module.intermediate_size
            for expert in range(module.num_experts):
                sizes = ((inter, hidden), (inter, hidden), (hidden, inter))
                gate, up, down = (add(f"{key}.{expert}.{p}", *size) for p, size in zip(names, sizes))
                w13.append(packed(form, gate, up, asked=asked)[0])
                w2.append(packed(form, down, asked=asked)[0])
            size = form.block or group
            new = W4A8Experts(torch.stack(w13), torch.stack(w2), hidden, inter, size, module.activation)
        else:
            continue
        model.set_submodule(key, new.eval())
    save(directory / "theirs", model, tensors, quantization)
    return model


def load(directory):
    return test_transformers.load(directory, quantization_config=W4A8Config())


def check(directory, want):
    """The modules and the logits; and again from where it was saved packed."""
    model = load(directory / "theirs")
    ours = {name for name, module in want.named_modules() if isinstance(module, (PackedLinear, W4A8Experts))}
    for name, module in want.named_modules():
        assert type(model.get_submodule(name)) is type(module)
    assert set(model.hf_quantizer.report.replaced) == ours
    assert_same_bits(model(TOKENS).logits, want(TOKENS).logits)
    model.save_pretrained(directory / "packed")
    again = AutoModelForCausalLM.from_pretrained(directory / "packed")
    assert_same_bits(again(TOKENS).logits, want(TOKENS).logits)
    return model


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_formats(name, tmp_path):
    """The codes, none of them changed, every zero point, scales that bfloat16 would round; experts, and biases."""
    form = ALL_FORMATS[name]
    for family in ("qwen3", "Qwen2"):
        (tmp_path / family).mkdir()
        model = check(tmp_path / family, write(tmp_path / family, family, form))
        report = model.hf_quantizer.report
        left = {key.rpartition(".")[0] for key, parameter in model.named_parameters() if parameter.dim() > 1}
        assert {"model.embed_tokens", "lm_head"} <= left
        assert report.skipped == dict.fromkeys(left, "it is not quantized in the checkpoint")
        assert report.left_bytes == sum(parameter.numel() * 2 for parameter in model.parameters())
        found = [part for key, part in model.named_buffers() if key.endswith("packed")]
        headers = [w4a8.read_header(part.reshape(-1, part.shape[-1])[0]) for part in found]
        assert headers and all(header["has_zero_points"] != form.symmetric for header in headers)
        values = "e2m1" if name in FLOATS else f"int{form.bits}"
        assert all(header["values"] == values for header in headers)


@pytest.mark.parametrize(
    ("name", "family", "group"),
    [
        ("W4A8 pack asymmetric", "deepseek 3", -1),
        ("W4A8 pack", "deepseek 3", -1),
        ("GPTQ", "mixtral", 32),
        ("W4A8 int", "mixtral", 32),
        ("AWQ", "mixtral", 32),
    ],
)
def test_other_families(name, family, group, tmp_path):
    check(tmp_path, write(tmp_path, family, ALL_FORMATS[name], group, dtype=torch.bfloat16))


def test_checkpoint_of_the_example():
    """Byte for byte what `read_layers` makes of its layers; it writes text."""
    model = load(TINY)
    for name, layer in read_layers(TINY).items():
        for mine, theirs in zip(model.get_submodule(name).buffers(), layer.buffers()):
            assert_same_bits(mine.flatten(), theirs.flatten())
    prompt = torch.tensor([list(b"import ")])
    written = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert bytes(written[0].tolist()).decode("ascii").startswith("import ")


@pytest.mark.parametrize(
    ("name", "spelling"),
    [("GPTQ", "GPTQ"), ("AutoRound", "intel/auto-round"), ("AutoRound", "auto_round"), ("AWQ zero_point false", "Awq")],
)
def test_spellings(name, spelling, tmp_path):
    """Of the method: those that `read_layers` reads too, which transformers does not know."""
    want = write(tmp_path, "qwen3", FORMATS[name], quant_method=spelling)
    assert_same_bits(load(tmp_path / "theirs")(TOKENS).logits, want(TOKENS).logits)
    assert sum(name.endswith("experts") for name in read_layers(tmp_path / "theirs")) == 2


@pytest.mark.parametrize(
    ("name", "file", "change"),
    [
        # As AutoGPTQ once wrote it; transformers alone sees a float checkpoint without its weights.
        ("GPTQ", "quantize_config.json", lambda config: {k: v for k, v in config.items() if k != "quant_method"}),
        (
            "NVFP4 modelopt",
            "hf_quant_config.json",
            lambda config: {
                "producer": {},
                "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": config["ignore"]},
            },
        ),
    ],
)
def test_configuration_in_a_file_of_its_own(name, file, change, tmp_path):
    want = write(tmp_path, "qwen3", ALL_FORMATS[name])
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    stated = config.pop("quantization_config")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs" / file).write_text(json.dumps(change(stated)))
    check(tmp_path, want)


# --- modules that are left out, rules for some ------------------------------------------------------------------------

ATTENTION = ["lm_head", "*gate", "model.layers.0.self_attn*", "model.layers.1.self_attn"]


@pytest.mark.parametrize(
    ("name", "rules", "skip", "left", "packed_"),
    [
        ("GPTQ asymmetric", {"dynamic": {r"-:.*\.o_proj": {}, r"-:.*\.experts\.": {}}}, "o_proj", True, False),
        (
            "W4A8 pack asymmetric",
            {"ignore": ["lm_head", "re:.*gate$", "re:.*o_proj$", "re:.*experts.*"]},
            "o_proj",
            True,
            False,
        ),
        (
            "AutoRound as AWQ",
            {"extra_config": {".*o_proj": {"bits": 16}, ".*experts.*": {"bits": 16}}},
            "o_proj",
            True,
            False,
        ),
        ("NVFP4 modelopt", {"ignore": ATTENTION}, "self_attn.*", True, True),
    ],
)
def test_modules_that_are_left_out(name, rules, skip, left, packed_, tmp_path):
    """They are floats in the files, and stay so."""
    skip = [*DEFAULT_SKIP, f"re:.*{skip}", *([] if packed_ else ["re:.*experts$"])]
    model = check(tmp_path, write(tmp_path, "qwen3", ALL_FORMATS[name], skip=skip, **rules))
    assert isinstance(model.model.layers[0].self_attn.o_proj, torch.nn.Linear) == left
    assert isinstance(model.model.layers[0].mlp.experts, W4A8Experts) == packed_


def test_mixed_precision_of_modelopt(tmp_path):
    layers = {"model.layers.0": {"quant_algo": "W4A16_NVFP4"}, "model.layers.1": {"quant_algo": "NVFP4"}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    check(tmp_path, write(tmp_path, "qwen3", FLOATS["NVFP4 modelopt"], **mixed))


def test_nvfp4_with_inputs_of_4_bits(tmp_path):
    scheme = {"targets": ["Linear"], "weights": NVFP4_ARGS, "input_activations": {**NVFP4_ARGS, "dynamic": "local"}}
    check(tmp_path, write(tmp_path, "qwen3", FLOATS["NVFP4 pack"], config_groups={"group_0": scheme}))


# --- what is refused --------------------------------------------------------------------------------------------------

FP8_LAYER = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"model.layers.1.self_attn.v_proj": {"quant_algo": "FP8"}, "model": {"quant_algo": "NVFP4"}},
}
NOT_NVFP4 = r"layers\.\d\.\S+_proj: .*quant_algo is '{}', but 'NVFP4' or 'W4A16_NVFP4' is expected"


REFUSED = [
    ("GPTQ", "qwen3", {"bits": 3}, "bits is 3, but 4 or 8 is expected"),
    ("GPTQ", "qwen3", {"group_size": 24}, "group_size is 24"),
    ("AWQ", "qwen3", {"version": "marlin"}, "'marlin'"),
    ("GPTQ", "qwen3", {"quant_method": "mxfp4"}, "is quantized, but Qwen3MoeForCausalLM has no such weight"),
    ("GPTQ", "qwen3", {"quant_method": "fbgemm_fp8"}, "quantized with 'fbgemm_fp8'"),
    ("GPTQ", "qwen3", FORMATS["W4A8 pack"].quantization_config(32), "weight_packed is missing"),
    (
        "GPTQ 2",
        "Llama",
        {"dynamic": {r"+:.*layers\.1.*\.v_proj": {"bits": 3}}},
        r"1\.self_attn\.v_proj: .*bits is 3",
    ),
    ("NVFP4 modelopt", "Llama", {"quant_algo": "NVFP4_AWQ"}, NOT_NVFP4.format("NVFP4_AWQ")),
    ("NVFP4 modelopt", "Llama", FP8_LAYER, NOT_NVFP4.format("FP8")),
]


DENIED = [
    ("W4A8 pack", Format("pack-quantized", {}, symmetric=False)),
    ("GPTQ", Format("gptq", {}, symmetric=False)),
    ("AWQ zero_point false", Format("awq", {}, symmetric=False)),
]


def change_file(directory, change):
    """Changes the tensors of a checkpoint, a dict."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def turned_order(tensors):
    for key, tensor in tensors.items():
        if key.endswith("g_idx"):
            tensors[key] = (torch.arange(len(tensor)) % (len(tensor) // 32)).int()


def without(pattern):
    def change(tensors):
        for key in [key for key in tensors if key.endswith(pattern) or (pattern.endswith(".") and pattern in key)]:
            del tensors[key]

    return change


def add(key):
    def change(tensors):
        tensors[key] = torch.ones(32)

    return change


def another_layer(tensors):
    name = "model.layers.0.self_attn.{}_proj.qweight"
    tensors[name.format("z")] = tensors[name.format("q")]


def no_numbers(tensors):
    key = f"{UP}.weight_scale"
    tensors[key] = tensors[key].float().fill_(torch.nan).to(tensors[key].dtype)


def infinite(tensors):
    for suffix in ("weight_scale_2", "weight_global_scale"):
        if f"{UP}.{suffix}" in tensors:
            tensors[f"{UP}.{suffix}"] = torch.tensor(float("inf"))


def no_scale_of_all(tensors):
    for suffix in ("weight_scale_2", "weight_global_scale"):
        tensors.pop(f"{UP}.{suffix}", None)


OF_UP = r"layers\.1\.mlp\.experts: .*experts\.3\.up_proj"
OF_ALL = r"\.weight_(scale_2|global_scale)"


DAMAGED = [
    ("GPTQ", turned_order, r"layers\.0\.\S+_proj.*activation order"),
    ("GPTQ", without(f"{UP}.scales"), rf"{OF_UP}\.scales is missing"),
    ("GPTQ", without(f"{UP}.qweight"), rf"{OF_UP}\.qweight is missing"),
    ("GPTQ", without(f"{UP}."), r"layers\.1\.mlp\.experts: matrices of \[6, 5\] experts, expected 6"),
    ("GPTQ", without("layers.0.self_attn.q_proj.qweight"), r"layers\.0\.self_attn\.q_proj: .*qweight is missing"),
    ("GPTQ", another_layer, "z_proj is quantized, but Qwen3MoeForCausalLM has no such weight"),
    ("GPTQ", without("layers.0.self_attn.q_proj."), r"layers\.0\.self_attn\.q_proj\.weight is not in the"),
    ("GPTQ", without("layers.1.mlp.experts."), r"layers\.1\.mlp\.experts\.\w+_proj is not in the checkpoint"),
    ("GPTQ", add("model.layers.0.mlp.act_fn.scales"), r"'model\.layers\.0\.mlp\.act_fn\.scales' is not read"),
    ("GPTQ", add("model.layers.0.self_attn.q_proj.rotation"), r"q_proj\.rotation' is not read"),
    ("NVFP4 modelopt", add("model.layers.2.mlp.experts.0.up_proj.qq"), r"layers\.2\.\S+up_proj\.qq' is not read"),
    # Of int8 nothing else says that it is quantized: a linear layer, and a whole layer of experts.
    ("W4A8 int", without("layers.0.self_attn.q_proj.weight_scale"), r"q_proj: .*q_proj\.weight_scale is missing"),
    ("W4A8 int", lambda t: [t.pop(key) for key in list(t) if ".0.mlp.experts" in key and key.endswith("_scale")],
     r"mlp\.experts: .*experts\.0\.\w+\.weight_scale is missing"),
    *((name, change, rf"{OF_UP}{message}") for name in ("NVFP4 modelopt", "NVFP4 pack") for change, message in (
        (no_numbers, r"\.weight_scale: not all scales are numbers"),
        (without(f"{UP}.weight_scale"), r"\.weight_scale is missing"),
        (no_scale_of_all, rf"{OF_ALL} is missing"),
        (infinite, rf"{OF_ALL} is inf, of which no finite"),
    )),
]  # fmt: skip


EXTRA = {
    "linear": ["model.layers.1.self_attn.k_proj"],
    "an expert": [UP],
    "experts": [f"model.layers.1.mlp.experts.{expert}.{name}" for expert in range(6) for name in PROJECTIONS],
}


def add_bias(where, value):
    def change(tensors):
        for name in EXTRA[where]:
            bias = torch.zeros(32 if "experts" in name and "down" not in name else 64)
            bias[17] = value
            tensors[f"{name}.bias"] = bias

    return change


@pytest.mark.parametrize("where", EXTRA)
@pytest.mark.parametrize("name", ["GPTQ", "W4A8 pack"])
def test_extra_bias(name, where, tmp_path):
    """One that the model does not have is refused; of zeros, as older tools wrote them everywhere, left out."""
    want = write(tmp_path, "qwen3", FORMATS[name])
    change_file(tmp_path / "theirs", add_bias(where, 0.0))
    model = load(tmp_path / "theirs")
    assert_same_bits(model(TOKENS).logits, want(TOKENS).logits)
    assert model.state_dict().keys() == want.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert tensor.shape == want.state_dict()[key].shape, key
    for value in (1e-3, float("nan")):
        change_file(tmp_path / "theirs", add_bias(where, value))
        extra = EXTRA[where][0].replace(".", r"\.")
        with pytest.raises(ValueError, match=f"{extra} has a bias, but the model has none"):
            load(tmp_path / "theirs")

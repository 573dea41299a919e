"""Models beside a device without hardware. test_transformers_beside.py runs this file in a process of its own."""

import json

import available  # noqa: F401
import gguf_models
import pytest
import standin_device
import test_transformers
import torch
from common import assert_same_bits
from format_checkpoints import ALL_FORMATS
from gguf_models import TinyModel
from safetensors.torch import load_file
from test_quantize_transformers import make_model
from test_transformers_float8 import write as write_float8
from test_transformers_formats import write
from test_transformers_gpt_oss import write_gpt_oss
from transformers import AutoModelForCausalLM

import w4a8
from w4a8.core.bridge import WAYS
from w4a8.integrations.transformers import W4A8Cache, W4A8Config, fast_attention, fuse
from w4a8.integrations.transformers.dry_run import dry_run
from w4a8.nn import W4A8Experts
from w4a8.nn.embedding import PackedEmbedding
from w4a8.nn.packed import PackedLinear
from w4a8.ops import dequantize_rows
from w4a8.quantization import DEFAULT_SKIP

TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(0))
STACKS = ("w13_packed", "w2_packed")
pytestmark = pytest.mark.usefixtures("no_gradients")


def load(directory, config=None, device_map="standin", **options):
    options = {"attn_implementation": "eager", "dtype": torch.bfloat16, **options}
    if config is not None or device_map is not None:
        options["quantization_config"] = config or W4A8Config()
    return test_transformers.load(directory, device_map=device_map, **options)


def with_floats(model):
    """The model with linear layers of floats, unpacked by the operator."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            rows, columns = module.out_features, module.in_features
            found = dequantize_rows(module.packed, torch.arange(rows), columns, rows, dtype=torch.float32)
            biased = w4a8.read_header(module.packed)["has_bias"]
            new = torch.nn.Linear(columns, rows, bias=biased).to(model.dtype)
            new.weight.copy_(found)
            if biased:  # what the layer makes of zeros
                new.bias.copy_(module(torch.zeros(1, columns))[0])
            model.set_submodule(name, new)
    return model


def saved(directory, name="qwen3"):
    """A checkpoint of floats, and the model on the CPU that transformers makes of it."""
    make_model(name).bfloat16().save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory)


def only_experts(name, module):
    return isinstance(module, torch.nn.Linear)


def check(model, want):
    """All but the experts is on the device, and computes the bits of a model on the CPU."""
    want.set_attn_implementation("eager")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert (tensor.device.type == "cpu") == (name.rpartition(".")[2] in STACKS), name
    experts = {name: module for name, module in model.named_modules() if isinstance(module, W4A8Experts)}
    assert experts
    assert not any(isinstance(module, (PackedLinear, PackedEmbedding)) for module in model.modules())
    report = model.hf_quantizer.report
    if report is not None:
        assert list(report.replaced) == list(experts)
        assert report.packed_bytes == sum(each.numel() for module in experts.values() for each in module.buffers())
        numbers = sum(each.num_experts * 3 * each.hidden_size * each.intermediate_size for each in experts.values())
        biases = sum(each.num_experts * (each.sizes.w13_rows + each.hidden_size) for each in experts.values())
        assert report.float_bytes in (numbers * model.dtype.itemsize, (numbers + biases) * model.dtype.itemsize)
    assert not hasattr(model, "hf_device_map") and not hasattr(model, "_hf_hook")
    assert not model.hf_quantizer.is_compileable
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected, text = want(TOKENS).logits, want.generate(TOKENS, **how)
    for way in WAYS:
        standin_device.use(way)
        before = standin_device.calls(way)
        logits = model(TOKENS.to("standin")).logits
        assert standin_device.calls(way) == before + len(experts)  # each layer came over the bridge
        assert logits.device.type == "standin"
        assert_same_bits(logits.cpu(), expected)
        assert torch.equal(model.generate(TOKENS.to("standin"), **how).cpu(), text)
    return model


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek 3", "gpt-oss", "llama 4"])
def test_floats(name, tmp_path):
    """Linear layers stay as they are; experts are quantized."""
    want = saved(tmp_path, name)
    w4a8.quantize_(want, skip=only_experts)
    model = check(load(tmp_path), want)
    report = model.hf_quantizer.report
    assert {reason for part, reason in report.skipped.items() if part.endswith("o_proj")} == {"it goes to standin:0"}


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_formats(name, tmp_path):
    """The codes of the experts, and linear layers as the floats that their codes mean."""
    check(load(write_as(tmp_path, name)), with_floats(AutoModelForCausalLM.from_pretrained(tmp_path / "want")))


def write_as(directory, name):
    """A checkpoint in a format; the model packed by hand is saved beside it."""
    want = write(directory, "qwen3", ALL_FORMATS[name])
    want.config.quantization_config = W4A8Config()
    want.save_pretrained(directory / "want")
    return directory / "theirs"


def test_biases(tmp_path):
    want = write(tmp_path, "qwen2", ALL_FORMATS["GPTQ"])
    check(load(tmp_path / "theirs"), with_floats(want))


def test_float8(tmp_path):
    """Linear layers are not rounded."""
    want = write_float8(tmp_path, "qwen3", "blocks", skip=[*DEFAULT_SKIP, "re:.*self_attn"])
    want.model.layers.bfloat16(), want.model.norm.bfloat16(), want.lm_head.bfloat16()
    want.model.embed_tokens.bfloat16()  # not the rotary frequencies, which stay float32
    check(load(tmp_path / "theirs"), want)


def test_mxfp4_of_gpt_oss(tmp_path):
    check(load(write_gpt_oss_to(tmp_path)), AutoModelForCausalLM.from_pretrained(tmp_path / "want"))


def write_gpt_oss_to(directory):
    want = write_gpt_oss(directory)
    want.config.quantization_config = W4A8Config()
    want.save_pretrained(directory / "want")
    return directory / "theirs"


@pytest.mark.parametrize("name", ["qwen3moe", "qwen3moe, tied", "mixtral", "gpt-oss", "deepseek-v3", "glm4moe"])
def test_gguf(name, tmp_path, monkeypatch):
    """Also packed embeddings become floats; an output layer with the same weight shares the parameter."""
    architecture, family, fields = gguf_models.MODELS["qwen3moe"]
    tied = {**fields, "tie_word_embeddings": True}
    monkeypatch.setitem(gguf_models.MODELS, "qwen3moe, tied", (architecture, family, tied))
    tiny = TinyModel(name)
    tiny.write(tmp_path)
    options = {"gguf_file": "model.gguf", "dtype": torch.float32}
    want = load(tmp_path, device_map=None, **options)
    for part, module in list(want.named_modules()):
        if isinstance(module, (PackedLinear, PackedEmbedding)):
            want.set_submodule(part, tiny.model.get_submodule(part))
    model = check(load(tmp_path, **options), want)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    is_tied = name.endswith("tied")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    assert model.all_tied_weights_keys == ({"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {})


def test_packed_directory(tmp_path):
    """Its linear layers are packed too; saved from beside the device, they are floats."""
    saved(tmp_path / "float")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=W4A8Config())
    packed.save_pretrained(tmp_path / "packed")
    want = with_floats(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))
    model = check(load(tmp_path / "packed"), want)
    assert model.to("cpu") is model
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert_same_bits(model(TOKENS).logits, want(TOKENS).logits)
    model.save_pretrained(tmp_path / "again")
    listed = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["packed"]
    assert listed and all(name.rpartition(".")[2] in STACKS for name in listed)
    assert_same_bits(load(tmp_path / "again", device_map=None)(TOKENS).logits, want(TOKENS).logits)
    check(load(tmp_path / "again"), want)
    model.to("standin")
    check(model, want)


def test_experts_of_a_layer_on_the_device(tmp_path):
    """What ``skip`` names stays a float, and so goes to the device."""
    want = saved(tmp_path)
    skip = "re:model.layers.1.mlp.experts"
    w4a8.quantize_(want, skip=lambda name, module: only_experts(name, module) or name == skip[3:])
    want.set_experts_implementation("eager")
    config = W4A8Config(skip=skip)
    check(load(tmp_path, config, experts_implementation="eager"), want)


@pytest.mark.parametrize("name", ["GPTQ asymmetric", "AWQ", "W4A16 pack", "W8A16 pack asymmetric", "MXFP4 pack"])
def test_quantized_experts_of_a_layer_on_the_device(name, tmp_path):
    """They become the floats that the tensors in the file mean, rounded once to the model's type."""
    path, directory = "model.layers.1.mlp.experts", write_as(tmp_path, name)
    stored, form = load_file(directory / "model.safetensors"), ALL_FORMATS[name]

    def meant(expert, part):
        prefix = f"{path}.{expert}.{part}."
        return form.dequantized({key[len(prefix) :]: each for key, each in stored.items() if key.startswith(prefix)})

    want = with_floats(AutoModelForCausalLM.from_pretrained(tmp_path / "want"))
    experts = make_model("qwen3").bfloat16().get_submodule(path)
    for expert in range(experts.num_experts):
        experts.gate_up_proj[expert] = torch.cat([meant(expert, part) for part in ("gate_proj", "up_proj")])
        experts.down_proj[expert] = meant(expert, "down_proj")
    want.set_submodule(path, experts)
    want.set_experts_implementation("eager")
    model = check(load(directory, W4A8Config(skip="re:model.layers.1.mlp"), experts_implementation="eager"), want)
    on_device = model.get_submodule(path)
    for leaf in ("gate_up_proj", "down_proj"):
        assert_same_bits(getattr(on_device, leaf).cpu(), getattr(experts, leaf))
    with dry_run():
        planned = load(directory, W4A8Config(skip="re:model.layers.1.mlp")).hf_quantizer.report
    for report in (planned, model.hf_quantizer.report):
        assert report.skipped[path] == "skip" and path not in report.replaced
    model.to("cpu").save_pretrained(tmp_path / "again")
    check(load(tmp_path / "again", experts_implementation="eager"), want)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["qwen3moe", "mixtral", "gpt-oss"])
def test_gguf_experts_of_a_layer_on_the_device(name, layer, tmp_path):
    """They become the floats of the blocks; gpt-oss has matrices that are transposed, rows in turns, and biases."""
    tiny = TinyModel(name)
    tiny.write(tmp_path)
    options = {"gguf_file": "model.gguf", "dtype": torch.float32, "experts_implementation": "eager"}
    want = load(tmp_path, device_map=None, **options)
    path = f"model.layers.{layer}.mlp.experts"
    for part, module in list(want.named_modules()):
        if isinstance(module, (PackedLinear, PackedEmbedding)) or part == path:
            want.set_submodule(part, tiny.model.get_submodule(part))
    tiny.model.set_experts_implementation("eager")
    model = check(load(tmp_path, W4A8Config(skip=path), **options), want)
    for leaf, parameter in tiny.model.get_submodule(path).named_parameters():
        found = model.get_submodule(path).get_parameter(leaf).cpu()
        assert_same_bits(found + 0.0, parameter + 0.0)  # e2m1 has -0, which the table of GGUF's MXFP4 has as 0


REFUSED = {
    "two": ({"": "standin:0", "model.layers.0": "standin:1"}, {}, "standin:0 and standin:1, expected one accelerator"),
    "a layer on the CPU": ({"": "standin", "model.layers.0": "cpu"}, {}, "leaves 'model.layers.0' on the CPU"),
    "disk": ({"": "standin", "model.layers.0": "disk"}, {}, "device_map has 'disk'"),
    "meta": ("meta", {}, "device_map has 'meta', a device without weights"),
    "fuse": ("standin", {"fuse": "int8"}, "fuse is 'int8', but device_map has standin:0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_maps(name, tmp_path):
    device_map, options, message = REFUSED[name]
    saved(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, W4A8Config(**options), device_map)


def test_map_that_names_experts(tmp_path):
    want = saved(tmp_path)
    w4a8.quantize_(want, skip=only_experts)
    check(load(tmp_path, None, {"": "standin", **{f"model.layers.{i}.mlp.experts": "cpu" for i in (0, 1)}}), want)


def test_refused_models(tmp_path):
    message = "has standin:0, but the model has no experts to pack"
    saved(tmp_path / "dense", "Qwen3")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "dense")
    write(tmp_path, "Qwen2", ALL_FORMATS["AWQ"])
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "theirs")
    TinyModel("qwen3").write(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, gguf_file="model.gguf")
    (tmp_path / "experts").mkdir()
    write(tmp_path / "experts", "qwen3", ALL_FORMATS["GPTQ"])
    for skip, reason in (("re:x", "skip holds 're:x', which matches the name of no module"), ("model", message)):
        with pytest.raises(ValueError, match=reason):
            load(tmp_path / "experts" / "theirs", W4A8Config(skip=skip))


def test_refused_afterwards(tmp_path):
    saved(tmp_path)
    model, tokens = load(tmp_path), TOKENS.to("standin")
    for change in (fast_attention, fuse):
        with pytest.raises(ValueError, match="model is on standin:0, expected a CPU"):
            change(model)
    with pytest.raises(ValueError, match="keys are on standin:0, expected a CPU"):
        model(tokens, past_key_values=W4A8Cache(model.config))
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()
    model(tokens)


def test_auto_stays_on_the_cpu(tmp_path):
    saved(tmp_path)
    model = load(tmp_path, device_map="auto")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert isinstance(model.model.layers[0].self_attn.q_proj, PackedLinear)
    with pytest.raises(RuntimeError, match="cannot go to standin:0"):
        model.to("standin")

"""w4a8.integrations.transformers: from_pretrained quantizes while it loads, and maps what save_pretrained wrote."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from common import assert_same_bits
from test_quantize_transformers import DENSE, FAMILIES, MODELS, make_model
from torch.utils._python_dispatch import TorchDispatchMode

import w4a8
from w4a8.nn import W4A8Experts, W4A8Linear
from w4a8.quantization import QuantizationError

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import AutoModelForCausalLM  # noqa: E402

from w4a8.integrations.transformers import W4A8Config, quantizer  # noqa: E402
from w4a8.integrations.transformers.linear_attention import use_operators  # noqa: E402

TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.usefixtures("no_gradients")


def save_float(name, directory, dtype=torch.bfloat16, change=lambda model: None, **options):
    """A random checkpoint; the model."""
    model = make_model(name).to(dtype)
    change(model)
    model.save_pretrained(directory, **options)
    return model


def load(directory, **options):
    """The model, after a look at what transformers reports."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


def quantized_whole(directory, *args, **options):
    """The whole model in floats, then w4a8.quantize_."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    report = w4a8.quantize_(model, *args, **options)
    use_operators(model)
    return model, report


@pytest.mark.parametrize("name", [*MODELS, *DENSE, *FAMILIES])
def test_bits(name, tmp_path, monkeypatch):
    """Quantized while loading, and packed, saved and mapped: the logits of quantize_. In several shards, so that the
    weights of a module come from two files. Convolutions (test_transformers_convolutions.py) stay as they are."""
    monkeypatch.setattr(quantizer, "_is_fast", lambda dtype: True)
    save_float(name, tmp_path / "float", max_shard_size="50KB")
    assert len(list((tmp_path / "float").glob("*.safetensors"))) > 2
    whole, report = quantized_whole(tmp_path / "float")
    want = whole(TOKENS).logits
    model = load(tmp_path / "float", quantization_config=W4A8Config())
    assert model.hf_quantizer.report == report
    assert report.skipped["lm_head"] == "skip"
    assert_same_bits(model(TOKENS).logits, want)
    assert model.dtype == torch.bfloat16

    model.save_pretrained(tmp_path / "packed", max_shard_size="50KB")
    packed = load(tmp_path / "packed")
    assert_same_bits(packed(TOKENS).logits, want)
    state = whole.state_dict()
    for key, tensor in packed.state_dict().items():
        assert_same_bits(tensor, state[key])
    packed.save_pretrained(tmp_path / "again", max_shard_size="50KB")
    for file in (tmp_path / "packed").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": -1},
        {"group_size": 64, "scale_dtype": torch.bfloat16},
        {"effort": 0},
        {"symmetric": False},
        {"values": "e2m1", "effort": 2},
        {"skip": ["model.layers.0.mlp", "re:.*o_proj"]},
        {"skip": ["re:.*experts$"]},
        {"default_skip": False},
    ],
    ids=str,
)
def test_options(options, tmp_path):
    """Those of quantize_; they are in config.json, and a part of the model may stay floats."""
    save_float("qwen3", tmp_path / "float")
    whole, report = quantized_whole(tmp_path / "float", **options)
    want = whole(TOKENS).logits
    config = W4A8Config(**options)
    model = load(tmp_path / "float", quantization_config=config)
    assert model.hf_quantizer.report == report
    assert_same_bits(model(TOKENS).logits, want)
    model.save_pretrained(tmp_path / "packed")
    assert_same_bits(load(tmp_path / "packed")(TOKENS).logits, want)
    saved = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert saved == {**config.to_dict(), "packed": sorted(key for key in model.state_dict() if key.endswith("packed"))}
    again = W4A8Config.from_dict(saved)
    assert again.to_dict() == saved
    assert again.quant_options() == config.quant_options()


def test_skip_that_matches_nothing(tmp_path):
    save_float("qwen3", tmp_path)
    config = W4A8Config(skip=["model.layers.0", "layers.1.mlp"])
    with pytest.raises(ValueError, match=r"skip holds 'layers\.1\.mlp', which matches the name of no module"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def test_what_stays_float_is_said(tmp_path, caplog):
    """The share by a warning, where it is more than half; the rest in the report, which is logged."""
    save_float("qwen3", tmp_path)
    caplog.set_level("INFO", "w4a8")
    model = load(tmp_path, quantization_config=W4A8Config())
    report = model.hf_quantizer.report
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", str(report))]
    caplog.clear()
    model = load(tmp_path, quantization_config=W4A8Config(skip=["re:.*experts$"]))
    report = model.hf_quantizer.report
    floats = sum(parameter.numel() * 2 for parameter in model.parameters())
    packed = sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("packed"))
    assert report.left_share == floats / (floats + packed) > 0.5
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        f"{100 * report.left_share:.1f}% of the model's bytes stay float; model.hf_quantizer.report says which and why"
    ]
    load(tmp_path, quantization_config=W4A8Config()).save_pretrained(tmp_path / "packed")
    assert load(tmp_path / "packed").hf_quantizer.report is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes(dtype, tmp_path):
    """Of the checkpoint; and asked for, then rounded from what the model would have been."""
    save_float("mixtral", tmp_path, dtype)
    whole, _ = quantized_whole(tmp_path)
    model = load(tmp_path, quantization_config=W4A8Config())
    assert model.dtype == dtype
    assert_same_bits(model(TOKENS).logits, whole(TOKENS).logits)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    w4a8.quantize_(whole)
    model = load(tmp_path, quantization_config=W4A8Config(), dtype=torch.bfloat16)
    assert_same_bits(model(TOKENS).logits, whole(TOKENS).logits)


def test_quantized_with_quantize_is_saved_too(tmp_path):
    """Any model of transformers whose layers are packed, once config.json says so."""
    save_float("qwen3", tmp_path / "float")
    whole, _ = quantized_whole(tmp_path / "float")
    whole.config.quantization_config = W4A8Config()
    whole.save_pretrained(tmp_path / "packed")
    assert_same_bits(load(tmp_path / "packed")(TOKENS).logits, whole(TOKENS).logits)


def test_tied_output_layer_stays(tmp_path):
    """Also where ``skip`` does not name it: transformers ties it after loading."""
    config = copy.deepcopy(make_model("Qwen3").config)
    config.tie_word_embeddings = True
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "float")
    whole, report = quantized_whole(tmp_path / "float", default_skip=False)
    model = load(tmp_path / "float", quantization_config=W4A8Config(default_skip=False))
    assert report.skipped["lm_head"] == "its weight is shared with model.embed_tokens"
    assert model.hf_quantizer.report == report
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_bits(model(TOKENS).logits, whole(TOKENS).logits)
    model.save_pretrained(tmp_path / "packed")
    packed = load(tmp_path / "packed")
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    assert_same_bits(packed(TOKENS).logits, whole(TOKENS).logits)


def test_rows_do_not_depend_on_the_batch(tmp_path):
    save_float("qwen3", tmp_path)
    model = load(tmp_path, quantization_config=W4A8Config())
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts, W4A8Experts)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    ids, weights = torch.tensor([[0, 3]] * 5), torch.full((5, 2), 0.5)
    assert_same_bits(experts(x, ids, weights)[2:3], experts(x[2:3], ids[2:3], weights[2:3]))


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_generate(cache, name, tmp_path):
    """With the usual caches and without one, the same tokens as the model quantized as a whole."""
    save_float(name, tmp_path / "float")
    whole, _ = quantized_whole(tmp_path / "float")
    load(tmp_path / "float", quantization_config=W4A8Config()).save_pretrained(tmp_path / "packed")
    packed = load(tmp_path / "packed")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    written = packed.generate(TOKENS, **options)
    assert written.shape == (2, 13)
    assert torch.equal(written, whole.generate(TOKENS, **options))


def test_generate_in_a_padded_batch(tmp_path):
    """What each row writes alone, and what the model quantized as a whole writes. (In float32, where what padding does
    to attention's sums is far from changing a token.)"""
    save_float("qwen3", tmp_path, torch.float32)
    model = load(tmp_path, quantization_config=W4A8Config())
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    short = TOKENS[:1, :4]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), short], 1)
    batch = torch.cat([padded, TOKENS[1:]])
    mask = torch.ones_like(batch)
    mask[0, :3] = 0
    written = model.generate(batch, attention_mask=mask, **options)
    assert torch.equal(written[:1, 3:], model.generate(short, **options))
    assert torch.equal(written[1:], model.generate(TOKENS[1:], **options))
    whole, _ = quantized_whole(tmp_path)
    assert torch.equal(written, whole.generate(batch, attention_mask=mask, **options))


class Multiplications(TorchDispatchMode):
    """Matrix multiplications of torch with a dimension of some size: their names."""

    def __init__(self, size):
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.found += [str(func.overloadpacket)] * any(self.size in shape for shape in shapes)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_output_layer_is_not_copied(batch, biased, tmp_path):
    """torch multiplies the last token of a longer tensor, which is what generating needs, with a batch of copies of the
    weight if that needs no gradient. Here it is one multiplication, with the bits of quantize_'s."""
    config = copy.deepcopy(make_model("qwen3").config)
    config.vocab_size = 80
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "float")
    load(tmp_path / "float", quantization_config=W4A8Config()).save_pretrained(tmp_path / "packed")
    whole, _ = quantized_whole(tmp_path / "float")
    prompt = TOKENS[:1].repeat(batch, 1)
    want = whole(prompt, logits_to_keep=1).logits
    for model in (load(tmp_path / "packed"), load(tmp_path / "float", quantization_config=W4A8Config())):
        if biased:
            model.lm_head.bias = torch.nn.Parameter(torch.zeros(80, dtype=torch.bfloat16), requires_grad=False)
        for other in (model, pickle.loads(pickle.dumps(copy.deepcopy(model)))):
            with Multiplications(80) as used:
                other.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
            assert used.found == ["aten.addmm" if biased else "aten.mm"]
            if not biased:
                assert_same_bits(other(prompt, logits_to_keep=1).logits, want)


def test_output_layer_can_be_quantized_later(tmp_path):
    """What is done for its speed is no reason to leave it."""
    save_float("qwen3", tmp_path)
    model = load(tmp_path, quantization_config=W4A8Config())
    w4a8.quantize_(model, skip="re:.*gate", default_skip=False)
    assert isinstance(model.lm_head, W4A8Linear)


def test_compiled_decoding(tmp_path):
    """transformers compiles decoding with a static cache; whole graphs, through the operators."""
    save_float("qwen3", tmp_path)
    model = load(tmp_path, quantization_config=W4A8Config())
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["cache_implementation"] = "static"
    plain = model.generate(TOKENS, **options)
    compiling = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(model.generate(TOKENS, compile_config=compiling, **options), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_nan_names_the_module(tmp_path):
    def spoil(model):
        model.model.layers[1].mlp.experts.gate_up_proj[3, 5, 7] = float("nan")

    save_float("qwen3", tmp_path, change=spoil)
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.experts: w13 of expert 3: .*NaN"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4A8Config())


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"group_size": 48}, ValueError, "group_size is 48"),
        ({"group_size": 32.0}, TypeError, "group_size is 32.0"),
        ({"scale_dtype": "float16"}, ValueError, "scale_dtype is float16, expected torch.float32"),
        ({"skip": len}, TypeError, "skip is a function"),
        ({"skip": ["re:("]}, ValueError, "regular expression"),
        ({"default_skip": None}, TypeError, "default_skip is None, expected True or False"),
        ({"bits": "4"}, TypeError, "bits is .4., expected a number"),
        ({"nbits": 4}, TypeError, "nbits"),
        ({"symmetric": 0}, TypeError, "symmetric is 0, expected True or False"),
        ({"values": "fp8"}, ValueError, "values is 'fp8'"),
        ({"values": "e2m1", "symmetric": False}, ValueError, "expected True for values = 'e2m1'"),
        ({"format": "packed", "version": 2}, ValueError, "version 2"),
        ({"quant_method": "gptq"}, ValueError, "gptq"),
    ],
    ids=str,
)
def test_bad_options(options, error, match):
    with pytest.raises(error, match=match):
        W4A8Config(**options)


def damaged(directory, change):
    """The tensors of a packed directory, changed and written back."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(directory / "model.safetensors")
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    change(tensors)
    safetensors.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def swap(tensors):
    tensors["model.layers.0.self_attn.q_proj.packed"] = tensors["model.layers.0.self_attn.k_proj.packed"][:64].clone()


def other_shape(tensors):
    linear = torch.nn.Linear(32, 64, bias=False)
    tensors["model.layers.0.self_attn.q_proj.packed"] = W4A8Linear.from_float(linear, 32).packed


def extra_bias(tensors):
    tensors["model.layers.0.self_attn.q_proj.packed"] = W4A8Linear.from_float(torch.nn.Linear(64, 64), 32).packed


def extra_bias_of_experts(tensors):
    experts = W4A8Experts.from_float(torch.randn(6, 64, 64), torch.randn(6, 64, 32), w2_bias=torch.randn(6, 64))
    tensors["model.layers.0.mlp.experts.w2_packed"] = experts.w2_packed


def no_w2(tensors):
    del tensors["model.layers.0.mlp.experts.w2_packed"]


def fewer_experts(tensors):
    tensors["model.layers.0.mlp.experts.w2_packed"] = tensors["model.layers.0.mlp.experts.w2_packed"][:4].clone()


def nothing_packed(tensors):
    for key in [key for key in tensors if key.endswith("packed")]:
        del tensors[key]


DAMAGED = [
    (swap, r"q_proj\.packed: .*64 bytes"),
    (other_shape, r"q_proj: packed: \[n, k\] is \[64, 32\], expected \[64, 64\]"),
    (no_w2, r"layers\.0\.mlp\.experts\.w2_packed' is missing"),
    (fewer_experts, r"w13_packed is of 6 experts, but 4 are expected"),
    (nothing_packed, "no packed tensors"),
    (extra_bias, r"q_proj: packed: bias is True, expected False"),
    (extra_bias_of_experts, r"layers\.0\.mlp\.experts: w2_packed: bias is True, expected False"),
]


@pytest.mark.parametrize("name, part", [("Qwen2", "self_attn.q_proj"), ("gpt-oss", "mlp.experts")])
def test_packed_without_a_bias(name, part, tmp_path):
    """That the model has."""
    save_float(name, tmp_path / "float")
    load(tmp_path / "float", quantization_config=W4A8Config()).save_pretrained(tmp_path / "packed")

    def change(tensors):
        if name == "Qwen2":
            packed = W4A8Linear.from_float(torch.nn.Linear(64, 64, bias=False), 32).packed
            tensors["model.layers.0.self_attn.q_proj.packed"] = packed
        else:
            experts = W4A8Experts.from_float(torch.randn(6, 64, 64), torch.randn(6, 64, 32), 32)
            tensors["model.layers.0.mlp.experts.w13_packed"] = experts.w13_packed

    damaged(tmp_path / "packed", change)
    with pytest.raises(ValueError, match=rf"layers\.0\.{part}: \w*packed: bias is False, expected True"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_calls_of_other_versions():
    """transformers 5.19 gives the conversions alone."""
    quantizer = transformers.quantizers.AutoHfQuantizer.from_config(W4A8Config())
    assert quantizer.update_weight_conversions([]) == quantizer.update_weight_conversions([], None) == []


@pytest.mark.parametrize(
    "before, match",
    [
        ("import transformers; transformers.__version__ = '4.57.1'", "needs transformers 5, this is 4.57.1"),
        ("import sys; sys.modules['transformers'] = None", "needs transformers 5"),
    ],
)
def test_old_and_missing_transformers(before, match):
    """Importing says what is needed."""
    code = f"{before}; import w4a8.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert match in done.stderr

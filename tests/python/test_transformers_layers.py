"""What models of transformers, and PEFT, do with layers: reading weights, tying, resizing, LoRA."""

import copy
import json
import pickle
import re
import subprocess
import sys

import pytest
import torch
from common import assert_same_bits
from format_checkpoints import FORMATS
from test_transformers import TOKENS

import w4a8
from w4a8.nn import W4A8Linear
from w4a8.quantization.skip import NOT_LOADED

transformers = pytest.importorskip("transformers", minversion="5.0")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402

T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
NLLB = {
    **{f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads", "sparse_step")},
    "vocab_size": 64,
    "d_model": 64,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_experts": 2,
    "pad_token_id": 1,
    "max_position_embeddings": 64,
}
LLAMA = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
RWKV = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "rescale_every": 1, "tie_word_embeddings": False}
XLNET = {"vocab_size": 64, "d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 96}

# Models that read .weight of layers: class, sizes, the last parts of the names of those that are left alone for it.
READERS = {
    "T5": ("T5ForConditionalGeneration", T5, {"wo"}),
    "UMT5": ("UMT5ForConditionalGeneration", T5, {"wo"}),
    "Switch": ("SwitchTransformersForConditionalGeneration", {**T5, "num_experts": 2}, {"wo"}),
    "NLLB-MoE": ("NllbMoeForConditionalGeneration", NLLB, {"fc2"}),
    "RWKV": ("RwkvForCausalLM", RWKV, {"attention.output", "feed_forward.value"}),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1}, {"dt_proj"}),
}
pytestmark = pytest.mark.usefixtures("no_gradients")


def make(name, sizes, **more):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**sizes, **more)).eval()


def save(directory, name, sizes, **more):
    model = make(name, sizes, **more)
    model.save_pretrained(directory)
    return model


def logits(model):
    inputs = {"input_ids": TOKENS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = TOKENS
    return model(**inputs).logits


@pytest.mark.parametrize("name", READERS)
def test_layers_whose_weight_is_read(name, tmp_path):
    """They stay floats, said with who reads them; the others are packed; loaded, saved and loaded again alike."""
    cls, sizes, left = READERS[name]
    model = save(tmp_path / "float", cls, sizes)
    report = w4a8.quantize_(model)
    names = [name for name, reason in report.skipped.items() if reason.endswith(" reads its weight or bias itself")]
    assert names and all(any(name.endswith(f".{end}") for end in left) for name in names)
    assert len(report.replaced) > len(names)
    want = logits(model)
    loaded = getattr(transformers, cls).from_pretrained(tmp_path / "float", quantization_config=W4A8Config())
    assert loaded.hf_quantizer.report == report
    loaded.save_pretrained(tmp_path / "packed")  # before RWKV's forward changes weights
    assert_same_bits(logits(loaded), want)
    packed = getattr(transformers, cls).from_pretrained(tmp_path / "packed")
    assert_same_bits(logits(packed), want)
    for layer in (*loaded.modules(), *packed.modules()):
        assert not {"weight", "bias"} & set(vars(layer))  # what transformers' initialization was shown
    if name not in ("RWKV", "Mamba"):
        loaded.resize_token_embeddings(70)
        assert logits(loaded).shape[-1] == 70


def test_weights_that_are_read_for_a_setting_only():
    """Bloom's, cut up to add as its training did."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "n_layer": 1, "n_head": 4}
    for tp, left in ((1, False), (2, True)):
        report = w4a8.quantize_(make("BloomModel", sizes, pretraining_tp=tp, slow_but_exact=True))
        assert ("h.0.mlp.dense_4h_to_h" in report.skipped) == ("h.0.self_attention.dense" in report.skipped) == left


def save_gptq(directory, model, name):
    """A checkpoint whose layer of this name is quantized."""
    form, layer, state = FORMATS["GPTQ"], model.get_submodule(name), model.state_dict()
    tensors = form.random(layer.out_features, layer.in_features, 32)
    del state[f"{name}.weight"]
    state.update({f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()})
    save_file(
        {key: tensor.contiguous().clone() for key, tensor in state.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    config = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    config["quantization_config"] = form.quantization_config(32)
    (directory / "config.json").write_text(json.dumps(config))


def test_checkpoint_with_a_quantized_layer_whose_weight_is_read(tmp_path):
    """Of other tools, or of a version of this that did not look: refused with the name, instead of failing later."""
    model = make("T5ForConditionalGeneration", T5)
    name = "encoder.block.1.layer.1.DenseReluDense.wo"
    error = "T5DenseActDense reads its weight or bias itself"
    save_gptq(tmp_path, model, name)
    with pytest.raises(ValueError, match=f"{re.escape(name)} is quantized, but {error}"):
        type(model).from_pretrained(tmp_path, quantization_config=W4A8Config())
    model.set_submodule(name, W4A8Linear.from_float(model.get_submodule(name)))
    model.config.quantization_config = W4A8Config()
    model.save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match=f"{re.escape(name)} is quantized, but {error}"):
        type(model).from_pretrained(tmp_path / "packed")


def test_checkpoint_with_a_quantized_output_layer_that_says_tied(tmp_path):
    """The embeddings are floats, so nothing is tied."""
    model = make("LlamaForCausalLM", LLAMA)
    model.config.tie_word_embeddings = True
    save_gptq(tmp_path, model, "lm_head")
    model = type(model).from_pretrained(tmp_path, quantization_config=W4A8Config())
    assert isinstance(model.lm_head, W4A8Linear) and not dict(model.lm_head.named_parameters())
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("default_skip", [True, False])
def test_resized_vocabulary(default_skip, tmp_path):
    """A packed output layer cannot grow, which is said."""
    save(tmp_path, "LlamaForCausalLM", LLAMA)
    load = transformers.LlamaForCausalLM.from_pretrained
    model = load(tmp_path, quantization_config=W4A8Config(default_skip=default_skip))
    if default_skip:
        model.resize_token_embeddings(70)
        assert logits(model).shape[-1] == 70
        return
    with pytest.raises(RuntimeError, match="lm_head is packed, so it cannot be resized"):
        model.resize_token_embeddings(70)
    assert model.resize_token_embeddings() is model.get_input_embeddings()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("cls", "sizes", "head"),
    [
        ("LlamaForCausalLM", LLAMA, "lm_head"),
        ("RwkvForCausalLM", RWKV, "head"),
        ("XLNetLMHeadModel", {**XLNET, "tie_word_embeddings": False}, "lm_loss"),
    ],
)
def test_resized_vocabulary_of_a_quantized_model(cls, sizes, head, whole):
    """As of a loaded one, also of a part of the module that was quantized, of copies, and until it is a float again."""
    model = make(cls, sizes)
    linear, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    report = w4a8.quantize_(torch.nn.ModuleList([model]) if whole else model, default_skip=False)
    assert (f"0.{head}" if whole else head) in report.replaced
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        want = each.get_input_embeddings(), each.get_output_embeddings()
        for arguments in ((70,), (32, 8), ()):
            options = {} if arguments else {"pad_to_multiple_of": 128}
            message = rf"^{head} is packed, so it cannot be resized: resize the model before it is quantized, or leave "
            with pytest.raises(RuntimeError, match=message + "the layer a float"):
                each.resize_token_embeddings(*arguments, **options)
        assert (each.get_input_embeddings(), each.get_output_embeddings()) == want
        assert each.resize_token_embeddings() is want[0] and each.config.vocab_size == 64
    assert model.get_input_embeddings() is embedding
    model.set_output_embeddings(linear)
    model.resize_token_embeddings(70)
    assert model.get_output_embeddings().weight.shape[0] == model.get_input_embeddings().weight.shape[0] == 70


def test_packed_output_layer_of_a_config_that_says_tied(tmp_path):
    """The two differ in the file, so they are not tied; a packed output layer has nothing to tie."""
    model = make("LlamaForCausalLM", LLAMA)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "float")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "float")
    assert "lm_head" in w4a8.quantize_(model, default_skip=False).replaced
    model.config.quantization_config = W4A8Config(default_skip=False)
    model.save_pretrained(tmp_path / "packed")
    packed = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "packed")
    assert isinstance(packed.lm_head, W4A8Linear)
    assert_same_bits(logits(packed), logits(model))
    packed.tie_weights()
    assert not dict(packed.lm_head.named_parameters())
    assert_same_bits(logits(packed), logits(model))


@pytest.mark.parametrize(
    ("cls", "sizes", "head"),
    [
        ("RwkvForCausalLM", RWKV, "head"),
        ("XLNetLMHeadModel", XLNET, "lm_loss"),
        ("LlamaForCausalLM", LLAMA, "lm_head"),
    ],
)
def test_output_layers_of_any_name(cls, sizes, head):
    model = make(cls, {**sizes, "tie_word_embeddings": False})
    assert w4a8.quantize_(model).skipped[head] == "skip"
    assert head in w4a8.quantize_(model, default_skip=False).replaced


def test_head_that_was_not_loaded(tmp_path):
    """Its weights were made up: whoever trains it, or finds out, needs floats."""
    save(tmp_path / "float", "LlamaForCausalLM", LLAMA)
    load = transformers.LlamaForSequenceClassification.from_pretrained
    whole = load(tmp_path / "float")
    report = w4a8.quantize_(whole)
    assert report.skipped["score"] == NOT_LOADED
    model = load(tmp_path / "float", quantization_config=W4A8Config())
    assert model.hf_quantizer.report == report
    assert type(model.score) is torch.nn.Linear and model.score.weight.isfinite().all()
    whole = load(tmp_path / "float")
    whole.save_pretrained(tmp_path / "trained")
    model = load(tmp_path / "trained", quantization_config=W4A8Config())
    assert isinstance(model.score, W4A8Linear) and isinstance(model.model.layers[1].mlp.up_proj, W4A8Linear)


def test_dtype_that_the_operators_do_not_take(tmp_path):
    save(tmp_path, "LlamaForCausalLM", LLAMA)
    with pytest.raises(ValueError, match=r"dtype is torch\.float64, expected float32, bfloat16 or float16"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, quantization_config=W4A8Config())


def test_loading_lets_peft_know_packed_layers(tmp_path):
    """In a process that imports nothing of this package but W4A8Config."""
    pytest.importorskip("peft")
    save(tmp_path / "float", "LlamaForCausalLM", LLAMA)
    program = """
import sys
from transformers import LlamaForCausalLM
from w4a8.integrations.transformers import W4A8Config

model = LlamaForCausalLM.from_pretrained(sys.argv[1], quantization_config=W4A8Config())
import peft

try:
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj"]))
except ValueError as error:
    print(error)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "float")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("'down_proj' of modules_to_save is for model.layers.0.mlp.down_proj, whose weights")


@pytest.mark.parametrize("while_loading", [False, True])
def test_lora(while_loading, tmp_path):
    """An adapter beside packed layers: its part is added to what the layer gives; what reads weights is refused."""
    peft = pytest.importorskip("peft")
    import w4a8.integrations.peft

    targets = ["q_proj", "down_proj", "lm_head"]  # the last stays a float
    config = {"target_modules": targets, "init_lora_weights": False}
    float_model = save(tmp_path / "float", "LlamaForCausalLM", LLAMA)
    peft.get_peft_model(float_model, peft.LoraConfig(**config)).save_pretrained(tmp_path / "adapter")
    options = {"quantization_config": W4A8Config()} if while_loading else {}
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "float", **options)
    if not while_loading:
        w4a8.quantize_(model)
    want = logits(model)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    layer = adapted.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    assert isinstance(layer, w4a8.integrations.peft.LoraPackedLinear)
    x = torch.randn(3, 64)
    a, b = (getattr(layer, f"lora_{which}")["default"] for which in "AB")
    assert_same_bits(layer(x), layer.base_layer(x) + b(a(x)) * layer.scaling["default"])
    assert not torch.equal(logits(adapted), want)
    with adapted.disable_adapter():
        assert_same_bits(logits(adapted), want)
    with pytest.raises(ValueError, match="adapters cannot be merged into packed weights"):
        adapted.merge_and_unload()
    model = adapted.unload()
    assert_same_bits(logits(model), want)
    with pytest.raises(ValueError, match="an option of LoraConfig reads the weight of a layer, which is packed"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], use_dora=True))


QWEN3_MOE = {
    **LLAMA, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = r"model\.layers\.0\.mlp\.experts, whose weights are packed"


def write_adapter(directory, name, sizes, more=(), **options):
    """Of PEFT, with further tensors; and the float model."""
    peft = pytest.importorskip("peft")
    model = make(name, sizes)
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(**{"target_modules": ["q_proj"], "init_lora_weights": False, **options})
    )
    adapted.save_pretrained(directory)
    if more:
        file = directory / "adapter_model.safetensors"
        save_file({**load_file(file), **dict(more)}, file)
    return model


def loaders(model, directory):
    """By PEFT, and by transformers."""
    import peft

    import w4a8.integrations.peft  # noqa: F401

    return (
        lambda: peft.PeftModel.from_pretrained(copy.deepcopy(model), directory),
        lambda: copy.deepcopy(model).load_adapter(directory),
    )


def test_lora_on_packed_experts(tmp_path):
    """PEFT drops pairs for parameters that are not there: refused by name."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = write_adapter(tmp_path, "Qwen3MoeForCausalLM", QWEN3_MOE, target_parameters=parameters)
    w4a8.quantize_(model)
    for load in loaders(model, tmp_path):
        with pytest.raises(ValueError, match=rf"'mlp\.experts\.\w+' of target_parameters is for {EXPERTS}"):
            load()


def test_lora_on_experts_by_the_names_of_transformers_4(tmp_path):
    shapes = {"gate_proj": (64, 64), "up_proj": (64, 64), "down_proj": (64, 64)}  # in, out
    pairs = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}.lora_{which}.weight": tensor
        for layer in range(2)
        for expert in range(4)
        for name, (columns, rows) in shapes.items()
        for which, tensor in (("A", torch.randn(8, columns)), ("B", torch.randn(rows, 8)))
    }
    model = write_adapter(tmp_path, "Qwen3MoeForCausalLM", QWEN3_MOE, pairs)
    settings = tmp_path / "adapter_config.json"
    targets = {"target_modules": ["q_proj", *shapes]}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | targets))
    w4a8.quantize_(model)
    for load in loaders(model, tmp_path):
        with pytest.raises(ValueError, match=rf"tensor '\S+experts\S+lora_A\S+' of the adapter is for \S*{EXPERTS}"):
            load()


def test_an_adapter_with_a_tensor_too_many(tmp_path):
    other = {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(8, 64)}
    model = write_adapter(tmp_path, "LlamaForCausalLM", LLAMA, other)
    w4a8.quantize_(model)
    for load in loaders(model, tmp_path):
        with pytest.raises(ValueError, match=r"no place for tensor '\S*layers\.7\.self_attn\.q_proj\.lora_A\S*'"):
            load()


def test_modules_of_an_adapter(tmp_path):
    """In place of floats they are used, in place of packed layers refused."""
    model = write_adapter(tmp_path, "LlamaForCausalLM", LLAMA, modules_to_save=["lm_head"])
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        head = file.get_tensor("base_model.model.lm_head.weight")
    packed = copy.deepcopy(model)
    w4a8.quantize_(model)
    by_peft, _ = loaders(model, tmp_path)
    assert_same_bits(by_peft().base_model.model.lm_head.modules_to_save["default"].weight, head)
    w4a8.quantize_(packed, default_skip=False)
    for load in loaders(packed, tmp_path):
        with pytest.raises(ValueError, match="'lm_head' of modules_to_save is for lm_head, whose weights are packed"):
            load()


def test_modules_of_an_adapter_of_packed_embeddings(tmp_path):
    gguf_models = pytest.importorskip("gguf_models", exc_type=ImportError)
    peft = pytest.importorskip("peft")
    import w4a8.integrations.peft  # noqa: F401

    gguf_models.TinyModel("llama, tied").write(tmp_path)
    for name, path in (("lm_head", "lm_head"), ("embed_tokens", "model.embed_tokens"), ("mlp", "model.layers.0.mlp")):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
        with pytest.raises(ValueError, match=f"'{name}' of modules_to_save is for {path}, whose weights are packed"):
            peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[name]))

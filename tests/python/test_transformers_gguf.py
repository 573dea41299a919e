"""`from_pretrained(gguf_file=)`: every architecture with blocks of every type."""

import math

import available  # noqa: F401
import gguf_files
import gguf_models
import multiplied_out
import numpy as np
import pytest
import safetensors
import test_transformers
import torch
from common import assert_same_bits
from gguf_models import HEAD, HIDDEN, INTER, MODELS, TinyModel
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

import w4a8
from w4a8.checkpoint import gguf_linear
from w4a8.core.matrix import Matrix, unpack_codes
from w4a8.integrations.transformers import W4A8Config
from w4a8.nn.embedding import PackedEmbedding
from w4a8.nn.packed import PackedLinear, PackedModule

# Those whose tensors transformers' own loader does not know.
OURS = {"mixtral", "gpt-oss", "olmoe", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4moe"}
THEIRS = sorted(set(MODELS) - OURS)
pytestmark = pytest.mark.usefixtures("no_gradients")


def load(folder, **options):
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    return test_transformers.load(folder, gguf_file="model.gguf", **options)


def unpacked(packed):
    header = w4a8.read_header(packed)
    return Matrix(kind=header["values"], **unpack_codes(packed, header["group"], header["k"], header["n"]))


def packed_modules(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}


def assert_same_weights(model, floats):
    """Every weight of a model is that of the float one: nothing is rounded again."""
    packed = packed_modules(model)
    for name, module in packed.items():
        theirs = floats.get_submodule(name)
        if isinstance(module, (PackedEmbedding, PackedLinear)):
            if isinstance(module, PackedEmbedding):
                ids = torch.arange(len(theirs.weight))
                assert torch.equal(module(ids), theirs(ids)), name
                continue
            mine = unpacked(module.packed)
            assert torch.equal(mine.floats(), theirs.weight), name
            assert (mine.bias is None) == (theirs.bias is None), name
            assert mine.bias is None or torch.equal(mine.bias, theirs.bias), name
            continue
        for expert in range(module.num_experts):
            w13, w2 = unpacked(module.w13_packed[expert]), unpacked(module.w2_packed[expert])
            gate_up, down = theirs.gate_up_proj[expert], theirs.down_proj[expert]
            if hasattr(theirs, "gate_up_proj_bias"):  # gpt-oss
                gate_up, down = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1).T, down.T
                bias = theirs.gate_up_proj_bias[expert]
                assert torch.equal(w13.bias, torch.cat((bias[::2], bias[1::2])))
                assert torch.equal(w2.bias, theirs.down_proj_bias[expert])
            assert torch.equal(w13.floats(), gate_up), name
            assert torch.equal(w2.floats(), down), name
    left = dict(model.named_parameters())
    assert set(left) == {key for key, _ in floats.named_parameters() if key.rpartition(".")[0] not in packed}
    for key, parameter in left.items():
        assert torch.equal(parameter, floats.get_parameter(key)), key
    for key, buffer in floats.named_buffers():
        assert key.rpartition(".")[0] in packed or torch.equal(buffer, model.get_buffer(key)), key


# Short: the later a position, the likelier an input before it is on the other side of a tie.
TOKENS = torch.randint(3, gguf_models.VOCAB, (16, 5), generator=torch.Generator().manual_seed(1))


def logprobs(model, int8=()):
    """[16, 5, vocabulary]; int8 are the matrices whose inputs are rounded, 32 values with one scale."""
    with multiplied_out.Int8Inputs(int8, 32) as mode:
        logits = model(TOKENS, use_cache=False).logits
    assert len(mode.seen) == len(mode.storages), "a quantized matrix was not used as the reference expects"
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    """Weights exactly; logits beside an emulation of int8 inputs, as in test_transformers_tools.py; saved packed.

    Where no input is on the other side of a tie, sums of float32 in another order are all that is left: some 2^-22 of
    the logits, whose noise is some 2^-6 of them.
    """
    tiny = TinyModel(name)
    tiny.write(tmp_path)
    model = load(tmp_path)
    assert type(model) is type(tiny.model)
    packed = packed_modules(model)
    linear = {key for key, module in tiny.model.named_modules() if type(module) is torch.nn.Linear}
    experts = {key for key, module in tiny.model.named_modules() if key.endswith(".experts")}
    floats = {key for key in linear if key.endswith(("shared_expert_gate", "kv_b_proj"))}
    tied = tiny.model.config.tie_word_embeddings
    assert set(packed) == (linear | experts) - floats | {"model.embed_tokens"}
    assert_same_weights(model, tiny.model)
    assert not tied or model.lm_head.packed is model.model.embed_tokens.rows_packed
    report = model.hf_quantizer.report
    assert set(report.replaced) == set(packed)
    assert not any("embed" in name for name in report.skipped)

    multiplied = {key for key in packed if tied or "embed" not in key}
    int8 = [p for key, p in tiny.model.named_parameters() if key.rpartition(".")[0] in multiplied and "bias" not in key]
    found, exact, rounded = logprobs(model), logprobs(tiny.model), logprobs(tiny.model, int8)
    multiplied_out.assert_near(found, exact, rounded, 0.0005)

    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation="eager")
    assert set(packed_modules(again)) == set(packed)
    assert not tied or again.lm_head.packed is again.model.embed_tokens.rows_packed
    assert_same_bits(logprobs(again), found)


@pytest.mark.parametrize("name", THEIRS)
def test_beside_transformers_own_loader(name, tmp_path):
    """Which dequantizes all; asked for, it still does."""
    TinyModel(name).write(tmp_path)
    floats = load(tmp_path, quantization_config=GgufConfig(dequantize=True))
    assert not packed_modules(floats)
    model = load(tmp_path)
    assert packed_modules(model)
    assert_same_weights(model, floats)


def test_own_dtype_and_generate(tmp_path):
    """What is float gets the dtype that is asked for; text comes out."""
    tiny = TinyModel("gemma3")
    tiny.write(tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ids = torch.arange(gguf_models.VOCAB)
    assert torch.equal(model.model.embed_tokens(ids), tiny.model.bfloat16().model.embed_tokens(ids))
    assert torch.equal(model.model.norm.weight, tiny.model.model.norm.weight.bfloat16())
    assert model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, min_new_tokens=4).shape == (1, 7)
    default, _ = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", output_loading_info=True)
    assert {parameter.dtype for parameter in default.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["llama, tied", "gemma3"])
def test_tied_embeddings_that_are_floats(name, tmp_path):
    """One float matrix for both, as in transformers; saved, too."""
    tiny = TinyModel(name)
    floats = gguf_files.meaning(*tiny.tensors["token_embd.weight"])
    tiny.tensors["token_embd.weight"] = floats
    tiny.write(tmp_path)
    model = load(tmp_path)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    for each in (model, again):
        assert each.lm_head.weight is each.model.embed_tokens.weight
        assert torch.equal(each.lm_head.weight, floats)


def test_tied_embeddings_saved(tmp_path):
    """Once in the file, under the name of the embedding; another model cannot take them."""
    TinyModel("llama, tied").write(tmp_path)
    model = load(tmp_path)
    model.save_pretrained(tmp_path / "packed")
    model.tie_weights()
    assert model.lm_head.packed is model.model.embed_tokens.rows_packed
    with safetensors.safe_open(tmp_path / "packed" / "model.safetensors", "pt") as file:
        assert {key for key in file.keys() if "embed" in key or "head" in key} == {"model.embed_tokens.rows_packed"}  # noqa: SIM118
    config = AutoConfig.from_pretrained(tmp_path / "packed")
    config.vocab_size += 16
    with pytest.raises(ValueError, match=r"model.embed_tokens: rows_packed: \[n, k\] is \[96, 256\], expected \[112, "):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed", config=config)
    config.vocab_size, config.tie_word_embeddings = gguf_models.VOCAB, False
    with pytest.raises(ValueError, match=r"lm_head.weight is not in the checkpoint"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed", config=config)


def test_in_pieces(tmp_path, monkeypatch):
    """Large matrices are unpacked some rows at a time: the same bytes, and the same floats."""
    tiny = TinyModel("llama, tied")
    tiny.write(tmp_path)
    whole = load(tmp_path).state_dict()
    monkeypatch.setattr(gguf_linear, "AT_ONCE", 7 * HIDDEN)
    pieces = load(tmp_path).state_dict()
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[key], pieces[key]) for key in whole)


def test_split_files(tmp_path):
    """output.weight may be in a file that the config is not read from."""
    tiny = TinyModel("llama")
    tiny.write(tmp_path, split_max_tensors=5)
    first = sorted(path.name for path in tmp_path.iterdir())[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=first)
    assert not model.config.tie_word_embeddings
    assert_same_weights(model, tiny.model)


def test_floats_in_the_file(tmp_path):
    """Of any type, in any matrix: they stay floats, rows of q and k put back, experts joined."""
    tiny = TinyModel("mixtral")
    for name, tensor in tiny.tensors.items():
        stays = ("blk.0.attn_q", "blk.0.attn_v", "blk.1.ffn_up_exps")
        if not isinstance(tensor, torch.Tensor) and name.startswith(stays):
            # Of blocks that float16 holds: q times a power of two.
            values = torch.from_numpy(np.random.default_rng(0).integers(-8, 8, gguf_files.meaning(*tensor).shape))
            tiny.tensors[name] = (values / 128).half()
    down, gate = (gguf_files.meaning(*tiny.tensors[f"blk.1.ffn_{each}_exps.weight"]) for each in ("down", "gate"))
    tiny.write(tmp_path)
    model = load(tmp_path)
    left = {key.rpartition(".")[0] for key, parameter in model.named_parameters() if parameter.dim() > 1}
    floats = {*(f"model.layers.{i}.mlp.gate" for i in (0, 1)), "model.layers.1.mlp.experts"}
    assert left == floats | {f"model.layers.0.self_attn.{each}_proj" for each in "qv"}
    q, v = (model.get_parameter(f"model.layers.0.self_attn.{each}_proj.weight") for each in "qv")
    assert torch.equal(gguf_models.turned(q, 4).half(), tiny.tensors["blk.0.attn_q.weight"])
    assert torch.equal(v.half(), tiny.tensors["blk.0.attn_v.weight"])
    experts = model.model.layers[1].mlp.experts
    assert torch.equal(experts.gate_up_proj[:, :INTER], gate) and torch.equal(experts.down_proj, down)
    assert torch.equal(experts.gate_up_proj[:, INTER:].half(), tiny.tensors["blk.1.ffn_up_exps.weight"])
    assert model.hf_quantizer.report.skipped["model.layers.0.self_attn.q_proj"] == "it is not quantized in the file"


def test_fused_gate_and_up(tmp_path):
    """The form of llama.cpp's --fuse-gate-up-exps."""
    tiny = TinyModel("qwen3moe")
    for layer in range(2):
        (kind, gate), (_, up) = (tiny.tensors.pop(f"blk.{layer}.ffn_{each}_exps.weight") for each in ("gate", "up"))
        tiny.tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = kind, np.concatenate((gate, up), 1)
    tiny.write(tmp_path)
    assert_same_weights(load(tmp_path), tiny.model)


def test_the_scale_of_nvfp4(tmp_path):
    """One number for a matrix; input_scale is what activations are not quantized with here."""
    tiny = TinyModel("qwen3")
    name = "blk.1.ffn_up"
    found = gguf_files.random_blocks("NVFP4", (INTER, HIDDEN), np.random.default_rng(0))
    tiny.tensors |= {f"{name}.weight": ("NVFP4", found), f"{name}.scale": torch.tensor([0.0003])}
    tiny.tensors |= {f"{name}.input_scale": torch.tensor([0.5])}
    tiny.write(tmp_path)
    mine = unpacked(load(tmp_path).model.layers[1].mlp.up_proj.packed).floats()
    torch.testing.assert_close(mine, gguf_files.meaning("NVFP4", found) * 0.0003, rtol=2**-22, atol=0)


@pytest.mark.parametrize("asked, got", [(None, 32), (32, 32), (-1, -1)])
def test_activation_group(asked, got, tmp_path):
    TinyModel("qwen3moe").write(tmp_path)
    model = load(tmp_path, quantization_config=W4A8Config(activation_group=asked))
    for name, module in packed_modules(model).items():
        for packed in () if "embed" in name else module.buffers():  # which nothing multiplies by
            assert w4a8.read_header(packed if packed.dim() == 1 else packed[0])["activation_group"] == got
    assert model.config.quantization_config.activation_group == asked


def test_an_activation_group_that_does_not_fit(tmp_path):
    TinyModel("qwen3").write(tmp_path)
    with pytest.raises(ValueError, match=r"0.self_attn.q_proj: activation_group is 64, expected .* that divides"):
        load(tmp_path, quantization_config=W4A8Config(activation_group=64))


# ---- configs ----


def config_of(folder):
    return AutoConfig.from_pretrained(folder, gguf_file="model.gguf")


@pytest.mark.parametrize("name", MODELS)
def test_configs(name, tmp_path):
    """As the models were made with, and what vLLM's model of DeepSeek-V3 asks for."""
    tiny = TinyModel(name)
    tiny.write(tmp_path)
    mine, theirs = config_of(tmp_path).to_dict(), tiny.model.config.to_dict()
    differ = {key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)}
    assert differ - {"topk_method", "scoring_func"} == {"_name_or_path", "architectures"}
    if name == "deepseek-v3":
        assert (mine["topk_method"], mine["scoring_func"]) == ("noaux_tc", "sigmoid")


@pytest.mark.parametrize(
    "name, changes, field, expected",
    [
        ("qwen3moe", {"rope.scaling.factor": 4.0}, "rope_parameters", ("linear", 4.0)),
        ("qwen3moe", {"rope.scale_linear": 4.0}, "rope_parameters", ("linear", 4.0)),
        ("qwen3moe", {"rope.scaling.type": "linear"}, "rope_parameters", ("default", None)),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping", 30.0),
        ("gemma3", {"attention.sliding_window": None}, "layer_types", [False] * 6),
        ("gemma3", {"attention.sliding_window_pattern": 3}, "layer_types", [True, True, False] * 2),
        ("gemma3", {"attention.sliding_window_pattern": 0}, "layer_types", [True] * 6),
        ("gemma3", {"attention.sliding_window_pattern": [False, True] * 3}, "layer_types", [False, True] * 3),
    ],
)  # fmt: skip
def test_keys_that_change_what_is_computed(name, changes, field, expected, tmp_path):
    """As llama.cpp reads them (llama-model.cpp, load_hparams)."""
    tiny = TinyModel(name)
    for key, value in changes.items():
        tiny.keys.pop(f"{name}.{key}", None)
        tiny.keys |= {} if value is None else {f"{name}.{key}": value}
    tiny.write(tmp_path)
    found = getattr(config_of(tmp_path), field)
    if field == "rope_parameters":
        found = found["rope_type"], found.get("factor")
    if field == "layer_types":
        found = [each == "sliding_attention" for each in found]
    assert found == expected


def test_attention_factor_of_yarn(tmp_path):
    tiny = TinyModel("gpt-oss")
    tiny.keys["gpt-oss.rope.scaling.attn_factor"] = 2.0
    tiny.write(tmp_path)
    rope = config_of(tmp_path).rope_parameters
    assert rope["attention_factor"] == pytest.approx(2 * (0.1 * math.log(rope["factor"]) + 1), rel=1e-12)


def test_ends_of_a_text(tmp_path):
    """The end of a turn is one, as in llama.cpp."""
    tiny = TinyModel("gemma3")
    tiny.keys |= {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    tiny.write(tmp_path)
    assert config_of(tmp_path).eos_token_id == [2, 7]


def test_vocabulary_of_the_tokens(tmp_path):
    tiny = TinyModel("qwen3moe")
    del tiny.keys["qwen3moe.vocab_size"]
    tiny.keys |= {"tokenizer.ggml.tokens": [str(i) for i in range(gguf_models.VOCAB)]}
    tiny.keys |= {"qwen3moe.expert_weights_norm": False}
    tiny.write(tmp_path)
    config = config_of(tmp_path)
    assert config.vocab_size == gguf_models.VOCAB and config.norm_topk_prob is False


def llama3_factors():
    """What llama.cpp's conversion/llama.py writes into rope_freqs."""
    factor, original, found = 8.0, 8192, []
    for i in range(0, HEAD, 2):
        length = 2 * math.pi * 5000.0 ** (i / HEAD)
        smooth = (original / length - 1) / (4 - 1)
        near = length < original / 4
        found.append(1.0 if near else factor if length > original else 1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found)


def test_rope_of_llama_3(tmp_path):
    """Frequencies are divided by the factors in the file; saved, they still are."""
    tiny = TinyModel("llama")
    factors = llama3_factors()
    assert factors.min() == 1 and factors.max() > 1
    tiny.tensors["rope_freqs.weight"] = factors
    tiny.write(tmp_path)
    model = load(tmp_path)
    expected = tiny.model.model.rotary_emb.inv_freq / factors
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected, rtol=1e-6, atol=0)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)

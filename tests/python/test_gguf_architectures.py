"""Architectures whose names need no table: every parameter of a model of transformers, from a GGUF file and back, and
from safetensors of int4."""

import re
from functools import partial
from pathlib import Path

import available  # noqa: F401
import gguf_models
import multiplied_out
import pytest
import test_transformers
import torch
from gguf_architectures import (
    HIDDEN,
    INT4,
    LAYERS,
    MODELS,
    NOT_INT4_IN_VLLM,
    STACKED,
    VOCAB,
    Written,
    beside,
    digest_of,
    model_of,
    write,
    write_int4,
    written_by_llama_cpp,
)
from test_transformers_gguf import unpacked

from w4a8.checkpoint.gguf_architectures import NOT_IN_VLLM
from w4a8.integrations.transformers import W4A8Config
from w4a8.nn.embedding import PackedEmbedding
from w4a8.nn.packed import PackedLinear, PackedModule

TOKENS = torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1))
# Short: the later a position, the likelier an input before it is on the other side of a tie.
SHORT = torch.randint(3, VOCAB, (24, 3), generator=torch.Generator().manual_seed(2))
pytestmark = pytest.mark.usefixtures("no_gradients")


def load(folder, **options):
    """Of the file, unless options say otherwise."""
    options = {"gguf_file": "model.gguf", "attn_implementation": "eager", "experts_implementation": "eager"} | options
    return test_transformers.load(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_of_llama_cpp(name):
    found = written_by_llama_cpp(name)
    assert digest_of(Written(model_of(name), found["architecture"]).tensors | beside(name)) == found["digest"]


@pytest.mark.parametrize("name", MODELS)
def test_floats(name, tmp_path):
    """Every parameter exactly, but for logarithms of exponentials; and so the logits, which a wrong config changes."""
    floats = model_of(name)
    write(name, floats, tmp_path)
    model = load(tmp_path)
    expected, found = floats.state_dict(), model.state_dict()
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        if key.endswith("A_log"):
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6)
            found[key].copy_(tensor)
        else:
            assert torch.equal(found[key], tensor), key
    assert torch.equal(model(TOKENS, use_cache=False).logits, floats(TOKENS, use_cache=False).logits)


def test_groups_of_heads(tmp_path):
    """A file has Mamba-2's norms in a row for each group of heads, a model in one row."""
    floats = model_of("nemotron_h_moe", n_groups=2)
    write("nemotron_h_moe", floats, tmp_path, **{"nemotron_h_moe.ssm.group_count": 2})
    assert Written(floats, "nemotron_h_moe").tensors["blk.0.ssm_norm.weight"].shape == (2, 64)
    found = load(tmp_path).state_dict()
    name = "model.layers.0.mixer.norm.weight"
    assert torch.equal(found[name], floats.state_dict()[name])


# Linear layers that stay float: along another axis in the file, or routers, which files have as floats.
LEFT = ("kv_b_proj", "shared_expert_gate", "gate.wg", "router.proj")


def assert_same_weights(name, module, floats):
    if isinstance(module, PackedEmbedding):
        ids = torch.arange(VOCAB)
        assert torch.equal(module(ids), floats(ids)), name
    elif isinstance(module, PackedLinear):
        assert torch.equal(unpacked(module.packed).floats(), floats.weight), name
    else:
        transposed = floats.down_proj.shape[1] != module.hidden_size
        first = floats.gate_up_proj if hasattr(floats, "gate_up_proj") else floats.up_proj
        for packed, expected in ((module.w13_packed, first), (module.w2_packed, floats.down_proj)):
            for one, weight in zip(packed, expected):
                assert torch.equal(unpacked(one).floats(), weight.T if transposed else weight), name


@pytest.mark.parametrize("name", MODELS)
def test_blocks(name, tmp_path):
    """Every linear layer and all experts are packed, with the weights of the file; logits as in the next test."""
    floats = model_of(name)
    write(name, floats, tmp_path, quantized=True)
    assert_packed(load(tmp_path), floats, LEFT)


# Written as floats; experts in one stack, and what is around the convolutions of LFM2, besides.
LEFT_IN_INT4 = (*LEFT, "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection", "lm_head")


@pytest.mark.parametrize("name", INT4)
def test_int4_safetensors(name, tmp_path):
    """A checkpoint of compressed-tensors with the same weights."""
    floats = model_of(name)
    write_int4(floats, tmp_path)
    left = (*LEFT_IN_INT4, *["experts"] * (name in STACKED), *["conv.in_proj", "conv.out_proj"] * ("lfm2" in name))
    assert_packed(load(tmp_path, gguf_file=None, quantization_config=W4A8Config()), floats, left)


def assert_packed(model, floats, may_be_left):
    """The same weights, packed but for names that end so; the logits of the floats but for the int8 of inputs."""
    packed = {key: module for key, module in model.named_modules() if isinstance(module, PackedModule)}
    for key, module in packed.items():
        assert_same_weights(key, module, floats.get_submodule(key))
    linear = {key for key, module in floats.named_modules() if type(module) is torch.nn.Linear}
    experts = {key for key, module in floats.named_modules() if key.endswith(".experts")}
    tied = {key for key in ("lm_head",) if floats.config.tie_word_embeddings}
    left = (linear | experts) - set(packed) - tied
    assert all(key.endswith(may_be_left) or "indexer" in key for key in left), left
    for key, parameter in model.named_parameters():
        if not key.endswith("A_log"):
            assert torch.equal(parameter, floats.get_parameter(key)), key

    int8 = [p for key, p in floats.named_parameters() if key.rpartition(".")[0] in packed and "bias" not in key]
    with multiplied_out.Int8Inputs(int8, 32):
        rounded = floats(SHORT, use_cache=False).logits
    exact, found = floats(SHORT, use_cache=False).logits, model(SHORT, use_cache=False).logits
    noise, off = ((each - rounded).square().mean((1, 2)).sqrt() for each in (exact, found))
    print(f"off by {off.quantile(0.25):.7f}, int8 {noise.median():.5f} of {exact.std():.3f}")
    assert 0 < noise.median() < exact.std() / 4, "the noise hides what is to be seen"
    # Sums of float32 in another order, where no input is on the other side of a tie: in a quarter of the texts or more.
    assert off.quantile(0.25) <= 0.0005 * noise.median()


def joined(whole, parts, dim, tensors):
    """As the script makes them with --fuse-qkv and --fuse-gate-up-exps."""
    for suffix in ("weight", "bias"):
        for layer in range(LAYERS):
            names = [f"blk.{layer}.{part}.{suffix}" for part in parts]
            if names[0] in tensors:
                tensors[f"blk.{layer}.{whole}.{suffix}"] = torch.cat([tensors.pop(name) for name in names], dim)
    return tensors


joined_qkv = partial(joined, "attn_qkv", ("attn_q", "attn_k", "attn_v"), 0)
joined_gate_up = partial(joined, "ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps"), 1)


def old_qwen3next(tensors):
    """As older scripts left in_proj_qkvz: the rows of a head of keys together."""
    for layer in range(LAYERS - 1):
        qkv, gate = (tensors.pop(f"blk.{layer}.attn_{each}.weight") for each in ("qkv", "gate"))
        heads = [part.view(2, -1, HIDDEN) for part in (*qkv.split([256, 256, 512]), gate)]
        tensors[f"blk.{layer}.ssm_in.weight"] = torch.cat(heads, 1).flatten(0, 1)
    return tensors


@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "blocks"])
@pytest.mark.parametrize("name, change", [
    ("granite", joined_qkv), ("glm4", joined_qkv), ("minimax-m2", joined_gate_up), ("lfm2moe", joined_gate_up),
    ("qwen3next", old_qwen3next),
])  # fmt: skip
def test_tensors_joined_otherwise(name, change, quantized, tmp_path):
    """The same model."""
    floats = model_of(name)
    write(name, floats, tmp_path, quantized, change)
    model = load(tmp_path)
    packed = {key: module for key, module in model.named_modules() if isinstance(module, PackedModule)}
    assert bool(packed) == quantized
    for key, module in packed.items():
        assert_same_weights(key, module, floats.get_submodule(key))
    for key, parameter in model.named_parameters():
        assert key.endswith("A_log") or torch.equal(parameter, floats.get_parameter(key)), key


def test_another_number_of_rows(tmp_path):
    def cut(tensors):
        found = joined_qkv(tensors)
        return found | {"blk.1.attn_qkv.weight": found["blk.1.attn_qkv.weight"][:-1]}

    write("granite", model_of("granite"), tmp_path, change=cut)
    with pytest.raises(
        ValueError, match=r"tensor 'blk.1.attn_qkv.weight' has 127 rows, but .*'blk.1.attn_v.weight': 32"
    ):
        load(tmp_path)


@pytest.mark.parametrize("name, tensor, shape", [
    ("qwen35", "blk.0.ssm_alpha.weight", (6, 64)), ("qwen35", "blk.0.attn_qkv.weight", (1022, 64)),
    ("qwen3next", "blk.0.attn_gate.weight", (127, 64)),
])  # fmt: skip
def test_heads_that_do_not_fit(name, tensor, shape, tmp_path):
    write(name, model_of(name), tmp_path, change=lambda tensors: tensors | {tensor: torch.zeros(shape)})
    with pytest.raises(ValueError, match=f"tensors? .*{tensor}.* "):
        load(tmp_path)


def test_one_number_of_all_layers(tmp_path):
    floats = model_of("apertus")
    for layer in floats.model.layers:
        layer.mlp.act_fn.alpha_p.fill_(0.25)
    write("apertus", floats, tmp_path, **{"xielu.alpha_p": 0.25})
    assert torch.equal(load(tmp_path)(TOKENS).logits, floats(TOKENS).logits)


@pytest.mark.parametrize("value", [[0.5, 0.25, 0.5], [0.5, 0.25, 0.5, float("nan")], "0.5", ["a", "b", "c", "d"]])
def test_numbers_that_do_not_fit_the_layers(value, tmp_path):
    write("apertus", model_of("apertus"), tmp_path, **{"xielu.alpha_n": value})
    with pytest.raises(ValueError, match=r"xielu.alpha_n is .*, but a number, or one for each of 4 layers"):
        load(tmp_path)


def test_no_quarter_is_rotated(tmp_path):
    factors = {"rope_freqs.weight": torch.ones(32)}
    write("gemma4", model_of("gemma4"), tmp_path, change=lambda tensors: tensors | factors)
    with pytest.raises(ValueError, match=r"rope_freqs.weight does not rotate a quarter of the heads"):
        load(tmp_path)


def test_the_table_of_the_documents():
    """docs/formats.md, "Architectures": each has a row, and a tick stands where these tests and vLLM's have a case."""
    text = (Path(__file__).parents[2] / "docs/formats.md").read_text().partition("## Architectures")[2]
    found = {}
    for line in text.partition("\n## ")[0].splitlines():
        names, _, *cells = line.strip("|").split(" | ")[:6] if line.startswith("| `") else ("", "")
        found |= {
            name: [cell in ("✓", "✓; g", "in bfloat16", "dense; a") for cell in cells]
            for name in re.findall("`(.+?)`", names)
        }
    gguf_cases = {name.partition(",")[0] for name in MODELS} | {each[0] for each in gguf_models.MODELS.values()}
    int4_cases = {name.partition(",")[0] for name in INT4.keys() - STACKED} - {"mixtral"}
    assert found.keys() == gguf_cases | {"nemotron_h"}
    for name, cells in found.items():
        in_vllm = gguf_cases - NOT_IN_VLLM.keys(), int4_cases - NOT_INT4_IN_VLLM
        assert cells == [name in cases for cases in (gguf_cases, in_vllm[0], int4_cases, in_vllm[1])], name

"""Layers of packed directories that were made of GGUF files, beside the layers of the file: whole and cut for ranks."""

import json
from types import MethodType, SimpleNamespace

import pytest
import torch
import transformers
from gguf_models import EXPERTS, HEAD, HEADS, HIDDEN, INTER, KV_HEADS, VOCAB, TinyModel
from layers import make_layer, rank  # noqa: F401 (a fixture)
from safetensors.torch import load_file, save_file
from test_gguf import ATTENTION, MAPPING, MLP, config_of, linear, products, retyped, rows_of, settings  # noqa: F401
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

import w4a8.integrations.transformers  # noqa: F401 (reads GGUF files)
from w4a8.checkpoint.packed_source import open_packed
from w4a8.core.packer import pack_experts, pack_rows
from w4a8.core.weight import Cut, Floats
from w4a8.integrations.vllm.moe import W4A8MoEMethod
from w4a8.integrations.vllm.packed_layers import W4A8PackedConfig, read_packed
from w4a8.integrations.vllm.products import Share
from w4a8.integrations.vllm.pulled import Pulled, PulledExperts, _cuts

# Types of q, k, v, output, down.
MIXED = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q4_1", "ffn_down": "Q6_K"}
KINDS = {
    "minimums, super-scales, a mixture": MIXED,
    "e2m1": dict.fromkeys(MIXED, "MXFP4"),
    "int6": dict.fromkeys(MIXED, "Q5_0"),
    "iq4": dict.fromkeys(MIXED, "IQ4_NL"),
    "int8": dict.fromkeys(MIXED, "Q8_0"),
}
LAYERS = [f"{ATTENTION}.qkv_proj", f"{ATTENTION}.o_proj", f"{MLP}.down_proj", f"{MLP}.gate_up_proj"]


def both(tmp_path, name="llama, biases", **types):
    """Configurations of a GGUF file, and of the packed directory that transformers makes of it."""
    path = retyped(TinyModel(name), **types).write(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    model.save_pretrained(tmp_path / "packed")
    return config_of(path), packed_config(tmp_path / "packed")


def stated_in(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def packed_config(directory):
    config = W4A8PackedConfig.from_config(stated_in(directory))
    config.maybe_update_config(str(directory))
    config.packed_modules_mapping = MAPPING
    return config


def test_models_whose_weights_vllm_changes():
    """Its models put rows of the queries and keys that they load elsewhere."""
    text = SimpleNamespace(model_type="llama4_text")
    for config in (text, SimpleNamespace(model_type="llama4", text_config=text), SimpleNamespace(model_type="bloom")):
        with pytest.raises(ValueError, match=r"w4a8: a folder: packed .*, whose rows vLLM moves when"):
            W4A8PackedConfig.from_config({}).maybe_update_config("a folder", config)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_the_gguf_file(kind, rank, tmp_path):  # noqa: F811
    """Whole, and cut for two ranks: a product for each run of one form, biases in it."""
    theirs, ours = both(tmp_path, **KINDS[kind])
    for index, ranks in ((0, 1), (0, 2), (1, 2)):
        rank(index, ranks)
        for name in LAYERS:
            expected, found = linear(theirs, name), linear(ours, name, theirs.path)
            assert list(map(len, products(found))) == list(map(len, products(expected)))
            assert all(map(torch.equal, products(found), products(expected))), (name, index, ranks)
            x = torch.randn(2, expected.input_size_per_partition)
            assert torch.equal(found.quant_method.apply(found, x), expected.quant_method.apply(expected, x))


def test_four_ranks_over_two_heads_of_keys():
    """Neighbours hold the same head."""
    weight = Floats("k", 2 * HEAD, HIDDEN, lambda dtype: None)
    cuts = [Cut.of_rank(weight, HEAD, HIDDEN, index, 4) for index in range(4)]
    assert [(cut.begin, cut.end) for cut in cuts] == [(0, HEAD), (0, HEAD), (HEAD, 2 * HEAD), (HEAD, 2 * HEAD)]
    assert all((cut.first, cut.last) == (0, HIDDEN) for cut in cuts)
    with pytest.raises(ValueError, match="k has 128 rows, but parts of 64 for 3 ranks are expected"):
        Cut.of_rank(weight, HEAD, HIDDEN, 0, 3)


def test_parts_of_a_layer_in_fewer_tensors():
    """Qwen3.5's q, k, v in one, z in another: each rank has its part of each of the four."""
    layer = SimpleNamespace(tp_rank=1, tp_size=2, output_sizes=[4, 4, 8, 8])
    values = torch.arange(24.0)[:, None]
    weights = [Floats(name, n, 1, lambda _, at=at, n=n: (values[at : at + n], None)) for name, at, n in
               (("qkv", 0, 16), ("z", 16, 8))]  # fmt: skip
    share = Share(1, [2, 2, 4, 4], 1, torch.float32, None)
    cuts = _cuts(layer, weights, share)
    read = [cut.weight.read(torch.float32)[0][cut.begin : cut.end, 0].tolist() for cut in cuts]
    assert read == [[2, 3], [6, 7], [12, 13, 14, 15], [20, 21, 22, 23]]
    layer.output_sizes = [4, 4, 9, 7]
    with pytest.raises(ValueError, match=r"qkv has 16 rows, which are no sum of parts of \[4, 4, 9, 7\]"):
        _cuts(layer, weights, share)
    layer.tp_rank, layer.tp_size, share = 0, 1, share._replace(sizes=[4, 4, 8, 8])
    assert [(cut.begin, cut.end) for cut in _cuts(layer, weights, share)] == [(0, 16), (0, 8)]


def test_heads_that_ranks_share(rank, tmp_path):  # noqa: F811
    theirs, ours = both(tmp_path, **MIXED)
    for index in range(4):
        rank(index, 4)
        expected, found = (linear(config, LAYERS[0], theirs.path) for config in (theirs, ours))
        assert all(map(torch.equal, products(found), products(expected)))
    with pytest.raises(
        ValueError, match=r"of .*packed: 128 of the 512 columns of .*down_proj.packed for each of 4 ranks "
    ):
        linear(ours, LAYERS[2], theirs.path)


def test_floats_in_a_joined_layer(rank, tmp_path):  # noqa: F811
    """They are a product of their own."""
    tiny = retyped(TinyModel("llama, biases"), attn_k="Q8_0", attn_v="Q8_0")
    tiny.tensors["blk.0.attn_q.weight"] = torch.randn(HEADS * HEAD, HIDDEN) / 16
    tiny.write(tmp_path)
    theirs = config_of(tmp_path / "model.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    model.save_pretrained(tmp_path / "packed")
    ours = packed_config(tmp_path / "packed")
    for index, ranks in ((0, 1), (1, 2)):
        rank(index, ranks)
        expected, found = linear(theirs, LAYERS[0]), linear(ours, LAYERS[0], theirs.path)
        assert [product.group for product in found.w4a8] == [None, 32]
        assert torch.equal(found.weight_packed, expected.weight_packed)
        assert torch.equal(found.weight_packed1, expected.weight_packed1)
        assert torch.equal(found.weight_packed_bias, expected.weight_packed_bias)


def joined_in_the_file(directory, module, names):
    """Rewrites a packed directory, with some matrices of a layer as one."""
    source = open_packed(directory, stated_in(directory))
    tensors = load_file(directory / "model.safetensors")
    owner = module.rpartition(".")[0]
    cuts = [Cut.whole(source.weight(f"{owner}.{name}", "packed")) for name in names]
    tensors[f"{module}.packed"] = pack_rows(cuts, None).bytes
    for name in names:
        del tensors[f"{owner}.{name}.packed"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((directory / "config.json").read_text())
    del stated["quantization_config"]["packed"]
    (directory / "config.json").write_text(json.dumps(stated))


@pytest.mark.parametrize(
    ("name", "parts"),
    [(f"{ATTENTION}.qkv_proj", ("q_proj", "k_proj", "v_proj")), (f"{MLP}.gate_up_proj", ("gate_proj", "up_proj"))],
)
def test_matrices_that_are_joined_in_the_files(name, parts, rank, tmp_path):  # noqa: F811
    """As Phi-3 has them: each rank has its part of each."""
    same = {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q4_0", "ffn_gate": "Q4_K", "ffn_up": "Q4_K"}
    theirs, ours = both(tmp_path, **same)
    joined_in_the_file(tmp_path / "packed", name, parts)
    ours = packed_config(tmp_path / "packed")
    ours.packed_modules_mapping = {}
    for index, ranks in ((0, 1), (0, 2), (1, 2), (3, 4)):
        rank(index, ranks)
        expected, found = linear(theirs, name), linear(ours, name, theirs.path)
        assert torch.equal(*map(torch.stack, (products(found), products(expected))))


@pytest.mark.parametrize("ranks", [1, 2])
def test_embeddings_that_are_the_output_layer(ranks, rank, tmp_path):  # noqa: F811
    """Packed beside vLLM's floats, which are the packed ones multiplied out."""
    theirs, ours = both(tmp_path, "llama, tied")
    directory, found = tmp_path / "packed", []
    source = open_packed(directory, stated_in(directory))
    for index in range(ranks):
        rank(index, ranks)
        heads = [ParallelLMHead(VOCAB, HIDDEN, quant_config=config, prefix="lm_head") for config in (theirs, ours)]
        model = torch.nn.ModuleDict({"lm_head": heads[1]})
        tensors = load_file(directory / "model.safetensors")
        given = dict(read_packed(tensors.items(), model, source, torch.float32))
        heads[0].w4a8_filler.load(heads[0])
        assert torch.equal(heads[1].weight_packed, heads[0].weight_packed)
        found.append(rows_of(heads[1])[0])
        embeddings = VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=torch.float32)
        embeddings.weight_loader(embeddings.weight, given["model.embed_tokens.weight"])
        own = embeddings.weight[: embeddings.shard_indices.num_org_elements]
        assert torch.equal(own, found[-1][: len(own)])
    assert torch.equal(torch.cat(found)[:VOCAB], given["model.embed_tokens.weight"])
    # Layers that nothing here takes packed become floats, too; experts cannot.
    assert f"{ATTENTION}.q_proj.weight" in given and not any(key.endswith("packed") for key in given)


def experts_layer(config, *, tp=(0, 1), ep=None):
    """A layer of experts of a directory, filled; ep are the experts that this rank holds."""
    other, _ = make_layer(intermediate=INTER, tp_size=tp[1], tp_rank=tp[0])
    layer, moe, mine = torch.nn.Module(), other.moe_config, list(range(EXPERTS)) if ep is None else ep
    layer.moe_config, moe.activation = moe, MoEActivation("silu")
    moe.num_experts, moe.num_local_experts, moe.hidden_dim = EXPERTS, len(mine), HIDDEN
    local = {expert: index for index, expert in enumerate(mine)}
    layer._map_global_expert_id_to_local_expert_id = MethodType(lambda self, expert: local.get(expert, -1), layer)
    filler = PulledExperts("experts", config.path, config.expert_weights(f"{MLP}.experts"))
    method = W4A8MoEMethod(filler, layer, "experts")
    method.create_weights(layer, len(mine), HIDDEN, INTER // tp[1], torch.bfloat16)
    filler.load(layer)
    method.process_weights_after_loading(layer)
    return layer


def test_experts(rank, tmp_path):  # noqa: F811
    """To the byte those of the file: whole, half of each for two ranks, and some of them."""
    theirs, ours = both(tmp_path, "qwen3moe")
    experts = theirs.expert_weights(f"{MLP}.experts")
    for tp, ep in (((0, 1), None), ((0, 2), None), ((1, 2), None), ((0, 1), [2, 3])):
        layer = experts_layer(ours, tp=tp, ep=ep)
        _, expected, _ = pack_experts(experts, range(EXPERTS) if ep is None else ep, None, *tp)
        for stack in ("w13", "w2"):
            assert torch.equal(getattr(layer, f"{stack}_weight_packed"), expected[stack])


def test_experts_that_vllm_would_have_to_run(rank, tmp_path):  # noqa: F811
    _, ours = both(tmp_path, "qwen3moe")
    layer, _ = make_layer()
    layer.moe_config.is_lora_enabled = True
    message = rf"w4a8: {MLP}.experts: experts of a packed directory cannot be served with LoRA"
    with pytest.raises(ValueError, match=message):
        ours._of_experts(layer, f"{MLP}.experts")


def test_other_weights(rank, tmp_path):  # noqa: F811
    """Go into the form of the first ones, or are refused by the name of the layer."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, ours = both(tmp_path / "a", attn_output="Q4_0")
    layer = linear(ours, LAYERS[1], str(tmp_path / "a" / "model.gguf"))
    before = layer.weight_packed.clone()
    both(tmp_path / "b", attn_output="Q4_1")
    source = open_packed(tmp_path / "b" / "packed", stated_in(tmp_path / "b" / "packed"))
    filler = layer.w4a8_filler
    with pytest.raises(ValueError, match=rf"w4a8: {LAYERS[1]} of .*: the matrix has minimums, unlike those before"):
        filler.load(layer, filler.again(lambda weight: source.matrix(weight.name)))
    assert torch.equal(layer.weight_packed, before)
    with pytest.raises(ValueError, match=r"has no matrix model\.layers\.7\.packed"):
        source.matrix("model.layers.7.packed")
    assert isinstance(filler, Pulled)


def test_random_weights(rank, tmp_path):  # noqa: F811
    """--load-format dummy: of the forms in the directory."""
    _, ours = both(tmp_path, **MIXED)
    dummy = VllmConfig()
    dummy.load_config.load_format = "dummy"
    expected = linear(ours, LAYERS[0], str(tmp_path / "model.gguf"))
    with set_current_vllm_config(dummy):
        found = type(expected)(HIDDEN, HEAD, HEADS, KV_HEADS, prefix=LAYERS[0], quant_config=ours, bias=True)
    found.quant_method.process_weights_after_loading(found)
    assert [len(packed) for packed in products(found)] == [len(packed) for packed in products(expected)]
    assert rows_of(found)[0].isfinite().all() and not torch.equal(*(products(layer)[0] for layer in (found, expected)))

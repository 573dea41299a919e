"""GGUF files: layers beside read_layers, whole and cut for two ranks; what is refused."""

from types import MethodType

import gguf_models
import numpy as np
import pytest
import torch
from gguf_models import EXPERTS, HEAD, HEADS, HIDDEN, INTER, KV_HEADS, VOCAB, TinyModel
from layers import make_layer, rank  # noqa: F401 (a fixture)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

import w4a8
from w4a8.checkpoint.layers import read_layers
from w4a8.core.matrix import Matrix, unpack_codes
from w4a8.core.packer import pack_experts
from w4a8.integrations.vllm.gguf import W4A8GGUFConfig
from w4a8.integrations.vllm.gguf_folder import experts_of, linears_of
from w4a8.integrations.vllm.linear_layers import Rounded
from w4a8.integrations.vllm.moe import W4A8MoEMethod
from w4a8.integrations.vllm.pulled import PulledExperts

MAPPING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name in ("W4A8_VLLM_ACTIVATION_GROUP", "W4A8_VLLM_LM_HEAD"):
        monkeypatch.delenv(name, raising=False)


def retyped(tiny, **types):
    """The same model with other blocks in some tensors, by the middle of their names."""
    generator = np.random.default_rng(7)
    for name, kind in types.items():
        name = f"blk.0.{name}.weight"
        shape = gguf_models.gguf_files.meaning(*tiny.tensors[name]).shape
        tiny.tensors[name], _ = gguf_models.blocks(kind, shape, generator)
    return tiny


def written(tmp_path, name="llama", **types):
    return retyped(TinyModel(name), **types).write(tmp_path)


def config_of(path):
    config = W4A8GGUFConfig(str(path))
    config.packed_modules_mapping = MAPPING
    return config


def linear(config, name, file=None):
    """A layer of vLLM's that has read its weights; `file` has the biases of the path of the configuration."""
    file = linears_of(file or config.path).file
    how = {"quant_config": config, "params_dtype": torch.float32, "bias": False}
    if name.endswith("qkv_proj"):
        how["bias"] = "blk.0.attn_q.bias" in file
        layer = QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, prefix=name, **how)
    elif name.endswith("gate_up_proj"):
        layer = MergedColumnParallelLinear(HIDDEN, [INTER, INTER], prefix=name, **how)
    elif name.endswith("o_proj"):
        how["bias"] = "blk.0.attn_output.bias" in file
        layer = RowParallelLinear(HEADS * HEAD, HIDDEN, prefix=name, **how)
    else:
        layer = RowParallelLinear(INTER, HIDDEN, prefix=name, **how)
    if not isinstance(layer.quant_method, UnquantizedLinearMethod):
        layer.w4a8_filler.load(layer)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def unpacked(packed):
    header = w4a8.read_header(packed)
    return Matrix(kind=header["values"], **unpack_codes(packed, header["group"], header["k"], header["n"]))


def products(layer):
    """What is multiplied, one after the other."""
    return [getattr(layer, product.parameter).data for product in layer.w4a8]


def rows_of(layer):
    """Weights, float32 [N, K], and biases [N] or None."""
    found = [unpacked(packed) for packed in products(layer)]
    biases = [matrix.bias for matrix in found]
    return torch.cat([matrix.floats() for matrix in found]), None if biases[0] is None else torch.cat(biases)


# ---- linear layers ----


@pytest.mark.parametrize("kind", gguf_models.TYPES)
def test_one_product_of_one_type(kind, rank, tmp_path):  # noqa: F811
    """Of three matrices of a type; one matrix is, to the byte, what read_layers packs."""
    path = written(tmp_path, **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), kind))
    theirs, config = read_layers(path), config_of(path)
    layer = linear(config, f"{ATTENTION}.o_proj")
    assert [packed.tolist() for packed in products(layer)] == [theirs["blk.0.attn_output"].packed.tolist()]
    layer = linear(config, f"{ATTENTION}.qkv_proj")
    assert len(products(layer)) == 1
    parts = [unpacked(theirs[f"blk.0.attn_{each}"].packed).floats() for each in "qkv"]
    assert torch.equal(rows_of(layer)[0], torch.cat(parts))


def test_a_product_for_each_type(rank, tmp_path):  # noqa: F811
    """Each is, to the byte, what read_layers packs; the answers are its answers, one after the other."""
    path = written(tmp_path, attn_q="Q4_K", attn_k="Q8_0", attn_v="Q6_K", ffn_gate="Q4_K", ffn_up="Q5_K")
    theirs, config = read_layers(path), config_of(path)
    for name, parts in (
        ("self_attn.qkv_proj", ("attn_q", "attn_k", "attn_v")),
        ("mlp.gate_up_proj", ("ffn_gate", "ffn_up")),
    ):
        layer = linear(config, f"model.layers.0.{name}")
        expected = [theirs[f"blk.0.{part}"] for part in parts]
        assert [packed.tolist() for packed in products(layer)] == [each.packed.tolist() for each in expected]
        x = torch.randn(3, HIDDEN)
        assert torch.equal(layer(x)[0], torch.cat([each(x) for each in expected], -1))


def test_neighbours_of_one_type(rank, tmp_path):  # noqa: F811
    """Are one product, as queries and keys of a Q4_K_M file are."""
    path = written(tmp_path, attn_q="Q4_K", attn_k="Q4_K", attn_v="Q6_K")
    layer = linear(config_of(path), f"{ATTENTION}.qkv_proj")
    assert [w4a8.read_header(packed)["n"] for packed in products(layer)] == [(HEADS + KV_HEADS) * HEAD, KV_HEADS * HEAD]


def test_floats_beside_blocks(rank, tmp_path):  # noqa: F811
    """A layer of both multiplies both; rows of queries are put back; a layer of floats alone is vLLM's."""
    tiny = retyped(TinyModel("llama, biases"), attn_k="Q8_0", attn_v="Q8_0")
    weight = torch.randn(HEADS * HEAD, HIDDEN) / 16
    tiny.tensors["blk.0.attn_q.weight"] = gguf_models.turned(weight, HEADS)
    tiny.tensors |= {f"blk.0.ffn_{each}.weight": torch.randn(INTER, HIDDEN) for each in ("gate", "up")}
    config = config_of(tiny.write(tmp_path))
    layer, theirs = linear(config, f"{ATTENTION}.qkv_proj"), read_layers(config.path)
    x = torch.randn(3, HIDDEN)
    bias = tiny.model.model.layers[0].self_attn.q_proj.bias
    queries = torch.nn.functional.linear(x, weight, bias)
    found = layer(x)[0].split([HEADS * HEAD, 2 * KV_HEADS * HEAD], -1)
    torch.testing.assert_close(found[0], queries)
    assert torch.equal(found[1], torch.cat([theirs[f"blk.0.attn_{each}"](x) for each in "kv"], -1))
    assert isinstance(linear(config, f"{MLP}.gate_up_proj").quant_method, UnquantizedLinearMethod)


def heads_of(rows, index, ranks):
    """A rank's share of rows that come in heads; where there are fewer heads than ranks, neighbours share one."""
    heads = len(rows) // HEAD
    begin, count = index * heads // ranks, max(heads // ranks, 1)
    return rows[begin * HEAD : (begin + count) * HEAD]


@pytest.mark.parametrize("name", ["llama, biases", "qwen2"])
def test_cut_for_two_ranks(name, rank, tmp_path):  # noqa: F811
    """Rows or columns of the whole; of four ranks two have the same head of keys and values. One rank adds the bias."""
    path = written(tmp_path, name, attn_q="Q4_K", attn_k="Q4_K", attn_v="Q6_K", attn_output="Q5_0", ffn_down="Q6_K")
    whole = {}
    for layer in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.gate_up_proj"):
        whole[layer] = rows_of(linear(config_of(path), f"model.layers.0.{layer}"))
    sizes = {"self_attn.qkv_proj": [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], "mlp.gate_up_proj": [INTER, INTER]}
    for ranks in (2, 4):
        for index in range(ranks):
            rank(index, ranks)
            config = config_of(path)
            for layer, rows in sizes.items():
                weight, bias = rows_of(linear(config, f"model.layers.0.{layer}"))
                for found, expected in ((weight, whole[layer][0]), (bias, whole[layer][1])):
                    if expected is None:
                        assert found is None
                        continue
                    mine = [heads_of(part, index, ranks) for part in expected.split(rows)]
                    assert torch.equal(found, torch.cat(mine))
            weight, bias = rows_of(linear(config, f"{ATTENTION}.o_proj"))
            width = HEADS * HEAD // ranks
            assert torch.equal(weight, whole["self_attn.o_proj"][0][:, index * width :][:, :width])
            expected = whole["self_attn.o_proj"][1] if index == 0 else None
            assert (bias is None) == (expected is None) and (bias is None or torch.equal(bias, expected))
            if ranks == 2:
                weight, _ = rows_of(linear(config, f"{MLP}.down_proj"))
                assert torch.equal(weight, whole["mlp.down_proj"][0][:, index * INTER // 2 :][:, : INTER // 2])


def test_a_cut_through_blocks(rank, tmp_path):  # noqa: F811
    path = written(tmp_path, ffn_down="Q6_K", attn_output="Q4_0")
    rank(1, 4)
    config = config_of(path)
    message = (
        rf"w4a8: {MLP}.down_proj of .*model.gguf: 128 of the 512 columns of blk.0.ffn_down.weight for each of "
        r"4 ranks cut blocks of 256 \(Q6_K\)"
    )
    with pytest.raises(ValueError, match=message):
        linear(config, f"{MLP}.down_proj")
    assert rows_of(linear(config, f"{ATTENTION}.o_proj"))[0].shape == (HIDDEN, HEADS * HEAD // 4)


@pytest.mark.parametrize(("ranks", "rows"), [(1, [VOCAB]), (2, [64, 64]), (4, [32] * 4)])
def test_the_output_layer(ranks, rows, rank, tmp_path):  # noqa: F811
    """Its rows, for several ranks as many each, with zeros behind the vocabulary."""
    path = written(tmp_path)
    theirs, found = unpacked(read_layers(path)["output"].packed).floats(), []
    for index in range(ranks):
        rank(index, ranks)
        layer = ParallelLMHead(VOCAB, HIDDEN, quant_config=config_of(path), prefix="lm_head")
        layer.w4a8_filler.load(layer)
        found.append(rows_of(layer)[0])
        x = torch.randn(2, HIDDEN)
        assert layer.quant_method.apply(layer, x).shape == (2, rows[index])
    assert [len(part) for part in found] == rows
    assert torch.equal(torch.cat(found)[:VOCAB], theirs) and not torch.cat(found)[VOCAB:].any()


def test_an_output_layer_that_shares_the_embeddings(rank, tmp_path, monkeypatch):  # noqa: F811
    """In the bits of the file, beside the embeddings; a setting leaves it to vLLM or rounds it."""
    path = written(tmp_path, "llama, tied")
    config = config_of(path)
    rank(0, 1)
    layer = ParallelLMHead(VOCAB, HIDDEN, quant_config=config, prefix="lm_head")
    embeddings = torch.nn.Module()
    assert layer.tie_weights(embeddings) is layer and not hasattr(layer, "weight")
    layer.w4a8_filler.load(layer)
    assert layer.w4a8_filler.names == [], "the tensor is left for the embeddings"
    assert torch.equal(rows_of(layer)[0], linears_of(str(path)).file.floats("token_embd.weight", 0, VOCAB))
    for value in ("0", "int8"):
        monkeypatch.setenv("W4A8_VLLM_LM_HEAD", value)
        other = ParallelLMHead(VOCAB, HIDDEN, quant_config=config, prefix="lm_head")
        assert hasattr(other, "weight")


def test_an_output_layer_of_floats_beside_embeddings_in_blocks(rank, tmp_path):  # noqa: F811
    """llama-quantize --leave-output-tensor: vLLM loads its own matrix, which is rounded."""
    tiny = TinyModel("llama")
    tiny.tensors["output.weight"] = torch.randn(VOCAB, HIDDEN)
    rank(0, 1)
    layer = ParallelLMHead(VOCAB, HIDDEN, quant_config=config_of(tiny.write(tmp_path)), prefix="lm_head")
    assert isinstance(layer.w4a8_filler, Rounded) and layer.weight.shape[1] == HIDDEN


# ---- experts ----


def experts_layer(path, name, *, tp=(0, 1), ep=None, intermediate=INTER):
    """What the method reads of a layer of vLLM's, filled; ep are the experts that this rank holds."""
    oss = name == "gpt-oss"
    activation = "swigluoai" if oss else "silu"
    other, _ = make_layer(intermediate=intermediate, tp_size=tp[1], tp_rank=tp[0], has_bias=oss, activation=activation)
    layer, moe, mine = torch.nn.Module(), other.moe_config, list(range(EXPERTS)) if ep is None else ep
    layer.moe_config = moe
    moe.num_experts, moe.num_local_experts, moe.hidden_dim = EXPERTS, len(mine), HIDDEN
    moe.activation = MoEActivation(activation)
    local = {expert: index for index, expert in enumerate(mine)}
    layer._map_global_expert_id_to_local_expert_id = MethodType(lambda self, expert: local.get(expert, -1), layer)
    (first, *_) = experts_of(str(path))
    method = W4A8MoEMethod(PulledExperts("experts", str(path), experts_of(str(path))[first]), layer, "experts")
    method.create_weights(layer, len(mine), HIDDEN, intermediate // tp[1], torch.bfloat16)
    method.filler.load(layer)
    method.process_weights_after_loading(layer)
    return layer, method


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral", "gpt-oss", "qwen2moe"])
def test_experts(name, rank, tmp_path):  # noqa: F811
    """To the byte what pack_experts packs: whole, half of each for two ranks, and some of them; unequal groups run."""
    path = TinyModel(name).write(tmp_path)
    published = "block_sparse_moe" if name == "mixtral" else "mlp"
    names = {f"model.layers.{i}.{each}.experts": f"model.layers.{i}.{published}.experts" for i in (0, 1)
             for each in {published, "mlp"}}  # fmt: skip
    assert config_of(path).experts == names
    experts = linears_of(str(path)).layers()["blk.0.experts"]
    for tp, ep in (((0, 1), None), ((0, 2), None), ((1, 2), None), ((0, 1), [2, 3])):
        layer, method = experts_layer(path, name, tp=tp, ep=ep)
        _, expected, _ = pack_experts(experts, range(EXPERTS) if ep is None else ep, None, *tp)
        for stack in ("w13", "w2"):
            assert torch.equal(getattr(layer, f"{stack}_weight_packed"), expected[stack])
        assert method.sizes.operator_group_size == 0


def test_experts_whose_blocks_would_be_cut(rank, tmp_path):  # noqa: F811
    path = TinyModel("qwen3moe").write(tmp_path)
    message = (
        r"w4a8: experts of .*model.gguf: 128 of the 512 columns of blk.0.ffn_down_exps.weight for each "
        r"of 4 ranks cut blocks of 256 \(Q6_K\): expert parallelism does not \(--enable-expert-parallel\)"
    )
    with pytest.raises(ValueError, match=message):
        experts_layer(path, "qwen3moe", tp=(0, 4))


def test_experts_of_other_sizes(rank, tmp_path):  # noqa: F811
    path = TinyModel("qwen3moe").write(tmp_path)
    with pytest.raises(
        ValueError, match=r"bias\) are \(4, 256, 512, True, False\), expected \(4, 256, 1024, True, False\)"
    ):
        experts_layer(path, "qwen3moe", intermediate=2 * INTER)

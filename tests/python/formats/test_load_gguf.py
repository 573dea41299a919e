"""`w4a8.load` of GGUF files: every weight as `gguf` has it, settings of each architecture, ranks, what is refused."""

import re

import numpy as np
import pytest
import torch

import w4a8
from w4a8.checkpoint import load_linear
from w4a8.core.activation import MoEActivation
from w4a8.core.json_fields import CheckpointError
from w4a8.core.routing import RoutingMethodType

pytest.importorskip("gguf")
import gguf_files
from test_gguf_blocks import unpacked

EXPERTS, HIDDEN, INTER, LAYERS = 3, 256, 512, 2
STACKS = {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}
FIRST = "model.layers.0.mlp.experts"


def keys(architecture="qwen3moe", **changes):
    found = {"expert_count": EXPERTS, "expert_used_count": 2, "embedding_length": HIDDEN}
    found |= {"expert_feed_forward_length": INTER, **changes}
    return {f"{architecture}.{name}": value for name, value in found.items() if value is not None}


def stacks(types, layers=LAYERS, shapes=STACKS):
    """Tensors of the experts; types: one for all, or of gate, up, down."""
    generator = np.random.default_rng(3)
    types = dict(zip(shapes, [types] * len(shapes) if isinstance(types, str) else types))
    return {
        f"blk.{layer}.ffn_{name}_exps.weight": (
            types[name],
            gguf_files.random_blocks(types[name], (EXPERTS, *shape), generator),
        )
        for layer in range(layers)
        for name, shape in shapes.items()
    }


@pytest.fixture
def write(tmp_path):
    def write(tensors, architecture="qwen3moe", given=None):
        return gguf_files.write(tmp_path / "m.gguf", architecture, given or keys(architecture), tensors)

    return write


def weights(tensors, layer=0):
    """float32 w13 [E, 2 I, H] and w2 [E, H, I] as `gguf` has them."""
    found = {name: gguf_files.meaning(*tensors[f"blk.{layer}.ffn_{name}_exps.weight"]) for name in STACKS}
    return torch.cat((found["gate"], found["up"]), 1), found["down"]


def assert_holds(packed, expected):
    assert len(packed) == len(expected)
    for mine, theirs in zip(packed, expected):
        assert torch.equal(unpacked(mine).floats(), theirs)


@pytest.mark.parametrize("types", [*sorted(gguf_files.BLOCKS), ("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q4_0", "Q4_1")])
def test_every_weight(types, write):
    tensors = stacks(types)
    loaded = w4a8.load(write(tensors))
    assert list(loaded) == [f"model.layers.{i}.mlp.experts" for i in range(LAYERS)]
    for index, layer in enumerate(loaded.values()):
        w13, w2 = weights(tensors, index)
        assert_holds(layer.w13_packed, w13)
        assert_holds(layer.w2_packed, w2)
        x, logits = torch.randn(5, HIDDEN), torch.randn(5, EXPERTS)
        values, ids = layer.route(x, logits)
        group = w4a8.read_header(layer.w13_packed[0])["group"]
        same = w4a8.read_header(layer.w2_packed[0])["group"] == group
        arguments = (layer.w13_packed, layer.w2_packed, HIDDEN, INTER, 2 * INTER, group if same else 0, False, 0)
        assert torch.equal(layer(x, logits), torch.ops.w4a8.dynamic_4bit_int_moe(x, ids.long(), values, *arguments))


def test_the_layer_computes_what_the_file_means(write):
    """Beside float64: activations rounded to int8 in groups of 32 cost a percent or two."""
    tensors = stacks(("Q4_K", "Q4_K", "Q6_K"), 1)
    layer = w4a8.load(write(tensors))[FIRST]
    x, logits = torch.randn(64, HIDDEN), torch.randn(64, EXPERTS)
    (w13, w2), (values, ids) = weights(tensors), layer.route(x, logits)
    expected = torch.zeros(64, HIDDEN, dtype=torch.float64)
    for token in range(64):
        for value, expert in zip(values[token].double(), ids[token]):
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            expected[token] += value * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    error = (layer(x, logits).double() - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.03


def test_fused_gate_and_up(write):
    shapes = {"gate_up": (2 * INTER, HIDDEN), "down": STACKS["down"]}
    tensors = stacks("Q4_K", 1, shapes)
    layer = w4a8.load(write(tensors))[FIRST]
    assert_holds(layer.w13_packed, gguf_files.meaning(*tensors["blk.0.ffn_gate_up_exps.weight"]))


def biases():
    """Of the experts of the first layer, [E, N] each."""
    return {f"blk.0.ffn_{name}_exps.bias": torch.randn(EXPERTS, shape[0]) for name, shape in STACKS.items()}


def test_biases_and_gpt_oss(write):
    found = biases()
    tensors = stacks("MXFP4", 1) | found
    gate, up, down = found.values()
    layer = w4a8.load(write(tensors, "gpt-oss"))[FIRST]
    assert layer.activation == MoEActivation.SWIGLUOAI and layer.routing_method == RoutingMethodType.Renormalize
    assert_holds(layer.w13_packed, weights(tensors)[0])
    for expert in range(EXPERTS):
        expected = torch.cat((gate[expert], up[expert]))
        assert torch.equal(unpacked(layer.w13_packed[expert]).bias, expected)
        assert torch.equal(unpacked(layer.w2_packed[expert]).bias, down[expert])


@pytest.mark.parametrize("of_experts", [False, True])
def test_the_scale_of_nvfp4(of_experts, write):
    tensors = stacks("NVFP4", 1)
    scales = {name: torch.rand(EXPERTS if of_experts else 1) + 0.5 for name in STACKS}
    tensors |= {f"blk.0.ffn_{name}_exps.scale": scale for name, scale in scales.items()}
    layer = w4a8.load(write(tensors))[FIRST]
    expected = torch.cat(
        [gguf_files.meaning(*tensors[f"blk.0.ffn_{n}_exps.weight"]) * scales[n].view(-1, 1, 1) for n in ("gate", "up")],
        1,
    )
    for mine, theirs in zip(layer.w13_packed, expected):
        torch.testing.assert_close(unpacked(mine).floats(), theirs, rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    "architecture, changes, expected",
    [
        ("qwen3moe", {}, {"routing_method": "Renormalize"}),
        ("qwen3moe", {"expert_weights_norm": False}, {"routing_method": "Default"}),
        ("qwen2moe", {}, {"routing_method": "Default"}),
        ("olmoe", {"feed_forward_length": INTER, "expert_feed_forward_length": None}, {"routing_method": "Default"}),
        (
            "llama",
            {"feed_forward_length": INTER, "expert_feed_forward_length": None},
            {"routing_method": "Renormalize"},
        ),
        (
            "deepseek2",
            {
                "expert_gating_func": 2,
                "expert_weights_norm": True,
                "expert_weights_scale": 2.5,
                "expert_group_count": 3,
                "expert_group_used_count": 2,
            },
            {"routing_method": "DeepSeekV3", "routed_scaling_factor": 2.5, "num_expert_group": 3, "topk_group": 2},
        ),
        ("deepseek2", {}, {"routing_method": "Default", "routed_scaling_factor": 1.0}),
        ("deepseek2", {"expert_gating_func": 2}, {"routing_method": "Sigmoid"}),
        ("glm4moe", {}, {"routing_method": "DeepSeekV3"}),
    ],
)
def test_settings(architecture, changes, expected, write):
    bias = torch.randn(EXPERTS)
    with_bias = expected["routing_method"] in ("DeepSeekV3", "Sigmoid")
    tensors = stacks("Q4_0", 1) | ({"blk.0.exp_probs_b.bias": bias} if with_bias else {})
    layer = w4a8.load(write(tensors, architecture, keys(architecture, **changes)))[FIRST]
    found = {name: getattr(layer, name) for name in expected}
    found["routing_method"] = found["routing_method"].name
    assert found == expected
    assert layer.top_k == 2 and layer.num_experts == EXPERTS
    assert torch.equal(layer.e_score_correction_bias, bias) if with_bias else layer.e_score_correction_bias is None


@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"ep_size": 2}, {"ep_size": 3}])
def test_ranks(ranks, write):
    tensors = stacks(("Q4_K", "Q4_K", "Q6_K"), 1)
    path = write(tensors)
    x, logits = torch.randn(6, HIDDEN), torch.randn(6, EXPERTS)
    (name, size), w13, w2 = *ranks.items(), *weights(tensors)
    total = 0
    for rank in range(size):
        layer = w4a8.load(path, **ranks, **{name.replace("size", "rank"): rank}, activation_group=-1)[FIRST]
        total = total + layer(x, logits)
        if name == "tp_size":
            part = slice(rank * INTER // 2, (rank + 1) * INTER // 2)
            gate, up = w13.chunk(2, 1)
            assert_holds(layer.w13_packed, torch.cat((gate[:, part], up[:, part]), 1))
            assert_holds(layer.w2_packed, w2[:, :, part])
        else:
            mine = (layer.expert_map >= 0).nonzero().flatten()
            assert_holds(layer.w2_packed, w2[mine])
    if name == "ep_size":
        whole = w4a8.load(path, activation_group=-1)[FIRST](x, logits)
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


def test_only_some_layers(write):
    path = write(stacks("Q4_0"))
    assert list(w4a8.load(path, only=lambda name: ".1." in name)) == ["model.layers.1.mlp.experts"]


def replaced(tensors, name, value):
    return {**tensors, name: value} if value is not None else {n: t for n, t in tensors.items() if n != name}


GATE = "blk.1.ffn_gate_exps.weight"
BLOCKS = gguf_files.random_blocks("Q4_1", (EXPERTS, INTER, HIDDEN), np.random.default_rng(0))
BROKEN = {
    "no experts": ({"x": torch.ones(4)}, {}, r"holds no stacks of experts \(blk.<n>.ffn_<projection>_exps.weight\)"),
    "no gate": (replaced(stacks("Q4_0"), GATE, None), {}, "blk.1 has the stacks of experts down, up, but gate, up"),
    "gate twice": (
        replaced(stacks("Q4_0"), "blk.1.ffn_gate_up_exps.weight", ("Q4_1", BLOCKS)),
        {},
        "blk.1 has the stacks of experts down, gate, gate_up, up, but gate, up",
    ),
    "float": (
        replaced(stacks("Q4_0"), GATE, torch.ones(EXPERTS, INTER, HIDDEN)),
        {},
        f"tensor '{GATE}' is F32, but a quantized type is expected",
    ),
    "another kind": (replaced(stacks("Q4_0"), GATE, ("Q4_1", BLOCKS)), {}, "a stack is of one kind"),
    "fewer experts": (
        replaced(stacks("Q4_0"), GATE, ("Q4_1", BLOCKS[:2])),
        {},
        rf"tensor '{GATE}' has shape \(2, 512, 256\), but \(3, 512, 256\) is expected",
    ),
    "no key": (stacks("Q4_0"), {"expert_count": None}, "qwen3moe.expert_count is None, but int is expected"),
    "a key of text": (stacks("Q4_0"), {"expert_count": "4"}, "qwen3moe.expert_count is '4', but int is expected"),
    "a key of 0": (stacks("Q4_0"), {"expert_used_count": 0}, "qwen3moe.expert_used_count is 0, but 1..2"),
    "gating": (stacks("Q4_0"), {"expert_gating_func": 9}, "expert_gating_func is 9 in .*, but qwen3_moe computes 1"),
    "a scale": (stacks("Q4_0"), {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5 .* qwen3_moe computes 1.0"),
    "a bias": (
        stacks("Q4_0") | {"blk.0.exp_probs_b.bias": torch.ones(EXPERTS)},
        {},
        r"has a correction bias \(exp_probs_b\), but qwen3_moe has none",
    ),
    **{
        f"biases of {what}": (
            stacks("Q4_0", 1) | biases() | {"blk.0.ffn_up_exps.bias": torch.ones(shape)},
            {},
            rf"tensor 'blk.0.ffn_up_exps.bias' has shape {re.escape(str(shape))}, but \(3, 512\) is expected",
        )
        for what, shape in {
            "fewer experts": (EXPERTS - 1, INTER),
            "more experts": (EXPERTS + 1, INTER),
            "more features": (EXPERTS, INTER + 32),
            "one dimension": (EXPERTS * INTER,),
            "the other order": (INTER, EXPERTS),
        }.items()
    },
    "biases of some matrices": (
        replaced(stacks("Q4_0", 1) | biases(), "blk.0.ffn_down_exps.bias", None),
        {},
        "tensor 'blk.0.ffn_down_exps.bias' is missing from",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refused(case, write):
    tensors, changes, message = BROKEN[case]
    with pytest.raises(CheckpointError, match=message):
        w4a8.load(write(tensors, given=keys(**changes)))


def test_other_architectures_are_refused(write):
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'bert', whose experts are not known here"):
        w4a8.load(write(stacks("Q4_0"), "bert"))


@pytest.mark.parametrize(
    "architecture, key",
    [("llama", "expert_count"), ("deepseek2", "expert_gating_func"), ("glm4moe", "nextn_predict_layers")],
)
def test_keys_that_are_arrays(architecture, key, write):
    """Those that are looked at first."""
    path = write(stacks("Q4_0", 1), architecture, keys(architecture, **{key: [1, 2]}))
    with pytest.raises(CheckpointError, match=rf"{architecture}\.{key} is array\(.*, but int is expected"):
        w4a8.load(path)


def test_a_cut_inside_a_block_is_refused(write):
    """512 intermediate features for 4 ranks are 128 a rank, half of a block of Q4_K."""
    path = write(stacks("Q4_K", 1))
    with pytest.raises((CheckpointError, NotImplementedError), match="128"):
        w4a8.load(path, tp_size=4)


def test_a_cut_that_does_not_divide_is_refused(write):
    """512 intermediate features are none for three ranks to share."""
    with pytest.raises(ValueError, match="intermediate_size 512 cannot be cut for 3 tensor-parallel ranks"):
        w4a8.load(write(stacks("Q4_0", 1)), tp_size=3)


@pytest.mark.parametrize(
    "bias, message",
    [
        (torch.ones(EXPERTS + 1), r"has shape \(4,\), but \(3,\) is expected"),
        (torch.ones(1, EXPERTS), r"has shape \(1, 3\), but \(3,\) is expected"),
        (torch.tensor([0.0, float("nan"), 0.0]), "holds a NaN or an infinity"),
    ],
)
def test_a_correction_bias_that_is_refused(bias, message, write):
    path = write(stacks("Q4_0", 1) | {"blk.0.exp_probs_b.bias": bias}, "glm4moe", keys("glm4moe"))
    with pytest.raises(CheckpointError, match=f"tensor 'blk.0.exp_probs_b.bias' {message}"):
        w4a8.load(path)


def test_activation_groups(write):
    path = write(stacks(("Q4_K", "Q4_K", "Q6_K"), 1))
    for asked, expected in ((None, 32), (-1, -1), (32, 32), (128, 128)):
        try:
            layer = w4a8.load(path, activation_group=asked)[FIRST]
        except ValueError as error:
            assert asked == 128 and f"{FIRST}: w13: activation_group is 128" in str(error)
            continue
        assert [w4a8.read_header(p[0])["activation_group"] for p in (layer.w13_packed, layer.w2_packed)] == [
            expected
        ] * 2


# ---- load_linear ----

HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2}


def linear_layers(types=("Q4_K", "Q6_K", "Q4_0")):
    generator = np.random.default_rng(4)
    shapes = {"attn_q": (256, HIDDEN), "attn_k": (128, HIDDEN), "ffn_down": (HIDDEN, INTER)}
    tensors = {
        f"blk.0.{name}.weight": (kind, gguf_files.random_blocks(kind, shape, generator))
        for (name, shape), kind in zip(shapes.items(), types)
    }
    output = ("Q6_K", gguf_files.random_blocks("Q6_K", (40, HIDDEN), generator))
    return tensors | {
        "token_embd.weight": output,
        "output.weight": output,
        "blk.0.attn_norm.weight": torch.ones(HIDDEN),
        "blk.0.attn_v.weight": torch.randn(128, HIDDEN),
        "blk.0.attn_q.bias": torch.randn(256),
    }


NAMES = {
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    "lm_head": "output",
}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_linear_layers(architecture, write):
    """Llama's q and k have the halves of each head in turns in the file: row 2 i + j of a head is row i of half j."""
    tensors = linear_layers()
    given = {f"{architecture}.{name}": value for name, value in HEADS.items()}
    loaded = load_linear(write(tensors, architecture, given), activation_group=-1)
    assert list(loaded) == list(NAMES)
    for name, tensor in NAMES.items():
        expected = gguf_files.meaning(*tensors[f"{tensor}.weight"])
        bias = tensors.get(f"{tensor}.bias")
        heads = {"blk.0.attn_q": 4, "blk.0.attn_k": 2}.get(tensor)
        if architecture == "llama" and heads:
            order = [head * 64 + 2 * i + j for head in range(heads) for j in range(2) for i in range(32)]
            if heads == 2:
                assert order[:2] + order[32:34] == [0, 2, 1, 3]
            expected, bias = expected[order], None if bias is None else bias[order]
        assert torch.equal(unpacked(loaded[name].packed).floats(), expected)
        x = torch.randn(3, expected.shape[1])
        y = torch.ops.w4a8.dyn_quant_matmul_4bit(
            x, loaded[name].packed, loaded[name].group_size, x.shape[1], len(expected)
        )
        assert torch.equal(loaded[name](x), y)
        if bias is not None:
            assert torch.equal(unpacked(loaded[name].packed).bias, bias)


def test_only_some_linear_layers(write):
    assert list(
        load_linear(write(linear_layers(), "qwen3", {"qwen3.block_count": 1}), only=lambda name: name == "lm_head")
    ) == ["lm_head"]


@pytest.mark.parametrize(
    "architecture, keys, message",
    [
        ("bert", {}, "general.architecture is 'bert', whose linear layers are not known here"),
        ("llama", {}, "tensor 'blk.0.attn_q.weight' has 256 rows, but llama.attention.head_count is None"),
        ("llama", {"llama.attention.head_count": 3}, "has 256 rows, but llama.attention.head_count is 3"),
    ],
)
def test_linear_layers_that_are_refused(architecture, keys, message, write):
    with pytest.raises(CheckpointError, match=message.replace(".", r"\.")):
        load_linear(write(linear_layers(), architecture, keys))


@pytest.mark.parametrize("shape", [(257,), (255,), (1, 256), (256, 1)])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_biases_of_linear_layers_that_do_not_fit(architecture, shape, write):
    tensors = linear_layers() | {"blk.0.attn_q.bias": torch.ones(shape)}
    given = {f"{architecture}.{name}": value for name, value in HEADS.items()}
    message = rf"tensor 'blk.0.attn_q.bias' has shape {re.escape(str(shape))}, but \(256,\) is expected"
    with pytest.raises(CheckpointError, match=message):
        load_linear(write(tensors, architecture, given))


def test_scales_of_nvfp4_that_are_not_as_many_as_matrices(write):
    tensors = stacks("NVFP4", 1) | {"blk.0.ffn_up_exps.scale": torch.ones(2)}
    with pytest.raises(
        CheckpointError, match=r"tensor 'blk.0.ffn_up_exps.scale' has 2 elements, but 1 or 3 are expected"
    ):
        w4a8.load(write(tensors))

"""`read_layers` of GGUF files: every weight as `gguf` has it, ranks, what is refused."""

import re

import numpy as np
import pytest
import torch

import w4a8
from w4a8.checkpoint import CheckpointError, open_source, read_layers
from w4a8.core.packer import pack_experts
from w4a8.nn import W4A8Experts

pytest.importorskip("gguf")
import gguf_files
from test_gguf_blocks import unpacked

EXPERTS, HIDDEN, INTER, LAYERS = 3, 256, 512, 2
STACKS = {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}
FIRST = "blk.0.experts"


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
    loaded = read_layers(write(tensors))
    assert list(loaded) == [f"blk.{i}.experts" for i in range(LAYERS)]
    for index, layer in enumerate(loaded.values()):
        w13, w2 = weights(tensors, index)
        assert_holds(layer.w13_packed, w13)
        assert_holds(layer.w2_packed, w2)
        x, values, ids = torch.randn(5, HIDDEN), torch.rand(5, 2), torch.randint(EXPERTS, (5, 2))
        group = w4a8.read_header(layer.w13_packed[0])["group"]
        same = w4a8.read_header(layer.w2_packed[0])["group"] == group
        arguments = (layer.w13_packed, layer.w2_packed, HIDDEN, INTER, 2 * INTER, group if same else 0, False, 2)
        assert torch.equal(layer(x, ids, values), torch.ops.w4a8.dynamic_4bit_int_moe(x, ids, values, *arguments))


def test_the_layer_computes_what_the_file_means(write):
    """Beside float64: activations rounded to int8 in groups of 32 cost a percent or two."""
    tensors = stacks(("Q4_K", "Q4_K", "Q6_K"), 1)
    layer = read_layers(write(tensors))[FIRST]
    x, (values, ids) = torch.randn(64, HIDDEN), torch.randn(64, EXPERTS).softmax(1).topk(2)
    w13, w2 = weights(tensors)
    expected = torch.zeros(64, HIDDEN, dtype=torch.float64)
    for token in range(64):
        for value, expert in zip(values[token].double(), ids[token]):
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            expected[token] += value * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    error = (layer(x, ids, values).double() - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.03


def test_fused_gate_and_up(write):
    shapes = {"gate_up": (2 * INTER, HIDDEN), "down": STACKS["down"]}
    tensors = stacks("Q4_K", 1, shapes)
    layer = read_layers(write(tensors))[FIRST]
    assert_holds(layer.w13_packed, gguf_files.meaning(*tensors["blk.0.ffn_gate_up_exps.weight"]))


def biases():
    """Of the experts of the first layer, [E, N] each."""
    return {f"blk.0.ffn_{name}_exps.bias": torch.randn(EXPERTS, shape[0]) for name, shape in STACKS.items()}


def test_biases_and_gpt_oss(write):
    found = biases()
    tensors = stacks("MXFP4", 1) | found
    gate, up, down = found.values()
    layer = read_layers(write(tensors, "gpt-oss"))[FIRST]
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
    layer = read_layers(write(tensors))[FIRST]
    expected = torch.cat(
        [gguf_files.meaning(*tensors[f"blk.0.ffn_{n}_exps.weight"]) * scales[n].view(-1, 1, 1) for n in ("gate", "up")],
        1,
    )
    for mine, theirs in zip(layer.w13_packed, expected):
        torch.testing.assert_close(unpacked(mine).floats(), theirs, rtol=2**-23, atol=0)


def test_ranks(write):
    """Tensor parallel, and experts of their own; the parts add up to the whole layer."""
    tensors = stacks(("Q4_K", "Q4_K", "Q6_K"), 1)
    layer, (w13, w2) = open_source(write(tensors)).layers()[FIRST], weights(tensors)
    x, ids, values = torch.randn(6, HIDDEN), torch.randint(EXPERTS, (6, 2)), torch.rand(6, 2)

    def run(local, rank=0, ranks=1):
        sizes, packed, _ = pack_experts(layer, local, -1, rank, ranks)
        how = sizes.hidden, sizes.intermediate, sizes.group_size, w4a8.Activation.SILU, sizes.w2_group_size
        mine = torch.full((EXPERTS,), -1)
        mine[local] = torch.arange(len(local))
        return packed, W4A8Experts(packed["w13"], packed["w2"], *how)(x, mine[ids], values)

    _, whole = run([0, 1, 2])
    parts = [run([0, 1, 2], rank, 2) for rank in range(2)]
    for rank, (packed, _) in enumerate(parts):
        part, (gate, up) = slice(rank * INTER // 2, (rank + 1) * INTER // 2), w13.chunk(2, 1)
        assert_holds(packed["w13"], torch.cat((gate[:, part], up[:, part]), 1))
        assert_holds(packed["w2"], w2[:, :, part])
    # The inputs of w2 are rounded by the largest of each half.
    assert (parts[0][1] + parts[1][1] - whole).norm() < 0.02 * whole.norm()
    parts = [run([0, 2]), run([1])]
    assert_holds(parts[0][0]["w2"], w2[[0, 2]])
    torch.testing.assert_close(parts[0][1] + parts[1][1], whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


def test_only_some_layers(write):
    path = write(stacks("Q4_0"))
    assert list(read_layers(path, only=lambda name: ".1." in name)) == ["blk.1.experts"]


def replaced(tensors, name, value):
    return {**tensors, name: value} if value is not None else {n: t for n, t in tensors.items() if n != name}


GATE = "blk.1.ffn_gate_exps.weight"
BLOCKS = gguf_files.random_blocks("Q4_1", (EXPERTS, INTER, HIDDEN), np.random.default_rng(0))
BROKEN = {
    "no gate": (
        replaced(stacks("Q4_0"), GATE, None),
        {},
        "blk.1.experts has the stacks of experts down, up, expected gate, up, down",
    ),
    "gate twice": (
        replaced(stacks("Q4_0"), "blk.1.ffn_gate_up_exps.weight", ("Q4_1", BLOCKS)),
        {},
        "blk.1.experts has the stacks of experts down, gate, gate_up, up, expected gate, up, down",
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
        f"{GATE} is of 2 experts, but 3 are expected",
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
        "blk.0.ffn_gate_exps.weight has a bias, unlike the layer",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refused(case, write):
    tensors, changes, message = BROKEN[case]
    with pytest.raises(CheckpointError, match=message):
        read_layers(write(tensors, given=keys(**changes)))


def test_a_cut_inside_a_block_is_refused(write):
    """512 intermediate features for 4 ranks are 128 a rank, half of a block of Q4_K."""
    path = write(stacks("Q4_K", 1))
    with pytest.raises(ValueError, match="128"):
        pack_experts(open_source(path).layers()[FIRST], range(EXPERTS), None, 0, 4)


def test_a_cut_that_does_not_divide_is_refused(write):
    """512 intermediate features are none for three ranks to share."""
    with pytest.raises(ValueError, match="intermediate_size 512 cannot be cut for 3 tensor-parallel ranks"):
        pack_experts(open_source(write(stacks("Q4_0", 1))).layers()[FIRST], range(EXPERTS), None, 0, 3)


def test_activation_groups(write):
    path = write(stacks(("Q4_K", "Q4_K", "Q6_K"), 1))
    for asked, expected in ((None, 32), (-1, -1), (32, 32), (128, 128)):
        try:
            layer = read_layers(path, activation_group=asked)[FIRST]
        except ValueError as error:
            assert asked == 128 and f"{FIRST}: w13: activation_group is 128" in str(error)
            continue
        assert [w4a8.read_header(p[0])["activation_group"] for p in (layer.w13_packed, layer.w2_packed)] == [
            expected
        ] * 2


# ---- linear layers ----

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


NAMES = ["blk.0.attn_q", "blk.0.attn_k", "blk.0.ffn_down", "output"]


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_linear_layers(architecture, write):
    """Llama's q and k have the halves of each head in turns in the file: row 2 i + j of a head is row i of half j."""
    tensors = linear_layers()
    given = {f"{architecture}.{name}": value for name, value in HEADS.items()}
    loaded = read_layers(write(tensors, architecture, given), activation_group=-1)
    assert list(loaded) == NAMES
    for name in NAMES:
        expected = gguf_files.meaning(*tensors[f"{name}.weight"])
        bias = tensors.get(f"{name}.bias")
        heads = {"blk.0.attn_q": 4, "blk.0.attn_k": 2}.get(name)
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
    path = write(linear_layers(), "qwen3", {"qwen3.block_count": 1})
    assert list(read_layers(path, only=lambda name: name == "output")) == ["output"]


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
        read_layers(write(linear_layers(), architecture, keys))


@pytest.mark.parametrize("shape", [(257,), (255,), (1, 256), (256, 1)])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_biases_of_linear_layers_that_do_not_fit(architecture, shape, write):
    tensors = linear_layers() | {"blk.0.attn_q.bias": torch.ones(shape)}
    given = {f"{architecture}.{name}": value for name, value in HEADS.items()}
    message = rf"tensor 'blk.0.attn_q.bias' has shape {re.escape(str(shape))}, but \(256,\) is expected"
    with pytest.raises(CheckpointError, match=message):
        read_layers(write(tensors, architecture, given))


def test_scales_of_nvfp4_that_are_not_as_many_as_matrices(write):
    tensors = stacks("NVFP4", 1) | {"blk.0.ffn_up_exps.scale": torch.ones(2)}
    with pytest.raises(
        CheckpointError, match=r"tensor 'blk.0.ffn_up_exps.scale' has 2 elements, but 1 or 3 are expected"
    ):
        read_layers(write(tensors))

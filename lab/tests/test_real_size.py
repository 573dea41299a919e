"""lab/real_size: what it writes at small sizes, read by the packages that models are read with."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from folders import ROOT
from real_size import gguf_file, gguf_q4_0, gguf_q4_k_m, values, write
from real_size.architectures import Lfm2Shapes, NemotronShapes
from real_size.gguf_shapes import GGUFShapes
from real_size.qwen35 import HybridShapes

import w4a8
from w4a8.checkpoint import read_layers

FORMATS = ["w4a8", "w4a16", "bfloat16"]


@pytest.fixture(scope="module")
def small():
    return GGUFShapes(
        layers=2,
        vocabulary=320,
        group=32,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=96,
        experts=16,
        top_k=4,
        positions=512,
    )


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    """A folder with the formats of safetensors, in several files each."""
    folder = tmp_path_factory.mktemp("real_size")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "SHARD_BYTES", 300_000)
        write.write(small, folder, FORMATS)
    return folder


def _tensors(folder):
    load_file = pytest.importorskip("safetensors.torch").load_file
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(folder / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(part)
        found.update(part)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    return found


def _dequantized(tensors, module, group):
    words = tensors[f"{module}.weight_packed"]
    nibbles = torch.stack([words >> 4 * i & 15 for i in range(8)], -1).flatten(1)
    grouped = (nibbles - 8).float().unflatten(1, (-1, group))
    assert tensors[f"{module}.weight_shape"].tolist() == [words.shape[0], words.shape[1] * 8]
    return (grouped * tensors[f"{module}.weight_scale"].float().unsqueeze(-1)).flatten(1)


def test_full_size_is_that_of_the_model():
    """Names, sizes and bytes of the whole; nothing is written."""
    full = GGUFShapes()
    count = sum(
        t.matrix[0] * t.matrix[1] for t in full.tensors() if t.content in ("words", "unit", "normal", "weights", "ones")
    )
    assert count == 30_532_122_624  # parameters of Qwen3-30B-A3B
    config = full.config()
    assert (config["num_hidden_layers"], config["vocab_size"], config["num_experts_per_tok"]) == (48, 151936, 8)
    scheme = config["quantization_config"]["config_groups"]["group_0"]
    assert scheme["weights"]["group_size"] == 128
    assert scheme["input_activations"]["num_bits"] == 8
    w4a16 = replace(full, scheme="w4a16").config()["quantization_config"]
    assert w4a16["config_groups"]["group_0"]["input_activations"] is None
    assert "quantization_config" not in replace(full, scheme="bfloat16").config()
    assert 16.4e9 < full.nbytes < 17.2e9


def test_tensors(small, written):
    """Those and only those of the model, of the right shapes; the bfloat16 ones are the int4 ones multiplied out."""
    tensors, plain = _tensors(written / "w4a8"), _tensors(written / "bfloat16")
    assert len(list((written / "w4a8").glob("*.safetensors"))) > 2
    for index in range(small.layers):
        experts = [f"mlp.experts.{e}.{p}_proj" for e in range(small.experts) for p in ("gate", "up", "down")]
        for name in ("self_attn.q_proj", "self_attn.o_proj", *experts):
            module = f"model.layers.{index}.{name}"
            expected = _dequantized(tensors, module, small.group)
            assert torch.equal(plain[f"{module}.weight"].float(), expected)
            assert expected.abs().max() > 0
    assert tensors["model.layers.1.mlp.experts.3.down_proj.weight_packed"].shape == (256, 96 // 8)
    assert torch.equal(tensors["lm_head.weight"], plain["lm_head.weight"])
    assert sum(name.endswith("weight_packed") for name in tensors) == small.layers * (4 + 3 * small.experts)


def test_w4a16_is_the_same_files(written):
    for path in (written / "w4a16").glob("*.safetensors"):
        assert path.samefile(written / "w4a8" / path.name)
    config = json.loads((written / "w4a16" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["input_activations"] is None


def test_a_tensor_does_not_depend_on_what_else_is_written(small, written, tmp_path):
    write.write(replace(small, layers=1), tmp_path, ["w4a8"])
    one, two = _tensors(tmp_path / "w4a8"), _tensors(written / "w4a8")
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_read_layers_reads_it(small, written):
    layers = read_layers(written / "w4a8", only=lambda name: name.endswith("experts"))
    assert list(layers) == [f"model.layers.{i}.mlp.experts" for i in range(small.layers)]
    weights, ids = w4a8.topk_routing(torch.randn(5, small.experts), 2, True)
    out = layers["model.layers.0.mlp.experts"](torch.randn(5, small.hidden), ids, weights)
    assert torch.isfinite(out).all()


def test_transformers_runs_it(small, written):
    """Activations stay finite and of one size, and tokens go to all experts."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    tokenizer = transformers.AutoTokenizer.from_pretrained(written / "bfloat16")
    text = "w5 w300 w17"
    assert tokenizer(text)["input_ids"] == [5, 300, 17]
    assert tokenizer.decode([5, 300, 17]) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(written / "bfloat16", dtype=torch.float32).eval()
    ids = torch.randint(small.vocabulary, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, output_router_logits=True)
    for hidden in out.hidden_states:
        assert 0.3 < hidden.square().mean().sqrt() < 5
    assert torch.isfinite(out.logits).all()
    for logits in out.router_logits:
        used = torch.bincount(logits.topk(small.top_k).indices.flatten(), minlength=small.experts)
        # 50 expected; a favourite of a random router has not many times as many.
        assert used.min() > 0
        assert used.max() < 4 * 200 * small.top_k / small.experts


@pytest.mark.parametrize("group", [32, 128])
def test_q4_0_has_the_same_numbers(group):
    quants, types = _gguf()
    words = values.words("m", 8, 256)
    scales = values.scales("m", 8, 256, group)
    blocks = gguf_q4_0.q4_0(words, scales)
    expected = values.dequantized(words, scales)
    assert np.array_equal(quants.dequantize(blocks, types.Q4_0), expected)
    if (
        group == 32
    ):  # and the same bits as gguf's own packing of these numbers, which knows only what spans all of [-8, 7]
        extreme = np.abs(expected.reshape(8, -1, 32)).argmax(-1)
        chosen = np.take_along_axis(expected.reshape(8, -1, 32), extreme[..., None], -1)[..., 0] == -8 * scales
        theirs = quants.quantize(expected, types.Q4_0).reshape(8, -1, 18)
        assert chosen.any()
        assert np.array_equal(theirs[chosen], blocks.reshape(8, -1, 18)[chosen])


def test_q4_0_refuses_scales_that_it_would_round():
    words = values.words("m", 1, 32)
    with pytest.raises(ValueError, match="not exact in float16"):
        gguf_q4_0.q4_0(words, np.float32([[2.0**-30]]))


def test_q6_k_is_near():
    quants, types = _gguf()
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    values[0] = 0
    back = quants.dequantize(gguf_q4_0.q6_k(values), types.Q6_K)
    # Half a step of 31 up to the largest of 16 values, plus what rounding the step up to an eighth of a bit adds.
    step = np.abs(values.reshape(6, -1, 16)).max(-1) / 31
    largest = np.abs(values.reshape(6, -1, 256)).max(-1) / 31 / 127
    bound = np.repeat((step + np.repeat(largest, 16, 1) * 1.01) / 2, 16, 1)
    assert (np.abs(back - values) <= bound * 1.01).all()


def test_gguf_file(small, written, tmp_path):
    """Read back by the package: keys, names, shapes, and the weights of the checkpoint."""
    quants, types = _gguf()
    import gguf

    shutil.copytree(written, tmp_path / "m", symlinks=True)
    write.write(small, tmp_path / "m", ["gguf"])
    path = tmp_path / "m" / "gguf" / "model.gguf"
    expected = gguf_file.nbytes(small, write.gguf_source(small, "gguf", tmp_path))
    assert abs(path.stat().st_size - expected) < 65536
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3moe"
    assert fields["qwen3moe.expert_used_count"] == small.top_k
    assert fields["qwen3moe.vocab_size"] == small.vocabulary
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 3 + 12 * small.layers
    checkpoint = _tensors(written / "w4a8")
    stack = tensors["blk.1.ffn_down_exps.weight"]
    assert stack.tensor_type == types.Q4_0
    assert stack.shape.tolist() == [small.intermediate, small.hidden, small.experts]
    values = quants.dequantize(stack.data, types.Q4_0)
    for expert in range(small.experts):
        module = f"model.layers.1.mlp.experts.{expert}.down_proj"
        assert np.array_equal(values[expert], _dequantized(checkpoint, module, small.group).numpy())
    query = quants.dequantize(tensors["blk.0.attn_q.weight"].data, types.Q4_0)
    assert np.array_equal(query, _dequantized(checkpoint, "model.layers.0.self_attn.q_proj", small.group).numpy())
    router = tensors["blk.0.ffn_gate_inp.weight"].data
    assert np.array_equal(router, checkpoint["model.layers.0.mlp.gate.weight"].float().numpy())


def test_hybrid_file(tmp_path):
    """As transformers' class of the architecture wants it, and nothing else; other formats are refused."""
    _gguf()
    transformers = pytest.importorskip("transformers", minversion="5.19")
    import gguf

    import w4a8.integrations.transformers  # noqa: F401, which reads the file
    from w4a8.checkpoint.gguf_file import GGUFFile
    from w4a8.checkpoint.gguf_linear import GGUFLinears
    from w4a8.checkpoint.gguf_names import QWEN_HEADS

    full = HybridShapes()
    count = sum(math.prod(part.shape) for part in gguf_file.parts(full))
    assert count == 34_660_610_688  # parameters of Qwen3.5-35B-A3B without its tower for pictures
    sizes = {"hidden": 256, "heads": 2, "kv_heads": 1, "head_dim": 128, "intermediate": 256, "experts": 4, "top_k": 2}
    some = HybridShapes(layers=4, vocabulary=512, positions=64, key_heads=1, value_heads=2, group=32, **sizes)
    write.write(some, tmp_path, ["gguf-q4_k_m"])
    path = tmp_path / "gguf-q4_k_m" / "model.gguf"
    assert {tensor.name for tensor in gguf.GGUFReader(path).tensors} == {part.name for part in gguf_file.parts(some)}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3_5MoeForCausalLM" and model.config.layer_types[2:] == [
        "linear_attention",
        "full_attention",
    ]
    with torch.no_grad():
        logits = model(torch.arange(9)[None]).logits
    assert logits.isfinite().all()

    write.write(replace(some, guessing=1), tmp_path / "guessing", ["gguf-q4_k_m"])
    guessing = tmp_path / "guessing" / "gguf-q4_k_m" / "model.gguf"
    linears = GGUFLinears(GGUFFile(guessing))
    assert GGUFLinears(GGUFFile(path)).heads == 0 and linears.heads == 1
    layer = {name.removeprefix("blk.4.") for name in linears.file.tensors if name.startswith("blk.4.")}
    assert {"attn_q.weight", "ffn_down_exps.weight", *(f"nextn.{name}.weight" for name in QWEN_HEADS.beside)} < layer
    same = transformers.AutoModelForCausalLM.from_pretrained(guessing.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():  # the layer that guesses is left out
        assert torch.equal(same(torch.arange(9)[None]).logits, logits)
    with pytest.raises(ValueError, match="formats are 'w4a8', expected gguf-q4_k_m for qwen35moe"):
        write.write(some, tmp_path, ["w4a8"])


def _parameters(shapes):
    """Biases of routers are none."""
    return sum(math.prod(part.shape) for part in gguf_file.parts(shapes) if "exp_probs_b" not in part.name)


@pytest.mark.parametrize(
    ("shapes", "parameters", "sizes", "kinds"),
    [
        (
            NemotronShapes,
            31_577_937_344,
            {"hidden": 96, "intermediate": 96, "shared": 160, "mixers": 4, "groups": 2, "state_size": 16, "layers": 7},
            {"blk.0.ssm_in": "Q5_0", "blk.0.ssm_out": "Q4_K", "blk.1.ffn_down_exps": "Q5_0", "blk.5.attn_v": "Q8_0"}
            | {"blk.6.ffn_down_exps": "Q8_0", "token_embd": "Q5_0", "output": "Q8_0"},
        ),
        (
            Lfm2Shapes,
            8_339_929_856,
            {"hidden": 256, "intermediate": 256, "dense": 512, "layers": 3},
            {"blk.0.shortconv.in_proj": "Q4_K", "blk.2.attn_v": "Q6_K", "blk.2.ffn_gate_exps": "Q4_K"}
            | {"blk.0.ffn_down": "Q4_K", "token_embd": "Q6_K"},
        ),
    ],
)
def test_files_of_other_hybrids(tmp_path, shapes, parameters, sizes, kinds):
    """Parameters of the whole model; a small file has the keys that llama.cpp's converter writes, and the types that
    its mix has, and transformers' class of the architecture runs it."""
    _gguf()
    transformers = pytest.importorskip("transformers", minversion="5.19")
    import gguf

    import w4a8.integrations.transformers  # noqa: F401, which reads the file

    assert _parameters(shapes()) == parameters
    some = {"heads": 4, "kv_heads": 2, "head_dim": 64, "experts": 4, "top_k": 2, "vocabulary": 512, "positions": 64}
    small = shapes(**{**some, **sizes})
    write.write(small, tmp_path, ["gguf-q4_k_m"])
    path = tmp_path / "gguf-q4_k_m" / "model.gguf"
    reader = gguf.GGUFReader(path)
    converted = json.loads((ROOT / "tests/gguf_architectures.json").read_text())[small.architecture]["keys"]
    assert converted.keys() <= reader.fields.keys()
    types = {tensor.name.removesuffix(".weight"): tensor.tensor_type.name for tensor in reader.tensors}
    assert {name: types[name] for name in kinds} == kinds
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        out = model(torch.arange(9)[None], output_hidden_states=True)
    assert out.logits.isfinite().all() and 0.1 < out.hidden_states[-1].square().mean().sqrt() < 10


@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0"])
def test_blocks_of_one_scale(kind):
    """Of the size that is asked for, to the next power of two, and without a mean."""
    quants, types = _gguf()
    blocks = gguf_q4_k_m.MAKE[kind]("some", 4096, 0.02)
    values = quants.dequantize(blocks, types[kind])
    assert values.shape == (4096, 32)
    size = np.sqrt(np.mean(np.square(values)))
    assert 0.7 < size / 0.02 < 1.42
    # The middle of Q5_0's codes is half a code off.
    assert abs(values.mean()) < size / 18 + 5 * size / np.sqrt(values.size)


def test_q4_k_m_file(small, tmp_path):
    """Types as llama.cpp chooses them, weights of the size that keeps activations, and the file runs in w4a8."""
    quants, types = _gguf()
    import gguf

    wide = replace(small, layers=8, intermediate=256)
    write.write(wide, tmp_path, ["gguf-q4_k_m"])
    path = tmp_path / "gguf-q4_k_m" / "model.gguf"
    expected = gguf_file.nbytes(wide, gguf_q4_k_m.RandomBlocks(wide))
    assert abs(path.stat().st_size - expected) < 65536
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    downs = [tensors[f"blk.{layer}.ffn_down_exps.weight"].tensor_type for layer in range(8)]
    # The first and last eighth, and every third of the others, from the third on.
    assert [kind == types.Q6_K for kind in downs] == [True, False, False, True, False, False, True, True]
    assert all(kind in (types.Q4_K, types.Q6_K) for kind in downs)
    assert tensors["blk.3.attn_v.weight"].tensor_type == types.Q6_K == tensors["output.weight"].tensor_type
    assert tensors["blk.3.attn_k.weight"].tensor_type == types.Q4_K == tensors["token_embd.weight"].tensor_type
    for name in ("blk.0.ffn_down_exps.weight", "blk.1.ffn_down_exps.weight"):
        values = quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        size = np.sqrt(np.mean(np.square(values)))
        # To the next power of two, either way; the mean of as many of this size is within five of its deviations.
        assert 0.7 < size * 16 < 1.42
        assert abs(values.mean()) < 5 * size / np.sqrt(values.size)
    layer = read_layers(path, only=lambda name: name == "blk.0.experts")["blk.0.experts"]
    weights, ids = w4a8.topk_routing(torch.randn(5, small.experts), 2, True)
    out = layer(torch.randn(5, 256), ids, weights)
    assert 0.01 < out.square().mean().sqrt() < 10


def test_refuses_without_the_space(small, tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=1_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(write.NotEnoughSpace, match=r"need .* GB .* has 1\.0 GB free"):
        write.write(small, tmp_path / "m", ["w4a8"])
    assert not any((tmp_path / "m").iterdir())


def test_writes_once(small, tmp_path, capfd):
    """What is there is kept, what was cut short is written again, another model is not overwritten."""
    tiny = replace(small, layers=1, experts=4)
    write.write(tiny, tmp_path, ["w4a8"])
    said = capfd.readouterr().err
    assert "about 1 min" in said
    assert "s left" in said
    before = (tmp_path / "w4a8" / "config.json").stat().st_mtime_ns
    write.write(tiny, tmp_path, ["w4a8"])
    assert (tmp_path / "w4a8" / "config.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="other sizes"):
        write.write(small, tmp_path, ["w4a8"])
    (tmp_path / "w4a8" / "complete.json").unlink()
    write.write(small, tmp_path, ["w4a8"])
    assert len(_tensors(tmp_path / "w4a8")) > 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"group": 48}, "group is 48"), ({"layers": 0}, "layers is 0"), ({"scheme": "x"}, "scheme is")],
)
def test_bad_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        GGUFShapes(**changes)


def test_bad_format(small, tmp_path):
    with pytest.raises(ValueError, match="formats are 'w8'"):
        write.write(small, tmp_path, ["w8"])


def _gguf():
    gguf = pytest.importorskip("gguf")
    return gguf.quants, gguf.GGMLQuantizationType

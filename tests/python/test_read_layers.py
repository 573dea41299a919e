"""`open_source` and `read_layers`: which layers of which files; in every format: formats/test_read_formats.py."""

import json
from dataclasses import replace

import meter
import pytest
import shuffled_model
import torch
from format_checkpoints import FORMATS, LAYER, QUERY, experts_checkpoint

import w4a8
from w4a8.checkpoint import CheckpointError, open_source, read_layers
from w4a8.core.packer import pack_experts
from w4a8.nn import W4A8Experts

pytest.importorskip("safetensors", reason="the safetensors package is not installed")
from safetensors.torch import load_file, save_file

MEMORY = """
import torch
from w4a8.checkpoint import open_source, read_layers
from w4a8.core.packer import pack_experts
warm = read_layers(sys.argv[1], only=lambda name: ".0." in name)  # what a first call allocates for good
del warm
before = begin()
how = eval(sys.argv[2])
if how:
    found = [pack_experts(each, *how)[1].values() for each in open_source(sys.argv[1]).layers(experts).values()]
else:
    found = [layer.buffers() for layer in read_layers(sys.argv[1], only=experts).values()]
found = [tensor for tensors in found for tensor in tensors]
print(sum(tensor.numel() for tensor in found), memory("VmHWM") - before)
""".replace("experts)", 'lambda name: name.endswith("experts"))')


@pytest.fixture
def made():
    made = experts_checkpoint(FORMATS["W4A16 pack"], 64, 64, 32, experts=4)
    made.add(QUERY, FORMATS["W4A16 pack"], 64, 64, 32)
    return made


def run(layer, local, rank=0, ranks=1):
    """The part of the output that a rank computes, of a choice among four experts."""
    sizes, packed, _ = pack_experts(layer, local, -1, rank, ranks)
    experts = W4A8Experts(packed["w13"], packed["w2"], sizes.hidden, sizes.intermediate, sizes.group_size)
    generator = torch.Generator().manual_seed(0)
    mine = torch.full((4,), -1)
    mine[local] = torch.arange(len(local))
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(8)])
    return experts(torch.randn(8, 64, generator=generator), mine[ids], torch.rand(8, 2, generator=generator))


def test_ranks_add_up(made, tmp_path):
    layer = open_source(made.write(tmp_path)).layers()[LAYER]
    whole = run(layer, [0, 1, 2, 3])
    parts = [run(layer, [0, 1, 2, 3], rank, 2) for rank in range(2)]
    # The inputs of w2 are rounded by the largest of each half.
    assert 0 < (parts[0] + parts[1] - whole).norm() < 0.02 * whole.norm()
    parts = [run(layer, [1, 3]), run(layer, [0]), run(layer, [2])]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


def test_layers(made, tmp_path):
    """All or some, in the order of numbers, from one file or from several."""
    for number in (10, 2):
        name = LAYER.replace("0", str(number))
        made.tensors |= {
            key.replace(LAYER, name): tensor.clone() for key, tensor in made.tensors.items() if LAYER in key
        }
    for files in (1, 3):
        path = made.write(tmp_path / str(files), files)
        expected = [QUERY, *(LAYER.replace("0", number) for number in ("0", "2", "10"))]
        assert sorted(read_layers(path)) == sorted(expected)
        assert [name for name in read_layers(path) if name != QUERY] == expected[1:]
        assert list(read_layers(path, only=lambda name: ".2." in name)) == expected[2:3]


@pytest.mark.parametrize("asked, found", [(None, 32), (-1, -1), (32, 32)])
def test_activation_group(asked, found, made, tmp_path):
    layers = read_layers(made.write(tmp_path), activation_group=asked)
    for packed in (layers[QUERY].packed, layers[LAYER].w13_packed[0], layers[LAYER].w2_packed[3]):
        assert w4a8.read_header(packed)["activation_group"] == found
    with pytest.raises(CheckpointError, match=f"^{LAYER}: w13: activation_group is 64"):
        read_layers(tmp_path, activation_group=64, only=lambda name: name == LAYER)


def test_packed_directory(made, tmp_path):
    """Bit for bit, whole and a rank's part."""
    made, packed = made.write(tmp_path / "theirs"), tmp_path / "packed"
    layers = read_layers(made)
    packed.mkdir()
    tensors = {f"{name}.{key}": tensor for name, layer in layers.items() for key, tensor in layer.state_dict().items()}
    save_file(tensors, packed / "model.safetensors")
    stated = {"quant_method": "w4a8", "format": "packed", "version": 1}
    (packed / "config.json").write_text(json.dumps({"quantization_config": stated}))
    again = read_layers(packed)
    assert again.keys() == layers.keys()
    for name, layer in layers.items():
        assert type(layer) is type(again[name]) and all(map(torch.equal, layer.buffers(), again[name].buffers()))
    for how in (([1, 3],), ([0, 1, 2, 3], None, 1, 2)):
        how = (*how, None)[: max(2, len(how))]
        mine, theirs = (pack_experts(open_source(path).layers()[LAYER], *how)[1] for path in (packed, made))
        assert all(torch.equal(mine[stack], theirs[stack]) for stack in ("w13", "w2"))
    layer = open_source(packed).layers()[LAYER]
    forms = {
        stack: replace(form, scale_dtype=torch.float32) for stack, form in pack_experts(layer, [0], None)[2].items()
    }
    other = pack_experts(layer, range(4), None, packed_as=forms)  # in the place of experts of other forms
    assert other[2] == forms
    for stack in ("w13", "w2"):
        assert w4a8.read_header(other[1][stack][3])["scale_dtype"] == "float32"


@pytest.mark.parametrize("name", [QUERY, LAYER])
def test_only_what_is_asked_for_is_looked_at(name, made, tmp_path):
    """A layer that is broken is named, and hinders no other."""
    path = made.write(tmp_path) / "model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(path).items() if not key.startswith(f"{name}.0")}
    tensors = {key: tensor for key, tensor in tensors.items() if key != f"{QUERY}.weight_scale" or name == LAYER}
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"^{name}: "):
        read_layers(tmp_path)
    other = QUERY if name == LAYER else LAYER
    assert list(read_layers(tmp_path, only=lambda each: each == other)) == [other]


@pytest.mark.parametrize("text, message", [
    (None, "config.json is missing"), ("{", "is not valid JSON"), ("[]", "is not a JSON object"),
    ("{}", "has no quantization_config"),
])  # fmt: skip
def test_no_checkpoint(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_layers(tmp_path)


def test_wrong_files(made, tmp_path):
    path = made.write(tmp_path / "two", files=2)
    index = path / "model.safetensors.index.json"
    index.unlink()
    for message in (r"holds 2 \*.safetensors files, but no", r"holds no \*.safetensors file"):
        with pytest.raises(CheckpointError, match=message):
            open_source(path)
        for file in path.glob("*.safetensors"):
            file.unlink()
    (path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        open_source(path)


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory):
    return shuffled_model.write(tmp_path_factory.mktemp("shuffled") / "model", layers=2, experts=128)


@meter.needs_proc
@pytest.mark.parametrize("how", [(), (range(128), None, 1, 2), (range(64, 128), None)], ids=["whole", "tp", "ep"])
def test_peak_memory(how, shuffled):
    """What is packed, a rank's share, and an expert; files' pages are freed as they are read."""
    packed, peak = meter.run(MEMORY, shuffled, how)
    assert packed > (200e6 if not how else 100e6)
    assert peak < 1.02 * packed + (36 << 20)

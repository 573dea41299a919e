"""The container: what is read beside the package `gguf`, and what is refused."""

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from w4a8.checkpoint.gguf_file import GGUFFile, Strings, gguf_in
from w4a8.core.json_fields import CheckpointError

gguf = pytest.importorskip("gguf")
pytest.importorskip("hypothesis")
import gguf_files  # noqa: E402
from fuzzing import fuzz  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

KEYS = {
    "test.bool": True,
    "test.count": 7,
    "test.float": 0.5,
    "test.name": "Käse",
    "test.names": ["a", "", "ü"],
    "test.numbers": [1, -2, 3],
}


@pytest.fixture
def file(tmp_path):
    """One of all kinds of tensors."""
    generator = np.random.default_rng(1)
    tensors = {
        "f32": torch.randn(3, 5),
        "f16": torch.randn(7).half(),
        "stack": ("Q4_K", gguf_files.random_blocks("Q4_K", (3, 4, 256), generator)),
    }
    for name in gguf_files.BLOCKS:
        tensors[f"matrix.{name}"] = (name, gguf_files.random_blocks(name, (4, 256), generator))
    return gguf_files.write(tmp_path / "model.gguf", "llama", KEYS, tensors), tensors


def test_keys_and_tensors(file):
    path, tensors = file
    read, reader = GGUFFile(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    arrays = (np.ndarray, Strings)
    found = {name: list(value) if isinstance(value, arrays) else value for name, value in read.keys.items()}
    assert found == expected
    assert list(read.tensors) == [tensor.name for tensor in reader.tensors]
    for name, tensor in tensors.items():
        expected = tensor.float() if isinstance(tensor, torch.Tensor) else gguf_files.meaning(*tensor)
        assert read.tensors[name].shape == expected.shape
        assert torch.equal(read.tensor(name).float(), expected)
        assert read.is_float(name) == isinstance(tensor, torch.Tensor)
    assert torch.equal(read.floats("stack", 4, 8), gguf_files.meaning(*tensors["stack"])[1])
    assert [read.type_name(name) for name in ("f32", "f16", "stack")] == ["F32", "F16", "Q4_K"]


def test_floats_are_the_callers(file):
    """Written to, they do not change what is read next."""
    path, tensors = file
    read = GGUFFile(path)
    read.tensor("f32").zero_()
    assert torch.equal(read.tensor("f32"), tensors["f32"])


def test_bfloat16(tmp_path):
    values = torch.randn(2, 4).bfloat16()
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", values.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert torch.equal(GGUFFile(path).tensor("x"), values)


def test_a_split_model(tmp_path):
    tensors = {f"t{i}": torch.full((4, 32), float(i)) for i in range(6)}
    gguf_files.write(tmp_path / "m.gguf", "llama", KEYS, tensors, split_max_tensors=2)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in paths:
        read = GGUFFile(path)
        assert set(read.tensors) == set(tensors) and read.keys["test.count"] == 7
        assert all(torch.equal(read.tensor(name), tensor) for name, tensor in tensors.items())
    assert gguf_in(tmp_path) == paths[0]
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf is missing"):
        GGUFFile(paths[0])


def test_the_file_of_a_folder(tmp_path):
    assert gguf_in(tmp_path) is None
    (tmp_path / "a.gguf").touch()
    assert gguf_in(tmp_path) == tmp_path / "a.gguf" == gguf_in(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=r"holds 2 models in GGUF, name one: a.gguf, b.gguf"):
        gguf_in(tmp_path)
    (tmp_path / "config.json").touch()
    assert gguf_in(tmp_path) is None


def test_an_alignment_of_its_own(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.arange(5.0)}
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GGUFFile(path)
    assert all(place.offset % 256 == 0 for place in read.tensors.values())
    assert torch.equal(read.tensor("b"), tensors["b"])


# ---- what is refused: files made byte by byte ----


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def place(name="t", shape=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def head(keys=(), places=(), data=32, counts=None, magic=b"GGUF", version=3):
    counts = counts or (len(places), len(keys))
    body = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(places)
    return body + bytes(-len(body) % 32 + data)


BROKEN = {
    "empty": (b"", "cannot be read"),
    "magic": (head(magic=b"GGML"), "does not begin with 'GGUF'"),
    "version": (head(version=2), "version is 2, expected 3"),
    "big endian": (head(version=3 << 24), "version is 50331648, expected 3, little-endian"),
    "cut in the counts": (
        head()[:17],
        "the number of keys has 8 bytes from byte 16 on, but the file has 1 bytes there",
    ),
    "tensors": (head(counts=(1 << 60, 0)), "the number of tensors is 1152921504606846976"),
    "keys": (head(counts=(0, 1 << 60)), "the number of keys is 1152921504606846976"),
    "a long name": (head([struct.pack("<Q", 1 << 60)]), "the name of a key has 1152921504606846976 bytes"),
    "no text": (head([key(b"\xff", 4, bytes(4))]), "the name of a key is no text in UTF-8"),
    "a long string": (head([key("s", 8, struct.pack("<Q", 1 << 60))]), "s has 1152921504606846976 bytes"),
    "a type of values": (head([key("s", 13, b"")]), "s has type 13, expected 0..12"),
    "a long array": (head([key("a", 9, struct.pack("<IQ", 4, 1 << 61))]), "the length of a is 2305843009213693952"),
    "many strings": (head([key("a", 9, struct.pack("<IQ", 8, 1 << 61))]), "the length of a is 2305843009213693952"),
    "nested arrays": (head([key("a", 9, struct.pack("<IQ", 9, 1))]), "a is an array of type 9, expected 0..8 or"),
    "a key twice": (head([key("a", 4, bytes(4))] * 2), "key 'a' is there twice"),
    "alignment": (
        head([key("general.alignment", 4, struct.pack("<I", 3))]),
        "general.alignment is 3, expected a power",
    ),
    "alignment 0": (head([key("general.alignment", 4, bytes(4))]), "general.alignment is 0, expected a power"),
    "alignment as text": (head([key("general.alignment", 8, text("32"))]), "general.alignment is '32', expected"),
    "dimensions": (head(places=[place(shape=())]), "tensor 't' has 0 dimensions, expected 1..4"),
    "many dimensions": (head(places=[place(shape=(1,) * 5)]), "tensor 't' has 5 dimensions, expected 1..4"),
    "no elements": (head(places=[place(shape=(0, 4))]), r"tensor 't' has shape \(4, 0\), expected 1 to"),
    "2^80 elements": (head(places=[place(shape=(1 << 40,) * 2)]), "tensor 't' has shape"),
    "behind the end": (head(places=[place(shape=(9,))]), "tensor 't' ends at 100, but the file at 96"),
    "an offset behind the end": (head(places=[place(offset=1 << 63)]), "tensor 't' ends at"),
    "an odd offset": (head(places=[place(offset=8)]), "tensor 't' is at 8, which is no multiple of 32"),
    "overlapping": (
        head(places=[place("a", (9,)), place("b", offset=32)], data=64),
        "tensor 'b' begins inside tensor 'a'",
    ),
    "a tensor twice": (head(places=[place(), place(offset=32)], data=64), "tensor 't' is there twice"),
    "a type": (head(places=[place(kind=99)]), "tensor 't' has type 99, which is not read"),
    "Ollama's MXFP4": (head(places=[place(kind=4)]), r"tensor 't' has type 4 \(Q4_2, or MXFP4 as Ollama numbers it\)"),
    "IQ2_XXS": (head(places=[place(kind=16)]), "tensor 't' has type IQ2_XXS, which is not read"),
    "half a block": (head(places=[place(shape=(48,), kind=2)]), "tensor 't' has rows of 48, but Q4_0 has blocks of 32"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refused(case, tmp_path):
    content, message = BROKEN[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        GGUFFile(path)
    assert str(path) in str(error.value)


def test_what_the_parts_above_make_is_right(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(head([key("a", 4, struct.pack("<I", 5))], [place(shape=(4, 2))]))
    read = GGUFFile(path)
    assert read.keys == {"a": 5} and read.tensors["t"].shape == (2, 4)
    with pytest.raises(CheckpointError, match="tensor 'u' is missing from"):
        read.tensor("u")
    with pytest.raises(CheckpointError, match="tensor 't' is F32, expected a type in blocks"):
        read.matrix("t")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="tensor 't' ends behind the end of the file"):
        read.tensor("t")


def test_strings_take_memory_when_they_are_asked_for(tmp_path):
    """A list of them took four times the bytes that they have in the file, here."""
    path, words = tmp_path / "m.gguf", [f"word {i}" for i in range(200_000)]
    array = struct.pack("<IQ", 8, len(words)) + b"".join(map(text, words))
    path.write_bytes(head([key("a", 9, array), key("b", 4, struct.pack("<I", 5))], [place()]))
    tracemalloc.start()
    read = GGUFFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(array) / 10
    found = read.keys["a"]
    assert len(found) == len(words) and (found[0], found[-1]) == ("word 0", "word 199999") and list(found) == words
    assert read.keys["b"] == 5 and repr(found) == "200000 strings"


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (text("x") + struct.pack("<Q", 99), "a has 99 bytes from byte"),
        (text("x") + text(b"\xff"), "a is no text in UTF-8"),
    ],
)
def test_strings_that_are_wrong(strings, message, tmp_path):
    """Lengths are checked at once, texts when they are read."""
    path = tmp_path / "m.gguf"
    path.write_bytes(head([key("a", 9, struct.pack("<IQ", 8, 2) + strings)]))
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path).keys["a"][0]


def test_names_of_split_files(tmp_path):
    for name, message in (
        ("m-00003-of-00002.gguf", "the name says file 3 of 2"),
        ("m-00001-of-00001.gguf", "split.count is 2, but the name says 1"),
        ("m-00001-of-00002.gguf", "tensor 't' is in another file, too"),
    ):
        count = key("split.count", 2, struct.pack("<H", 2))
        for i in (1, 2):
            (tmp_path / f"m-0000{i}-of-00002.gguf").write_bytes(head([count], [place()]))
        (tmp_path / "m-00001-of-00001.gguf").write_bytes(head([count], [place()]))
        with pytest.raises(CheckpointError, match=message):
            GGUFFile(tmp_path / name)


@fuzz(data=st.data())
def test_damaged_files(tmp_path_factory, data):
    """Any bytes overwritten, any end cut off: an error in words, or a file all of whose tensors can be read."""
    whole = head(
        [key("general.architecture", 8, text("llama")), key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y"))],
        [place("t", (64, 2), 2), place("u", (3,), 0, 96)],
        data=128,
    )
    content = bytearray(whole[: data.draw(st.integers(0, len(whole)), "length")])
    for _ in range(data.draw(st.integers(0, 3), "changes")):
        at = data.draw(st.integers(0, max(len(content) - 8, 0)), "at")
        value = data.draw(st.sampled_from([0, 1, 255, 2**31, 2**32, 2**60, 2**63, 2**64 - 1]), "value")
        content[at : at + 8] = struct.pack("<Q", value)[: len(content) - at]
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    path.write_bytes(content)
    try:
        read = GGUFFile(path)
    except CheckpointError:
        return
    for name, tensor in read.tensors.items():
        assert read.tensor(name).shape == tensor.shape
    if isinstance(read.keys.get("a"), Strings):
        with contextlib.suppress(CheckpointError):  # no text in UTF-8
            assert len(list(read.keys["a"])) == len(read.keys["a"])

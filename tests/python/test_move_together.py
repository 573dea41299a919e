"""move_together and placed: small packed weights in pages of their own, large ones and mapped ones where they are."""

import itertools
import mmap
import sys

import pytest
import torch

from w4a8.core import memory
from w4a8.core.memory import move_together, placed

KIB = 1 << 10


def numbers(count, seed):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_small_ones_lie_together(monkeypatch):
    monkeypatch.setattr(memory, "_CHUNK", 1 << 20)
    tensors = [numbers(100 * KIB + 37 * i, i) for i in range(24)]
    copies = [tensor.clone() for tensor in tensors]
    assert move_together(tensors) == sum(map(len, tensors))
    for tensor, copy in zip(tensors, copies):
        assert torch.equal(tensor, copy)
        assert tensor.data_ptr() % 64 == 0 and tensor.storage_offset() == 0
        assert getattr(tensor, "untyped_storage", tensor.storage)().nbytes() == len(tensor), "saved apart"
    gaps = [b.data_ptr() - a.data_ptr() - len(a) for a, b in itertools.pairwise(tensors)]
    assert sum(0 <= gap < 64 for gap in gaps) >= 20, "ten to a chunk of 1 MiB"
    assert move_together(tensors) == sum(map(len, tensors)), "as often as one likes"
    first, rest = tensors[0], tensors[1:]
    del tensors, tensor
    rest.clear()
    assert torch.equal(first, copies[0]), "a chunk lives as long as one of its tensors"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self/maps")
def test_what_stays(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 400)
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    mapped = torch.frombuffer(pages, dtype=torch.uint8)
    whole = numbers(4 * KIB, 1)
    stay = {
        "mapped": mapped, "slice": whole[64:], "large": torch.zeros(8 << 20, dtype=torch.uint8),
        "meta": torch.empty(64, dtype=torch.uint8, device="meta"), "empty": torch.empty(0, dtype=torch.uint8),
        "strided": numbers(64, 2)[::2],
    }  # fmt: skip
    before = {name: (tensor.data_ptr(), tensor.storage_offset()) for name, tensor in stay.items() if name != "meta"}
    assert move_together(stay.values()) == 0
    after = {name: (tensor.data_ptr(), tensor.storage_offset()) for name, tensor in stay.items() if name != "meta"}
    assert before == after


def test_one_tensor_twice():
    tensor = numbers(KIB, 3)
    copy, alias = tensor.clone(), tensor.detach()
    assert move_together([tensor, tensor, alias]) == KIB
    assert torch.equal(tensor, copy) and torch.equal(alias, copy)


def test_a_system_without_pages(monkeypatch):
    monkeypatch.setattr(memory, "_fresh_pages", lambda count: None)
    tensor = numbers(KIB, 4)
    copy = tensor.clone()
    assert move_together([tensor]) == 0 and torch.equal(tensor, copy)


def test_modules_keep_their_weights():
    linear = torch.nn.Module()
    linear.register_buffer("packed", numbers(KIB, 5))
    tied = torch.nn.Module()
    tied.register_buffer("packed", linear.packed)
    copy = linear.packed.clone()
    move_together([linear.packed])
    assert tied.packed is linear.packed and torch.equal(linear.state_dict()["packed"], copy)


@pytest.mark.parametrize("stays_mapped", [True, False])
@pytest.mark.parametrize("value", ["", "map", "copy", "interleave"])
def test_where_a_mapped_tensor_is_wanted(value, stays_mapped, monkeypatch):
    monkeypatch.setenv("W4A8_MEMORY", value)
    packed = torch.arange(256, dtype=torch.uint8).repeat(1024)
    there = placed(packed, stays_mapped)
    stays = stays_mapped if value == "" else value == "map"
    assert (there.data_ptr() == packed.data_ptr()) == stays
    assert torch.equal(there, packed)

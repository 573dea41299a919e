"""Packing while tensors come: in any order and cut the same bytes as packing all at once, and little more memory."""

import os
import random
import subprocess
import sys

import pytest
import torch

from w4a8.core.experts import ExpertSizes
from w4a8.core.packer import ExpertPacker
from w4a8.core.scale_types import kept_scale_dtypes
from w4a8.core.stack import MatrixStack, PackedAs
from w4a8.moe.parameters import pack_stack

EXPERTS, HIDDEN, INTERMEDIATE = 3, 128, 64


def _words(values):
    nibbles = (values.to(torch.int32) + 8).unflatten(-1, (-1, 8))
    return sum((nibbles[..., i] & 15) << 4 * i for i in range(8)).to(torch.int32)


def _checkpoint(group, scale_dtype, gated=True, seed=0):
    """{(expert, shard, kind): tensor} of whole experts, int8."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for expert in range(EXPERTS):
        for shard in ("w1", "w3", "w2") if gated else ("w1", "w2"):
            rows, columns = (HIDDEN, INTERMEDIATE) if shard == "w2" else (INTERMEDIATE, HIDDEN)
            groups = 1 if group == -1 else columns // group
            found[expert, shard, "weight"] = torch.randint(-8, 8, (rows, columns), generator=generator).to(torch.int8)
            found[expert, shard, "weight_scale"] = torch.rand(rows, groups, generator=generator).to(scale_dtype)
            found[expert, shard, "bias"] = torch.randn(rows, generator=generator)
    return found


def _expected(tensors, group, gated, rank, ranks):
    """Both stacks, from parameters that hold everything."""
    part = INTERMEDIATE // ranks
    mine = slice(rank * part, (rank + 1) * part)
    stacks = {}
    for name, shards in (("w13", ("w1", "w3") if gated else ("w1",)), ("w2", ("w2",))):
        parts = {}
        for kind in ("weight", "weight_scale", "bias"):
            experts = []
            for expert in range(EXPERTS):
                pieces = [tensors[expert, shard, kind] for shard in shards]
                if name == "w13":
                    pieces = [piece[mine] for piece in pieces]
                elif kind == "weight":
                    pieces = [pieces[0][:, mine]]
                elif kind == "weight_scale" and group != -1:
                    pieces = [pieces[0][:, mine.start // group : mine.stop // group]]
                elif kind == "bias" and rank != 0:
                    pieces = [torch.zeros_like(pieces[0])]
                experts.append(torch.cat(pieces))
            parts[kind] = torch.stack(experts)
        bias = parts["bias"].to(torch.bfloat16)
        stacks[name] = pack_stack(parts["weight"], parts["weight_scale"].float(), bias, group)
    return stacks


def _packer(group, gated, rank, ranks, interleaved=False, **more):
    sizes = ExpertSizes(EXPERTS, HIDDEN, INTERMEDIATE // ranks, group, gated)
    return ExpertPacker(sizes, torch.bfloat16, rank, ranks, interleaved, **more)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("seed", range(3))
def test_any_order(group, gated, scale_dtype, seed):
    tensors = _checkpoint(group, scale_dtype, gated)
    for ranks in (1, 2):
        for rank in range(ranks):
            packer = _packer(group, gated, rank, ranks)
            order = list(tensors)
            random.Random(seed).shuffle(order)
            for expert, shard, kind in order:
                tensor = tensors[expert, shard, kind].clone()
                if kind == "weight" and expert % 2:
                    tensor = _words(tensor)
                packer.put(expert, shard, kind, tensor, "name")
                tensor.zero_()  # what was given is not needed any more
            expected = _expected(tensors, group, gated, rank, ranks)
            found = packer.pack()
            assert all(torch.equal(found[name], expected[name]) for name in ("w13", "w2"))
            assert packer.is_empty


@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_gate_and_up(interleaved):
    tensors = _checkpoint(32, torch.bfloat16)
    for ranks in (1, 2):
        packer = _packer(32, True, ranks - 1, ranks, interleaved)
        for (expert, shard, kind), tensor in tensors.items():
            if shard == "w2":
                packer.put(expert, shard, kind, tensor, "name")
            elif shard == "w1":
                both = [tensor, tensors[expert, "w3", kind]]
                fused = torch.stack(both, 1).flatten(0, 1) if interleaved else torch.cat(both)
                packer.put(expert, "w13", kind, fused, "name")
        expected = _expected(tensors, 32, True, ranks - 1, ranks)
        found = packer.pack()
        assert all(torch.equal(found[name], expected[name]) for name in ("w13", "w2"))


def test_separate_gate_and_up_of_an_interleaved_layer():
    """They are not interleaved."""
    tensors = _checkpoint(32, torch.bfloat16)
    packer = _packer(32, True, 0, 1, interleaved=True)
    for (expert, shard, kind), tensor in tensors.items():
        packer.put(expert, shard, kind, tensor, "name")
    found, expected = packer.pack(), _expected(tensors, 32, True, 0, 1)
    assert all(torch.equal(found[name], expected[name]) for name in ("w13", "w2"))


@pytest.mark.parametrize("last", range(EXPERTS))
def test_scales_that_bfloat16_would_round_come_late(last):
    """All of the stack becomes float32, whatever was packed before, and nothing is rounded."""
    tensors = _checkpoint(32, torch.bfloat16)
    for (expert, _, kind), tensor in tensors.items():
        if kind == "weight_scale":
            tensors[expert, _, kind] = tensor.float()
    tensors[last, "w1", "weight_scale"][5, 1] = 1 / 3
    packer = _packer(32, True, 0, 1)
    for (expert, shard, kind), tensor in tensors.items():
        packer.put(expert, shard, kind, tensor, "name")
    assert packer.stacks["w13"].scale_dtype == torch.float32
    assert packer.stacks["w2"].scale_dtype == torch.bfloat16
    found, expected = packer.pack(), _expected(tensors, 32, True, 0, 1)
    assert all(torch.equal(found[name], expected[name]) for name in ("w13", "w2"))


def test_again():
    """Other weights into the same packer, as when an engine gets new ones; their scales must fit."""
    first, second = _checkpoint(32, torch.bfloat16), _checkpoint(32, torch.float32, seed=1)
    dtypes = {"w13": torch.float32, "w2": torch.bfloat16}
    packed_as = {name: PackedAs(scale_dtype=dtype) for name, dtype in dtypes.items()}
    packer = _packer(32, True, 0, 1, packed_as=packed_as)
    for key, tensor in first.items():
        packer.put(*key, tensor, "name")
    assert packer.stacks["w13"].scale_dtype == torch.float32
    packer.pack()
    with pytest.raises(ValueError, match=r"name w2: .*are no bfloat16 values"):
        for (expert, shard, kind), tensor in second.items():
            packer.put(expert, shard, kind, tensor, f"name {shard}")


def test_no_experts():
    packer = ExpertPacker(ExpertSizes(0, HIDDEN, INTERMEDIATE, 32), None)
    assert packer.pack()["w13"].shape[0] == 0


def test_incomplete():
    packer = _packer(32, True, 0, 1)
    tensors = _checkpoint(32, torch.bfloat16)
    del tensors[1, "w3", "bias"]
    for key, tensor in tensors.items():
        packer.put(*key, tensor, "name")
    with pytest.raises(ValueError, match="the matrix of expert 1 is incomplete"):
        packer.pack()


@pytest.mark.parametrize(
    ("shard", "kind", "tensor", "message"),
    [
        ("w1", "weight", torch.zeros(INTERMEDIATE, HIDDEN), "dtype torch.float32, but int8 or packed int32"),
        ("w1", "weight", torch.full((INTERMEDIATE, HIDDEN), 9, dtype=torch.int8), r"holds values in \[9, 9\]"),
        ("w1", "weight", torch.zeros(INTERMEDIATE, 32, dtype=torch.int8), "128 columns are expected"),
        ("w1", "weight", torch.zeros(INTERMEDIATE, 17, dtype=torch.int32), "128 columns make 16 words"),
        ("w1", "weight", torch.zeros(32, HIDDEN, dtype=torch.int8), "dimension 0 is 32"),
        ("w2", "weight_scale", torch.zeros(HIDDEN, 1), "dimension 1 is 1"),
        ("w2", "weight_scale", torch.zeros(5, 2), "but .128, 2. is expected"),
        ("w2", "weight_scale", torch.zeros(HIDDEN, 2, dtype=torch.int8), "a float is expected"),
        ("w3", "bias", torch.zeros(INTERMEDIATE, 1), "1 dimensions are expected"),
    ],
)
def test_wrong_tensors(shard, kind, tensor, message):
    with pytest.raises(ValueError, match=f"the name.*{message}"):
        _packer(32, True, 0, 1).put(0, shard, kind, tensor, "the name")


def test_no_third_projection_without_a_gate():
    with pytest.raises(ValueError, match="no w3"):
        _packer(32, False, 0, 1).put(0, "w3", "bias", torch.zeros(INTERMEDIATE), "name")


def test_exactness_is_one_rule():
    """Channelwise too."""
    for scale, dtype in ((1 / 3, torch.float32), (0.25, torch.bfloat16), (1365 / 4096, torch.float16)):
        scales = torch.full((2, 1), scale)
        assert next(kept_scale_dtypes(scales, "int4", -1, 64)) == dtype
        stack = MatrixStack(1, 2, 64, -1)
        stack.put_piece(0, "scales", slice(0, 2), scales)
        stack.put_piece(0, "codes", slice(0, 2), torch.zeros(2, 32, dtype=torch.uint8))
        assert stack.scale_dtype == dtype


PEAK = """
import random, sys, torch
from w4a8.core.experts import ExpertSizes
from w4a8.core.packer import ExpertPacker

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

sizes = ExpertSizes(64, 1024, 512, 128)
zeros = ("w13", "w2") if sys.argv[2] == "zeros" else ()
packer = ExpertPacker(sizes, None, zero_points=zeros)
pieces = ("weight", "weight_scale", "zero_points") if zeros else ("weight", "weight_scale")
order = [(e, s, k) for e in range(64) for s in ("w1", "w3", "w2") for k in pieces]
if sys.argv[1] == "shuffled":
    random.Random(0).shuffle(order)
tensors = {}
for shard in ("w1", "w2"):
    rows, columns = (1024, 512) if shard == "w2" else (512, 1024)
    tensors[shard, "weight"] = torch.randint(2**31 - 1, (rows, columns // 8), dtype=torch.int32)
    tensors[shard, "weight_scale"] = torch.rand(rows, columns // 128).to(torch.bfloat16)
    if zeros:
        tensors[shard, "zero_points"] = torch.randint(16, (rows, columns // 128), dtype=torch.uint8)
for kind in pieces:
    tensors["w3", kind] = tensors["w1", kind]
warm = ExpertPacker(ExpertSizes(1, 1024, 512, 128), None, zero_points=zeros)
for shard, kind in tensors:
    warm.put(0, shard, kind, tensors[shard, kind], "name")
warm.pack()
del warm
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM begins anew
before = status("VmRSS")
for expert, shard, kind in order:
    packer.put(expert, shard, kind, tensors[shard, kind], "name")
packed = packer.pack()
total = sum(p.numel() for p in packed.values())
print(total, status("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("order", ["natural", "shuffled"])
@pytest.mark.parametrize("zeros", ["", "zeros"])
def test_peak_memory(order, zeros):
    """What is packed, and a few experts: what waits has not been packed yet, so that both together are never more."""
    # Large temporaries go back to the system: what malloc keeps for later is not what is measured.
    variables = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, order, zeros], capture_output=True, text=True, check=True, env=variables
    )
    total, peak = map(int, done.stdout.split())
    assert total > 50e6
    few, huge_pages = 5 * total / 64, 2 * (2 << 20)
    scales = 2 * 64 * (1024 * 8 + 1024 * 4)  # wait as float32, and are packed as bfloat16
    assert peak < total + scales + few + huge_pages

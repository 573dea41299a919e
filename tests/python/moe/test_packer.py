"""Packing while matrices come: in any order and cut the same bytes as packing all at once, and little more memory."""

import os
import random
import subprocess
import sys

import pytest
import torch

from w4a8.core.experts import ExpertSizes
from w4a8.core.matrix import Matrix, PackedAs, pack_codes
from w4a8.core.nibbles import to_nibbles
from w4a8.core.packer import ExpertPacker
from w4a8.core.scale_types import kept_scale_dtypes
from w4a8.core.stack import MatrixStack

EXPERTS, HIDDEN, INTERMEDIATE = 3, 128, 64


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
        stacks[name] = pack_codes(to_nibbles(parts["weight"]), parts["weight_scale"].float(), bias, group)
    return stacks


def _packer(group, gated, rank, ranks, interleaved=False, **more):
    sizes = ExpertSizes(EXPERTS, HIDDEN, INTERMEDIATE // ranks, group, gated)
    return ExpertPacker(sizes, torch.bfloat16, rank, ranks, interleaved, **more)


def _matrix(tensors, expert, shard):
    """What is packed of an expert's tensors."""
    weight, scales, bias = (tensors[expert, shard, kind] for kind in ("weight", "weight_scale", "bias"))
    return Matrix(to_nibbles(weight), scales.clone(), bias=bias.clone())


def _put_all(packer, tensors, names=lambda expert, shard: "name"):
    for expert, shard in dict.fromkeys((expert, shard) for expert, shard, _ in tensors):
        packer.put(expert, shard, _matrix(tensors, expert, shard), names(expert, shard))


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("seed", range(3))
def test_any_order(group, gated, scale_dtype, seed):
    tensors = _checkpoint(group, scale_dtype, gated)
    for ranks in (1, 2):
        for rank in range(ranks):
            packer = _packer(group, gated, rank, ranks)
            order = [key for key in tensors if key[2] == "weight"]
            random.Random(seed).shuffle(order)
            for expert, shard, _ in order:
                matrix = _matrix(tensors, expert, shard)
                packer.put(expert, shard, matrix, "name")
                for tensor in matrix.tensors().values():
                    tensor.zero_()  # what was given is not needed any more
            expected = _expected(tensors, group, gated, rank, ranks)
            found = packer.pack()
            assert all(torch.equal(found[name], expected[name]) for name in ("w13", "w2"))
            assert packer.is_empty


def test_separate_gate_and_up_of_an_interleaved_layer():
    """They are not interleaved."""
    tensors = _checkpoint(32, torch.bfloat16)
    packer = _packer(32, True, 0, 1, interleaved=True)
    _put_all(packer, tensors)
    found, expected = packer.pack(), _expected(tensors, 32, True, 0, 1)
    assert all(torch.equal(found[name], expected[name]) for name in ("w13", "w2"))


@pytest.mark.parametrize("last", range(EXPERTS))
def test_scales_that_bfloat16_would_round_come_late(last):
    """All of the stack becomes float32, whatever was packed before, and nothing is rounded."""
    tensors = _checkpoint(32, torch.bfloat16)
    for key, tensor in tensors.items():
        if key[2] == "weight_scale":
            tensors[key] = tensor.float()
    tensors[last, "w1", "weight_scale"][5, 1] = 1 / 3
    packer = _packer(32, True, 0, 1)
    _put_all(packer, tensors)
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
    _put_all(packer, first)
    assert packer.stacks["w13"].scale_dtype == torch.float32
    packer.pack()
    with pytest.raises(ValueError, match=r"name w2: .*are no bfloat16 values"):
        _put_all(packer, second, lambda expert, shard: f"name {shard}")


def test_incomplete():
    packer = _packer(32, True, 0, 1)
    tensors = _checkpoint(32, torch.bfloat16)
    _put_all(packer, {key: tensor for key, tensor in tensors.items() if key[:2] != (1, "w3")})
    with pytest.raises(ValueError, match="the matrix of expert 1 is incomplete"):
        packer.pack()


@pytest.mark.parametrize("shard", ["w3", "w13"])
def test_no_third_projection_without_a_gate(shard):
    with pytest.raises(ValueError, match=f"name: a layer without a gate has w1 and w2, but no {shard}"):
        matrix = _matrix(_checkpoint(32, torch.bfloat16), 0, "w3")
        _packer(32, False, 0, 1).put(0, shard, matrix, "name")


def test_exactness_is_one_rule():
    """Channelwise too."""
    for scale, dtype in ((1 / 3, torch.float32), (0.25, torch.bfloat16), (1365 / 4096, torch.float16)):
        scales = torch.full((2, 1), scale)
        assert next(kept_scale_dtypes(scales, "int4", -1, 64)) == dtype
        stack = MatrixStack(1, 2, 64, -1)
        stack.put(0, 0, Matrix(torch.zeros(2, 32, dtype=torch.uint8), scales))
        assert stack.scale_dtype == dtype


PEAK = """
import random, sys, torch
from w4a8.core.experts import ExpertSizes
from w4a8.core.matrix import Matrix
from w4a8.core.packer import ExpertPacker

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

sizes = ExpertSizes(64, 1024, 512, 128)
packer = ExpertPacker(sizes, None)
order = [(e, s) for e in range(64) for s in ("w1", "w3", "w2")]
if sys.argv[1] == "shuffled":
    random.Random(0).shuffle(order)
matrices = {}
for shard in ("w1", "w2"):
    rows, columns = (1024, 512) if shard == "w2" else (512, 1024)
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.rand(rows, columns // 128).to(torch.bfloat16)
    zeros = torch.randint(16, (rows, columns // 128), dtype=torch.uint8) if sys.argv[2] == "zeros" else None
    matrices[shard] = Matrix(codes, scales, zeros)
matrices["w3"] = matrices["w1"]
warm = ExpertPacker(ExpertSizes(1, 1024, 512, 128), None)
for shard, matrix in matrices.items():
    warm.put(0, shard, matrix, "name")
warm.pack()
del warm
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM begins anew
before = status("VmRSS")
for expert, shard in order:
    packer.put(expert, shard, matrices[shard], "name")
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

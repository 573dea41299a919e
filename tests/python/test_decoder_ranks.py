"""Decoders of several ranks, threads or processes, bit for bit beside the single operators of each."""

import mmap
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import test_decoder_linear
import torch
from common import assert_same_bits
from test_decoder import EPS, HIDDEN, Model, mean_of

from w4a8.decoder import Decoder

MODELS = {
    "attention, an MLP": {},
    "norms behind": {"four_norms": True, "head": False},
    "parallel": {"parallel": True, "biases": True},
    "experts": {"experts": 5, "shared": "gated"},
    "norms of experts": {"experts": 5, "shared": "plain", "own_norms": True},
    "norms of all heads": {"head_norm": "whole", "head": False},
    "linear layers of a layer's own": {"inputs": "floats"},
}
# Of five experts: where each rank has them. One rank of three has none of the last two.
PLACES = {
    2: [[0, -1, 1, -1, 2], [-1, 0, -1, 1, -1]],
    3: [[0, 1, -1, -1, -1], [-1, -1, 0, -1, -1], [-1, -1, -1, 0, 1]],
}


class OfAllRanks:
    """What a model of one rank makes with the others, its ``together`` and ``rank``."""

    def of_all_ranks(self, part):
        return self.together.sum(self.rank, part)

    def norm_of_all_heads(self, rows, weight):
        flat = rows.view(len(rows), -1).numpy()
        mean = self.of_all_ranks(mean_of(flat * flat)) / np.float32(len(self.together.parts))
        return torch.from_numpy(flat * (np.float32(1) / np.sqrt(mean + np.float32(EPS))) * weight.numpy()).view(
            rows.shape
        )


class Rank(OfAllRanks, Model):
    """The model of one rank."""

    def __init__(self, together, rank, **options):
        super().__init__(common=torch.Generator().manual_seed(7), **options)
        self.together, self.rank = together, rank


class LinearRank(OfAllRanks, test_decoder_linear.Model):
    """One with layers of linear attention."""


class Together:
    """Sums of what threads make, in the order of their ranks."""

    def __init__(self, ranks):
        self.barrier, self.parts = threading.Barrier(ranks), [None] * ranks

    def sum(self, rank, part):
        self.parts[rank] = part
        self.barrier.wait()
        found = self.parts[0]
        for each in self.parts[1:]:
            found = found + each
        self.barrier.wait()
        return found


def make_ranks(count, places=None, **options):
    """Models with the same norms, and weights of their own."""
    together = Together(count)
    return [Rank(together, rank, places=places and places[rank], **options) for rank in range(count)]


def shared(count):
    return torch.zeros(Decoder.ranks_bytes(count), dtype=torch.uint8)


def join(models, memory, timeout=60.0):
    for rank, model in enumerate(models):
        model.decoder.set_ranks(memory, rank, len(models), timeout)


def of_each(models, function):
    """function(model) of all ranks at once."""
    with ThreadPoolExecutor(len(models)) as pool:
        return [each.result() for each in [pool.submit(function, model) for model in models]]


def check(models, tokens):
    x = torch.randn(tokens, HIDDEN)
    expected = of_each(models, lambda model: model.one_by_one(x, [tokens], [tokens]))
    found = of_each(models, lambda model: model.step(x, [tokens], [tokens]))
    for a, b in zip(found, expected):
        assert_same_bits(a, b)
    return found


@pytest.mark.parametrize("tokens", [1, 5, 37])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(name, tokens):
    models = make_ranks(2, **MODELS[name])
    join(models, shared(2))
    check(models, tokens)


@pytest.mark.parametrize("tokens", [1, 37])
def test_a_norm_of_the_states_of_all_ranks(tokens):
    together = Together(2)
    names = ["state space, norm over ranks", "as one", "state space"]
    models = [LinearRank(names, common=torch.Generator().manual_seed(7)) for _ in range(2)]
    for rank, model in enumerate(models):
        model.together, model.rank = together, rank
    join(models, shared(2))
    x = torch.randn(tokens, HIDDEN)
    expected = of_each(models, lambda model: model.one_by_one(x, [tokens]))
    for a, b in zip(of_each(models, lambda model: model.step(x, [tokens], [tokens])), expected):
        assert_same_bits(a, b)


@pytest.mark.parametrize("count", PLACES)
@pytest.mark.parametrize("tokens", [1, 3, 37])
def test_ranks_with_whole_experts(count, tokens):
    models = make_ranks(count, places=PLACES[count], experts=5, head=False)
    join(models, shared(count))
    rows = check(models, tokens)
    assert all(torch.equal(each, rows[0]) for each in rows)


@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_all_ranks(count):
    """Between steps, whose sums have a memory of their own. Some are more than the ranks exchange at once."""
    models, own = make_ranks(count, layers=1), shared(count)
    join(models, shared(count))
    parts = [
        [torch.randn(3, 7).to(torch.bfloat16), torch.randint(-9, 9, (2**18 + 3,)), torch.randn(5, 4).t(), torch.ones(0)]
        for _ in models
    ]
    x = torch.randn(1, HIDDEN)

    def found(model):
        rows = model.step(x, [1], [1])
        return [(Decoder.gather_ranks(part, own, model.rank, count), rows) for part in parts[model.rank]]

    for each in of_each(models, found):
        for i, (gathered, _) in enumerate(each):
            assert torch.equal(gathered, torch.stack([of_rank[i] for of_rank in parts]))


def gather_by(together, rank):
    """In place of a network."""

    def gather(parts):
        together.parts[rank] = parts[rank].clone()
        together.barrier.wait()
        for part, sent in zip(parts, together.parts):
            part.copy_(sent)
        together.barrier.wait()

    return gather


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("tokens", [1, 37])
def test_ranks_without_shared_memory(count, tokens):
    models = make_ranks(count, experts=5, shared="gated")
    for rank, model in enumerate(models):
        model.decoder.set_ranks(shared(count), rank, count, gather=gather_by(models[0].together, rank))
    check(models, tokens)


def test_parts_that_cannot_be_sent():
    def gather(parts):
        raise ConnectionError("no way")

    model = make_ranks(2)[0]
    model.decoder.set_ranks(shared(2), 0, 2, gather=gather)
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 \(process \d+\) has not exchanged its part") as caught:
        model.step(torch.randn(1, HIDDEN), [1], [1])
    assert repr(caught.value.__cause__) == "ConnectionError('no way')"
    with pytest.raises(RuntimeError, match="has failed before"):
        model.step(torch.randn(1, HIDDEN), [1], [1])


def test_rows_of_several_sums():
    """More than the ranks share at once: 2^18 numbers."""
    models = make_ranks(2, layers=1)
    join(models, shared(2))
    x = torch.randn(2744, HIDDEN)
    expected = of_each(models, lambda model: (model.step(x[:3], [3], [3]), model.step(x[2741:], [3], [3])))
    lengths = [3, *[97] * 28, 22, 3]
    for model in models:
        model.caches = [torch.full((70, *cache.shape[1:]), 255, dtype=torch.uint8) for cache in model.caches]
    found = of_each(models, lambda model: model.step(x, lengths, lengths))
    for rows, (first, last) in zip(found, expected):
        assert_same_bits(rows[:3], first)
        assert_same_bits(rows[-3:], last)


def test_a_part_that_does_not_come():
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 \(process 0\) has not come within 100 ms"):
        Decoder.gather_ranks(torch.ones(1), shared(2), 0, 2, timeout=0.1)


def test_a_rank_that_does_not_come():
    model = make_ranks(2)[0]
    model.decoder.set_ranks(shared(2), 0, 2, timeout=0.1)
    for problem in (
        r"rank 1 of 2 \(process 0\) has not come within 100 ms",
        r"rank 0 of 2 \(process \d+\) has failed before",
    ):
        with pytest.raises(RuntimeError, match=problem):
            model.step(torch.randn(1, HIDDEN), [1], [1])


ENDS = """
import mmap, os, signal, sys
import torch
from test_decoder import HIDDEN
from test_decoder_ranks import make_ranks

file = os.open(sys.argv[1], os.O_RDWR)
memory = torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
model = make_ranks(2)[1]
model.decoder.set_ranks(memory, 1, 2)
for _ in range(3):
    model.step(torch.ones(1, HIDDEN), [1], [1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed():
    """A process that is killed between two steps. The memory goes with the processes: it has no name."""
    file = os.memfd_create("ranks")
    os.ftruncate(file, Decoder.ranks_bytes(2))
    memory = torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
    model = make_ranks(2)[0]
    model.decoder.set_ranks(memory, 0, 2)
    command = [sys.executable, "-c", ENDS, f"/proc/{os.getpid()}/fd/{file}"]
    with subprocess.Popen(command, cwd=Path(__file__).parent) as other:
        rows = [model.step(torch.ones(1, HIDDEN), [1], [1]) for _ in range(3)]
        assert all(torch.equal(each, rows[0]) for each in rows)
        with pytest.raises(RuntimeError, match=rf"rank 1 of 2 \(process {other.pid}\) has ended, as all ranks"):
            model.step(torch.ones(1, HIDDEN), [1], [1])
        assert other.wait() == -signal.SIGKILL
    os.close(file)


def test_arguments():
    model = Model()
    memory = shared(2)
    for arguments, message in [
        ((memory[:-1], 0, 2), r"memory has dtype Byte and shape \[\d+\], expected contiguous uint8 \[\d+ or more\]"),
        ((memory.char(), 0, 2), "memory has dtype Char"),
        ((memory, 2, 2), "rank is 2, expected 0..1"),
        ((memory, 0, 1), "ranks is 1, expected 2..64"),
        ((memory, 0, 65), "ranks is 65, expected 2..64"),
        ((memory, 0, 2, 0.0), "timeout is 0, expected seconds up to 86400"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            model.decoder.set_ranks(*arguments)
        with pytest.raises(RuntimeError, match=message):
            Decoder.gather_ranks(torch.ones(1), *arguments)
    model.decoder.set_ranks(memory, 0, 2)
    with pytest.raises(RuntimeError, match="decoder has ranks, expected one without"):
        model.decoder.set_ranks(memory, 0, 2)
    with pytest.raises(RuntimeError, match="decoder has a norm of all heads at once, expected RMS norms of q and k"):
        Model(head_norm="whole", turn_first=True).decoder.set_ranks(memory, 0, 2)


@pytest.mark.parametrize(
    "places, message",
    [
        ([0, 1, 2, 3], r"expert_map has dtype Int and shape \[4\], expected int32 \[5\]"),
        ([0, 1, 2, 3, -2], "expert_map of expert 4 is -2, expected -1..3, the experts of w13_packed"),
    ],
)
def test_maps_of_experts(places, message):
    with pytest.raises(RuntimeError, match=message):
        Model(experts=5, places=places)

"""Memory of a decoder's tensors between its steps: given another storage, resized, moved, freed."""

import gc

import pytest
import torch
from common import assert_same_bits
from test_decoder import HEADS, HIDDEN, Model


def given(model):
    """name -> tensors that the decoder's first layer was given."""
    names = {"w13": "w13_packed", "w2": "w2_packed"}
    layer = {names.get(name, name): value for name, value in model.layers[0].items() if value is not None}
    layer |= {"norm": model.norm, "head": model.head, "sinks": model.attention["sinks"]}
    layer |= layer.pop("own", {})
    for of_reference in ("both", "makes"):
        layer.pop(of_reference, None)
    return {name: value if isinstance(value, list) else [value] for name, value in layer.items()}


def with_everything():
    return Model(layers=1, experts=4, shared="gated", head_norm="head", biases=True, sinks=torch.randn(HEADS))


def other_data(tensor):
    tensor.data = torch.zeros(0, dtype=tensor.dtype)


def other_storage(tensor):
    tensor.set_(torch.zeros(0, dtype=tensor.dtype))


@pytest.mark.parametrize("replace", [other_data, other_storage])
def test_the_decoder_keeps_its_memory(replace):
    """What a tensor holds after the decoder was made is not what the decoder reads."""
    model, x = with_everything(), torch.randn(3, HIDDEN)
    expected = model.step(x, [3], [3])
    for tensors in given(model).values():
        for tensor in tensors:
            replace(tensor)
    gc.collect()
    freed = [torch.full((size,), 123, dtype=torch.uint8) for size in range(64, 1 << 16, 64)]
    assert_same_bits(model.step(x, [3], [3]), expected)
    del freed


def storage_of(tensor):
    return getattr(tensor, "untyped_storage", tensor.storage)()  # torch 1 has no untyped_storage


def emptied(tensor):
    storage_of(tensor).resize_(0)


def grown(tensor):
    tensor.detach().resize_(3 * tensor.numel())


def shared(tensor):
    tensor.share_memory_()


@pytest.mark.parametrize("change", [emptied, grown, shared])
@pytest.mark.parametrize("name", given(with_everything()))
def test_a_storage_that_is_resized_or_moved_is_an_error(name, change):
    model, x = with_everything(), torch.randn(3, HIDDEN)
    model.step(x, [3], [3])
    change(given(model)[name][-1])
    with pytest.raises(
        RuntimeError, match=f"w4a8::decoder_step: {name} has a storage of [0-9]+ bytes that was resized"
    ):
        model.step(x, [3], [3])


@pytest.mark.parametrize("name", ["caches", "positions", "tables", "ropes", "hidden", "normed"])
def test_an_argument_of_a_step_without_its_storage(name):
    model, x = Model(layers=1), torch.randn(3, HIDDEN)
    pages, lengths, starts = model.tables([3], [3])
    arguments = {
        "hidden": x, "positions": torch.arange(3), "caches": model.caches[0].clone(), "tables": pages,
        "ropes": model.rope.clone(), "normed": torch.empty(3, HIDDEN),
    }  # fmt: skip
    storage_of(arguments[name]).resize_(1)
    named = {"tables": "block_tables"}.get(name, name)
    match = f"w4a8::decoder_step: {named} has a storage of [0-9] bytes, expected at least [0-9]+, as its"
    with pytest.raises(RuntimeError, match=match):
        model.decoder.step(
            arguments["hidden"], arguments["positions"], [arguments["caches"]], (arguments["tables"], lengths, starts),
            [arguments["ropes"]], None, arguments["normed"],
        )  # fmt: skip


@pytest.mark.parametrize("name", ["positions", "tables", "lengths", "starts", "rows"])
@pytest.mark.parametrize("written", ["caches", "normed"])
def test_numbers_in_the_memory_that_is_written(name, written):
    """They say where to read and write, so they must not change within a step."""
    model, x, normed = Model(layers=1), torch.randn(3, HIDDEN), torch.zeros(3, HIDDEN)
    numbers = dict(zip(("tables", "lengths", "starts"), model.tables([3], [3])))
    numbers |= {"positions": torch.arange(3), "rows": torch.tensor([2])}
    given = numbers[name]
    memory = (normed if written == "normed" else model.caches[0][0, 0, :1024]).flatten().view(given.dtype)
    numbers[name] = memory[: given.numel()].copy_(given.flatten()).view(given.shape)
    named = {"tables": "block_tables", "lengths": "seq_lens", "starts": "query_start_loc"}.get(name, name)
    with pytest.raises(RuntimeError, match=f"{named} lies in the memory of {written}, which is written"):
        model.decoder.step(
            x, numbers["positions"], model.caches, (numbers["tables"], numbers["lengths"], numbers["starts"]),
            [model.rope], numbers["rows"], normed,
        )  # fmt: skip


def test_a_cache_that_overlaps():
    model, x = Model(layers=1), torch.randn(3, HIDDEN)
    model.caches = [model.caches[0][:1].expand(9, -1, -1)]
    with pytest.raises(RuntimeError, match="w4a8::decoder_step: caches has stride 0 in dimension 0, expected at least"):
        model.step(x, [3], [3])


def test_many_decoders_come_and_go():
    for _ in range(20):
        Model(layers=1).step(torch.randn(2, HIDDEN), [2], [2])
    gc.collect()

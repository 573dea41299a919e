"""w4a8.core: nibbles and words, parameters of layers, and which experts a rank holds."""

import pytest
import torch

from w4a8.core.experts import determine_expert_map, local_expert_ids
from w4a8.core.nibbles import from_int32, from_nibbles, to_nibbles
from w4a8.core.weight_utils import replace_parameter, set_weight_attrs


def test_nibbles():
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    nibbles = to_nibbles(values)
    assert nibbles.dtype == torch.uint8 and nibbles.shape == (3, 16)
    assert nibbles[0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(from_nibbles(nibbles), values)
    every_pair = torch.cartesian_prod(values[0, :16], values[0, :16])
    assert torch.equal(from_nibbles(to_nibbles(every_pair)), every_pair)


@pytest.mark.parametrize("columns", [8, 10, 12, 14, 64])
def test_int32_words(columns):
    values = torch.randint(-8, 8, (5, columns), dtype=torch.int8)
    words = []
    for row in values.tolist():
        padded = row + [0] * (-columns % 8)
        unsigned = [
            sum((value + 8) << 4 * i for i, value in enumerate(padded[k : k + 8])) for k in range(0, len(padded), 8)
        ]
        words.append([word - 2**32 if word >= 2**31 else word for word in unsigned])
    assert torch.equal(from_int32(torch.tensor(words, dtype=torch.int32), columns), values)


def test_set_weight_attrs_and_replace_parameter():
    layer = torch.nn.Module()
    parameter = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    set_weight_attrs(parameter, None)
    set_weight_attrs(parameter, {"weight_loader": "loader", "other": 1})
    with pytest.raises(ValueError, match="parameter attribute 'other' is already set and would be overwritten"):
        set_weight_attrs(parameter, {"other": 2})
    layer.register_parameter("weight", parameter)
    replace_parameter(layer, "weight", torch.nn.Parameter(torch.ones(3)))
    assert layer.weight.tolist() == [1, 1, 1] and layer.weight.weight_loader == "loader"
    assert not layer.weight.requires_grad and not hasattr(layer.weight, "other")
    replace_parameter(layer, "new", torch.ones(1, dtype=torch.uint8))
    assert dict(layer.named_parameters())["new"].dtype == torch.uint8


def test_determine_expert_map():
    assert determine_expert_map(1, 0, 8) == (8, None)
    maps = [determine_expert_map(3, rank, 8) for rank in range(3)]
    assert [count for count, _ in maps] == [3, 3, 2]
    assert [m.tolist() for _, m in maps] == [
        [0, 1, 2, -1, -1, -1, -1, -1],
        [-1, -1, -1, 0, 1, 2, -1, -1],
        [-1, -1, -1, -1, -1, -1, 0, 1],
    ]
    with pytest.raises(ValueError, match=r"ep_rank 2 is outside \[0, 2\)"):
        determine_expert_map(2, 2, 8)


def test_local_expert_ids():
    ids = torch.tensor([[0, 3], [-1, 2]], dtype=torch.int32)
    assert local_expert_ids(ids, None) is ids  # the operator takes both types
    expert_map = torch.tensor([0, -1, 1, -1], dtype=torch.int32)
    assert local_expert_ids(ids, expert_map).tolist() == [[0, -1], [-1, 1]]
    assert local_expert_ids(ids, expert_map).dtype == torch.int64

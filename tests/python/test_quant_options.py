"""QuantOptions: what is checked when it is made, and that every function that quantizes floats takes it."""

import dataclasses
import json

import pytest
import torch
from common import assert_same_bits

import w4a8
from w4a8.nn import QuantOptions, W4A8Experts, W4A8Linear

OTHER = {"group_size": 64, "scale_dtype": torch.bfloat16, "effort": 1, "symmetric": False, "activation_group": -1}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"group_size": 32.0}, TypeError, "group_size is 32.0, expected an int"),
        ({"group_size": True}, TypeError, "group_size is True, expected an int"),
        *(({"group_size": n}, ValueError, f"group_size is {n}, expected -1, 16 or a multiple") for n in (0, 8, 48, -2)),
        ({"scale_dtype": torch.float16}, ValueError, "scale_dtype is torch.float16, expected torch.float32 or torch.b"),
        ({"scale_dtype": "half"}, ValueError, "scale_dtype is half, expected torch.float32 or torch.bfloat16"),
        *(({"effort": e}, ValueError, f"effort is {e!r}, expected 0, 1 or 2") for e in (-1, 3, True, "1")),
        ({"symmetric": 0}, TypeError, "symmetric is 0, expected True or False"),
        ({"values": "fp4"}, ValueError, "values is 'fp4', expected 'int4', 'e2m1', 'int6' or 'int8'"),
        ({"values": "e2m1", "symmetric": False}, ValueError, "symmetric is False, expected True for values = 'e2m1'"),
        ({"activation_group": 16}, ValueError, "activation_group is 16, expected -1"),
        ({"activation_group": 64}, ValueError, "activation_group is 64, expected -1"),
        ({"bits": "4"}, TypeError, "bits is '4', expected a number"),
        ({"nbits": 4}, TypeError, "nbits"),
    ],
    ids=str,
)
def test_refused(fields, error, message):
    """Alike by everything that takes options, before anything is touched."""
    linear = torch.nn.Linear(64, 4)
    model = torch.nn.Sequential(linear)
    calls = [
        lambda: QuantOptions(**fields),
        lambda: W4A8Linear.from_float(linear, **fields),
        lambda: W4A8Experts.from_float(torch.randn(1, 64, 64), torch.randn(1, 64, 32), **fields),
        lambda: w4a8.quantize_(model, **fields),
    ]
    for call in calls:
        with pytest.raises(error, match=message):
            call()
    assert model[0] is linear


@pytest.mark.parametrize("fields", [{}, OTHER, {"values": "e2m1", "effort": 0}], ids=["default", "other", "e2m1"])
def test_whole_or_by_name(fields):
    linear = torch.nn.Linear(128, 24)
    w13, w2 = torch.randn(2, 128, 128), torch.randn(2, 128, 64)
    options = QuantOptions(**fields)
    assert_same_bits(W4A8Linear.from_float(linear, options).packed, W4A8Linear.from_float(linear, **fields).packed)
    one, other = W4A8Experts.from_float(w13, w2, options), W4A8Experts.from_float(w13, w2, **fields)
    assert_same_bits(one.w13_packed, other.w13_packed)
    assert_same_bits(one.w2_packed, other.w2_packed)
    models = [torch.nn.Sequential(torch.nn.Linear(128, 24)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    w4a8.quantize_(models[0], options)
    w4a8.quantize_(models[1], **fields)
    assert_same_bits(models[0][0].packed, models[1][0].packed)


def test_names_go_before_the_object():
    linear = torch.nn.Linear(128, 24)
    packed = W4A8Linear.from_float(linear, QuantOptions(**OTHER), group_size=128).packed
    assert w4a8.read_header(packed)["group"] == 128
    assert w4a8.read_header(packed)["scale_dtype"] == "bfloat16"
    with pytest.raises(TypeError, match="group_size"):
        W4A8Linear.from_float(linear, 32, group_size=64)


def test_as_json():
    fields = {field.name for field in dataclasses.fields(QuantOptions)}
    for options in (QuantOptions(), QuantOptions(**OTHER), QuantOptions(-1, "bfloat16", values="e2m1")):
        stated = json.loads(json.dumps(options.to_dict()))
        assert stated.keys() == fields - {"bits"}  # so that earlier versions read it
        assert QuantOptions(**stated) == options
    for options in (QuantOptions(bits=5), QuantOptions(**OTHER, bits=5.5)):
        stated = json.loads(json.dumps(options.to_dict()))
        assert stated.keys() == fields
        assert QuantOptions(**stated) == options


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantOptions().group_size = 64


def test_bits_are_those_of_a_model():
    """A layer by itself has no other that could get fewer; scales of bfloat16 are the default beside bits."""
    linear, options = torch.nn.Linear(64, 4), QuantOptions(bits=5)
    assert options.scale_dtype == torch.bfloat16
    assert QuantOptions(bits=5, scale_dtype="float32").scale_dtype == torch.float32
    with pytest.raises(ValueError, match="bits is 5, expected None: of one matrix there is no average"):
        W4A8Linear.from_float(linear, options)
    with pytest.raises(ValueError, match="w13 of expert 0: bits is 5, expected None"):
        W4A8Experts.from_float(torch.randn(1, 64, 64), torch.randn(1, 64, 32), options)

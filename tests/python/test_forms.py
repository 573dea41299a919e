"""form_problem and form_bytes beside what packing does with tensors of the form, on the meta device."""

from itertools import product

import pytest
import torch

import w4a8
from w4a8.core.activation_groups import check_activation_group
from w4a8.core.kind import Kind
from w4a8.core.matrix import PackedAs, is_group_size
from w4a8.nn import QuantOptions, W4A8Linear
from w4a8.ops import form_bytes, form_problem

SHAPES = [
    (group, k)
    for k in (16, 30, 96, 512)
    for group in (-1, 0, 15, 16, 24, 32, 64, 256, k)
]  # fmt: skip
WIDE = [(k, k) for k in (1 << 15, 1 << 16, 1 << 18, 1 << 19, 1 << 20)]
WIDE += [(k + 2, k + 2) for k, _ in WIDE] + [(32, 2 * k) for k, _ in WIDE]
TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e5m3": torch.uint8,
    "e8m0": torch.uint8,
    "super": torch.int8,
}


def packed(group, k, n, values, zero_points, minimums, scale_dtype, activation_group):
    """Of tensors without values; the sizes are made up where the group does not divide K."""

    def empty(columns, dtype):
        return torch.empty(n, columns, dtype=dtype, device="meta")

    groups, supers = k // group if group > 0 else 1, scale_dtype == "super"
    scales = empty(groups, TYPES[scale_dtype])
    return w4a8.dyn_quant_pack_4bit_weight(
        empty(k // Kind(values).codes_in_a_byte, torch.uint8),
        *(scales, None, group, k, n),
        zero_points=empty(groups, torch.uint8) if zero_points else None,
        values=values,
        channel_scales=empty(1, torch.float32)[:, 0] if scale_dtype == "e5m3" else None,
        activation_group=activation_group,
        minimums=scales if minimums else None,
        super_scales=empty(k // 256, torch.float16) if supers else None,
        super_minimums=empty(k // 256, torch.float16) if supers and minimums else None,
    )


@pytest.mark.parametrize("values", list(Kind))
@pytest.mark.parametrize("scale_dtype", TYPES)
def test_as_packing(values, scale_dtype):
    """A form has a problem if and only if it cannot be packed; the bytes are those of the packed matrix."""
    taken = 0
    for (group, k), zeros, minimums, activations in product(
        SHAPES + WIDE, (False, True), (False, True), (-1, 16, 32, 64)
    ):
        how = {"zero_points": zeros, "minimums": minimums, "scale_dtype": scale_dtype}
        how |= {"values": values.value, "activation_group": activations}
        problem = form_problem(group, k, 17, **how)
        if not problem:
            taken += 1
            assert form_bytes(group, k, 17, **how) == packed(group, k, 17, **how).numel(), (group, k, how)
            continue
        assert " is " in problem or problem.startswith(("values are", "minimums "))
        assert "expected " in problem
        with pytest.raises(RuntimeError):
            packed(group, k, 17, **how)
        with pytest.raises(RuntimeError) as error:
            form_bytes(group, k, 17, **how)
        assert str(error.value).splitlines()[0] == f"w4a8::form_bytes: {problem}"
    assert taken > 0 or (values, scale_dtype) in {
        *((kind, "e8m0") for kind in Kind if kind != Kind.E2M1),
        *((kind, "e5m3") for kind in (Kind.INT8, Kind.INT6, Kind.IQ4)),
        (Kind.E2M1, "super"),
    }


def test_bad_arguments():
    for ask in (form_problem, form_bytes):
        with pytest.raises(RuntimeError, match=rf"w4a8::{ask.__name__}: values is 'int5', expected 'int4', "):
            ask(32, 64, 16, values="int5")
        with pytest.raises(RuntimeError, match=rf"w4a8::{ask.__name__}: scale_dtype is 'half', expected 'float32', "):
            ask(32, 64, 16, scale_dtype="half")


def test_group_sizes():
    """Of a configuration, which says no K."""
    sizes = [size for size in range(-3, 300) if is_group_size(size)]
    assert sizes == [-1, 16, *range(32, 300, 32)]
    for size in (True, False, None, "32", 32.0, 1 << 62, -(1 << 62), 10**30):
        assert not is_group_size(size)


def test_activation_groups_without_k():
    for group in (None, -1, 16, 32, 64, 96, 128, 256, 1 << 19):
        for size in (None, -1, 32, 64, 128):
            if group in (None, -1, 16) or size in (None, -1) or group % size == 0:
                check_activation_group(size, group)
            else:
                with pytest.raises(ValueError, match=f"^activation_group is {size}, .* that divides group = {group}$"):
                    check_activation_group(size, group)
    for size in (0, 1, 16, 48, 256, -2, True, "32", 32.0, 1 << 62, 10**30):
        with pytest.raises(ValueError, match=f"^activation_group is {size!r}, expected "):
            check_activation_group(size)


@pytest.mark.parametrize("values", ["int4", "e2m1", "int6", "int8"])
def test_options(values):
    """What can be rounded is what can be packed: int8 is wider in groups than with one scale a row."""
    most = {"int4": 20, "e2m1": 19, "int6": 18, "int8": 16}[values]
    channelwise, grouped = QuantOptions(-1, values=values), QuantOptions(32, values=values)
    assert channelwise.form == PackedAs(Kind(values), torch.float32)
    assert channelwise.form.problem(1, 1 << most, -1) == ""
    assert str((1 << most) + 2) in channelwise.form.problem(1, (1 << most) + 2, -1)
    assert grouped.form.problem(1, 1 << max(most, 19), 32) == ""


def test_a_wide_matrix():
    """int8 in groups, in all wider than one scale can be for: weights of -1 and 1 are exact, an input of 1 to 2^-22."""
    linear = torch.nn.Linear(1 << 17, 1, bias=False)
    linear.weight.data = linear.weight.sign()
    layer = W4A8Linear.from_float(linear, 32, values="int8")
    assert layer(torch.ones(1, 1 << 17)).item() == pytest.approx(linear.weight.sum().item(), abs=2**-5)

"""Arguments on different devices, gradients, copy-on-write memory: what torch adds to a tensor."""

import pytest
import torch
from common import assert_same_bits
from op_samples import op_samples, results, tensor_arguments

SAMPLES = op_samples()
NAMES = list(SAMPLES)
TENSORS = [(name, argument) for name in NAMES for argument in tensor_arguments(SAMPLES[name][1])]
SEVERAL = [(name, argument) for name, argument in TENSORS if len(tensor_arguments(SAMPLES[name][1])) > 1]


# --- devices ----------------------------------------------------------------------------------------------------------


def expect_mixed(name, on_meta):
    """The first tensor decides; the first that is elsewhere is named."""
    op, arguments = SAMPLES[name]
    tensors = tensor_arguments(arguments)
    device = {n: "meta" if n in on_meta else "cpu" for n in tensors}
    odd = next(n for n in tensors if device[n] != device[tensors[0]])
    where = f"on device {device[odd]}, expected {device[tensors[0]]}, the device of {tensors[0]}"
    with pytest.raises(RuntimeError, match=f"{op._schema.name}: {odd} is {where}"):
        op(**{n: a.to("meta") if n in on_meta else a for n, a in arguments.items()})


@pytest.mark.parametrize(("name", "argument"), SEVERAL)
def test_one_argument_on_meta(name, argument):
    """A weight that was not loaded yet, say. Without the check the output was memory as it happened to be."""
    expect_mixed(name, {argument})


@pytest.mark.parametrize(("name", "argument"), SEVERAL)
def test_all_but_one_argument_on_meta(name, argument):
    expect_mixed(name, set(tensor_arguments(SAMPLES[name][1])) - {argument})


def test_unused_argument_on_meta():
    """g_idx is refused anyway, but not for a reason that is not its own."""
    op, arguments = SAMPLES["gemm of words"]
    with pytest.raises(RuntimeError, match="g_idx is on device meta, expected cpu, the device of quant_x"):
        op(**{**arguments, "g_idx": torch.zeros(64, dtype=torch.int32, device="meta")})


@pytest.mark.parametrize("name", [name for name in NAMES if "unpack" not in name])
def test_all_on_meta(name):
    op, arguments = SAMPLES[name]
    on_meta = {n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    for meta, real in zip(results(op, on_meta), results(op, arguments)):
        assert (meta.device.type, meta.shape, meta.dtype) == ("meta", real.shape, real.dtype)
        assert meta.stride() == real.stride()


@pytest.mark.parametrize("name", [name for name in NAMES if "unpack" not in name])
def test_fake_tensors_are_on_the_cpu(name):
    """What torch.compile traces with; underneath they are Meta tensors."""
    from torch._subclasses import FakeTensorMode

    op, arguments = SAMPLES[name]
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
        outputs = results(op, fake)
    for output, real in zip(outputs, results(op, arguments)):
        assert (output.device.type, output.shape, output.dtype) == ("cpu", real.shape, real.dtype)


# --- gradients --------------------------------------------------------------------------------------------------------

FLOATS = [
    (name, argument)
    for name, argument in TENSORS
    if SAMPLES[name][1][argument].is_floating_point() and SAMPLES[name][1][argument].numel()
]


def with_gradient(name, argument):
    op, arguments = SAMPLES[name]
    return op, {**arguments, argument: arguments[argument].clone().requires_grad_()}


@pytest.mark.parametrize(("name", "argument"), FLOATS)
def test_there_is_no_gradient(name, argument):
    """As for PyTorch's own operators without one: the call works, its output cannot be differentiated."""
    op, arguments = with_gradient(name, argument)
    with torch.enable_grad():
        outputs = results(op, arguments)
    for output, expected in zip(outputs, results(*SAMPLES[name])):
        assert output.requires_grad == output.is_floating_point()
        assert_same_bits(output.detach(), expected)
        if output.requires_grad:
            with pytest.raises(RuntimeError, match=f"derivative for {op._schema.name} is not implemented"):
                output.sum().backward()
    assert arguments[argument].grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("name", "argument"), FLOATS)
def test_gradients_are_off(name, argument, mode):
    op, arguments = with_gradient(name, argument)
    with mode():
        outputs = results(op, arguments)
    for output, expected in zip(outputs, results(*SAMPLES[name])):
        assert not output.requires_grad
        assert_same_bits(output, expected)


# --- copy-on-write memory ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch._C, "_is_cow_tensor"), reason="this torch has no copy-on-write tensors")
@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_only_read(name):
    """A lazy clone shares its memory until somebody may write to it: an operator does not count as one."""
    op, arguments = SAMPLES[name]
    expected = results(op, arguments)
    lazy = {
        n: torch._lazy_clone(a.clone()) if isinstance(a, torch.Tensor) and a.numel() else a
        for n, a in arguments.items()
    }
    for output, want in zip(results(op, lazy), expected):
        assert_same_bits(output, want)
    for argument in tensor_arguments(arguments):
        assert torch._C._is_cow_tensor(lazy[argument]) == bool(lazy[argument].numel()), argument

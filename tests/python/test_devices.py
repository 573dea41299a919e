"""Arguments on different devices, gradients, copy-on-write memory: what torch adds to a tensor."""

from contextlib import nullcontext

import pytest
import torch
from common import assert_same_bits
from op_samples import changes_arguments, op_samples, results, tensor_arguments
from torch.autograd import forward_ad

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
    if SAMPLES[name][1][argument].is_floating_point()
    and SAMPLES[name][1][argument].numel()
    and not changes_arguments(SAMPLES[name][0])
]


def passing():
    """A dispatch mode that changes nothing."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    return Mode()


NO_MODES = pytest.mark.skipif(not hasattr(torch, "func"), reason="this torch has no such modes")
MODES = [nullcontext, pytest.param(passing, marks=NO_MODES)]


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
            output += 1  # no view of another tensor, which could not be changed
            with pytest.raises(RuntimeError, match=f"derivative for {op._schema.name} is not implemented"):
                output.sum().backward()
    assert arguments[argument].grad is None


def with_another_path(name, argument):
    """The sum of the operator's outputs and of an argument, whose gradient would be without the operator's part."""
    op, arguments = SAMPLES[name]

    def loss(x):
        outputs = results(op, {**arguments, argument: x})
        return sum((output.sum() for output in outputs if output.is_floating_point()), x.sum())

    return loss, pytest.raises(RuntimeError, match=rf"{op._schema.name}\b")


# Packed weights are integers: nothing goes back from them.
DIFFERENTIABLE = [
    (name, argument)
    for name, argument in FLOATS
    if any(output.is_floating_point() and output.numel() for output in results(*SAMPLES[name]))
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "argument"), FLOATS)
def test_there_is_no_tangent(name, argument, mode):
    """Of forward mode, which no argument's requires_grad tells of."""
    op, arguments = SAMPLES[name]
    x = arguments[argument]
    for primal in (x, x.clone().requires_grad_()):
        with torch.enable_grad(), forward_ad.dual_level(), mode():
            dual = forward_ad.make_dual(primal, torch.ones_like(x))
            for output, expected in zip(results(op, {**arguments, argument: primal}), results(op, arguments)):
                assert_same_bits(output.detach(), expected)
            with pytest.raises(RuntimeError, match=rf"forward .*{op._schema.name}\b"):
                op(**{**arguments, argument: dual})


@pytest.mark.skipif(not hasattr(torch, "func"), reason="this torch has no torch.func")
@pytest.mark.parametrize(("name", "argument"), DIFFERENTIABLE)
def test_torch_func_has_no_gradient(name, argument):
    """It has gradients of its own, which requires_grad of the arguments does not tell of."""
    loss, refused = with_another_path(name, argument)
    x = SAMPLES[name][1][argument].detach()
    with refused:
        torch.func.grad(loss)(x)
    with refused:
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x)
    with refused:
        torch.func.vmap(torch.func.grad(loss))(x[None])
    with refused:
        torch.func.grad(lambda x: torch.func.vmap(loss)(x[None]).sum())(x)
    with refused:
        torch.func.jvp(loss, (x,), (x,))


@pytest.mark.skipif(not hasattr(torch, "func"), reason="this torch has no torch.func")
def test_torch_func_without_the_operator():
    """The gradient does not pass the operator: of another argument, or stopped."""
    op, arguments = SAMPLES["matmul bfloat16"]
    x = arguments["inp"].float()
    for loss in (
        lambda x: op(**arguments).sum() + x.sum(),
        lambda x: op(**{**arguments, "inp": x.detach().bfloat16()}).sum() + x.sum(),
        lambda x: op(**{**arguments, "inp": x.bfloat16()}).detach().sum() + x.sum(),
    ):
        assert_same_bits(torch.func.grad(loss)(x), torch.ones_like(x))
    rows = torch.func.vmap(lambda x: op(**{**arguments, "inp": x}))(arguments["inp"])
    assert_same_bits(rows, op(**arguments))


@NO_MODES
@pytest.mark.parametrize(("name", "argument"), DIFFERENTIABLE)
def test_there_is_no_gradient_in_a_mode(name, argument):
    """As of profilers, of selective checkpointing, and of what traces."""
    loss, refused = with_another_path(name, argument)
    x = SAMPLES[name][1][argument].clone().requires_grad_()
    with torch.enable_grad(), passing():
        output = loss(x)
    with refused:
        output.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("name", "argument"), FLOATS)
def test_gradients_are_off(name, argument, mode):
    op, arguments = with_gradient(name, argument)
    with mode():
        outputs = results(op, arguments)
    for output, expected in zip(outputs, results(*SAMPLES[name])):
        assert not output.requires_grad
        assert_same_bits(output, expected)


@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_is_off(mode):
    """In inference mode, which ends it."""
    op, arguments = SAMPLES["matmul bfloat16"]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(arguments["inp"], torch.ones_like(arguments["inp"]))
        with torch.inference_mode(), mode():
            output = op(**{**arguments, "inp": dual})
        assert forward_ad.unpack_dual(output).tangent is None
    assert_same_bits(output, op(**arguments))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "argument"), FLOATS)
def test_tensors_of_inference_mode(name, argument, mode):
    """Of which Autograd knows nothing, used where gradients and forward mode are on."""
    op, arguments = SAMPLES[name]
    with torch.inference_mode():
        made = arguments[argument].clone()
    with torch.enable_grad(), forward_ad.dual_level(), mode():
        outputs = results(op, {**arguments, argument: made})
    for output, expected in zip(outputs, results(op, arguments)):
        assert_same_bits(output, expected)


# --- copy-on-write memory ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch._C, "_is_cow_tensor"), reason="this torch has no copy-on-write tensors")
@pytest.mark.parametrize("name", [name for name in NAMES if not changes_arguments(SAMPLES[name][0])])
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

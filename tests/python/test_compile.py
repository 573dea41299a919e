"""torch.compile, opcheck and Meta tensors: what PyTorch 2 asks of an operator."""

import shutil

import pytest
import torch
from common import DTYPES, TORCH_VERSION, assert_same_bits, make_layer, make_matrix
from op_samples import changes_arguments, op_samples, results

import w4a8

compiles = pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason=f"torch {TORCH_VERSION} has no opcheck")


def matmul_arguments(dtype=torch.float32, lead=(5,)):
    matrix = make_matrix(24, 64, 32, bias=True)
    return torch.randn(*lead, 64).to(dtype), matrix.pack(), 32, 64, 24


SAMPLES = op_samples()


@compiles
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    """Traced with sizes that are known and with symbols for them, too."""
    op, arguments = SAMPLES[name]
    # What is unpacked depends on the bytes: whether there is a bias, what type the scales have.
    checks = {"test_utils": ("test_schema", "test_autograd_registration")} if name.startswith("unpack") else {}
    torch.library.opcheck(op, (), arguments, **checks)


@compiles
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_matmul(dynamic):
    x, packed, *sizes = matmul_arguments()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def model(x):
        return torch.relu(w4a8.dyn_quant_matmul_4bit(x * 2, packed, *sizes)) + 1

    for rows in (5, 3, 8):
        x = torch.randn(rows, 64)
        want = torch.relu(w4a8.dyn_quant_matmul_4bit(x * 2, packed, *sizes)) + 1
        assert_same_bits(model(x), want)


@compiles
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_moe(dynamic):
    layer = make_layer(4, 64, 32)

    def forward(x, logits):
        router, ids = torch.topk(torch.softmax(logits, 1), 2)
        return x + layer(x, ids, router)

    compiled = torch.compile(forward, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 1, 16):
        x, logits = torch.randn(tokens, 64), torch.randn(tokens, 4)
        assert_same_bits(compiled(x, logits), forward(x, logits))


@compiles
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
def test_compile_inductor():
    """The default backend, whose generated code calls the operators between its own kernels."""
    layer = make_layer(4, 64, 32)

    def model(x, logits):
        weights, ids = w4a8.topk_routing(logits * 2, 2, True)
        return layer(x, ids, weights + 1).clone()

    x, logits = torch.randn(5, 64), torch.randn(5, 4)
    assert_same_bits(torch.compile(model, fullgraph=True)(x, logits), model(x, logits))


def float_argument(arguments):
    """The name of an argument that a gradient could be of; "" without one."""
    found = (name for name, a in arguments.items() if isinstance(a, torch.Tensor) and a.is_floating_point())
    return next(found, "")


# A sample of each operator whose output could have a gradient, and the argument that asks for it.
FLOATS = {
    op: (name, float_argument(arguments))
    for name, (op, arguments) in reversed(SAMPLES.items())
    if float_argument(arguments)
    and not changes_arguments(op)
    and any(output.is_floating_point() for output in results(op, arguments))
}


@compiles
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", FLOATS, ids=str)
def test_compile_has_no_gradient(op, dynamic):
    """There is a gradient by another path, which alone would be a wrong number."""
    name, argument = FLOATS[op]
    arguments = {**SAMPLES[name][1], argument: SAMPLES[name][1][argument].clone().requires_grad_()}
    x = arguments[argument]

    @torch.compile(backend="aot_eager", dynamic=dynamic)
    def loss(arguments):
        outputs = results(op, arguments)
        return sum((output.sum() for output in outputs if output.is_floating_point()), arguments[argument].sum())

    with pytest.raises(Exception, match=f"derivative for {op._schema.name} is not implemented"):
        loss(arguments).backward()
    assert x.grad is None


@compiles
def test_compile_with_gradients_elsewhere():
    """What does not go back through an operator is as without torch.compile."""
    x, packed, *sizes = matmul_arguments()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x):
        y = w4a8.dyn_quant_matmul_4bit(x, packed, *sizes)
        y += 1
        return y.detach().sum() + x.sum()

    loss(x.requires_grad_()).backward()
    assert_same_bits(x.grad, torch.ones_like(x))


def test_unpack_has_no_meta():
    """The type of the scales and whether there is a bias are in the bytes, which a Meta tensor does not have."""
    op, arguments = SAMPLES["unpack"]
    with pytest.raises(NotImplementedError):
        op(**{**arguments, "packed_weights": arguments["packed_weights"].to("meta")})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_meta_keeps_the_type_of_the_input(dtype):
    x, packed, *sizes = matmul_arguments(dtype)
    y = w4a8.dyn_quant_matmul_4bit(x.to("meta"), packed.to("meta"), *sizes)
    assert (y.dtype, y.shape) == (dtype, (5, 24))

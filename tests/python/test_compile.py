"""torch.compile, opcheck and Meta tensors: what PyTorch 2 asks of an operator."""

import pytest
import torch
from common import DTYPES, TORCH_VERSION, assert_same_bits, make_layer, make_matrix, route

import w4a8

compiles = pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason=f"torch {TORCH_VERSION} has no opcheck")


def matmul_arguments(dtype=torch.float32, lead=(5,)):
    matrix = make_matrix(24, 64, 32, bias=True)
    return torch.randn(*lead, 64).to(dtype), matrix.pack(), 32, 64, 24


def moe_arguments(dtype=torch.float32, id_dtype=torch.int64):
    layer = make_layer(4, 64, 32)
    ids, router = route(5, 2, 4, id_dtype)
    return torch.randn(5, 64).to(dtype), ids, router, layer.w13_packed, layer.w2_packed, 64, 32, 64, 32, False, 0


def gated(arguments):
    return arguments[:7] + arguments[8:]  # without I2


def samples():
    plain, stack = make_matrix(24, 64, 32, bias=True), make_matrix(24, 64, 64, torch.bfloat16, experts=3)
    pack, unpack = torch.ops.w4a8.dyn_quant_pack_4bit_weight, torch.ops.w4a8.dyn_quant_unpack_4bit_weight
    matmul, moe = torch.ops.w4a8.dyn_quant_matmul_4bit, torch.ops.w4a8.dynamic_4bit_int_moe
    return {
        "pack": (pack.default, (plain.weights, plain.scales, plain.bias, 32, 64, 24)),
        "pack stack": (pack.default, (stack.weights, stack.scales, None, 64, 64, 24)),
        "unpack": (unpack.default, (plain.pack(), 32, 64, 24)),
        "unpack stack": (unpack.default, (stack.pack(), 64, 64, 24)),
        "matmul": (matmul.default, matmul_arguments()),
        "matmul bfloat16": (matmul.default, matmul_arguments(torch.bfloat16, (2, 3))),
        "matmul no rows": (matmul.default, matmul_arguments(lead=(0,))),
        "moe": (moe.default, moe_arguments()),
        "moe float16, int32": (moe.default, moe_arguments(torch.float16, torch.int32)),
        "moe of 10 arguments": (moe.gated, gated(moe_arguments())),
    }


NAMES = list(samples())


@compiles
@pytest.mark.parametrize("name", [name for name in NAMES if "unpack" not in name])
def test_opcheck(name):
    op, arguments = samples()[name]
    torch.library.opcheck(op, arguments)


@compiles
@pytest.mark.parametrize("name", ["unpack", "unpack stack"])
def test_opcheck_unpack(name):
    """Whether there is a bias and what type the scales have is in the bytes, not in the arguments."""
    op, arguments = samples()[name]
    checks = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(op, arguments, test_utils=checks)


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
def test_compile_inductor():
    """The default backend, whose generated code calls the operators between its own kernels."""
    layer = make_layer(4, 64, 32)

    def model(x, logits):
        weights, ids = w4a8.topk_routing(logits * 2, 2, True)
        return layer(x, ids, weights + 1).clone()

    x, logits = torch.randn(5, 64), torch.randn(5, 4)
    assert_same_bits(torch.compile(model, fullgraph=True)(x, logits), model(x, logits))


@pytest.mark.parametrize("name", [name for name in NAMES if "unpack" not in name])
def test_meta(name):
    """Shapes and types without data, on every torch."""
    op, arguments = samples()[name]
    on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    real, meta = op(*arguments), op(*on_meta)
    assert meta.is_meta
    assert meta.shape == real.shape
    assert meta.dtype == real.dtype
    assert meta.stride() == real.stride()


def test_unpack_has_no_meta():
    """The type of the scales and whether there is a bias are in the bytes, which a Meta tensor does not have."""
    op, (packed, *sizes) = samples()["unpack"]
    with pytest.raises(NotImplementedError):
        op(packed.to("meta"), *sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_meta_keeps_the_type_of_the_input(dtype):
    x, packed, *sizes = matmul_arguments(dtype)
    y = w4a8.dyn_quant_matmul_4bit(x.to("meta"), packed.to("meta"), *sizes)
    assert (y.dtype, y.shape) == (dtype, (5, 24))

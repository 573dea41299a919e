"""Against PyTorch's own operators where they are KleidiAI: fresh random cases beside the stored ones.

Channelwise every bit is the same (docs/numerics.md section 2); with groups both round the sum over the groups in their
own order. Random float32 numbers have no K % 8 tail here, in which KleidiAI rounds half away from zero.
"""

import platform

import pytest
import torch

import w4a8

pytestmark = pytest.mark.skipif(platform.machine() != "aarch64", reason="only on Arm ATen's operators are KleidiAI")

# Rows around the sizes of the tiles, columns off the multiples of 16.
CHANNELWISE = [(1, 32, 64), (2, 20, 512), (5, 68, 256), (7, 100, 1000), (33, 36, 2048), (64, 132, 768), (71, 16, 128)]
GROUPS = [
    (1, 32, 64, 32),
    (3, 36, 256, 64),
    (7, 100, 1024, 128),
    (13, 20, 512, 32),
    (64, 68, 768, 256),
    (70, 48, 384, 32),
]


@pytest.fixture(params=[k["name"] for k in w4a8.kernels() if k["supported"] and k["name"] != "scalar"])
def arm_kernel(request):
    with w4a8.use_kernel(request.param) as name:
        yield name


def random_case(m, n, k, group, dtype, bias):
    weights = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    # With groups KleidiAI takes bfloat16 scales, channelwise float32.
    scales = (torch.rand(n, k // group) + 0.2) / 20 * torch.where(torch.rand(n, k // group) < 0.1, -1.0, 1.0)
    scales = scales if group == k else scales.to(torch.bfloat16)
    x = torch.randn(m, k) * torch.rand(m, 1) * 10 + torch.randn(m, 1)
    return x.to(dtype), weights, scales, torch.randn(n) if bias else None


def both(x, weights, scales, bias, group):
    n, k = weights.shape[0], x.shape[1]
    sizes = (group, k, n)
    theirs = torch.ops.aten._dyn_quant_pack_4bit_weight(weights, scales, bias, *sizes)
    ours = w4a8.dyn_quant_pack_4bit_weight(weights, scales, bias, *sizes)
    actual = w4a8.dyn_quant_matmul_4bit(x, ours, *sizes)
    try:
        return actual, torch.ops.aten._dyn_quant_matmul_4bit(x, theirs, *sizes)
    except RuntimeError as error:
        # ATen's bfloat16 path wants a CPU with bfloat16 instructions. Its float32 answer, rounded, has the same bits.
        if "BF16 Unsupported" not in str(error):
            raise
        return actual, torch.ops.aten._dyn_quant_matmul_4bit(x.float(), theirs, *sizes).to(x.dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "n", "k"), CHANNELWISE)
def test_channelwise_bit_for_bit(arm_kernel, m, n, k, dtype, bias, seed):
    torch.manual_seed(1000 * seed + m)
    actual, expected = both(*random_case(m, n, k, k, dtype, bias), k)
    assert actual.dtype == expected.dtype == dtype
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    different = (actual.view(integers) != expected.view(integers)).sum().item()
    assert different == 0, f"{different} of {actual.numel()} differ"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("m", "n", "k", "group"), GROUPS)
def test_groups_within_rounding(arm_kernel, m, n, k, group, bias, seed):
    torch.manual_seed(1000 * seed + m)
    actual, expected = both(*random_case(m, n, k, group, torch.float32, bias), group)
    assert (actual - expected).abs().max() <= 3e-7 * expected.abs().max()

"""Scratch memory is bounded, does not grow from call to call, and running out of memory is an exception."""

import textwrap

import meter
import pytest
import torch

pytestmark = [meter.needs_proc, meter.needs_its_allocator]

PRELUDE = """
import gc, resource
import torch, w4a8
from common import make_layer, make_matrix, matmul, route
"""


def run(code, *arguments):
    """The numbers that the code prints."""
    return meter.run(PRELUDE + textwrap.dedent(code), *arguments)


def test_no_growth_over_ten_thousand_calls():
    code = """
        torch.set_num_threads(2)
        layer, x = make_layer(4, 64, 32), torch.randn(5, 64)
        ids, router = route(5, 2, 4)
        matrix = make_matrix(40, 64, 32)
        packed = matrix.pack()
        def calls(n):
            for _ in range(n):
                layer(x, ids, router)
                matmul(x, matrix, packed)
                matrix.pack()
                try:
                    w4a8.dyn_quant_matmul_4bit(x, packed[:-1], 32, 64, 40)
                except RuntimeError:
                    pass
            gc.collect()
            return memory("VmRSS")
        calls(500)
        print(calls(10), calls(10_000))
    """
    before, after = run(code)
    assert after - before < 1 << 20, f"{after - before} bytes more after 10,000 calls"


def test_moe_of_65536_tokens_has_bounded_scratch():
    """docs/memory.md has the formula: all rows at once would be 2.2 GB here, the batches stay near 96 MiB."""
    code = """
        tokens, top_k, hidden, inter = 65536, 8, 512, 256
        layer = make_layer(4, hidden, inter, group_size=128)
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16).normal_()  # in place: no peak before the call
        ids = torch.full((tokens, top_k), -1)
        ids[::97, 3] = torch.arange(tokens)[::97] % 4  # few rows: only memory is looked at
        router = torch.rand(tokens, top_k)
        layer(x[:1], ids[:1], router[:1])
        before = memory("VmHWM")
        y = layer(x, ids, router)
        most = memory("VmHWM")
        few = ids[:, 3] >= 0
        some = layer(x[few][:50], ids[few][:50], router[few][:50])
        print(most - before, y.numel() * 2, int(torch.equal(y[few][:50], some)), int(y[~few].abs().max() == 0))
    """
    taken, out, same, rest = run(code)
    assert taken < out + (110 << 20), f"{taken} bytes, of which {out} are the output"
    assert same and rest


def test_matmul_of_many_rows_has_bounded_scratch():
    code = """
        matrix = make_matrix(1, 64, 64)
        packed, x = matrix.pack(), torch.empty(2_000_000, 64, dtype=torch.bfloat16).normal_()
        matmul(x[:1], matrix, packed)
        before = memory("VmHWM")
        y = matmul(x, matrix, packed)
        taken = memory("VmHWM") - before
        print(taken, y.numel() * 2, int(torch.equal(y[1_234_567], matmul(x[1_234_567], matrix, packed))))
    """
    taken, out, same = run(code)
    assert taken < out + (110 << 20), f"{taken} bytes, of which {out} are the output"
    assert same


@pytest.mark.parametrize("what", ["matmul", "moe", "pack", "output"])
def test_out_of_memory_is_an_exception(what):
    """Under a limit of addresses (RLIMIT_AS) the call fails, names the operator, and the next one works."""
    code = """
        torch.set_num_threads(1)
        what = sys.argv[1]
        layer, matrix = make_layer(4, 64, 32), make_matrix(40, 64, 32)
        packed, x = matrix.pack(), torch.randn(5, 64)
        ids, router = route(5, 2, 4)
        expected = layer(x, ids, router), matmul(x, matrix, packed)
        wide = make_matrix(4, 512, 512)
        wide_packed, wide_x = wide.pack(), torch.zeros(400_000, 512, dtype=torch.bfloat16)
        tall = make_matrix(2048, 2, 2)
        tall_packed, tall_x = tall.pack(), torch.zeros(200_000, 2)
        many = torch.zeros(100_000, 64), torch.zeros(100_000, 8, dtype=torch.int64), torch.rand(100_000, 8)
        stack = make_matrix(20_000, 4096, 32, experts=2)
        room = {"matmul": 40, "moe": 60, "pack": 30, "output": 300}[what] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + room, resource.RLIM_INFINITY))
        calls = {
            "matmul": lambda: matmul(wide_x, wide, wide_packed),
            "moe": lambda: layer(*many),
            "pack": stack.pack,
            "output": lambda: matmul(tall_x, tall, tall_packed),
        }
        names = {"moe": "dynamic_4bit_int_moe", "pack": "dyn_quant_pack_4bit_weight"}
        raised = False
        for _ in range(3):
            try:
                calls[what]()
            except RuntimeError as error:
                named = str(error).startswith(f"w4a8::{names.get(what, 'dyn_quant_matmul_4bit')}: ")
                raised = named and ("alloc" in str(error) or "memory" in str(error))
        usable = torch.equal(layer(x, ids, router), expected[0]) and torch.equal(matmul(x, matrix, packed), expected[1])
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(int(raised), int(usable), int(len(calls[what]()) > 0))
    """
    assert run(code, what) == [1, 1, 1]


def test_huge_calls_on_the_meta_device_take_nothing():
    """Shapes only: what a real call would need is not allocated."""
    import w4a8

    x = torch.empty(2**40, 64, device="meta")
    packed = torch.empty(4, 10**12, dtype=torch.uint8, device="meta")
    ids, router = (torch.empty(2**40, 8, device="meta", dtype=d) for d in (torch.int64, torch.float32))
    y = w4a8.dynamic_4bit_int_moe(x, ids, router, packed, packed, 64, 32, 64, 32, False, 0)
    assert y.shape == x.shape

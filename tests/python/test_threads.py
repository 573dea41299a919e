"""Who calls, from where and how often must not matter: threads of Python and of torch, forks, modes of torch."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from common import KERNELS, TORCH_VERSION, assert_same_bits, at_once, make_layer, make_matrix, matmul, route

import w4a8


def cases():
    """Calls of different operators and shapes, small and large enough for several threads."""
    made = []
    for n, k, group, rows in [(40, 64, 32, 3), (300, 256, 64, 50), (17, 90, 90, 7), (512, 512, 128, 1)]:
        matrix = make_matrix(n, k, group, bias=True)
        packed, x = matrix.pack(), torch.randn(rows, k)
        made.append(lambda matrix=matrix, packed=packed, x=x: matmul(x, matrix, packed))
        made.append(lambda matrix=matrix: matrix.pack())
    for experts, hidden, inter, tokens, top_k in [(4, 64, 32, 5, 2), (8, 256, 128, 40, 3), (3, 128, 96, 1, 3)]:
        layer, x = make_layer(experts, hidden, inter), torch.randn(tokens, hidden)
        ids, router = route(tokens, top_k, experts)
        made.append(lambda layer=layer, x=x, ids=ids, router=router: layer(x, ids, router))
    x = torch.randn(60, 300)
    made.append(lambda: w4a8.dynamic_per_token_int8_quant(x, False, 8)[0])
    return made


def test_eight_python_threads_at_once():
    calls = cases()
    expected = [call() for call in calls]
    start = threading.Barrier(8)

    def work(first):
        start.wait()
        for i in range(60):
            at = (first + i) % len(calls)
            assert_same_bits(calls[at](), expected[at], f"call {at}")

    at_once(work, range(8))


def test_switching_kernels_while_operators_run():
    """A call ends with the kernel it began with; the bits are those of every kernel."""
    calls = cases()
    expected = [call() for call in calls]
    done, used = threading.Event(), set()

    def work(first):
        for i in range(4000):
            if i >= 40 and used == set(KERNELS):
                break
            at = (first + i) % len(calls)
            used.add(w4a8.active_kernel())
            assert_same_bits(calls[at](), expected[at], f"call {at}")

    def switch():
        while not done.is_set():
            for name in KERNELS:
                w4a8.use_kernel(name)
                done.wait(0.001)

    switcher = threading.Thread(target=switch)
    try:
        switcher.start()
        at_once(work, range(4))
    finally:
        done.set()
        switcher.join()
        w4a8.use_kernel("")
    assert used == set(KERNELS)


def test_errors_in_one_thread_leave_the_others_alone():
    matrix = make_matrix(40, 64, 32)
    packed, x = matrix.pack(), torch.randn(3, 64)
    expected = matmul(x, matrix, packed)

    def work(is_bad):
        for _ in range(200):
            if is_bad:
                with pytest.raises(RuntimeError):
                    w4a8.dyn_quant_matmul_4bit(x, packed[:-1], 32, 64, 40)
            else:
                assert_same_bits(matmul(x, matrix, packed), expected)

    at_once(work, [True, False, True, False])


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_number_of_threads(set_threads, threads):
    calls = cases()
    set_threads(1)
    expected = [call() for call in calls]
    set_threads(threads)
    for at, call in enumerate(calls):
        assert_same_bits(call(), expected[at], f"call {at} with {threads} threads")


def test_a_thousand_runs(set_threads):
    set_threads(4)
    layer, x = make_layer(8, 256, 128), torch.randn(40, 256)
    ids, router = route(40, 3, 8)
    expected = layer(x, ids, router)
    for _ in range(1000):
        assert torch.equal(layer(x, ids, router), expected)


def test_flushed_denormals_and_threads(set_threads):
    """torch.set_flush_denormal is of the calling thread alone: with it, several threads would not agree."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot flush denormals")
    matrix = make_matrix(300, 256, 64)
    matrix.scales = matrix.scales * 1e-38
    packed, x = matrix.pack(), torch.randn(50, 256)
    set_threads(1)
    expected = matmul(x, matrix, packed)
    assert (expected != 0).any()
    assert (expected.abs() < torch.finfo(torch.float32).tiny).any()
    try:
        for threads in (1, 4):
            set_threads(threads)
            torch.set_flush_denormal(True)
            y = matmul(x, matrix, packed)
            still = float(torch.tensor([1e-40]) * 1)  # the caller's own setting is as it was
            torch.set_flush_denormal(False)
            assert_same_bits(y, expected, f"{threads} threads")
            assert still == 0
    finally:
        torch.set_flush_denormal(False)


def float64_cases():
    """Calls whose float64 arguments are denormals of float32, and show in the result."""
    tiny = torch.arange(1, 41, dtype=torch.float64) * 1e-40
    matrix, layer = make_matrix(40, 64, 32), make_layer(4, 64, 32)
    matrix.bias = tiny
    x, (ids, router) = torch.randn(5, 64) * 1e3, route(5, 2, 4)
    q, rows = torch.ones(40, 64, dtype=torch.int8), (tiny[:, None], torch.zeros(40, 1, dtype=torch.int32))
    empty = torch.empty(0)
    plain = make_matrix(40, 64, 32)
    packed, zeros = plain.pack(), torch.tensor(8)
    gemm = lambda *more: w4a8.int4_gemm_w4a8(q, *rows, packed, empty, zeros, 32, None, *more, torch.float32)  # noqa: E731
    logits, many = torch.zeros(2, 40), torch.rand(50_000, 2, dtype=torch.float64) * 1e-40
    ones = make_layer(4, 2, 2, group_size=-1)
    return {
        "bias of a packed matrix": matrix.pack,
        "router weights": lambda: layer(x, ids, router.double() * 1e-40),
        "router weights by several threads": lambda: ones(torch.ones(50_000, 2), torch.zeros(50_000, 2).int(), many),
        "correction bias": lambda: w4a8.topk_routing(logits, 3, False, "identity", e_score_correction_bias=tiny)[1],
        "scaling factor": lambda: w4a8.topk_routing(logits, 3, False, "softmax", routed_scaling_factor=1e-39)[0],
        "scales of rows": lambda: gemm(None),
        "bias of a product": lambda: gemm(tiny),
    }


def run_script(script, *arguments):
    """What it prints in a process of its own, in which sys.argv[1] is this folder."""
    command = [sys.executable, "-c", textwrap.dedent(script), os.path.dirname(__file__), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


FLUSHED = """
    import hashlib, sys
    import torch
    sys.path.insert(0, sys.argv[1])
    torch.set_num_threads(4)
    if sys.argv[2] == "flushed":  # before any thread is started: those take it over
        assert torch.set_flush_denormal(True)
    torch.manual_seed(0)
    from test_threads import float64_cases
    for name, call in float64_cases().items():
        print(name, hashlib.sha256(call().numpy().tobytes()).hexdigest())
"""


def test_flushed_denormals_and_float64():
    """What the operators are given as float64 is rounded as without flushing, on every thread."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot flush denormals")
    printed = []
    for mode in ("as it is", "flushed"):
        printed.append(run_script(FLUSHED, mode).splitlines())
    assert len(printed[0]) == len(float64_cases())
    assert printed[1] == printed[0]


def test_flushed_denormals_and_every_type_of_floats():
    """Every other type is converted exactly: all its bits, among them its own denormals, as a bias."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot flush denormals")
    names = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    for name in [name for name in names if hasattr(torch, name)]:
        width = 2 if "16" in name else 1
        bits = torch.arange(256**width).to(torch.int32).view(torch.uint8).view(-1, 4)[:, :width].contiguous()
        n = len(bits)
        matrix = make_matrix(n, 2, 2)
        matrix.bias = bits.view(-1).view(getattr(torch, name))
        expected = matrix.pack()
        try:
            torch.set_flush_denormal(True)
            flushed = matrix.pack()
        finally:
            torch.set_flush_denormal(False)
        assert_same_bits(flushed, expected, name)


def test_modes_of_torch():
    calls = cases()
    expected = [call() for call in calls]
    modes = [torch.no_grad, torch.enable_grad]
    modes += [torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
    for mode in modes:
        with mode():
            for at, call in enumerate(calls):
                assert_same_bits(call(), expected[at], f"call {at}")


def test_inputs_made_in_inference_mode_and_with_gradients():
    layer, x = make_layer(4, 64, 32), torch.randn(5, 64)
    ids, router = route(5, 2, 4)
    expected = layer(x, ids, router)
    with torch.inference_mode():
        inside = x.clone(), router.clone()
    assert_same_bits(layer(inside[0], ids, inside[1]), expected)
    with torch.no_grad():
        assert_same_bits(layer(x.requires_grad_(), ids, router), expected)


@pytest.mark.skipif(TORCH_VERSION < (2, 2), reason="torch.compile of this torch cannot trace operators of a library")
def test_compiled_under_a_mode():
    layer, x = make_layer(4, 64, 32), torch.randn(5, 64)
    ids, router = route(5, 2, 4)
    expected = layer(x, ids, router) * 2
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = torch.compile(lambda: layer(x, ids, router) * 2, backend="eager", fullgraph=True)
        assert_same_bits(compiled(), expected)


FORK = """
    import os, signal, sys, threading
    import torch, w4a8
    sys.path.insert(0, sys.argv[1])
    from common import make_layer, route
    torch.manual_seed(0)
    torch.set_num_threads(1)  # starts none: packing would
    layer, x = make_layer(8, 256, 128), torch.randn(40, 256)
    ids, router = route(40, 3, 8)
    torch.set_num_threads(2)
    before, inside = sys.argv[2], sys.argv[3]
    if before == "ours":
        layer(x, ids, router)
    elif before == "torch":
        torch.randn(1_000_000).add_(1)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a hang ends as a signal
        if inside == "one":
            torch.set_num_threads(1)
        y = layer(x, ids, router)
        torch.save(y, sys.argv[4])
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    torch.set_num_threads(1)
    expected = layer(x, ids, router)
    if status != 0:
        print("child", status)
    elif not torch.equal(torch.load(sys.argv[4]), expected):
        print("other bits")
    else:
        print("same")
"""


# before: what ran on several threads in the parent; inside: what the child does first.
@pytest.mark.parametrize(("before", "inside"), [("nothing", "as it is"), ("ours", "one"), ("torch", "one")])
def test_after_fork(tmp_path, before, inside):
    """The child computes the same bits: on several threads if the parent had not started any, else on one.

    libgomp's threads do not exist in the child of a process that had started them, and the first parallel region
    waits for them forever. That is so for every operator of torch; torch.set_num_threads(1) in the child avoids it.
    """
    assert run_script(FORK, before, inside, str(tmp_path / "y.pt")).strip() == "same"

"""paged_attention beside vLLM's attention and PyTorch's scaled_dot_product_attention, in one process, in turns.

    make bench-attention [ARGS='--threads 1 2 --questions prefill --rounds 5']

The shapes are those of a layer of Qwen3-30B-A3B (32 query heads, 4 key heads of 128), bfloat16, pages of 128 tokens.
Where few rows read a long cache, calls go from layer to layer, so that no cache of the CPU holds one. Printed are
medians of the rounds, and how many times as fast as vLLM's attention over its bfloat16 cache. PyTorch's attention gets
keys and values contiguous, which no cache gives it. Latent attention (MLA) has the shapes of DeepSeek-V2-Lite and V3,
and vLLM's operator for decode steps without AMX. See benchmarks/README.md.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import ClassVar

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import _custom_ops as vllm_ops
from vllm.platforms import current_platform

import w4a8

current_platform.import_kernels()  # those of this CPU

HEADS, KEY_HEADS, SIZE, PAGE = 32, 4, 128, 128
SCALE = SIZE**-0.5
BASE = "vLLM bfloat16"
# Enough layers that what they cache is beyond any cache of the CPU.
CACHED_BYTES = 120e6


@dataclass(frozen=True)
class Question:
    """`rows` new tokens of each of `sequences` sequences, behind `behind` others."""

    rows: int
    behind: int
    sequences: int = 1
    token_bytes: ClassVar[int] = KEY_HEADS * SIZE * 2  # of the keys of a layer

    @property
    def key_flops(self) -> int:
        return 4 * HEADS * SIZE

    @property
    def name(self) -> str:
        of = f"{self.sequences} x " if self.sequences > 1 else ""
        return f"{of}{self.rows} behind {self.behind}"

    @property
    def total(self) -> int:
        return self.rows + self.behind

    @property
    def flops(self) -> float:
        keys = self.rows * self.behind + self.rows * (self.rows + 1) / 2
        return self.key_flops * keys * self.sequences

    @property
    def layers(self) -> int:
        if self.rows > 64:
            return 1
        return max(2, min(48, int(CACHED_BYTES / (self.total * self.sequences * self.token_bytes))))


LATENT = (512, 64)  # channels of keys that are values, and those that are not


@dataclass(frozen=True)
class Latent(Question):
    """Of latent attention with `heads` query heads, one new row of each sequence: DeepSeek's decode steps."""

    heads: int = 16
    token_bytes: ClassVar[int] = sum(LATENT) * 2

    @property
    def key_flops(self) -> int:
        return 2 * self.heads * (LATENT[0] + sum(LATENT))

    @property
    def name(self) -> str:
        return f"{self.heads} heads, {super().name}"


QUESTIONS = {
    "prefill": [Question(512, 0), Question(2048, 0), Question(2048, 6144), Question(8192, 0)],
    "decode": [
        Question(1, 1024), Question(1, 4096), Question(1, 16384), Question(1, 65536), Question(8, 4096),
        Question(1, 4096, 8),
    ],
    "latent": [
        Latent(1, 1024), Latent(1, 4096), Latent(1, 16384), Latent(1, 4096, 8), Latent(1, 4096, heads=128),
    ],
}  # fmt: skip


class Call:
    """What all ways are given."""

    def __init__(self, question: Question) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = question.total * question.sequences
        draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
        self.question = question
        self.key, self.value = draw(tokens, KEY_HEADS, SIZE), draw(tokens, KEY_HEADS, SIZE)
        self.query = draw(question.rows * question.sequences, HEADS, SIZE)
        self.pages = -(-question.total // PAGE)
        self.table = torch.arange(self.pages * question.sequences, dtype=torch.int32).view(question.sequences, -1)
        self.lengths = torch.full((question.sequences,), question.total, dtype=torch.int32)
        self.starts = torch.arange(question.sequences + 1, dtype=torch.int32) * question.rows


def w4a8_way(call: Call, kind: str):
    width = PAGE // 64 * w4a8.attention_block_bytes(kind, SIZE, SIZE)
    written = torch.arange(call.question.sequences + 1, dtype=torch.int32) * call.question.total
    caches = []
    for _ in range(call.question.layers):
        cache = torch.zeros(call.table.numel(), KEY_HEADS, width, dtype=torch.uint8)
        w4a8.paged_attention_write(call.key, call.value, cache, call.table, call.lengths, written, kind=kind)
        caches.append(cache)

    def run(i: int) -> torch.Tensor:
        cache = caches[i % len(caches)]
        return w4a8.paged_attention(call.query, cache, call.table, call.lengths, call.starts, SCALE, kind=kind)

    return run


def vllm_way(call: Call, dtype: str):
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    fp8 = dtype != "auto"
    scales = {"k_scale": 1.0, "v_scale": 1.0} if fp8 else {}
    slots = torch.arange(call.question.total, dtype=torch.int64)
    slots = torch.cat([slots + i * call.pages * PAGE for i in range(call.question.sequences)])
    caches = []
    for _ in range(call.question.layers):
        both = torch.zeros(
            call.table.numel(), KEY_HEADS, PAGE * 2, SIZE, dtype=torch.uint8 if fp8 else torch.bfloat16
        ).chunk(2, dim=2)
        vllm_ops.cpu_attn_reshape_and_cache(call.key, call.value, *both, slots, isa, kv_cache_dtype=dtype, **scales)
        caches.append(both)
    plan = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=call.question.sequences, num_heads=HEADS, num_kv_heads=KEY_HEADS, head_dim=SIZE,
        seq_lens=call.lengths, dtype=torch.bfloat16, query_start_loc=call.starts, causal=True,
        sliding_window_size=-1, isa=isa, enable_kv_split=True, kv_cache_dtype=dtype,
    )  # fmt: skip
    out = torch.empty_like(call.query)

    def run(i: int) -> torch.Tensor:
        keys, values = caches[i % len(caches)]
        vllm_ops.cpu_attention_with_kv_cache(
            query=call.query, key_cache=keys, value_cache=values, output=out, query_start_loc=call.starts,
            seq_lens=call.lengths, scale=SCALE, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=call.table, softcap=0.0, scheduler_metadata=plan, s_aux=None, kv_cache_dtype=dtype, **scales,
        )  # fmt: skip
        return out

    return run


def sdpa_way(call: Call):
    question = call.question
    shape = lambda x, n: x.view(question.sequences, n, -1, SIZE).transpose(1, 2).contiguous()  # noqa: E731
    layers = [(shape(call.key, question.total), shape(call.value, question.total)) for _ in range(question.layers)]
    query = shape(call.query, question.rows)
    mask = None
    if question.rows > 1 and question.behind:
        mask = torch.ones(question.rows, question.total, dtype=torch.bool).tril(question.behind)

    def run(i: int) -> torch.Tensor:
        keys, values = layers[i % len(layers)]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=question.behind == 0, scale=SCALE, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(call.query.shape)

    return run


def ways(call: Call) -> dict:
    found = {"w4a8 int8": w4a8_way(call, "int8"), "w4a8 bfloat16": w4a8_way(call, "bfloat16")}
    found[BASE] = vllm_way(call, "auto")
    if torch.cpu._is_avx512_supported():
        found["vLLM fp8"] = vllm_way(call, "fp8_e4m3")
    found["torch sdpa"] = sdpa_way(call)
    return found


def latent_ways(question: Latent) -> dict:
    generator = torch.Generator().manual_seed(0)
    size, values = sum(LATENT), LATENT[0]
    query = torch.randn(question.sequences, question.heads, size, generator=generator).bfloat16()
    lengths = torch.full((question.sequences,), question.total, dtype=torch.int32)
    pages = -(-(question.total) // PAGE)
    ours, theirs = [], []
    keys = torch.randn(question.sequences * (question.total), 1, size, generator=generator).bfloat16()
    count = pages * question.sequences
    table = torch.arange(count, dtype=torch.int32).view(question.sequences, -1)
    small = torch.arange(count * PAGE // 16, dtype=torch.int32).view(question.sequences, -1)
    starts = torch.arange(question.sequences + 1, dtype=torch.int32)
    for _ in range(question.layers):
        width = PAGE // 64 * w4a8.attention_block_bytes("latent", size, values)
        cache = torch.zeros(count, 1, width, dtype=torch.uint8)
        w4a8.paged_attention_write(
            keys, keys[..., :values], cache, table, lengths, starts * (question.total), kind="latent"
        )
        ours.append(cache)
        plain = torch.zeros(question.sequences, pages * PAGE, size, dtype=torch.bfloat16)
        plain[:, : question.total] = keys.view(question.sequences, -1, size)
        theirs.append(plain.view(-1, 16, size))
    scale = (128 + LATENT[1]) ** -0.5
    out = torch.empty(question.sequences, question.heads, values, dtype=torch.bfloat16)

    def vllm(i: int) -> torch.Tensor:
        vllm_ops.mla_decode_kvcache_cpu(out, query, theirs[i % len(theirs)], scale, small, lengths)
        return out

    def w4a8_(i: int) -> torch.Tensor:
        cache = ours[i % len(ours)]
        return w4a8.paged_attention(query, cache, table, lengths, starts, scale, kind="latent", value_size=values)

    return {"w4a8 bfloat16": w4a8_, BASE: vllm}


def measure(question: Question, rounds: int) -> dict[str, float]:
    """Seconds of a call, the median of the rounds, in which the ways take turns."""
    latent = isinstance(question, Latent)
    candidates = latent_ways(question) if latent else ways(Call(question))
    exact = candidates[BASE if latent else "torch sdpa"](0).float()
    for name, run in candidates.items():
        error = (run(0).float() - exact).norm() / exact.norm()
        if not error < (0.02 if latent else 0.3):  # random keys: what is left of random values is small
            raise RuntimeError(f"{name} gives something else for {question.name}: relative error {error:.3f}")
    calls = 1 if question.rows > 64 else max(2, min(question.layers, 8))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            begun = time.perf_counter()
            for i in range(calls):
                run(i)
            times[name].append((time.perf_counter() - begun) / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def cpu_name() -> str:
    with open("/proc/cpuinfo") as file:
        fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    return f"{fields.get('model name')} (family {fields.get('cpu family')} model {fields.get('model')})"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--questions", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    print(f"{cpu_name()}, kernel {w4a8.active_kernel()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    for threads in given.threads:
        torch.set_num_threads(threads)
        print(f"\n{threads} thread{'s' if threads > 1 else ''}: ms (times as fast as {BASE}), GFLOP/s of the first\n")
        heading = ""
        for question in (q for name in given.questions for q in QUESTIONS[name]):
            found = measure(question, given.rounds)
            before, heading = heading, "| tokens | " + " | ".join(found) + " | GFLOP/s |"
            if heading != before:
                print("\n" * bool(before) + heading, "\n|---|" + "---|" * (len(found) + 1), sep="")
            cells = [f"{t * 1e3:.3f} ({found[BASE] / t:.2f})" for t in found.values()]
            rate = question.flops / next(iter(found.values())) / 1e9
            print(f"| {question.name} | " + " | ".join(cells) + f" | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Sequences for paged_attention, and attention over them in float64."""

import math

import numpy as np
import torch

import w4a8

# A sum of many small errors is beyond that once in a thousand million.
SIGMAS = 6


class Sequences:
    """Random sequences of `lengths` tokens, of which the last `fresh` ones are queried, in pages that lie anywhere."""

    def __init__(self, lengths, fresh, *, heads=2, group=3, size=64, value_size=None, dtype=torch.float32,
                 kind="int8", page_blocks=2, spread=1.0, seed=0, **options):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.lengths, self.fresh, self.kind, self.options = lengths, fresh, kind, options
        value_size = value_size or size
        if kind == "latent":
            size = value_size + 32
        self.heads, self.group, self.size, self.value_size = heads, group, size, value_size
        tokens = sum(lengths)
        # Keys as models have them: large constant parts.
        bias = draw(1, heads, size) * 3
        self.key = ((draw(tokens, heads, size) + bias) * spread).to(dtype)
        self.value = draw(tokens, heads, value_size).to(dtype)
        if kind == "latent":
            self.key[..., :value_size] = self.value
            self.value = self.key[..., :value_size]
        self.query = draw(tokens, heads * group, size).to(dtype)
        self.scale = size**-0.5
        page_tokens = 64 * page_blocks
        width = max(-(-n // page_tokens) for n in lengths)
        pages = sum(-(-n // page_tokens) for n in lengths) + 1
        order = torch.randperm(pages, generator=generator).int()
        self.table = torch.full((len(lengths), width), -1, dtype=torch.int32)
        used = 0
        for b, n in enumerate(lengths):
            count = -(-n // page_tokens)
            self.table[b, :count] = order[used : used + count]
            used += count
        block = w4a8.attention_block_bytes(kind, size, self.value_size)
        self.cache = torch.full((pages, heads, page_blocks * block), 255, dtype=torch.uint8)

    def call(self, begin, end):
        """seq_lens, query_start_loc and the rows of tokens begin[b] to end[b] of each sequence."""
        firsts = np.cumsum([0, *self.lengths])
        rows = torch.cat([torch.arange(first + a, first + z) for first, a, z in zip(firsts, begin, end)])
        starts = np.cumsum([0, *(z - a for a, z in zip(begin, end))])
        return torch.tensor(end, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32), rows

    def write(self, begin=None, end=None):
        lens, starts, rows = self.call(begin or [0] * len(self.lengths), end or self.lengths)
        key = self.key[rows]
        value = key[..., : self.value_size] if self.kind == "latent" else self.value[rows]
        w4a8.paged_attention_write(
            key, value, self.cache, self.table, lens, starts,
            kind=self.kind, window=self.options.get("window", 0),
        )  # fmt: skip
        return self

    def attend(self, begin=None, end=None):
        begin = begin or [n - f for n, f in zip(self.lengths, self.fresh)]
        lens, starts, rows = self.call(begin, end or self.lengths)
        return w4a8.paged_attention(
            self.query[rows], self.cache, self.table, lens, starts, self.scale,
            kind=self.kind, value_size=self.value_size, **self.options,
        )  # fmt: skip

    def exact(self):
        """What `attend()` approximates, and how far from that it may be: float64 [T, H, V] twice.

        Codes of int8 are off by up to half of a scale. Weights are off by up to 1 / 508 of the largest of their step of
        128 keys (times the scale of its value), and by as much that another one was rounded by. bfloat16 is off by 2^-9
        of a number. These errors are even in their range and have nothing to do with each other, so that their sums are
        within six standard deviations. What is rounded of the query is in all scores. A score that is off by d changes
        the output by w d (v - out), and what is of higher order is below exp(2 d) - 1 - 2 d of the values.
        """
        outs, bounds = [], []
        first = 0
        for b, n in enumerate(self.lengths):
            for t in range(n - self.fresh[b], n):
                for h in range(self.heads * self.group):
                    out, bound = self._row(b, first, n, t, h)
                    outs.append(out)
                    bounds.append(bound)
            first += n
        shape = (sum(self.fresh), self.heads * self.group, self.value_size)
        return np.array(outs).reshape(shape), np.array(bounds).reshape(shape)

    def _row(self, b, first, n, t, h):
        window, causal = self.options.get("window", 0), self.options.get("causal", True)
        begin = max(0, t - window + 1) if window else 0
        begin = max(begin, t - t % self.options.get("chunk", n))
        end = t + 1 if causal else (min(n, t + window) if window else n)
        key = self.key[first + begin : first + end, h // self.group].double().numpy()
        value = self.value[first + begin : first + end, h // self.group].double().numpy()
        query = self.query[first + t, h].double().numpy()
        scores = key @ query * self.scale
        if self.kind == "int8":
            of_keys, of_query, half_codes = self._int8_errors(b, h // self.group, begin, end, key, query)
        else:
            of_keys = of_query = np.sqrt((key**2 @ query**2) / 3) * self.scale * 2.0**-9
            half_codes = np.abs(value) * 2.0**-9
        cap = self.options.get("soft_cap", 0.0)
        if cap:
            scores = cap * np.tanh(scores / cap)  # its slope is at most 1
        d = SIGMAS * (of_keys + of_query).max() + 1e-5
        sinks = self.options.get("sinks")
        most = max(scores.max(), -math.inf if sinks is None else float(sinks[h]))
        weights = np.exp(scores - most)
        total = weights.sum() + (0 if sinks is None else math.exp(float(sinks[h]) - most))
        weights /= total
        out = weights @ value
        grown = math.exp(2 * d)
        rest = np.abs(value - out)
        first = np.sqrt((weights * of_keys) ** 2 @ rest**2) + (weights * of_query) @ rest
        bound = SIGMAS * first + (grown - 1 - 2 * d) * (weights @ np.abs(value))
        if self.kind == "int8":
            turned = math.sqrt(self.value_size & -self.value_size)  # values were rotated: so many times larger
            bound = bound + grown * SIGMAS * np.sqrt((weights**2 @ half_codes**2) / 3) / turned
            scales = 2 * half_codes
            for step in range(begin // 128 * 128, end, 128):
                part = slice(max(step - begin, 0), max(step + 128 - begin, 0))
                largest = (weights[part] * scales[part]).max() * grown
                codes = np.abs(value[part]) / scales[part, None] + 0.5 / turned
                bound = bound + largest / 254 * SIGMAS * np.sqrt((codes**2).sum(0) / 6)
        else:
            bound = bound + grown * SIGMAS * 2 * np.sqrt((weights**2 @ half_codes**2) / 3)
        return out, bound * 1.01 + 1e-5 * np.abs(value).max()

    def _int8_errors(self, b, head, begin, end, key, query):
        """Standard deviations of each score by its key and by the query; half of the scale of each value."""
        transform = hadamard(self.size)
        rotated, q = key @ transform, query @ transform
        block_bytes = w4a8.attention_block_bytes(self.kind, self.size, self.value_size)
        page_blocks = self.cache.shape[2] // block_bytes
        n = self.size & -self.size
        of_keys, of_query, halves = [], [], []
        q_step = np.abs(q).max() / 127
        for t in range(begin, end):
            number = t // 64
            page = int(self.table[b, number // page_blocks])
            at = number % page_blocks * block_bytes
            block = self.cache[page, head, at : at + block_bytes].numpy()
            scales = block[64 * (self.size + self.value_size) :][: 64 * 8].copy().view(np.float32)
            reference = block[64 * (self.size + self.value_size) + 64 * 8 :][: 2 * self.size].copy().view(np.uint16)
            c = (reference.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            rest = rotated[t - begin] - c
            step = float(scales[t % 64]) * 1.001
            of_keys.append(step * math.sqrt((q**2).sum() / 12) * self.scale / n)
            of_query.append(q_step * math.sqrt(((np.abs(rest) + step / 2) ** 2).sum() / 12) * self.scale / n)
            halves.append(2.0 ** float(scales[64 + t % 64]) / 2 * 1.001)
        return np.array(of_keys), np.array(of_query), np.array(halves)


def hadamard(size):
    """The transform of the largest power of two that divides `size`, without a factor, float64 [size, size]."""
    n = size & -size
    one = np.array([[1.0]])
    while len(one) < n:
        one = np.block([[one, one], [one, -one]])
    return np.kron(np.eye(size // n), one)

"""A whole hybrid in one call at 32,768 tokens, beside transformers' model of the same weights with states of float64:
errors do not grow with a text.
"""

from itertools import pairwise

import pytest

transformers = pytest.importorskip("transformers", minversion="5.19")

import multiplied_out  # noqa: E402
import torch  # noqa: E402
from gguf_architectures import VOCAB, model_of, write_int4  # noqa: E402
from test_linear_attention_long import CHUNK, DECODED, REMEMBERED, TOKENS  # noqa: E402
from test_transformers_fuse import fails  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: E402

from w4a8.integrations.transformers import W4A8Cache, W4A8Config, fuse  # noqa: E402
from w4a8.nn.packed import PackedModule  # noqa: E402

WINDOW = 512
SIZES = {
    "max_position_embeddings": TOKENS, "num_attention_heads": 2, "num_key_value_heads": 1,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
# Nearly all of an error is int8 inputs'. If its square deviates between tokens as much as it is, the root of a window's
# mean deviates by half of 512^-1/2, and the ratio of two of these by 3.1 %: five times as much.
BOUND = 1.16


def recurrence(query, key, value, g, beta, **_):
    """In the place of transformers' chunks: token by token, with a state of float64. [1, tokens, heads, size]."""
    heads, query, key, value, beta = value.shape[2], *(x.double() for x in (query, key, value, beta))
    q, k = (x[0].repeat_interleave(heads // x.shape[2], 1) for x in (query, key))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k, v = q[:, :, None] * q.shape[-1] ** -0.5, k[:, :, None], value[0][:, :, None]
    decay, beta = g[0].double().exp()[..., None, None], beta[0][..., None, None]
    state = v.new_zeros(heads, k.shape[-1], v.shape[-1])
    out, columns = torch.empty_like(v), k.mT.contiguous()
    for t in range(len(v)):
        state = state * decay[t]
        state = torch.baddbmm(state, columns[t], beta[t] * (v[t] - torch.bmm(k[t], state)))
        torch.bmm(q[t], state, out=out[t])
    return out.view(value.shape).float(), None


def off(x, exact):
    """The error of the whole as a share of how logits differ from each other, as roots of sums of squares."""
    return ((x - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm()).item()


@torch.no_grad()
def test_no_drift(tmp_path, monkeypatch):
    floats = model_of("qwen35", **SIZES)
    for layer in floats.model.layers[:3]:
        # The slowest head remembers as in test_linear_attention_long.py.
        rates = 6 / REMEMBERED * 8.0 ** torch.arange(len(layer.linear_attn.A_log))
        layer.linear_attn.A_log.copy_(rates.log())
        layer.linear_attn.dt_bias.fill_(-2)
    write_int4(floats, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=W4A8Config()
    )
    packed = {key for key, module in model.named_modules() if isinstance(module, PackedModule)}
    tokens = torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0))

    undo = fuse(model, "bfloat16")
    monkeypatch.setattr(type(model.model), "forward", fails)
    cache = W4A8Cache(model.config, "bfloat16")
    cuts = [*range(0, TOKENS - DECODED, CHUNK), *range(TOKENS - DECODED, TOKENS + 1)]
    parts = [model(tokens[:, begin:end], past_key_values=cache).logits[0] for begin, end in pairwise(cuts)]
    found = torch.cat(parts)
    undo()
    monkeypatch.undo()

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", recurrence)
    floats.set_attn_implementation("sdpa")  # whose blocks fit into memory
    exact = floats(tokens, use_cache=False).logits[0]
    matrices = [each for key, each in floats.named_parameters() if key.rpartition(".")[0] in packed]
    with multiplied_out.Int8Inputs(matrices, 32):
        rounded = floats(tokens, use_cache=False).logits[0]
    first, last = slice(0, WINDOW), slice(TOKENS - WINDOW, TOKENS)
    for part in (first, last):
        assert off(found[part], exact[part]) < BOUND * off(rounded[part], exact[part])
    assert off(found[last], exact[last]) < BOUND * off(found[first], exact[first])

"""The output layer in int4 or int8: when, and what becomes of its weight."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from w4a8.integrations.vllm.linear_layers import Rounded, W4A8LinearMethod, lm_head_method
from w4a8.ops import read_header


def make_head(columns=64, seed=0) -> ParallelLMHead:
    """With a weight, but without the rest of a model."""
    head = ParallelLMHead.__new__(ParallelLMHead)
    torch.nn.Module.__init__(head)
    head.embedding_dim = columns
    weight = torch.randn(48, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return head


def test_off(monkeypatch):
    monkeypatch.setenv("W4A8_VLLM_LM_HEAD", "0")
    assert lm_head_method(make_head(), None) is None


@pytest.mark.parametrize(("value", "bits"), [(None, 8), ("", 8), ("int4", 4), ("int8", 8)])
def test_on(value, bits, monkeypatch):
    monkeypatch.delenv("W4A8_VLLM_LM_HEAD", raising=False)
    if value is not None:
        monkeypatch.setenv("W4A8_VLLM_LM_HEAD", value)
    method = lm_head_method(make_head(), None)
    assert isinstance(method.filler, Rounded) and method.filler.bits == bits
    assert isinstance(lm_head_method(make_head(), UnquantizedEmbeddingMethod()).filler, Rounded)
    quantized, other = object(), torch.nn.Module()
    assert lm_head_method(make_head(), quantized) is quantized
    assert lm_head_method(other, None) is None
    assert (lm_head_method(make_head(columns=48), None) is None) == (bits == 4)  # no groups of 32


def test_models_that_vllm_runs_are_left_alone(monkeypatch):
    monkeypatch.delenv("W4A8_VLLM_LM_HEAD", raising=False)
    assert lm_head_method(make_head(), None, by_default=False) is None
    monkeypatch.setenv("W4A8_VLLM_LM_HEAD", "int4")
    assert lm_head_method(make_head(), None, by_default=False).filler.bits == 4


def test_another_value(monkeypatch):
    monkeypatch.setenv("W4A8_VLLM_LM_HEAD", "1")
    with pytest.raises(ValueError, match=r"W4A8_VLLM_LM_HEAD='1', expected 0, int4 or int8"):
        lm_head_method(make_head(), None)


# Codes of a group of 32 normal values: steps of some 2 / 7.5 of their spread, and step / sqrt(12) off. Of a row of 64
# some 2.5 / 127, and the inputs are int8 as well: steps of some 5 / 255.
@pytest.mark.parametrize(
    ("bits", "least", "most"),
    [(4, 0.01, 2 / 7.5 / 12**0.5 * 1.5), (8, 0.001, ((2.5 / 127) ** 2 + (5 / 255) ** 2) ** 0.5 / 12**0.5 * 1.5)],
)
def test_packed_and_freed(bits, least, most):
    head, method = make_head(), W4A8LinearMethod(Rounded(bits))
    weight = head.weight.data.float()
    method.process_weights_after_loading(head)
    assert not hasattr(head, "weight") and head.weight_rounded.dtype == torch.uint8
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    bias = torch.arange(48.0)
    exact = x @ weight.T
    off = (method.apply(head, x, bias) - bias - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert least < off < most


def test_tied_to_the_embedding():
    """Which looks its rows up in the weight, and keeps it."""
    head, embedding = make_head(), SimpleNamespace(weight=make_head(seed=1).weight)
    method = W4A8LinearMethod(Rounded(4))
    head.quant_method = method
    assert head.tie_weights(embedding) is head
    kept = embedding.weight.clone()
    method.process_weights_after_loading(head)
    assert head.weight is embedding.weight and torch.equal(embedding.weight, kept)
    assert head.weight_rounded.numel() < kept.numel()


@pytest.mark.parametrize(("value", "expected"), [(None, 32), ("-1", -1), ("32", 32), ("64", None)])
@pytest.mark.parametrize("bits", [4, 8])
def test_activation_group(bits, value, expected, monkeypatch):
    """int8 has one group in a row, of 64 here, which 64 fits."""
    monkeypatch.delenv("W4A8_VLLM_ACTIVATION_GROUP", raising=False)
    if value is not None:
        monkeypatch.setenv("W4A8_VLLM_ACTIVATION_GROUP", value)
    head, method = make_head(), W4A8LinearMethod(Rounded(bits))
    if expected is None and bits == 4:
        with pytest.raises(
            ValueError, match=r"w4a8: the output layer: activation_group is 64, expected .* that divides"
        ):
            method.process_weights_after_loading(head)
        return
    method.process_weights_after_loading(head)
    assert read_header(head.weight_rounded)["activation_group"] == (expected or 64)

"""fuse(): numbers of a model that the call of all layers does not have, and angles of long texts."""

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("gguf")

import torch
from gguf_models import VOCAB
from test_transformers_fuse import ROUNDED, differs_by, load, run

from w4a8.integrations.transformers import W4A8Cache, fuse


def test_refuses_numbers_that_the_call_does_not_have(tmp_path, monkeypatch):
    model = load("gemma3", tmp_path)
    rope, norm = model.config.rope_parameters["full_attention"], model.model.layers[0].input_layernorm
    for change, message in (
        (lambda by: by.setattr(norm, "eps", 0.5), "norms have different eps, 0.5 and "),
        (lambda by: by.setitem(rope, "rope_type", "other"), "rotary embeddings of type other depend on the length"),
        (lambda by: by.setattr(model.config, "use_bidirectional_attention", True), "use_bidirectional_attention is se"),
    ):
        with monkeypatch.context() as by, pytest.raises(ValueError, match=message):
            change(by)
            fuse(model)
    fuse(model)


def test_angles_of_long_texts(tmp_path):
    """The tables grow before a position is behind their end, and what they had stays."""
    model = load("llama", tmp_path)
    fuse(model)
    stack = model.forward.stack
    (first,) = stack.tables(1)
    for positions in (len(first), len(first) + 1, 5 * len(first)):
        (found,) = stack.tables(positions)
        assert len(found) >= positions
        assert torch.equal(found[: len(first)], first)


@torch.no_grad()
def test_layers_without_a_window_beside_others(tmp_path, monkeypatch):
    """Qwen2-MoE's full attention does not say that it has no window."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 4}
    monkeypatch.setitem(ROUNDED, "Qwen2Moe", {**experts, **window, "shared_expert_intermediate_size": 64})
    model = load("Qwen2Moe", tmp_path, attn_implementation="eager")
    assert {*model.config.layer_types} == {"sliding_attention", "full_attention"}
    ids = torch.randint(3, VOCAB, (1, 48))
    own = model(ids).logits
    fuse(model, "bfloat16")
    assert differs_by(run(model, ids, cache=W4A8Cache(model.config, "bfloat16")), own) < 0.05

"""Layers of linear attention without an engine: vLLM's layer with this package's core beside vLLM's own."""

from types import SimpleNamespace

import pytest
import torch
from layers import rank  # noqa: F401
from test_mamba import GUESSES, HEADS, HIDDEN, LENGTHS, NAME, SLOTS, TOKENS, run, tokens
from vllm.config import get_current_vllm_config
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from w4a8.integrations.vllm import linear_attention

K = 64


@pytest.fixture
def layer_of(rank, monkeypatch):  # noqa: F811
    """``layer_of(dtype, ...)``: vLLM's layer with random weights and states; a page has more than a state."""
    backend = SimpleNamespace(gdn_prefill_backend="none")  # which asks for the config of a model
    monkeypatch.setattr(qwen_gdn_linear_attn, "ChunkGatedDeltaRule", lambda: backend)

    def make(dtype=torch.bfloat16, interleaved=False, guesses=0, gate="silu", value_size=K):
        vllm_config = get_current_vllm_config()
        vllm_config.compilation_config.static_forward_context.clear()
        config = SimpleNamespace(
            hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-6, linear_num_key_heads=2,
            linear_num_value_heads=HEADS, linear_key_head_dim=K, linear_value_head_dim=value_size,
            linear_conv_kernel_dim=4, output_gate_type=gate,
        )  # fmt: skip
        with set_default_torch_dtype(dtype):
            layer = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention(config, vllm_config, NAME, interleaved)
        layer.model_config = SimpleNamespace(dtype=dtype)
        layer.cache_config = SimpleNamespace(mamba_cache_dtype="auto", mamba_ssm_cache_dtype="float32")
        generator = torch.Generator().manual_seed(0)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad = False
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + name.startswith("norm"))
        for linear in (layer.in_proj_qkvz, layer.in_proj_ba, layer.out_proj, layer.conv1d):
            linear.quant_method.process_weights_after_loading(linear)
        pages = torch.randn(SLOTS, HEADS * K * value_size + 64, generator=generator)
        conv_state = torch.randn(SLOTS, 3 + guesses, 4 * K + HEADS * value_size, generator=generator).to(dtype)
        layer.kv_cache = (conv_state, pages[:, 64:].unflatten(1, (HEADS, value_size, K)))
        return layer

    return make


def step(lengths=LENGTHS, had_past=(True, True, False, True), slots=(4, 1, 5, 2), **others):
    """The metadata of a step: single tokens with a past first."""
    decodes = next((i for i, n in enumerate(lengths) if n > 1 or not had_past[i]), len(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    table = torch.tensor(slots, dtype=torch.int32).repeat(2, 1).T  # [sequences, pages]
    given = {
        "has_initial_state": torch.tensor(had_past) if decodes < len(lengths) else None,
        "non_spec_query_start_loc": starts, "non_spec_state_indices_tensor": table[:, 0],
    }  # fmt: skip
    tokens = int(starts[-1])
    counts = (len(lengths) - decodes, tokens - decodes, decodes, decodes, 0, 0, tokens)
    return GDNAttentionMetadata(*counts, **given | others)


def guesses(lengths=(3, 3), accepted=(1, 3)):
    """Sequences with up to two guesses each, and how many tokens of the last step were taken."""
    count, total = len(lengths), sum(lengths)
    return GDNAttentionMetadata(
        0, 0, 0, 0, count, total, total, spec_query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        spec_state_indices_tensor=torch.arange(3 * count, dtype=torch.int32).view(count, 3),
        spec_sequence_masks=torch.ones(count, dtype=torch.bool),
        num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
    )  # fmt: skip


def attach(layer):
    """Lets this package run the layer of a model, which is returned."""
    model = torch.nn.Module()
    model.layer, model.load_weights = layer, lambda weights: None
    linear_attention.attach(model, None, None)
    return model


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_beside_vllms_own(layer_of, interleaved, gate):
    """In bfloat16, which is the type that vLLM's has. vLLM's is up to 0.033 of the largest output off what float32
    gives (AVX2, where it rounds after each operator), and the operator here 0.012: that many roundings of 2^-9."""
    layer = layer_of(interleaved=interleaved, gate=gate)
    x = tokens(torch.bfloat16)
    expected = run(layer, [step()], x)
    attach(layer)
    assert layer._forward_method != layer.forward_cpu
    found = run(layer, [step()], x)
    for ours, vllms in zip(found, expected):
        assert (ours - vllms).abs().max() < 0.045 * vllms.abs().max()
    untouched = [slot for slot in range(SLOTS) if slot not in (4, 1, 5, 2)]
    for ours, before in zip(found[1:], layer.kv_cache):
        assert torch.equal(ours[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_cuts_and_other_sequences_change_no_bit(layer_of, dtype, layout, monkeypatch):
    """Nor do vLLM's two layouts of a convolution's states, and rows for guesses behind them."""
    layer, x = layer_of(dtype, value_size=32), tokens(dtype)
    attach(layer)
    out, conv_state, state = run(layer, [step()], x)
    if layout == "DS":
        monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: True)
        rows = torch.cat((layer.kv_cache[0], conv_state[:, :GUESSES]), 1)
        layer.kv_cache = (rows.transpose(1, 2).contiguous(), layer.kv_cache[1])
    pieces = [
        step((1, 40), (True, False), (4, 5)), step((1, 30), (True, True), (1, 5)), step((2,), (True,), (2,)),
        step((3,), (True,), (2,)),
    ]  # fmt: skip
    order = [0, *range(2, 42), 1, *range(42, 72), *range(72, 77)]
    cut, rows, state_of_cut = run(layer, pieces, x[order])
    assert torch.equal(cut, out[order])
    assert torch.equal(state_of_cut, state)
    assert torch.equal(rows.transpose(1, 2)[:, :3] if layout == "DS" else rows, conv_state)


def test_weights_that_are_loaded_later(layer_of):
    layer = layer_of()
    model, x = attach(layer), tokens(torch.bfloat16)
    old = run(layer, [step()], x)
    layer.A_log += 1
    model.load_weights([])
    new = run(layer, [step()], x)
    layer._forward_method = layer.forward_cpu
    expected = run(layer, [step()], x)
    assert not torch.equal(new[0], old[0])
    assert (new[0] - expected[0]).abs().max() < 0.02 * expected[0].abs().max()


def test_padding_and_warming_up(layer_of):
    layer = layer_of(torch.float32)
    attach(layer)
    x = tokens(torch.float32, TOKENS + 3)
    context = SimpleNamespace(no_compile_layers={NAME: layer}, attn_metadata=None)
    with override_forward_context(context), torch.no_grad():
        assert not layer(x).any()
        context.attn_metadata = {NAME: step()}
        before = [each.clone() for each in layer.kv_cache]
        padded = layer(x)
    for each, old in zip(layer.kv_cache, before):
        each.copy_(old)
    assert torch.equal(padded[:TOKENS], run(layer, [step()], x)[0])
    assert not padded[TOKENS:].any()


def test_guessed_tokens_beside_vllms_own(layer_of):
    """Behind a prompt, and behind other guesses."""
    layer = layer_of(guesses=GUESSES)
    x = tokens(torch.bfloat16, TOKENS + 12)
    steps = [step((71, 6), (False, False), (0, 3)), guesses(accepted=(1, 1)), guesses()]
    expected = run(layer, steps, x)
    attach(layer)
    for ours, vllms in zip(run(layer, steps, x), expected):
        assert (ours - vllms).abs().max() < 0.045 * vllms.abs().max()


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_guessed_tokens_change_no_bit(layer_of, layout, monkeypatch):
    """Steps with as many guesses as there are, or fewer, or none, and a prompt that begins between them; all but two
    of the tokens of the first sequence are right."""
    if layout == "DS":
        monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: True)
    layer, x = layer_of(torch.float32, guesses=GUESSES), tokens(torch.float32, 40)
    if layout == "DS":
        layer.kv_cache = (layer.kv_cache[0].transpose(1, 2).contiguous(), layer.kv_cache[1])
    attach(layer)
    first, second = list(range(17)), list(range(20, 40))
    steps, order = [step((5, 4), (False, False), (0, 3))], first[:5] + second[:4]
    order += [*first[5:6], 18, 19, *second[4:7]]
    steps.append(guesses((3, 3), (1, 1)))
    order += first[6:8] + second[7:8]
    steps.append(guesses((2, 1), (1, 3)))
    order += second[8:20] + first[8:11]  # the second one is a prompt here, in other pages
    mixed = guesses((3,), (2,))
    mixed.num_prefills, mixed.num_prefill_tokens, mixed.num_actual_tokens = 1, 12, 15
    mixed.spec_sequence_masks = torch.tensor([False, True])
    mixed.non_spec_query_start_loc = torch.tensor([0, 12], dtype=torch.int32)
    mixed.non_spec_state_indices_tensor = torch.tensor([9], dtype=torch.int32)
    mixed.has_initial_state = torch.tensor([False])
    steps.append(mixed)
    order += first[11:12]
    steps.append(guesses((1,), (3,)))
    out, _, state = run(layer, steps, x[order])
    alone, _, expected = run(
        layer, [step((12,), (False,), (0,)), step((12,), (False,), (9,))], x[first[:12] + second[8:]]
    )
    where = {token: i for i, token in enumerate(order)}
    assert torch.equal(out[[where[token] for token in first[:12]]], alone[:12])
    assert torch.equal(out[[where[token] for token in second[8:]]], alone[12:])
    assert torch.equal(state[0], expected[0]) and torch.equal(state[9], expected[9])


def changed(**attributes):
    return lambda layer: vars(layer).update(attributes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(head_k_dim=24), "heads of 24"),
        (changed(activation="gelu"), "another convolution"),
        (lambda layer: vars(layer.norm).update(norm_before_gate=False), "another norm"),
        (lambda layer: vars(layer.cache_config).update(mamba_ssm_cache_dtype="bfloat16"), "states of torch.bfloat16"),
        (lambda layer: vars(layer).update(_forward_method=layer.forward_cuda), "another forward"),
    ],
)
def test_what_is_left_to_vllm(layer_of, change, reason):
    layer = layer_of()
    change(layer)
    stock = layer._forward_method
    attach(layer)
    assert reason in linear_attention.reason_against(layer)
    assert layer._forward_method == stock


def test_a_setting_leaves_layers_to_vllm(layer_of, monkeypatch):
    layer = layer_of()
    monkeypatch.setenv("W4A8_VLLM_ATTENTION", "0")
    attach(layer)
    assert layer._forward_method == layer.forward_cpu

"""Layers of Mamba-2 and of short convolutions without an engine: with this package's operators beside vLLM's own."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gguf_architectures import model_of, write, write_int4
from layers import rank, values_of  # noqa: F401
from safetensors.torch import load_file
from vllm.config import get_current_vllm_config
from vllm.config.mamba import MambaBackendEnum, MambaConfig
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear
from vllm.model_executor.layers.mamba import mamba_mixer2, mamba_utils, short_conv
from vllm.model_executor.layers.mamba.ops import ssu_dispatch
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata, compute_varlen_chunk_metadata
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata

from w4a8.integrations.vllm import mamba
from w4a8.integrations.vllm.configs import W4A8CompressedTensorsConfig
from w4a8.integrations.vllm.gguf import W4A8GGUFConfig
from w4a8.integrations.vllm.state_projections import register_state_projections

NAME, HIDDEN, HEADS, P, N, GROUPS, SLOTS, GUESSES = "model.layers.0.mixer", 64, 4, 32, 16, 2, 16, 2
LENGTHS = (1, 1, 70, 5)  # two single tokens, a prompt that begins, and one that goes on
TOKENS = sum(LENGTHS)
KINDS = ["Mamba-2", "without a norm", "short convolution"]


@pytest.fixture
def layer_of(rank, monkeypatch):  # noqa: F811
    """``layer_of(kind, dtype, ...)``: vLLM's layer with random weights and states; a page has more than a state."""
    backend = ssu_dispatch._BACKEND_REGISTRY[MambaBackendEnum.CPU](MambaConfig())
    monkeypatch.setattr(ssu_dispatch, "_mamba_ssu_backend", backend)

    def make(kind, dtype=torch.float32, guesses=0):
        vllm_config = get_current_vllm_config()
        vllm_config.compilation_config.static_forward_context.clear()
        cache = SimpleNamespace(
            mamba_cache_dtype="auto", mamba_ssm_cache_dtype="float32", use_replayssm=False, replayssm_buffer_len=None
        )
        shared = {"model_config": SimpleNamespace(dtype=dtype), "cache_config": cache, "prefix": NAME}
        with set_default_torch_dtype(dtype):
            if kind == "short convolution":
                config = SimpleNamespace(conv_L_cache=3, conv_bias=False)
                layer = short_conv.ShortConv(config, HIDDEN, 0, **shared)
            else:
                layer = mamba_mixer2.MambaMixer2(
                    HIDDEN, N, 4, HEADS * P, True, False, GROUPS, HEADS, P, use_rms_norm=kind == "Mamba-2", **shared
                )
        generator = torch.Generator().manual_seed(0)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad = False
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + name.startswith("norm"))
            if name == "A":
                parameter.copy_(-parameter.exp())
        for linear in (layer.in_proj, layer.out_proj):
            linear.quant_method.process_weights_after_loading(linear)
        (rows, channels), *of_state = layer.get_state_shape()
        states = [torch.randn(SLOTS, rows + guesses, channels, generator=generator).to(dtype)]
        for shape in of_state:
            pages = torch.randn(SLOTS, HEADS * P * N + 64, generator=generator)
            states.append(pages[:, 64:].unflatten(1, shape))
        layer.kv_cache = tuple(states)
        return layer

    return make


def step(lengths=LENGTHS, had_past=(True, True, False, True), slots=(4, 1, 5, 2), kind="Mamba-2", **others):
    """The metadata of a step: single tokens with a past first."""
    decodes = next((i for i, n in enumerate(lengths) if n > 1 or not had_past[i]), len(lengths))
    prompts, table = lengths[decodes:], torch.tensor(slots, dtype=torch.int32)
    given = {
        "num_prefills": len(prompts), "num_prefill_tokens": sum(prompts), "num_decodes": decodes,
        "num_decode_tokens": decodes, "num_reqs": len(lengths), "has_initial_states_p": None, "query_start_loc_p": None,
        "state_indices_tensor_p": table[decodes:], "state_indices_tensor_d": table[:decodes, None],
        "query_start_loc_d": None, "num_accepted_tokens": None, "seq_lens": torch.tensor(lengths),
    }  # fmt: skip
    if prompts:
        given["has_initial_states_p"] = torch.tensor(had_past[decodes:])
        given["query_start_loc_p"] = torch.tensor([0, *prompts]).cumsum(0).int()
    if kind == "short convolution":
        return ShortConvAttentionMetadata(**given | others)
    if prompts:
        chunks, last, numbers = compute_varlen_chunk_metadata(given["query_start_loc_p"], 16)
        given |= {"cu_chunk_seqlen_p": chunks, "last_chunk_indices_p": last, "seq_idx_p": numbers}
    return Mamba2AttentionMetadata(**given | others, chunk_size=16, prep_initial_states=any(had_past[decodes:]))


def attach(layer):
    """Lets this package run the layer of a model, which is returned."""
    model = torch.nn.Module()
    model.layer, model.load_weights = layer, lambda weights: None
    mamba.attach(model, None, None)
    return model


def call(layer, metadata, x):
    """The layer's outputs, in the context of a step."""
    context = SimpleNamespace(no_compile_layers={NAME: layer}, attn_metadata=metadata and {NAME: metadata})
    with override_forward_context(context), torch.no_grad():
        if not hasattr(layer, "conv"):
            return layer(x)
        output = torch.full_like(x, torch.nan)
        layer(x, output)
        return output


def run(layer, steps, x):
    """Outputs of steps, and states behind them: [tokens, HIDDEN], the states. Begins with the layer's states."""
    before, outputs = [each.clone() for each in layer.kv_cache], []
    for metadata in steps:
        count = getattr(metadata, "num_actual_tokens", metadata.num_decode_tokens + metadata.num_prefill_tokens)
        outputs.append(call(layer, metadata, x[:count]))
        x = x[count:]
    states = [each.clone() for each in layer.kv_cache]
    for each, old in zip(layer.kv_cache, before):
        each.copy_(old)
    return torch.cat(outputs), *states


def tokens(dtype=torch.float32, count=TOKENS):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_near(found, expected, most=2e-5):
    """Sums of float32 in another order."""
    for ours, vllms in zip(found, expected):
        assert (ours - vllms).abs().max() < most * vllms.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_beside_vllms_own(layer_of, kind):
    layer, x = layer_of(kind), tokens()
    expected = run(layer, [step(kind=kind)], x)
    attach(layer)
    assert layer.w4a8_runs_core
    found = run(layer, [step(kind=kind)], x)
    assert_near(found, expected)
    untouched = [slot for slot in range(SLOTS) if slot not in (4, 1, 5, 2)]
    for ours, before in zip(found[1:], layer.kv_cache):
        assert torch.equal(ours[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_and_other_sequences_change_no_bit(layer_of, kind, layout, dtype, monkeypatch):
    """Nor do vLLM's two layouts of a convolution's states, and rows for guesses behind them."""
    layer, x = layer_of(kind, dtype), tokens(dtype)
    attach(layer)
    out, conv_state, *state = run(layer, [step(kind=kind)], x)
    if layout == "DS":
        monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: True)
        rows = torch.cat((layer.kv_cache[0], conv_state[:, :GUESSES]), 1)
        layer.kv_cache = (rows.transpose(1, 2).contiguous(), *layer.kv_cache[1:])
    pieces = [
        step((1, 40), (True, False), (4, 5), kind), step((1, 30), (True, True), (1, 5), kind),
        step((2,), (True,), (2,), kind), step((3,), (True,), (2,), kind),
    ]  # fmt: skip
    order = [0, *range(2, 42), 1, *range(42, 72), *range(72, 77)]
    cut, rows, *state_of_cut = run(layer, pieces, x[order])
    assert torch.equal(cut, out[order])
    assert all(map(torch.equal, state_of_cut, state))
    assert torch.equal(rows.transpose(1, 2)[:, : conv_state.shape[1]] if layout == "DS" else rows, conv_state)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_loaded_later(layer_of, kind):
    layer, x = layer_of(kind), tokens()
    model = attach(layer)
    old = run(layer, [step(kind=kind)], x)
    convolution = layer.conv if hasattr(layer, "conv") else layer.conv1d
    convolution.weight.data += 1
    model.load_weights([])
    assert not torch.equal(run(layer, [step(kind=kind)], x)[0], old[0])
    assert_near(run(layer, [step(kind=kind)], x), run(_stock(layer), [step(kind=kind)], x))


def _stock(layer):
    """The same layer as vLLM runs it."""
    for name in ("conv_ssm_forward", "forward_native"):
        vars(layer).pop(name, None)
    if hasattr(layer, "norm"):
        layer.norm._forward_method = layer.norm.forward_native
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_warming_up(layer_of, kind):
    layer, x = layer_of(kind), tokens(count=TOKENS + 3)
    attach(layer)
    assert not call(layer, None, x).any()
    expected = run(layer, [step(kind=kind)], x[:TOKENS])[0]
    padded = call(layer, step(kind=kind), x)
    assert torch.equal(padded[:TOKENS], expected)
    assert not padded[TOKENS:].any()


def guesses(lengths, accepted, kind, prompts=(), slots=()):
    """Sequences with up to two guesses each, in pages of their own, and how many tokens of the last step were taken;
    behind them prompts that begin, in slots."""
    count = len(lengths)
    return replace(
        step(prompts, (False,) * len(prompts), slots, kind), num_decodes=count, num_decode_tokens=sum(lengths),
        num_reqs=count + len(prompts), query_start_loc_d=torch.tensor([0, *lengths]).cumsum(0).int(),
        state_indices_tensor_d=torch.arange(3 * count, dtype=torch.int32).view(count, 3),
        num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("kind", KINDS)
def test_guessed_tokens_change_no_bit(layer_of, kind, layout, monkeypatch):
    """Steps with as many guesses as there are, or fewer, or none, and a prompt that begins beside them; all but two
    of the tokens of the first sequence are right."""
    layer, x = layer_of(kind, guesses=GUESSES), tokens(count=40)
    if layout == "DS":
        monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: True)
        layer.kv_cache = (layer.kv_cache[0].transpose(1, 2).contiguous(), *layer.kv_cache[1:])
    attach(layer)
    first, second = list(range(17)), list(range(20, 40))
    steps, order = [guesses((), (1, 1), kind, (5, 4), (0, 3))], first[:5] + second[:4]
    order += [*first[5:6], 18, 19, *second[4:7]]
    steps.append(guesses((3, 3), (1, 1), kind))
    order += first[6:8] + second[7:8]
    steps.append(guesses((2, 1), (1, 3), kind))
    order += first[8:11] + second[8:20]  # the second one is a prompt here, in another page
    steps.append(guesses((3,), (2, 1), kind, (12,), (9,)))
    order += first[11:12]
    steps.append(guesses((1,), (3,), kind))
    out, _, *state = run(layer, steps, x[order])
    begin = step((12, 12), (False, False), (0, 9), kind)
    alone, _, *expected = run(layer, [begin], x[first[:12] + second[8:]])
    where = {token: i for i, token in enumerate(order)}
    assert torch.equal(out[[where[token] for token in first[:12]]], alone[:12])
    assert torch.equal(out[[where[token] for token in second[8:]]], alone[12:])
    for found, right in zip(state, expected):
        assert torch.equal(found[[0, 9]], right[[0, 9]])


def test_states_within_a_piece_are_not_asked_for(layer_of):
    """vLLM would take them from its own operator, and cache what lies in a slot that is never written to."""
    layer, config = layer_of("Mamba-2"), get_current_vllm_config()
    config.cache_config.mamba_block_size = 64
    assert layer.get_kv_cache_spec(config).num_prefill_checkpoint_blocks == 1
    attach(layer)
    spec = layer.get_kv_cache_spec(config)
    assert (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment) == (0, None)


def changed(**attributes):
    return lambda layer: vars(layer).update(attributes)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("Mamba-2", changed(head_dim=24), "states of heads of 24 x 16"),
        ("Mamba-2", changed(activation="gelu"), "another form of Mamba-2"),
        ("Mamba-2", changed(use_replayssm=True, get_state_dtype=lambda: (torch.float32,) * 5), "another form"),
        ("Mamba-2", changed(conv_kernel_size=9), "another convolution"),
        ("Mamba-2", changed(tp_size=4), "a norm over some of the ranks"),
        (
            "Mamba-2",
            lambda layer: vars(layer.cache_config).update(mamba_ssm_cache_dtype="bfloat16"),
            "states of torch.bfloat16",
        ),
        ("short convolution", changed(L_cache=9), "another convolution"),
        ("short convolution", changed(get_state_dtype=lambda: (torch.float64,)), "convolutions of torch.float64"),
    ],
)
def test_what_is_left_to_vllm(layer_of, kind, change, reason):
    layer = layer_of(kind)
    change(layer)
    attach(layer)
    assert reason in mamba.reason_against(layer)
    assert not hasattr(layer, "w4a8_runs_core")


def test_a_setting_leaves_layers_to_vllm(layer_of, monkeypatch):
    layer = layer_of("short convolution")
    monkeypatch.setenv("W4A8_VLLM_ATTENTION", "0")
    attach(layer)
    assert not hasattr(layer, "w4a8_runs_core")


def quantized(model, folder, of_file):
    """A config of vLLM's for a checkpoint of a model, and the tensors that vLLM loads of the projections of layer 0."""
    if of_file:
        write("granitehybrid", model, folder, True)
        return W4A8GGUFConfig(str(folder / "model.gguf")), {}
    write_int4(model, folder)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors, start = load_file(folder / "model.safetensors"), "model.layers.0.mamba.in_proj."
    found = {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
    return W4A8CompressedTensorsConfig.from_config(stated), found


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("of_file", [True, False], ids=["GGUF", "int4"])
def test_projections_are_cut_as_floats_are(of_file, groups, rank, tmp_path, monkeypatch):  # noqa: F811
    """vLLM cuts z, x, B, C and dt one by one. If it cannot divide the groups, ranks have copies of B and C."""
    made = mamba_mixer2.MambaMixer2
    monkeypatch.setattr(made, "__init__", made.__init__)
    register_state_projections()
    model = model_of("granitehybrid", mamba_n_groups=groups)
    config, tensors = quantized(model, tmp_path, of_file)
    weight = model.model.layers[0].mamba.in_proj.weight
    parts = ColumnParallelLinear if groups == 1 else MergedColumnParallelLinear
    for index in range(2):
        rank(index, 2)
        layers = []
        for quant_config in (None, config):
            get_current_vllm_config().compilation_config.static_forward_context.clear()
            sizes = {"n_groups": groups, "num_heads": 4, "head_dim": 32, "prefix": "model.layers.0.mamba"}
            with set_default_torch_dtype(torch.float32):
                layers.append(made(64, 16, 4, 128, True, False, quant_config=quant_config, **sizes).in_proj)
        expected, found = layers
        assert type(found) is parts
        expected.weight.weight_loader(expected.weight, weight)
        if of_file:
            found.w4a8_filler.load(found)
        for name, tensor in tensors.items():
            param = getattr(found, name)
            param.weight_loader(param, tensor)
        found.quant_method.process_weights_after_loading(found)
        assert torch.equal(values_of(found, 64), expected.weight.data)


def test_projections_of_another_size(rank, tmp_path, monkeypatch):  # noqa: F811
    made = mamba_mixer2.MambaMixer2
    monkeypatch.setattr(made, "__init__", made.__init__)
    register_state_projections()
    config, tensors = quantized(model_of("granitehybrid"), tmp_path, False)
    rank(1, 2)
    sizes = {"num_heads": 4, "head_dim": 32, "prefix": "model.layers.0.mamba"}
    param = made(64, 16, 4, 128, True, False, quant_config=config, **sizes).in_proj.weight_packed
    with pytest.raises(ValueError, match=r"weight_packed: shape \(293, 8\) is no part of .*292 rows are expected"):
        param.weight_loader(param, torch.cat([tensors["weight_packed"], tensors["weight_packed"][:1]]))

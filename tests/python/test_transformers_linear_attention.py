"""The operators of linear attention beside the layers of transformers that they can take the place of."""

import pytest
import torch

import w4a8

pytest.importorskip("transformers", minversion="5.19")

TOKENS = 70


def core(layer, **fields):
    """(hidden states [1, T, H], what the layer gives in front of its last projection [T, ..])."""
    torch.manual_seed(0)
    for name, weight in layer.named_parameters():
        torch.nn.init.normal_(weight, std=0.3)
        if name.endswith("A_log"):
            torch.nn.init.uniform_(weight, 0.0, 2.7)
    hidden = torch.randn(1, TOKENS, layer.out_proj.out_features if hasattr(layer, "out_proj") else fields.pop("hidden"))
    seen = []
    last = getattr(layer, "out_proj", None) or layer.o_proj
    last.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    layer(hidden)
    return hidden[0], seen[0]


def fresh(channels, width, state=None):
    """The states of one sequence that begins, and where it is."""
    given = {"conv_state": torch.full((1, width - 1, channels), torch.nan)}
    if state is not None:
        given["state"] = torch.full((1, *state), torch.nan)
    given["slots"] = torch.zeros(1, dtype=torch.int32)
    given["query_start_loc"] = torch.tensor([0, TOKENS], dtype=torch.int32)
    given["fresh"] = torch.ones(1, dtype=torch.bool)
    return given


def assert_near(got, expected):
    """Sums of float32 in another order."""
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 2e-5 * expected.abs().max()


@torch.no_grad()
def test_qwen3_5():
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as module
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(
        hidden_size=48, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=16, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    layer = module.Qwen3_5MoeGatedDeltaNet(config, 0)
    hidden, expected = core(layer)
    got = w4a8.gated_delta(
        layer.in_proj_qkv(hidden), layer.in_proj_z(hidden),
        torch.cat([layer.in_proj_b(hidden), layer.in_proj_a(hidden)], 1), layer.conv1d.weight.squeeze(1),
        layer.A_log.exp(), layer.dt_bias, layer.norm.weight, **fresh(192, 4, (4, 32, 16)),
        key_heads=2, value_heads=4, norm_eps=config.rms_norm_eps,
    )  # fmt: skip
    assert_near(got, expected)


@torch.no_grad()
@pytest.mark.parametrize("negative", [False, True])
def test_olmo_hybrid(negative):
    module = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig

    config = OlmoHybridConfig(
        hidden_size=48, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=48, num_hidden_layers=2,
        linear_allow_neg_eigval=negative,
    )  # fmt: skip
    layer = module.OlmoHybridGatedDeltaNet(config, 0)
    hidden, expected = core(layer, hidden=48)
    got = w4a8.gated_delta(
        torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], 1), layer.g_proj(hidden),
        torch.cat([layer.b_proj(hidden), layer.a_proj(hidden)], 1), layer.conv1d.weight.squeeze(1),
        layer.A_log.exp(), layer.dt_bias, layer.o_norm.weight, **fresh(384, 4, (2, 48, 96)),
        key_heads=2, value_heads=2, norm_eps=1e-5, beta_scale=2.0 if negative else 1.0,
    )  # fmt: skip
    assert_near(got, expected)


@torch.no_grad()
def test_kimi_linear():
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    config = KimiLinearConfig(
        hidden_size=48, linear_num_heads=3, linear_head_dim=32, num_hidden_layers=1, layer_types=["linear_attention"]
    )
    layer = module.KimiLinearDeltaAttention(config, 0)
    hidden, expected = core(layer, hidden=48)
    gate = layer.forget_gate
    got = w4a8.gated_delta(
        torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], 1),
        layer.g_b_proj(layer.g_a_proj(hidden)), layer.b_proj(hidden), layer.conv1d.weight.squeeze(1),
        gate.A_log.exp().flatten(), gate.dt_bias.view(3, 32), layer.o_norm.weight, **fresh(288, 4, (3, 32, 32)),
        key_heads=3, value_heads=3, norm_eps=config.rms_norm_eps, gate="sigmoid",
        decay=gate.f_b_proj(gate.f_a_proj(hidden)).view(TOKENS, 3, 32),
    )  # fmt: skip
    assert_near(got, expected)


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2])
def test_nemotron_h(groups):
    from transformers.models.nemotron_h import modeling_nemotron_h as module
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig

    config = NemotronHConfig(
        hidden_size=48, mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=48, n_groups=groups, chunk_size=16,
        time_step_min=0.0, num_hidden_layers=1, layers_block_type=["mamba"],
    )  # fmt: skip
    layer = module.NemotronHMamba2Mixer(config, 0)
    hidden, expected = core(layer)
    rows = 128 + 2 * groups * 48
    z, xbc, dt = layer.in_proj(hidden).split([128, rows, 4], 1)
    got = w4a8.state_space(
        xbc, z, dt, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.A_log.exp(), layer.dt_bias, layer.D,
        layer.norm.weight, **fresh(rows, 4, (4, 32, 48)), groups=groups, norm_groups=groups,
        norm_eps=config.layer_norm_epsilon,
    )  # fmt: skip
    assert_near(got, expected)


def falcon_h1(groups, normed, norm_first):
    """A layer, and its config."""
    from transformers.models.falcon_h1 import modeling_falcon_h1 as module
    from transformers.models.falcon_h1.configuration_falcon_h1 import FalconH1Config

    config = FalconH1Config(
        hidden_size=48, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=64, mamba_n_groups=groups,
        mamba_chunk_size=16, mamba_rms_norm=normed, mamba_norm_before_gate=norm_first, num_hidden_layers=1,
    )  # fmt: skip
    layer = module.FalconH1Mixer(config, 0)
    layer.register_buffer("mup_vector", module.compute_mup_vector(config))
    return layer, config


@torch.no_grad()
@pytest.mark.parametrize("normed", [False, True])
def test_falcon_h1(normed):
    layer, config = falcon_h1(1, normed, False)
    hidden, expected = core(layer)
    z, xbc, dt = (layer.in_proj(hidden * layer.ssm_in_multiplier) * layer.mup_vector[0]).split([128, 256, 4], 1)
    got = w4a8.state_space(
        xbc, z, dt, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.A_log.exp(), layer.dt_bias, layer.D,
        layer.norm.weight if normed else None, **fresh(256, 4, (4, 32, 64)), groups=1,
        norm_eps=config.rms_norm_eps,
    )  # fmt: skip
    assert_near(got, expected)


@torch.no_grad()
def test_the_norm_of_falcon_h1_before_its_gate():
    """The layer as its operator runs it, with two groups of the norm."""
    from w4a8.integrations.transformers.linear_attention import _StateSpace

    layer, _ = falcon_h1(2, True, True)
    hidden, _ = core(layer)
    assert_near(_StateSpace(layer)(hidden[None]), layer(hidden[None]))


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_lfm2(bias):
    from transformers.models.lfm2 import modeling_lfm2 as module
    from transformers.models.lfm2.configuration_lfm2 import Lfm2Config

    config = Lfm2Config(hidden_size=48, conv_L_cache=3, conv_bias=bias, num_hidden_layers=1, layer_types=["conv"])
    layer = module.Lfm2ShortConv(config, 0)
    hidden, expected = core(layer)
    weight = layer.conv.weight.squeeze(1)
    got = w4a8.short_conv(layer.in_proj(hidden), weight, layer.conv.bias, **fresh(48, 3))
    assert_near(got, expected)

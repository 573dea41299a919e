"""Checks that vLLM is as expected: makes, fills and runs a linear layer and a layer of experts by vLLM's code.

The layers use the internals of vLLM that the plugin uses, and run both operators. tests/vllm check the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.integrations.expectations import missing, more_to_implement, parameters
from w4a8.integrations.vllm.log import silence
from w4a8.integrations.vllm.settings import SELF_TEST, activation_group

# Every activation group fits these sizes.
K, N, EXPERTS, GROUP = 256, 128, 2, 128
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
CONFIG["modules_in_block_to_quantize"] = ["w4a8_selftest", "w4a8_selftest.experts"]
# The input's values are integers that make the quantizer's step 1, and the scales are 1: the sums are exact.
_ZERO = 5


def _configuration() -> object:
    """A configuration of vLLM. Making it sets variables of the process, which are restored here.

    Only changed variables are restored, one by one: other threads read the environment meanwhile.
    """
    from vllm.config import VllmConfig

    before = dict(os.environ)
    try:
        return VllmConfig()
    finally:
        after = dict(os.environ)
        for name in before.keys() | after.keys():
            if name not in before:
                os.environ.pop(name, None)
            elif after.get(name) != before[name]:
                os.environ[name] = before[name]


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """Sets what vLLM's layers need: a configuration, and a tensor-parallel group, here of one rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    before = parallel_state._TP
    parallel_state._TP = before or SimpleNamespace(world_size=1, rank_in_group=0)
    outside = SELF_TEST.set(True)
    try:
        with silence(), set_current_vllm_config(_configuration()):
            yield
    finally:
        SELF_TEST.reset(outside)
        parallel_state._TP = before


def _gptq(rows: int, columns: int, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a matrix, and its values float32 [rows, columns]."""
    codes = torch.randint(16, (rows, columns), generator=generator)
    eights = codes.unflatten(1, (-1, 8)) << 4 * torch.arange(8)
    words = eights.sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    zeros = int(f"{_ZERO - 1}" * 8, 16)
    tensors = {
        "qweight": words.T.contiguous(),
        "qzeros": torch.full((columns // GROUP, rows // 8), zeros, dtype=torch.int32),
        "scales": torch.ones(columns // GROUP, rows, dtype=torch.float16),
    }
    return tensors, (codes - _ZERO).float()


def _input(generator: torch.Generator) -> torch.Tensor:
    x = torch.randint(-127, 128, (3, K), generator=generator).float()
    if activation_group() == PER_TOKEN:
        x[:, 0], x[:, 1] = -128.0, 127.0
    else:
        x[:, ::32] = 127.0
    return x


def _linear_problem(config: object, generator: torch.Generator) -> str | None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    layer = ReplicatedLinear(
        K, N, bias=False, params_dtype=torch.float32, quant_config=config, prefix="w4a8_selftest", return_bias=False
    )
    tensors, values = _gptq(N, K, generator)
    for name, tensor in tensors.items():
        param = dict(layer.named_parameters())[name]
        param.weight_loader(param, tensor)
    layer.quant_method.process_weights_after_loading(layer)
    x = _input(generator)
    return None if torch.equal(layer(x), x @ values.T) else "a linear layer of vLLM gives wrong sums"


def _experts_problem(config: object, generator: torch.Generator) -> str | None:
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    moe = FusedMoEConfig(
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        experts_per_token=1,
        hidden_dim=K,
        intermediate_size=N,
        activation=MoEActivation.SILU,
        device="cpu",
        in_dtype=torch.float32,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
    )
    all_here = SimpleNamespace(
        local_num_experts=EXPERTS,
        placement_strategy="linear",
        expert_map=None,
        expert_mask=None,
        routing_tables=None,
        num_fused_shared_experts=0,
        map_global_to_local=lambda expert: expert,
    )
    layer = RoutedExperts("w4a8_selftest.experts", torch.float32, moe, config, expert_map_manager=all_here)
    values: dict[tuple[int, str], torch.Tensor] = {}
    for expert in range(EXPERTS):
        for stack, shard, rows, columns in (("w13", "w1", N, K), ("w13", "w3", N, K), ("w2", "w2", K, N)):
            tensors, values[expert, shard] = _gptq(rows, columns, generator)
            for name, tensor in tensors.items():
                param = getattr(layer, f"{stack}_{name}")
                param.weight_loader(param, tensor, f"w4a8_selftest.experts.{stack}_{name}", shard, expert, True)
    layer.quant_method.process_weights_after_loading(layer)
    x, logits = _input(generator) / 256, torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    out = layer.quant_method.apply_monolithic(layer, x, logits)
    for row, expert in enumerate((1, 0, 1)):
        gate, up, down = (values[expert, shard] for shard in ("w1", "w3", "w2"))
        hidden = torch.nn.functional.silu(gate @ x[row]) * (up @ x[row])
        # The second quantization has 255 steps over the range of a row, or in groups 127 up to the largest magnitude of
        # one, which is no larger than the row's, and rounds each value to the nearest.
        step = (hidden.amax().clamp(min=0) - hidden.amin().clamp(max=0)) / 255
        if activation_group() != PER_TOKEN:
            step = hidden.abs().amax() / 127
        if not ((out[row] - down @ hidden).abs() <= 0.51 * step * down.abs().sum(1)).all():
            return "a layer of experts of vLLM gives wrong sums"
    return None


@torch.no_grad()
def layer_problems() -> list[str]:
    """Problems of layers that vLLM's own interfaces make, load and run; empty: none."""
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # more would start, before a rank binds its own
        from w4a8.integrations.vllm.configs import W4A8GPTQConfig

        with _surroundings():
            config = W4A8GPTQConfig.from_config(CONFIG)
            found = [_linear_problem(config, generator), _experts_problem(config, generator)]
    except Exception as error:
        return [f"a layer could not be made and run: {type(error).__name__}: {error}"]
    finally:
        torch.set_num_threads(threads)
    return [problem for problem in found if problem is not None]


def interface_problems() -> list[str]:
    """Differences in vLLM's arguments of calls to the classes here, and in the methods that vLLM needs."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod, W4A8LinearScheme
    from w4a8.integrations.vllm.moe import W4A8MoEMethod

    sizes = ("num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype")
    arguments = (
        (FusedMoEMethodBase.create_weights, ("layer", *sizes)),
        (FusedMoEMethodBase.apply_monolithic, ("layer", "x", "router_logits", "input_ids")),
        (FusedMoEMethodBase.apply, ("layer", "x", "topk_weights", "topk_ids")),
        (CompressedTensorsConfig.get_quant_method, ("layer", "prefix")),
        (CompressedTensorsConfig.get_scheme, ("layer", "layer_name")),
    )
    return [
        *(each for call, names in arguments for each in missing(call.__name__, names, parameters(call))),
        *(each for cls in (W4A8MoEMethod, W4A8LinearMethod, W4A8LinearScheme) for each in more_to_implement(cls, ())),
    ]


def problems() -> list[str]:
    """All reasons against the plugin; empty: none."""
    try:
        found = interface_problems()
    except (ImportError, AttributeError, TypeError) as error:
        found = [f"{type(error).__name__}: {error}"]
    return found or layer_problems()

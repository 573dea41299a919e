"""Every public name of the mirrored modules of vLLM 0.24 and 0.17 is here, with the same signature."""

import inspect
import os
import subprocess
import sys

import pytest
import torch

from w4a8.core.activation import MoEActivation
from w4a8.core.routing import select_experts
from w4a8.moe import method, method_v0_17
from w4a8.moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    RoutingMethodType,
)
from w4a8.moe.experts.cpu_int4_moe import CPUExpertsInt4, CPUExpertsInt4Modular
from w4a8.moe.modular_kernel import FusedMoEExperts, FusedMoEExpertsModular, FusedMoEExpertsMonolithic
from w4a8.moe.oracle import w4a8_int8 as oracle
from w4a8.moe.quant_key import GroupShape, QuantKey, ScaleDesc

REQUIRED = inspect.Parameter.empty
VARIADIC = object()


def parameters(function):
    """Name -> default of what can be given by position, and names of what cannot."""
    positional, others = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional[name] = parameter.default
        else:
            others.append(name)
    return positional, others


def required(*names):
    return dict.fromkeys(names, REQUIRED)


METHOD_INIT = {**required("self", "weight_quant", "input_quant", "moe"), "layer_name": None}
METHOD_CREATE = required(
    "self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"
)
MONOLITHIC_APPLY = {
    **required("self", "hidden_states", "w1", "w2", "router_logits", "activation", "global_num_experts", "expert_map"),
    **required("a1q_scale", "apply_router_weight_on_input"),
    "num_expert_group": None,
    "e_score_correction_bias": None,
    "routed_scaling_factor": None,
    "topk_group": None,
}

NEW, OLD = method.CompressedTensorsW4A8Int8MoEMethod, method_v0_17.CompressedTensorsW4A8Int8MoEMethod
# function: what upstream can be given by position, what else is here
SIGNATURES = [
    (NEW.__init__, METHOD_INIT, []),
    (NEW.create_weights, METHOD_CREATE, ["extra_weight_attrs"]),
    (NEW.process_weights_after_loading, required("self", "layer"), []),
    (NEW.get_fused_moe_quant_config, required("self", "layer"), []),
    (NEW.apply_monolithic, {**required("self", "layer", "x", "router_logits"), "input_ids": None}, []),
    (
        NEW.apply,
        required("self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
        [],
    ),
    (OLD.__init__, METHOD_INIT, []),
    (OLD.create_weights, METHOD_CREATE, ["extra_weight_attrs"]),
    (OLD.process_weights_after_loading, required("self", "layer"), []),
    (OLD.get_fused_moe_quant_config, required("self", "layer"), []),
    (OLD.apply_monolithic, required("self", "layer", "x", "router_logits"), []),
    (oracle._get_priority_backends, required("moe_config"), []),
    (oracle.backend_to_kernel_cls, required("backend"), []),
    (oracle.map_w4a8_int8_backend, required("runner_backend"), []),
    (oracle.select_w4a8_int8_moe_backend, required("config", "weight_key", "activation_key"), []),
    (oracle.make_w4a8_int8_moe_quant_config, {"block_shape": None}, []),
    (
        oracle.pack_int4_weights_for_kleidi,
        required("int4_as_int8", "scales", "bias", "in_features", "out_features", "group_size"),
        [],
    ),
    (
        oracle.convert_to_w4a8_int8_moe_format,
        {
            **required("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "group_size"),
            "w13_bias": None,
            "w2_bias": None,
        },
        ["w13_interleaved", "in_place", "scale_dtype"],
    ),
    (
        oracle.make_w4a8_int8_moe_kernel,
        {**required("moe_quant_config", "moe_config", "experts_cls"), "routing_tables": None},
        ["allow_modular"],
    ),
    (CPUExpertsInt4.__init__, required("self", "moe_config", "quant_config"), []),
    (CPUExpertsInt4.activation_format, {}, []),
    (CPUExpertsInt4._supports_current_device, {}, []),
    (CPUExpertsInt4._supports_no_act_and_mul, {}, []),
    (CPUExpertsInt4._supports_activation, required("activation"), []),
    (CPUExpertsInt4._supports_parallel_config, required("moe_parallel_config"), []),
    (CPUExpertsInt4._supports_quant_scheme, required("weight_key", "activation_key"), []),
    (CPUExpertsInt4._supports_routing_method, required("routing_method", "weight_key", "activation_key"), []),
    (CPUExpertsInt4._supports_router_logits_dtype, required("router_logits_dtype", "routing_method"), []),
    (CPUExpertsInt4.supports_expert_map, required("self"), []),
    (CPUExpertsInt4._activation_kind, required("self", "activation"), []),
    (CPUExpertsInt4.apply, MONOLITHIC_APPLY, []),
    (FusedMoEExpertsMonolithic.apply, MONOLITHIC_APPLY, []),
    (
        CPUExpertsInt4Modular.apply,
        required(
            "self",
            "output",
            "hidden_states",
            "w1",
            "w2",
            "topk_weights",
            "topk_ids",
            "activation",
            "global_num_experts",
            "expert_map",
            "a1q_scale",
            "a2_scale",
            "workspace13",
            "workspace2",
            "expert_tokens_meta",
            "apply_router_weight_on_input",
        ),
        [],
    ),
    (
        FusedMoEExperts.is_supported_config,
        required("cls", "moe_config", "weight_key", "activation_key", "activation_format"),
        [],
    ),
    (
        select_experts,
        {
            **required("hidden_states", "router_logits", "top_k", "use_grouped_topk", "renormalize"),
            "topk_group": None,
            "num_expert_group": None,
            "custom_routing_function": None,
            "scoring_func": "softmax",
            "routed_scaling_factor": 1.0,
            "e_score_correction_bias": None,
        },
        [],
    ),
]


@pytest.mark.parametrize(("function", "positional", "others"), SIGNATURES, ids=lambda v: getattr(v, "__qualname__", ""))
def test_signature(function, positional, others):
    found_positional, found_others = parameters(function)
    assert list(found_positional.items()) == list(positional.items())
    assert found_others == others


@pytest.mark.parametrize(
    ("owner", "name"),
    [(NEW, "is_monolithic"), (OLD, "is_monolithic"), (CPUExpertsInt4, "expects_unquantized_inputs")],
)
def test_property(owner, name):
    assert isinstance(inspect.getattr_static(owner, name), property)


@pytest.mark.parametrize(
    "name",
    [
        "activation_format",
        "is_supported_config",
        "_supports_activation",
        "_supports_current_device",
        "_supports_no_act_and_mul",
        "_supports_parallel_config",
        "_supports_quant_scheme",
        "_supports_router_logits_dtype",
        "_supports_routing_method",
    ],
)
def test_static_method(name):
    assert isinstance(inspect.getattr_static(CPUExpertsInt4, name), staticmethod)


def test_class_hierarchy():
    assert issubclass(CPUExpertsInt4, FusedMoEExpertsMonolithic) and CPUExpertsInt4.is_monolithic()
    assert issubclass(CPUExpertsInt4Modular, FusedMoEExpertsModular) and not CPUExpertsInt4Modular.is_monolithic()
    assert issubclass(NEW, method.CompressedTensorsMoEMethod)
    assert issubclass(method.CompressedTensorsMoEMethod, method.FusedMoEMethodBase)


def test_routing_method_numbers():
    assert {member.name: int(member) for member in RoutingMethodType} == {
        "Default": 0,
        "Renormalize": 1,
        "DeepSeekV3": 2,
        "Llama4": 3,
        "RenormalizeNaive": 4,
        "TopK": 5,
        "SigmoidRenorm": 6,
        "MiniMax2": 7,
        "Sigmoid": 8,
        "Unspecified": 9,
        "DeepseekV4": 100,
        "Custom": 101,
    }


def test_activations():
    gated = ["silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swigluoai_uninterleave", "swiglustep"]
    ungated = ["silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"]
    assert [member.value for member in MoEActivation] == gated + ungated
    assert [member.is_gated for member in MoEActivation] == [True] * len(gated) + [False] * len(ungated)
    assert MoEActivation.SILU.without_mul() is MoEActivation.SILU_NO_MUL
    assert MoEActivation.SILU_NO_MUL.without_mul() is MoEActivation.SILU_NO_MUL
    assert MoEActivation.SWIGLUOAI.without_mul() is MoEActivation.SWIGLUOAI
    assert MoEActivation.from_str("gelu_pytorch_tanh") is MoEActivation.GELU_TANH


def test_quant_key_is_a_value():
    assert GroupShape.PER_TENSOR == (-1, -1) and GroupShape.PER_TOKEN == (1, -1) and GroupShape.PER_CHANNEL == (-1, 1)
    shape = GroupShape(1, 64)
    assert (shape.row, shape.col, shape.is_per_group(), shape.is_per_channel()) == (1, 64, True, False)
    assert GroupShape.PER_TOKEN.is_per_token() and GroupShape.PER_TENSOR.is_per_tensor()
    one = QuantKey(torch.int8, ScaleDesc(torch.bfloat16, static=True, group_shape=GroupShape(1, 64)), symmetric=True)
    two = QuantKey(torch.int8, ScaleDesc(torch.bfloat16, True, GroupShape(1, 64)))
    assert one == two and hash(one) == hash(two)
    assert one != QuantKey(torch.int8, ScaleDesc(torch.float32, True, GroupShape(1, 64)))
    with pytest.raises(AttributeError):
        one.symmetric = False


@pytest.mark.parametrize(
    ("shape", "block_shape", "per_token", "group_size"),
    [
        (None, None, False, -1),
        (GroupShape(-1, -1), None, False, -1),
        (GroupShape(1, -1), None, True, -1),
        (GroupShape(-1, 1), [-1, 1], False, -1),
        (GroupShape(1, 96), [1, 96], False, 96),
    ],
)
def test_block_shape(shape, block_shape, per_token, group_size):
    desc = FusedMoEQuantDesc(shape=shape)
    config = FusedMoEQuantConfig(_a1=desc, _a2=desc, _w1=desc, _w2=desc)
    assert config.block_shape == block_shape
    assert config.is_per_act_token is per_token
    assert config.group_size == group_size
    assert config.quant_dtype is None


def test_config_sizes():
    moe = FusedMoEConfig(8, 2, 64, 96, 8, moe_parallel_config=FusedMoEParallelConfig(tp_size=3))
    assert moe.intermediate_size_per_partition == 32
    assert moe.moe_backend == "auto" and not moe.has_bias and moe.is_act_and_mul
    assert FusedMoEConfig(8, 2, 64, 96, 8, activation="relu2", is_act_and_mul=False).activation.value == "relu2_no_mul"
    assert not FusedMoEConfig(8, 2, 64, 96, 8, activation="gelu_no_mul").is_act_and_mul


IMPORT_ALL = """
import importlib, pkgutil, sys
import w4a8
for module in pkgutil.walk_packages(w4a8.__path__, "w4a8."):
    if not module.name.startswith(("w4a8.integrations.", "w4a8.__main__", "w4a8.lib", "w4a8.stable.")):
        importlib.import_module(module.name)
print("w4a8.moe" in sys.modules, "vllm" in sys.modules)
"""


def test_nothing_of_vllm_is_imported(tmp_path):
    """With a package of that name to be found, every module but the plugin's leaves it alone."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", IMPORT_ALL]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd="/", capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stdout + done.stderr

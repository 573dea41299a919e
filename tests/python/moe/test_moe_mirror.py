"""Every public name of the mirrored modules of vLLM 0.24 and 0.17 is here, with the same signature."""

import importlib
import inspect
import os
import pickle
import subprocess
import sys

import pytest
import torch

from w4a8.core.activation import MoEActivation
from w4a8.core.routing import select_experts
from w4a8.linear import cpu_w4a8_int as linear
from w4a8.moe import method, method_v0_17
from w4a8.moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    GroupShape,
    QuantKey,
    RoutingMethodType,
    ScaleDesc,
)
from w4a8.moe.experts.cpu_int4_moe import CPUExpertsInt4, CPUExpertsInt4Modular
from w4a8.moe.modular_kernel import FusedMoEExperts, FusedMoEExpertsModular, FusedMoEExpertsMonolithic
from w4a8.moe.oracle import w4a8_int8 as oracle

NEW, OLD = method.CompressedTensorsW4A8Int8MoEMethod, method_v0_17.CompressedTensorsW4A8Int8MoEMethod
INIT = "self, weight_quant, input_quant, moe, layer_name=None"
CREATE = "self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs"
MONOLITHIC = (
    "self, hidden_states, w1, w2, router_logits, activation, global_num_experts, expert_map, a1q_scale, "
    "apply_router_weight_on_input, num_expert_group=None, e_score_correction_bias=None, routed_scaling_factor=None, "
    "topk_group=None"
)
MODULAR = (
    "self, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, "
    "apply_router_weight_on_input"
)
# Behind the star: what upstream does not have.
CONVERT = (
    "w13_weight, w2_weight, w13_weight_scale, w2_weight_scale, group_size, w13_bias=None, w2_bias=None, *, "
    "w13_interleaved=False, in_place=False, scale_dtype=None"
)
SIGNATURES = [
    (NEW.__init__, INIT),
    (NEW.create_weights, CREATE),
    (NEW.process_weights_after_loading, "self, layer"),
    (NEW.get_fused_moe_quant_config, "self, layer"),
    (NEW.apply_monolithic, "self, layer, x, router_logits, input_ids=None"),
    (NEW.apply, "self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input"),
    (OLD.__init__, INIT),
    (OLD.create_weights, CREATE),
    (OLD.process_weights_after_loading, "self, layer"),
    (OLD.get_fused_moe_quant_config, "self, layer"),
    (OLD.apply_monolithic, "self, layer, x, router_logits"),
    (oracle._get_priority_backends, "moe_config"),
    (oracle.backend_to_kernel_cls, "backend"),
    (oracle.map_w4a8_int8_backend, "runner_backend"),
    (oracle.select_w4a8_int8_moe_backend, "config, weight_key, activation_key"),
    (oracle.make_w4a8_int8_moe_quant_config, "block_shape=None"),
    (oracle.pack_int4_weights_for_kleidi, "int4_as_int8, scales, bias, in_features, out_features, group_size"),
    (oracle.convert_to_w4a8_int8_moe_format, CONVERT),
    (
        oracle.make_w4a8_int8_moe_kernel,
        "moe_quant_config, moe_config, experts_cls, routing_tables=None, *, allow_modular=False",
    ),
    (CPUExpertsInt4.__init__, "self, moe_config, quant_config"),
    (CPUExpertsInt4.activation_format, ""),
    (CPUExpertsInt4._supports_current_device, ""),
    (CPUExpertsInt4._supports_no_act_and_mul, ""),
    (CPUExpertsInt4._supports_activation, "activation"),
    (CPUExpertsInt4._supports_parallel_config, "moe_parallel_config"),
    (CPUExpertsInt4._supports_quant_scheme, "weight_key, activation_key"),
    (CPUExpertsInt4._supports_routing_method, "routing_method, weight_key, activation_key"),
    (CPUExpertsInt4._supports_router_logits_dtype, "router_logits_dtype, routing_method"),
    (CPUExpertsInt4.supports_expert_map, "self"),
    (CPUExpertsInt4._activation_kind, "self, activation"),
    (CPUExpertsInt4.apply, MONOLITHIC),
    (FusedMoEExpertsMonolithic.apply, MONOLITHIC),
    (CPUExpertsInt4Modular.apply, MODULAR),
    (FusedMoEExperts.is_supported_config, "cls, moe_config, weight_key, activation_key, activation_format"),
    (
        select_experts,
        "hidden_states, router_logits, top_k, use_grouped_topk, renormalize, topk_group=None, num_expert_group=None, "
        "custom_routing_function=None, scoring_func='softmax', routed_scaling_factor=1.0, e_score_correction_bias=None",
    ),
    (linear.CPUW4A8IntLinearKernel.can_implement, "c"),
    (linear.CPUW4A8IntLinearKernel.get_min_capability, ""),
    (linear.CPUW4A8IntLinearKernel._pack_int4_weight, "self, w"),
    (linear.CPUW4A8IntLinearKernel.process_weights_after_loading, "self, layer"),
    (linear.CPUW4A8IntLinearKernel.apply_weights, "self, layer, x, bias=None"),
]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda v: getattr(v, "__qualname__", ""))
def test_signature(function, expected):
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=signature.empty)) == f"({expected})"


def test_kinds_of_members():
    """Properties and static methods are that, and classes derive from each other, as upstream."""
    for owner, name in ((NEW, "is_monolithic"), (OLD, "is_monolithic"), (CPUExpertsInt4, "expects_unquantized_inputs")):
        assert isinstance(inspect.getattr_static(owner, name), property)
    what = "current_device no_act_and_mul activation parallel_config quant_scheme routing_method router_logits_dtype"
    for name in ["activation_format", "is_supported_config", *(f"_supports_{one}" for one in what.split())]:
        assert isinstance(inspect.getattr_static(CPUExpertsInt4, name), staticmethod), name
    assert issubclass(CPUExpertsInt4, FusedMoEExpertsMonolithic) and CPUExpertsInt4.is_monolithic()
    assert issubclass(CPUExpertsInt4Modular, FusedMoEExpertsModular) and not CPUExpertsInt4Modular.is_monolithic()
    assert issubclass(NEW, method.CompressedTensorsMoEMethod)
    assert issubclass(method.CompressedTensorsMoEMethod, method.FusedMoEMethodBase)


OTHER_NAMES = {
    "moe.config": ["moe.quant_key", "moe.platforms"],
    "moe.layer": ["moe.loader"],
    "linear.cpu_w4a8_int": ["linear.mixed_precision", "linear.scalar_type"],
}


def test_modules_by_the_names_of_vllm():
    """The same module object, also as an attribute of its package; what was pickled by such a name is found."""
    for name, paths in OTHER_NAMES.items():
        module = importlib.import_module(f"w4a8.{name}")
        for path in paths:
            assert importlib.import_module(f"w4a8.{path}") is module
            package, _, last = f"w4a8.{path}".rpartition(".")
            assert getattr(sys.modules[package], last) is module
    key = QuantKey(torch.int8, ScaleDesc(torch.float32, True, GroupShape(1, 64)))
    for value in (key, oracle.W4A8Int8MoeBackend.CPU_INT4, linear.scalar_types.int4, NEW, OLD):
        assert pickle.loads(pickle.dumps(value)) == value
    assert pickle.loads(b"cw4a8.moe.quant_key\nQuantKey\n.") is QuantKey


def test_routing_method_numbers():
    names = "Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK SigmoidRenorm MiniMax2 Sigmoid Unspecified"
    expected = {**{name: number for number, name in enumerate(names.split())}, "DeepseekV4": 100, "Custom": 101}
    assert {member.name: int(member) for member in RoutingMethodType} == expected


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
    assert (shape.row, shape.col, shape.group_size, GroupShape.PER_CHANNEL.group_size) == (1, 64, 64, -1)
    assert GroupShape.of_weights(64) == shape and GroupShape.of_weights(-1) == GroupShape.PER_CHANNEL
    one = QuantKey(torch.int8, ScaleDesc(torch.bfloat16, static=True, group_shape=shape), symmetric=True)
    two = QuantKey(torch.int8, ScaleDesc(torch.bfloat16, True, GroupShape(1, 64)))
    assert one == two and hash(one) == hash(two)
    assert one != QuantKey(torch.int8, ScaleDesc(torch.float32, True, shape))
    assert str(one) == "QuantKey(int8, scale(bfloat16, static, group (1, 64)), symmetric)"
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
    assert (config.block_shape, config.is_per_act_token, config.group_size) == (block_shape, per_token, group_size)
    if shape is None or block_shape is not None:  # what the method gives
        assert oracle.make_w4a8_int8_moe_quant_config(shape and tuple(shape)) == config


def test_config_sizes():
    moe = FusedMoEConfig(8, 2, 64, 96, 8, moe_parallel_config=FusedMoEParallelConfig(tp_size=3))
    assert moe.intermediate_size_per_partition == 32
    assert moe.moe_backend == "auto" and not moe.has_bias and moe.is_act_and_mul
    assert FusedMoEConfig(8, 2, 64, 96, 8, activation="relu2", is_act_and_mul=False).activation.value == "relu2_no_mul"
    assert not FusedMoEConfig(8, 2, 64, 96, 8, activation="gelu_no_mul").is_act_and_mul
    with pytest.raises(ValueError, match="is_act_and_mul=True contradicts activation 'gelu_no_mul'"):
        FusedMoEConfig(8, 2, 64, 96, 8, activation="gelu_no_mul", is_act_and_mul=True)
    with pytest.raises(ValueError, match="intermediate_size 96 cannot be cut for 5 tensor-parallel ranks"):
        FusedMoEConfig(8, 2, 64, 96, 8, moe_parallel_config=FusedMoEParallelConfig(tp_size=5))


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

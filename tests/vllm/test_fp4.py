"""Layers of NVFP4 and MXFP4 without an engine: made and filled by vLLM's classes, beside the weights multiplied out."""

import pytest
import tool_formats
import torch
from layers import HIDDEN, NAME, close, expert_values, load, make_layer, rank, values_of
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

from w4a8.formats import Scheme
from w4a8.integrations.vllm.configs import W4A8CompressedTensorsConfig, W4A8ModelOptConfig, W4A8QuarkConfig
from w4a8.integrations.vllm.moe import QuarkGptOssExperts, W4A8QuarkGptOssMethod

__all__ = ["rank"]  # a fixture

E4M3 = torch.float8_e4m3fn
CONFIGS = {
    "modelopt-nvfp4": W4A8ModelOptConfig,
    "nvfp4-pack-quantized": W4A8CompressedTensorsConfig,
    "quark": W4A8QuarkConfig,
}
FORMS, NVFP4 = list(CONFIGS), list(CONFIGS)[:2]
GROUP = {"modelopt-nvfp4": 16, "nvfp4-pack-quantized": 16, "quark": 32}
# Names of the codes, the scales, the scale of all where there is one; of that of inputs.
NAMES = {
    "modelopt-nvfp4": ("weight", "weight_scale", "weight_scale_2"),
    "nvfp4-pack-quantized": ("weight_packed", "weight_scale", "weight_global_scale"),
    "quark": ("weight", "weight_scale"),
}
INPUTS = {"modelopt-nvfp4": "input_scale", "nvfp4-pack-quantized": "input_global_scale", "quark": "input_scale"}
each_form = pytest.mark.parametrize("form", FORMS)


def columns_of(form):
    """An odd number of groups."""
    return 9 * 16 if GROUP[form] == 16 else 3 * 32


def matrix(rows, columns, form, size=1.0, seed=0):
    """(tensors, float32 values) of a matrix; ``size`` is that of its greatest value."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return tool_formats.rounded(size * weight / weight.abs().max(), form)


def config_of(form):
    return CONFIGS[form].from_config(tool_formats.config(form, GROUP[form], True, [], False))


def make(cls, *sizes, form, **options):
    options = {"bias": False, "quant_config": config_of(form), "prefix": NAME, "params_dtype": torch.float32, **options}
    return cls(*sizes, **options)


@each_form
@pytest.mark.parametrize("ranks", [1, 2])
def test_scales_of_parts_stay_their_own(form, ranks, rank):
    """Queries, keys and values of sizes that are far from each other: vLLM alone would give all the greatest scale."""
    k = columns_of(form)
    parts = {"q": matrix(64, k, form, 1.0, 1), "k": matrix(32, k, form, 1e-3, 2), "v": matrix(32, k, form, 30.0, 3)}
    for index in range(ranks):
        rank(index, ranks)
        layer = make(QKVParallelLinear, k, 16, 4, 2, form=form)
        for name, (tensors, _) in reversed(parts.items()):
            load(layer, tensors, name)
        layer.quant_method.process_weights_after_loading(layer)
        mine = [plain.chunk(ranks)[index] for _, plain in parts.values()]
        assert close(values_of(layer, k), torch.cat(mine))


@each_form
@pytest.mark.parametrize("shard", [None, (0, 1)])
def test_parts_that_are_one_matrix_in_the_file(form, shard, rank):
    """One scale for all of them."""
    k = columns_of(form)
    tensors, plain = matrix(96, k, form)
    layer = make(MergedColumnParallelLinear, k, [32, 64], form=form)
    load(layer, tensors, *(() if shard is None else (shard,)))
    assert close(values_of(layer, k), plain)


@each_form
def test_columns_are_cut_between_blocks(form, rank):
    """Of 6 blocks each of 2 ranks has 3: of NVFP4 no multiple of 32 columns."""
    half = 3 * GROUP[form]
    tensors, plain = matrix(40, 2 * half, form)
    for index in range(2):
        rank(index, 2)
        layer = make(RowParallelLinear, 2 * half, 40, form=form)
        load(layer, tensors)
        assert close(values_of(layer, half), plain.chunk(2, 1)[index])


@pytest.mark.parametrize(("form", "columns", "ranks"), [(FORMS[0], 136, 1), (FORMS[0], 144, 2), ("quark", 96, 2)])
def test_columns_that_are_not_whole_blocks(form, columns, ranks, rank):
    rank(0, ranks)
    message = rf"{columns // ranks} input features per rank \(of {columns}\): group .block_size. is {GROUP[form]}"
    with pytest.raises(ValueError, match=message):
        make(RowParallelLinear, columns, 32, form=form)


@pytest.mark.parametrize(("form", "lost"), [(form, name) for form in FORMS for name in NAMES[form]])
def test_a_missing_tensor(form, lost, rank):
    k = columns_of(form)
    layer = make(MergedColumnParallelLinear, k, [32, 32], form=form)
    tensors, _ = matrix(32, k, form)
    load(layer, tensors, 0)
    load(layer, {name: tensor for name, tensor in tensors.items() if name != lost}, 1)
    with pytest.raises(ValueError, match=rf"w4a8: {NAME}: the checkpoint lacks weights: {lost}: \d+ of \d+ elements$"):
        layer.quant_method.process_weights_after_loading(layer)


@each_form
def test_scales_of_inputs_may_come_last_or_not_at_all(form, rank):
    """Nothing reads them."""
    k = columns_of(form)
    for first in (True, False, None):
        layer = make(RowParallelLinear, k, 32, form=form)
        tensors, plain = matrix(32, k, form)
        inputs = {INPUTS[form]: tensors.pop(INPUTS[form], torch.tensor(0.5).bfloat16())}
        for given in {True: (inputs, tensors), False: (tensors, inputs), None: (tensors,)}[first]:
            load(layer, given)
        assert close(values_of(layer, k), plain)


@pytest.mark.parametrize(
    ("form", "name", "value", "message"),
    [
        (
            FORMS[0],
            "weight_scale",
            torch.full((32, 9), 127, dtype=torch.uint8).view(E4M3),
            "not all scales are num",
        ),
        (FORMS[0], "weight_scale", torch.ones(32, 9, dtype=torch.float8_e5m2), "float8_e5m2, but torch.float8_e4m3"),
        (FORMS[0], "weight_scale", torch.ones(32, 9), "dtype torch.float32, but torch.float8_e4m3fn"),
        (FORMS[0], "weight_scale_2", torch.tensor(float("inf")), "is inf, of which no finite scales"),
        (FORMS[0], "weight_scale_2", torch.ones(32), r"_2: shape \(32,\) is no part of a weight \[32, 144\] in gr"),
        (
            FORMS[0],
            "weight",
            torch.zeros(32, 60, dtype=torch.uint8),
            r"weight: shape \(32, 60\) is no part of a",
        ),
        (
            "quark",
            "weight_scale",
            torch.full((32, 3), 255, dtype=torch.uint8),
            "weight_scale: 255, which is not",
        ),
        ("quark", "weight_scale", torch.ones(32, 3), "dtype torch.float32, but torch.uint8 is expected"),
        ("quark", "weight", torch.ones(32, 48).to(E4M3), "dtype torch.float8_e4m3fn, but torch.uint8"),
    ],
)
def test_a_damaged_tensor(form, name, value, message, rank):
    k = columns_of(form)
    layer = make(RowParallelLinear, k, 32, form=form)
    with pytest.raises(ValueError, match=message) as caught:
        load(layer, {**matrix(32, k, form)[0], name: value})
    assert NAME in str(caught.value) and not hasattr(layer, "weight_packed")


# --- experts ----------------------------------------------------------------------------------------------------------


def make_experts(form, intermediate, *args, **options):
    return make_layer(GROUP[form], intermediate, *args, form={"quark": "quark-mxfp4"}.get(form, form), **options)


def load_experts(layer, form, intermediate, without=(), shards=("w1", "w3", "w2")):
    """The values by expert and shard."""
    plain = {}
    for expert in range(2):
        for shard in shards:
            stack, n, k = ("w2", HIDDEN, intermediate) if shard == "w2" else ("w13", intermediate, HIDDEN)
            size = {"w1": 1.0, "w3": 1e-3, "w2": 20.0}[shard] * (1 + expert)
            tensors, plain[expert, shard] = matrix(n, k, form, size, seed=expert)
            for name, tensor in {INPUTS[form]: torch.tensor(0.5), **tensors}.items():
                if (name, shard, expert) in without:
                    continue
                param = getattr(layer, f"{stack}_{name}")
                call = {"weight_name": f"experts.{stack}_{name}", "shard_id": shard, "expert_id": expert}
                assert param.weight_loader(param, tensor, return_success=True, **call)
    return plain


@each_form
@pytest.mark.parametrize("index", [None, 0, 1])
def test_experts(form, index):
    """Each matrix has a scale of its own. Cut for two ranks: of NVFP4 48 rows of an expert are no multiple of 32."""
    ranks, inner = 1 if index is None else 2, 6 * 16 if form in NVFP4 else 2 * 32
    layer, method = make_experts(form, inner, ranks, tp_rank=index or 0)
    plain = load_experts(layer, form, inner)
    method.process_weights_after_loading(layer)
    own = slice(None) if index is None else slice(inner // 2 * index, inner // 2 * (index + 1))
    for expert in range(2):
        halves = torch.cat([plain[expert, "w1"][own], plain[expert, "w3"][own]])
        for stack, expected in (("w13", halves), ("w2", plain[expert, "w2"][:, own])):
            n, k = expected.shape
            assert close(expert_values(layer, stack, expert, GROUP[form], k, n).T, expected)


def test_experts_without_a_gate():
    """One scale for w13, which has one half."""
    layer, method = make_experts("modelopt-nvfp4", 96, activation="relu2_no_mul")
    assert layer.w13_weight_scale_2.shape == (2, 1)
    plain = load_experts(layer, "modelopt-nvfp4", 96, shards=("w1", "w2"))
    method.process_weights_after_loading(layer)
    for expert in range(2):
        assert close(expert_values(layer, "w13", expert, 16, HIDDEN, 96).T, plain[expert, "w1"])


def test_experts_that_are_not_whole_blocks():
    """704 columns of 1408 are 44 blocks; 72 of 144 are four and a half."""
    make_experts("modelopt-nvfp4", 1408, 2)
    message = "kernel does not support intermediate size per partition 72: group .block_size. is 16"
    with pytest.raises(ValueError, match=f"w4a8: model.layers.0.mlp.experts: {message}"):
        make_experts("modelopt-nvfp4", 144, 2)


@pytest.mark.parametrize("form", NVFP4)
def test_a_missing_scale_of_experts(form):
    lost = NAMES[form][2]
    layer, method = make_experts(form, 96)
    load_experts(layer, form, 96, [(lost, "w3", 1)])
    with pytest.raises(ValueError, match=f"the checkpoint lacks weights: w13_{lost}: 3 of 4 tensors$"):
        method.process_weights_after_loading(layer)


# --- gpt-oss by Quark: stacks whose rows alternate gate and up --------------------------------------------------------


def empty_gpt_oss(layer):
    """Its method; parameters of gpt-oss's experts in the layer."""
    scheme = Scheme("quark-mxfp4", 32, True, weight_only="input_tensors is not int8")
    made, _ = make_layer(32, 64, has_bias=True, activation="swigluoai")
    method = W4A8QuarkGptOssMethod(QuarkGptOssExperts(scheme), made, NAME)
    method.create_weights(layer, 2, HIDDEN, 64, torch.bfloat16)
    return method


def gpt_oss_layer():
    """(layer, method), as vLLM's model of gpt-oss fills it: into the parameters, rows in turns; what is meant."""
    layer = make_layer(32, 64, has_bias=True, activation="swigluoai")[0]
    for name in list(layer._parameters):
        delattr(layer, name)
    method, plain = empty_gpt_oss(layer), {}
    for expert in range(2):
        for stack, n, k in (("w13", 128, HIDDEN), ("w2", HIDDEN, 64)):
            tensors, values = matrix(n, k, "quark", seed=expert)
            bias = torch.randn(n).bfloat16()
            plain[expert, stack] = values, bias.float()
            for name, tensor in {**tensors, "bias": bias, "input_scale": torch.tensor(0.5)}.items():
                getattr(layer, f"{stack}_{name}").data[expert].copy_(tensor)
    return layer, method, plain


def test_experts_of_gpt_oss():
    layer, method, plain = gpt_oss_layer()
    method.process_weights_after_loading(layer)
    for (expert, stack), (values, bias) in plain.items():
        if stack == "w13":
            values, bias = (torch.cat([part[0::2], part[1::2]]) for part in (values, bias))
        n, k = values.shape
        assert close((expert_values(layer, stack, expert, 32, k, n) - bias).T, values)
    packed = layer.w13_weight_packed
    method.process_weights_after_loading(layer)  # nothing has come since
    assert layer.w13_weight_packed is packed and layer.w13_weight.numel() == 0


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight_scale", "w13_bias", "w2_bias"])
def test_experts_of_gpt_oss_lack_something(name):
    layer, method, _ = gpt_oss_layer()
    empty = torch.nn.Module()
    empty.local_num_experts = 2
    empty_gpt_oss(empty)
    getattr(layer, name).data[1] = getattr(empty, name).data[1]
    with pytest.raises(ValueError, match=f"w4a8: {NAME}: the checkpoint lacks weights: {name} of expert 1"):
        method.process_weights_after_loading(layer)

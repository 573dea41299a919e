"""Linear layers without an engine: what the plugin notices to be missing."""

from types import SimpleNamespace

import pytest
import torch
from layers import chosen
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.formats import Scheme
from w4a8.integrations.vllm.configs import W4A8CompressedTensorsConfig, W4A8GPTQConfig
from w4a8.integrations.vllm.linear_layers import W4A8LinearScheme
from w4a8.integrations.vllm.received import Received

N, K, GROUP = 64, 128, 32
NAME = "model.layers.0.mlp.gate_up_proj"


def make_layer(monkeypatch, format_, symmetric=True):
    """A layer of two parts of N / 2 columns each, with a loader like vLLM's."""
    for what, value in (("rank", 0), ("world_size", 1)):
        name = f"vllm.model_executor.parameter.get_tensor_model_parallel_{what}"
        monkeypatch.setattr(name, lambda value=value: value)
    layer = torch.nn.Module()
    layer.scheme = W4A8LinearScheme(Received(Scheme(format_, GROUP, symmetric), NAME))

    def load(param, loaded, part):
        rows = param.shape[param.output_dim] // 2
        param.data.narrow(param.output_dim, part * rows, rows).copy_(loaded)

    layer.scheme.create_weights(layer, K, [N // 2, N // 2], K, N, torch.bfloat16, weight_loader=load)
    return layer


def tensors(format_):
    if format_ == "pack-quantized":
        weight = {"weight_packed": torch.zeros(N // 2, K // 8, dtype=torch.int32)}
    else:
        weight = {"weight": torch.zeros(N // 2, K, dtype=torch.int8)}
    return {**weight, "weight_scale": torch.ones(N // 2, K // GROUP, dtype=torch.bfloat16)}


@pytest.mark.parametrize("format_", ["int-quantized", "pack-quantized"])
def test_a_missing_part(format_, monkeypatch):
    """Whichever it is, the layer is named; with all of them it is packed."""
    found = tensors(format_)
    for lost in (*found, None):
        layer = make_layer(monkeypatch, format_)
        for name, tensor in found.items():
            for part in range(1 if name == lost else 2):
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, part)
        if lost is None:
            layer.scheme.process_weights_after_loading(layer)
            assert layer.weight_packed.dtype == torch.uint8
            continue
        total = 2 * found[lost].numel()
        with pytest.raises(ValueError) as caught:
            layer.scheme.process_weights_after_loading(layer)
        message = f"w4a8: {NAME}: the checkpoint lacks weights: {lost}: {total // 2} of {total} elements"
        assert str(caught.value) == message


def test_nothing_came(monkeypatch):
    layer = make_layer(monkeypatch, "int-quantized")
    with pytest.raises(ValueError, match=r"weight: 0 of 8192 elements, weight_scale: 0 of 256 elements"):
        layer.scheme.process_weights_after_loading(layer)


GPTQ = {"qweight": (K // 8, N // 2), "qzeros": (K // GROUP, N // 16), "scales": (K // GROUP, N // 2)}


def gptq_tensors(**changes):
    found = {
        name: torch.zeros(shape, dtype=torch.float16 if name == "scales" else torch.int32)
        for name, shape in GPTQ.items()
    }
    return {**found, **changes}


def load_gptq(layer, tensors):
    for name, tensor in tensors.items():
        for part in range(2):
            getattr(layer, name).weight_loader(getattr(layer, name), tensor, part)
    if layer.w4a8_filler.packed_as is None:
        layer.scheme.process_weights_after_loading(layer)


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_as_it_should_be(monkeypatch, symmetric):
    zeros = torch.full(GPTQ["qzeros"], 0x77777777 if symmetric else 0, dtype=torch.int32)
    layer = make_layer(monkeypatch, "gptq", symmetric)
    load_gptq(layer, gptq_tensors(qzeros=zeros))
    assert layer.weight_packed.dtype == torch.uint8 and not hasattr(layer, "qweight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qzeros": torch.full(GPTQ["qzeros"], -1, dtype=torch.int32)}, r"zero points in \[16, 16\], but"),
        ({"qzeros": torch.zeros(3, N // 16, dtype=torch.int32)}, r"\.qzeros: shape \(3, 4\) is no part of a weight"),
        ({"scales": torch.zeros(1, 3, dtype=torch.float16)}, r"\.scales: shape \(1, 3\) is no part of a weight"),
        ({"qweight": torch.zeros(GPTQ["qweight"])}, r"\.qweight: dtype torch.float32, but torch.int32 is expected"),
        ({"scales": torch.full(GPTQ["scales"], float("nan"))}, "scales: not all scales are finite"),
    ],
)
def test_a_damaged_tensor(monkeypatch, changes, message):
    """A zero point of 16, too few groups, another shape, dtype or value: an error with the layer's name."""
    layer = make_layer(monkeypatch, "gptq", symmetric=False)
    with pytest.raises(ValueError, match=message) as caught:
        load_gptq(layer, gptq_tensors(**changes))
    assert NAME in str(caught.value) and not hasattr(layer, "weight_packed")


def test_zero_points_of_a_symmetric_file(monkeypatch):
    layer = make_layer(monkeypatch, "gptq")
    with pytest.raises(
        ValueError, match=rf"{NAME}: weight.qzeros: zero points in \[1, 1\], but the configuration says"
    ):
        load_gptq(layer, gptq_tensors())


def gptq_rules(rules):
    stated = {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "dynamic": rules, "lm_head": False}
    return W4A8GPTQConfig.from_config({"quant_method": "gptq", **stated})


@pytest.mark.parametrize(
    ("dynamic", "bits"),
    [
        ({}, 4),
        ({r"+:.*[.][qkv]_proj$": {"bits": 8}}, 8),
        ({r"+:.*[.]qkv_proj$": {"bits": 4}, r"+:.*[.][qkv]_proj$": {"bits": 8}}, 4),  # its own name comes first
        ({r"+:.*[.]q_proj$": {"bits": 4}}, 4),  # as the others
        ({r"-:.*[.][qkv]_proj$": {}}, None),
    ],
    ids=["none", "of all parts", "of the whole", "of one part", "left out"],
)
def test_gptq_rules_of_a_layer_of_three_matrices(dynamic, bits):
    """They may name the matrices of the file."""
    config = gptq_rules(dynamic)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    method = config.get_quant_method(layer, "model.layers.0.self_attn.qkv_proj")
    if bits is None:
        assert isinstance(method, UnquantizedLinearMethod)
    else:
        scheme = Scheme("gptq", GROUP, True, bits=bits, weight_only="quant_method is 'gptq'")
        assert method.filler.scheme == scheme


def compressed(of_v):
    """Queries and keys of 4 bits in groups."""
    args = {"type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
    groups = {
        "a": {"targets": ["re:.*[qk]_proj$"], "weights": {**args, "num_bits": 4}},
        "b": {"targets": ["re:.*v_proj$"], "weights": {**args, **of_v}},
    }
    return W4A8CompressedTensorsConfig.from_config({"format": "pack-quantized", "config_groups": groups, "ignore": []})


@pytest.mark.parametrize(
    ("config", "of_v"),
    [
        (lambda: gptq_rules({r"+:.*[.]v_proj$": {"bits": 8}}), "v_proj has bits 8, group_size 32"),
        (lambda: gptq_rules({r"+:.*[.]v_proj$": {"group_size": 64}}), "v_proj has bits 4, group_size 64"),
        (lambda: gptq_rules({r"-:.*[.]v_proj$": {}}), "v_proj has no quantization"),
        (lambda: compressed({"num_bits": 8}), "v_proj has weights of 8 bits (int, group of 32)"),
        (lambda: compressed({"num_bits": 4, "group_size": 64}), "v_proj has weights of 4 bits (int, group of 64)"),
    ],
    ids=["bits", "groups", "not quantized", "compressed-tensors, bits", "compressed-tensors, groups"],
)
def test_matrices_of_one_layer_that_are_not_alike(config, of_v):
    """vLLM would read all of them as the first."""
    with pytest.raises(ValueError) as caught:
        chosen(config(), "model.layers.0.self_attn.qkv_proj")
    said = "w4a8: model.layers.0.self_attn.qkv_proj: vLLM joins matrices that are not quantized alike"
    assert str(caught.value).startswith(said) and f", {of_v}" in str(caught.value)


def test_matrices_of_one_layer_that_are_alike():
    """By two targets."""
    config = compressed({"num_bits": 4})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    config.get_quant_method(layer, "model.layers.0.self_attn.qkv_proj")
    assert layer.scheme.filler.scheme == Scheme(
        "pack-quantized", GROUP, True, weight_only="its group.input_activations is missing"
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_a_padded_vocabulary(bits, monkeypatch):
    """Rows that the checkpoint does not have give zeros; the others what they do without them."""

    def run(rows, padded):
        layer = ParallelLMHead.__new__(ParallelLMHead)
        torch.nn.Module.__init__(layer)
        layer.shard_indices = SimpleNamespace(num_org_elements=rows, org_vocab_start_index=0)
        scheme = W4A8LinearScheme(Received(Scheme("gptq", GROUP, False, bits=bits), NAME))
        scheme.create_weights(layer, K, [padded], K, padded, torch.bfloat16, weight_loader=None)
        for name, tensor in made.items():
            getattr(layer, name).weight_loader(getattr(layer, name), tensor)
        return scheme.apply_weights(layer, x)

    for what, value in (("rank", 0), ("world_size", 1)):
        name = f"vllm.model_executor.parameter.get_tensor_model_parallel_{what}"
        monkeypatch.setattr(name, lambda value=value: value)
    rows, words = 40, 32 // bits
    made = {
        "qweight": torch.randint(-(2**31), 2**31, (K // words, rows)).to(torch.int32),
        "qzeros": torch.zeros(K // GROUP, rows // words, dtype=torch.int32),
        "scales": torch.rand(K // GROUP, rows).half() + 0.1,
    }
    x = torch.randn(3, K)
    found = run(rows, N)
    assert torch.equal(found[:, :rows], run(rows, rows)) and found[:, :rows].any()
    assert not found[:, rows:].any()

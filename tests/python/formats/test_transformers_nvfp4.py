"""from_pretrained of NVFP4 checkpoints of both kinds: the logits of the same codes and scales packed by hand."""

import json

import format_writers
import numpy as np
import pytest
import torch
from common import default_activation_group
from test_nvfp4 import ARGS

import w4a8
from w4a8.nn import W4A8Experts, W4A8Linear
from w4a8.quantization import DEFAULT_SKIP

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("transformers 5 is needed", allow_module_level=True)

from safetensors.torch import load_file, save_file  # noqa: E402
from test_transformers_formats import load  # noqa: E402
from test_transformers_kinds import PROJECTIONS, check, save, skeleton  # noqa: E402

INPUTS = {**ARGS, "dynamic": "local"}
CONFIGS = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*gate"]},
    "pack": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": ARGS, "input_activations": INPUTS}},
    },
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", CONFIGS)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Codes:
    """A matrix of random codes and scales, with a scale of its own for all."""

    def __init__(self, rows, columns, kind):
        self.codes = torch.randint(16, (rows, columns), dtype=torch.uint8).numpy()
        self.scales = torch.randint(0x50, 0x7F, (rows, columns // 16)).numpy()
        # A power of two would be its own reciprocal's.
        factor = np.float32(10 ** np.random.default_rng(rows).uniform(-4.5, -3.5))
        stated = np.float32(1) / factor if kind == "pack" else factor
        self.factor = torch.tensor(np.float32(1) / stated if kind == "pack" else factor)
        self.tensors = format_writers.write_nvfp4(self.codes, self.scales, float(stated), kind == "pack")

    def nibbles(self):
        return torch.from_numpy(self.codes[:, ::2] | self.codes[:, 1::2] << 4)

    def channel_scales(self):
        return self.factor.repeat(len(self.codes))


def packed(*matrices, bias=None):
    """One below the other, by the operator."""
    nibbles = torch.cat([matrix.nibbles() for matrix in matrices])
    scales = torch.cat([torch.from_numpy(matrix.scales).to(torch.uint8) for matrix in matrices])
    n, k = len(nibbles), 2 * nibbles.shape[1]
    channels = torch.cat([matrix.channel_scales() for matrix in matrices])
    more = {"values": "e2m1", "channel_scales": channels, "activation_group": default_activation_group(16, k)}
    return w4a8.dyn_quant_pack_4bit_weight(nibbles, scales, bias, 16, k, n, **more)


def write(directory, name, kind, skip=DEFAULT_SKIP, **changes):
    """A checkpoint of random codes; the model with them."""
    model, tensors = skeleton(directory, name, group_size=32, skip=skip), {}

    def add(key, rows, columns, bias=None):
        matrix = Codes(rows, columns, kind)
        found = {**matrix.tensors, "input_scale": torch.tensor(0.1), "k_scale": torch.tensor(1.0)}
        if bias is not None:
            found["bias"] = bias
        tensors.update({f"{key}.{suffix}": tensor for suffix, tensor in found.items()})
        return matrix

    for key, module in list(model.named_modules()):
        if isinstance(module, W4A8Linear):
            n, k = module.out_features, module.in_features
            bias = torch.randn(n).bfloat16() if w4a8.read_header(module.packed)["has_bias"] else None
            new = W4A8Linear(packed(add(key, n, k, bias), bias=bias), k, n, 16)
        elif isinstance(module, W4A8Experts):
            w13, w2, hidden, inter = [], [], module.hidden_size, module.intermediate_size
            for expert in range(module.num_experts):
                sizes = ((inter, hidden), (inter, hidden), (hidden, inter))
                gate, up, down = (add(f"{key}.{expert}.{p}", *size) for p, size in zip(PROJECTIONS, sizes))
                w13.append(packed(gate, up))
                w2.append(packed(down))
            new = W4A8Experts(torch.stack(w13), torch.stack(w2), hidden, inter, 16, module.activation)
        else:
            continue
        model.set_submodule(key, new.eval())
    save(directory / "theirs", model, tensors, {**CONFIGS[kind], **changes})
    return model


@each_kind
@pytest.mark.parametrize("name", ["qwen3", "Qwen2"])
def test_experts_and_linear_layers(kind, name, tmp_path):
    """Biases too; and packed again."""
    model = check(tmp_path, write(tmp_path, name, kind))
    found = [value for key, value in model.named_buffers() if key.endswith("packed")]
    assert found and all(w4a8.read_header(each[0] if each.dim() == 2 else each)["values"] == "e2m1" for each in found)


def test_modules_that_are_left_out(tmp_path):
    skip = [*DEFAULT_SKIP, "re:.*self_attn.*"]
    ignore = ["lm_head", "*gate", "model.layers.0.self_attn*", "model.layers.1.self_attn"]
    model = check(tmp_path, write(tmp_path, "qwen3", "modelopt", skip, ignore=ignore))
    assert isinstance(model.model.layers[0].self_attn.o_proj, torch.nn.Linear)
    assert isinstance(model.model.layers[0].mlp.experts, W4A8Experts)


def test_configuration_in_a_file_of_its_own(tmp_path):
    want = write(tmp_path, "qwen3", "modelopt")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    stated = config.pop("quantization_config")
    inside = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": stated["ignore"]}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs" / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": inside}))
    check(tmp_path, want)


def test_other_algorithms_are_refused(tmp_path):
    fp8 = {"model.layers.1.self_attn.v_proj": {"quant_algo": "FP8"}, "model": {"quant_algo": "NVFP4"}}
    for name, changes, found in (
        ("all", {"quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ("one", {"quant_algo": "MIXED_PRECISION", "quantized_layers": fp8}, "FP8"),
    ):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "Llama", "modelopt", **changes)
        match = rf"layers\.\d\.\S+_proj: .*quant_algo is '{found}', but 'NVFP4' or 'W4A16_NVFP4' is expected"
        with pytest.raises(ValueError, match=match):
            load(tmp_path / name / "theirs")


def test_mixed_precision(tmp_path):
    layers = {"model.layers.0": {"quant_algo": "W4A16_NVFP4"}, "model.layers.1": {"quant_algo": "NVFP4"}}
    check(tmp_path, write(tmp_path, "qwen3", "modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers))


@each_kind
@pytest.mark.parametrize(
    ("suffix", "change", "match"),
    [
        ("weight_scale", lambda t: t.float().fill_(torch.nan).to(t.dtype), "weight_scale: not all scales are numbers"),
        ("weight_scale", None, "weight_scale is missing"),
        ("of all", None, "weight_(scale_2|global_scale) is missing"),
        ("of all", lambda t: t * 0 + float("inf"), "weight_(scale_2|global_scale) is inf, of which no finite"),
    ],
    ids=["not a number", "no scales", "no scale of all", "infinity"],
)  # fmt: skip
def test_damaged(kind, suffix, change, match, tmp_path):
    write(tmp_path, "qwen3", kind)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors, name = load_file(file), {"modelopt": "weight_scale_2", "pack": "weight_global_scale"}[kind]
    key = f"model.layers.1.mlp.experts.3.up_proj.{name if suffix == 'of all' else suffix}"
    tensor = tensors.pop(key)
    if change is not None:
        tensors[key] = change(tensor)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"layers\.1\.mlp\.experts: .*experts\.3\.up_proj\.{match}"):
        load(tmp_path / "theirs")

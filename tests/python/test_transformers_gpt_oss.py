"""gpt-oss as it is published, loaded with W4A8Config: experts stacked, gate and up rows in turns."""

import json

import pytest
import torch
from format_checkpoints import GPT_OSS, Format

import w4a8
from w4a8.nn import GateNumbers, W4A8Experts
from w4a8.quantization import DEFAULT_SKIP

pytest.importorskip("transformers", minversion="5.0")

from safetensors.torch import load_file, save_file
from test_transformers_formats import check, load, packed, save, skeleton
from transformers import GptOssConfig

from w4a8.integrations.transformers import prequantized

pytestmark = pytest.mark.usefixtures("no_gradients")


def write_gpt_oss(directory, method="mxfp4"):
    """As it is on the Hub; the model with the same codes."""
    form = Format("mxfp4", GPT_OSS)
    model, tensors = skeleton(directory, "gpt-oss", skip=[*DEFAULT_SKIP, "re:.*self_attn"]), {}
    for key, module in model.named_modules():
        if not isinstance(module, W4A8Experts):
            continue
        h, i = module.hidden_size, module.intermediate_size
        for part, stack, rows, columns in (("gate_up_proj", "w13", 2 * i, h), ("down_proj", "w2", h, i)):
            biases = torch.randn(module.num_experts, rows).bfloat16()
            found = [form.random(rows, columns, 32) for _ in range(module.num_experts)]
            for suffix in ("blocks", "scales"):
                tensors[f"{key}.{part}_{suffix}"] = torch.stack([each[suffix] for each in found])
            tensors[f"{key}.{part}_bias"] = biases
            order = [*range(0, rows, 2), *range(1, rows, 2)] if stack == "w13" else list(range(rows))
            each = [{name: tensor[order] for name, tensor in matrix.items()} for matrix in found]
            matrices = [packed(form, matrix, bias=bias[order])[0] for matrix, bias in zip(each, biases)]
            setattr(module, f"{stack}_packed", torch.stack(matrices))
    save(directory / "theirs", model, tensors, {**GPT_OSS, "quant_method": method})
    return model


@pytest.mark.parametrize("method", ["mxfp4", "MXFP4"])
def test_gpt_oss(method, tmp_path):
    model = check(tmp_path, write_gpt_oss(tmp_path, method))
    header = w4a8.read_header(model.model.layers[1].mlp.experts.w13_packed[5])
    assert (header["values"], header["scale_dtype"]) == ("e2m1", "e8m0")
    assert set(model.hf_quantizer.report.replaced) == {f"model.layers.{i}.mlp.experts" for i in (0, 1)}


@pytest.mark.parametrize("numbers", [{}, {"swiglu_limit": 0.5, "swiglu_alpha": 1.25}])
def test_numbers_of_the_gate(numbers, tmp_path):
    """Those of config.json, in every layer."""
    if not hasattr(GptOssConfig(), "swiglu_limit"):
        pytest.skip("this transformers has them in the code")
    write_gpt_oss(tmp_path)
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **numbers}))
    model = load(tmp_path / "theirs")
    found = {module.numbers for module in model.modules() if isinstance(module, W4A8Experts)}
    assert found == {GateNumbers(*numbers.values())}


def test_other_experts_in_one_tensor(tmp_path, monkeypatch):
    """Only of gpt-oss it is known that their rows alternate."""
    write_gpt_oss(tmp_path)
    monkeypatch.setattr(prequantized, "is_gpt_oss", lambda module: False)
    with pytest.raises(ValueError, match="all experts of a GptOssExperts in one tensor: do its rows alternate"):
        load(tmp_path / "theirs")


def test_gpt_oss_in_several_files(tmp_path):
    """Blocks, scales and biases of a layer in files of their own."""
    want = write_gpt_oss(tmp_path)
    directory = tmp_path / "theirs"
    tensors = load_file(directory / "model.safetensors")
    files = {key: f"part-{index % 3}.safetensors" for index, key in enumerate(sorted(tensors))}
    for file in set(files.values()):
        part = {key: tensors[key] for key in tensors if files[key] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    check(tmp_path, want)


DAMAGED_GPT_OSS = [
    ("down_proj_scales", None, ".*down_proj.*scales is missing"),
    ("down_proj_blocks", None, ".*down_proj"),
    ("gate_up_proj_bias", None, ".*bias"),
    ("gate_up_proj_scales", lambda t: t | 255, ".*255"),
    ("gate_up_proj_blocks", lambda t: t[:4], ".*4.* experts, expected 6"),
    ("down_proj_blocks", lambda t: t[:, :32], ".*down_proj"),
]

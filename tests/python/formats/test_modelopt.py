"""nvidia-modelopt: layers of several algorithms (its rules: test_rules.py; what is refused: test_broken.py)."""

import pytest
import torch
from format_checkpoints import ALL_FORMATS, LAYER, QUERY, experts_checkpoint
from test_read_formats import assert_meant, meaning

from w4a8.checkpoint import read_layers

pytest.importorskip("safetensors", reason="the safetensors package is not installed")
FORM = ALL_FORMATS["NVFP4 modelopt"]
E4M3 = getattr(torch, "float8_e4m3fn", torch.uint8)  # of old, the files of these tests have bytes


def test_mixed_precision(tmp_path, caplog):
    """What modelopt says layer by layer: NVFP4 beside FP8, which is left out and named."""
    made = experts_checkpoint(FORM, 64, 64)
    made.add(QUERY, FORM, 16, 64)
    other = QUERY.replace("q_proj", "k_proj")
    made.tensors[f"{other}.weight"] = torch.zeros(16, 64).to(E4M3)
    made.tensors[f"{other}.weight_scale"] = torch.tensor(1.0)
    layers = {LAYER: {"quant_algo": "NVFP4", "group_size": 16}, QUERY: {"quant_algo": "W4A16_NVFP4"}}
    layers[other] = {"quant_algo": "FP8"}
    stated = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    made.config["quantization_config"] = stated
    path = made.write(tmp_path)
    with caplog.at_level("WARNING", logger="w4a8.checkpoint"):
        found = read_layers(path)
    assert_meant(found.pop(LAYER), made)
    assert list(found) == [QUERY] and torch.equal(meaning(found[QUERY].packed)[0], made.meant[QUERY])
    problem = f"quantization_config.quantized_layers['{other}'].quant_algo is 'FP8', but"
    assert f"{other} is left out: {problem}" in caplog.text

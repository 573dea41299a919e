"""FP8 checkpoints of float ones, written by torch's casts: no code of the package."""

import json
import math

import torch
from safetensors.torch import load_file, save_file


def float8(weight, suffix, block):
    """The tensors of a matrix [N, K], and what they stand for, float32: each weight times the scale of its block.

    suffix: last part of the name of the scales. block: rows and columns that share one; "channel": a row has one; None:
    all have one.
    """
    rows, columns = weight.shape
    high, wide = {None: (rows, columns), "channel": (1, columns)}.get(block, block)
    shape = (math.ceil(rows / high), math.ceil(columns / wide))
    scales = torch.rand(shape) * 1e-3 + 5e-4
    spread = scales[torch.arange(rows)[:, None] // high, torch.arange(columns) // wide]
    codes = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = scales.reshape(1) if block is None else scales
    return {"weight": codes, suffix: stored}, codes.float() * spread


def write(floats, directory, config, suffix, block):
    """A checkpoint of the floats in a folder, whose matrices become what the new ones stand for.

    Embeddings, output layers and routers stay floats.
    """
    found, tensors, meant = load_file(floats / "model.safetensors"), {}, {}
    torch.manual_seed(1)
    for key, tensor in found.items():
        module = key.removesuffix(".weight")
        if tensor.dim() != 2 or "embed" in key or module.endswith(("lm_head", "gate")):
            tensors[key] = tensor.clone()
            continue
        made, meant[key] = float8(tensor, suffix, block)
        tensors.update({f"{module}.{leaf}": part for leaf, part in made.items()})
        if config.get("activation_scheme") == "static":
            tensors[f"{module}.input_scale"] = torch.ones(1)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((floats / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**said, "quantization_config": config}))
    tensors = {key: tensor.clone() for key, tensor in {**found, **meant}.items()}
    save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
    return directory

"""`w4a8 pack --format compressed-tensors`: what compressed-tensors' own code reads is what the packed directory has."""

import json

import pytest
import torch
from common import assert_same_bits

transformers = pytest.importorskip("transformers", minversion="5.0")
import safetensors.torch  # noqa: E402
from test_pack import TOOL_WRITTEN, run_json  # noqa: E402
from test_quantize_transformers import make_model  # noqa: E402

from w4a8.command import main  # noqa: E402
from w4a8.core.matrix import matrix_of  # noqa: E402

# Model, options, and the bits and symmetries that are written.
EXPORTED = {
    "int4": ("Qwen3", "", {(4, True)}),
    "int4 with zero points, biases": ("Qwen2", "--zero-points --group-size 64", {(4, False)}),
    "one scale a row": ("Qwen3", "--group-size -1 --scale-dtype float32", {(4, True)}),
    "e2m1": ("Qwen3", "--values e2m1", {(8, True)}),
    "int6, experts": ("qwen3", "--values int6", {(8, True)}),
    "several kinds": ("Qwen3", "--bits 5.6", {(4, True), (8, True)}),
    "experts of other names": ("mixtral", "--skip re:.*o_proj", {(4, True)}),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_for_others(name, tmp_path, capsys):
    """What compressed-tensors reads is what the packed directory has, weight by weight."""
    base = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.utils import match_targets

    family, options, forms = EXPORTED[name]
    make_model(family).bfloat16().save_pretrained(tmp_path / "floats", max_shard_size="20KB")
    arguments = options.split() + ["--scale-dtype", "bfloat16"] * ("--scale-dtype" not in options)
    for out, form in (("packed", "packed"), ("out", "compressed-tensors")):
        code, _ = run_json(capsys, "pack", tmp_path / "floats", tmp_path / out, *arguments, "--format", form)
        assert code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    schemes = [QuantizationScheme(**group) for group in config["config_groups"].values()]
    assert {(scheme.weights.num_bits, scheme.weights.symmetric) for scheme in schemes} == forms
    (decompress,) = {base.BaseCompressor.get_value_from_registry("pack-quantized").decompress}
    tensors = safetensors_of(tmp_path / "out")
    expected = dict(weights_of(safetensors_of(tmp_path / "packed")))
    for module in [key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")]:
        (scheme,) = [each for each in schemes if match_targets(module, torch.nn.Linear(1, 1), each.targets)]
        assert module not in config["ignore"]
        own = {key.rpartition(".")[2]: tensors[key] for key in tensors if key.rpartition(".")[0] == module}
        read = decompress({**own, "weight_scale": own["weight_scale"].float()}, scheme)
        assert torch.equal(read["weight"].float(), expected.pop(module)), module
        assert ("weight_zero_point" in own) == (not scheme.weights.symmetric)
    assert not expected
    for key, tensor in safetensors_of(tmp_path / "packed").items():
        if key in tensors:
            assert_same_bits(tensor, tensors[key], key)
    floats = {key.removesuffix(".weight") for key in tensors if key.endswith(".weight") and tensors[key].dim() == 2}
    assert {*config["ignore"]} == {"lm_head", *floats} and config["quantization_status"] == "compressed"
    assert main(["inspect", str(tmp_path / "out")]) == 0


def safetensors_of(folder):
    return {
        key: tensor
        for file in folder.glob("*.safetensors")
        for key, tensor in safetensors.torch.load_file(file).items()
    }


def weights_of(tensors):
    """Of each packed matrix the weights, by the name that its module has in float checkpoints."""
    for key, tensor in tensors.items():
        module, _, leaf = key.rpartition(".")
        if leaf == "packed":
            yield module, matrix_of(tensor, key).floats()
        elif leaf in ("w13_packed", "w2_packed"):
            gate, up, down = (
                ("w1", "w3", "w2") if "block_sparse_moe" in module else ("gate_proj", "up_proj", "down_proj")
            )
            for i, packed in enumerate(tensor):
                weights = matrix_of(packed, key).floats()
                names = (gate, up) if leaf == "w13_packed" else (down,)
                yield from zip((f"{module}.{i}.{name}" for name in names), weights.chunk(len(names)))


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (TOOL_WRITTEN / "gptq", "", "quantized already: leave --format compressed-tensors out"),
        ("gpt-oss", "", "experts: a compressed-tensors checkpoint cannot have experts of gpt_oss"),
    ],
)
def test_what_others_cannot_read(model, options, why, tmp_path, capsys):
    if model == "gpt-oss":
        make_model("gpt-oss").save_pretrained(tmp_path / "floats")
    arguments = [str(tmp_path / "floats" if model == "gpt-oss" else model), str(tmp_path / "out")]
    assert main(["pack", *arguments, "--format", "compressed-tensors", *options.split()]) != 0
    assert why in capsys.readouterr().err and not (tmp_path / "out").exists()

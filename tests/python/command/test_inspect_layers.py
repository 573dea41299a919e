"""`w4a8 inspect` beside the loaded model, layer by layer: kinds by the headers of packed weights, and bytes."""

import available  # noqa: F401
import pytest
import torch
import transformers
from test_inspect import FOLDERS, TOOL_WRITTEN, examine, load
from test_quantize_transformers import make_model

import w4a8
from w4a8.command.contents import RUNS
from w4a8.core.words import weights_in_words
from w4a8.integrations.transformers import W4A8Config


def check_layer_by_layer(path, model, layers):
    """Kinds and bytes that inspect says beside the headers and tensors of the loaded model."""
    output = model.get_output_embeddings()
    said, seen = {each.name: each for each in layers if each.state == RUNS}, set()
    for name, module in model.named_modules():
        packed = {leaf: each for leaf, each in module.named_buffers(recurse=False) if leaf.endswith("packed")}
        if not packed or (
            name not in said and any(each is other for each in packed.values() for other in output.buffers())
        ):
            continue  # an embedding counts as the output layer that shares it
        words = {weights_in_words(w4a8.read_header(each[0] if each.dim() == 2 else each)) for each in packed.values()}
        assert all(each in said[name].what for each in words), f"{path} {name}: {said[name].what}, but it is {words}"
        rest = [each for each in (*module.parameters(recurse=False), *module.buffers()) if each.dtype != torch.uint8]
        bytes_ = sum(each.nbytes for each in (*packed.values(), *rest))
        assert said[name].bytes == bytes_, f"{path} {name}: {said[name].bytes} bytes, but it has {bytes_}"
        seen.add(name)
    assert seen == {*said} and len(seen) >= 1, f"{path}: {seen ^ {*said}}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_layer_by_layer(folder):
    path = TOOL_WRITTEN / folder
    check_layer_by_layer(folder, load(path, W4A8Config()), examine(path)[1])


@pytest.mark.parametrize("name", ["Qwen3", "qwen3", "gpt-oss", "granite", "Llama"])
def test_layer_by_layer_of_floats_and_what_is_packed_of_them(name, tmp_path):
    make_model(name).save_pretrained(tmp_path / "floats")
    model = load(tmp_path / "floats", W4A8Config())
    check_layer_by_layer(name, model, examine(tmp_path / "floats")[1])
    model.save_pretrained(tmp_path / "packed")
    packed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    check_layer_by_layer(name, packed, examine(tmp_path / "packed")[1])


def test_layer_by_layer_of_gguf(tmp_path):
    gguf_models = pytest.importorskip("gguf_models")
    for name in gguf_models.MODELS:
        gguf_models.TinyModel(name).write(tmp_path)
        check_layer_by_layer(name, load(tmp_path, gguf_file="model.gguf"), examine(tmp_path)[1])

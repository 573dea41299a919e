"""What a model of w4a8.integrations.transformers refuses: to be trained, and to leave the CPU. And that it is freed."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from common import assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

transformers = pytest.importorskip("transformers", minversion="5.0")

from test_transformers import TOKENS, load, save_float  # noqa: E402
from test_transformers_formats import FORMATS, change_file, write  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")


def quantized(directory):
    save_float("qwen3", directory)
    return load(directory, quantization_config=W4A8Config())


PARTS = {
    "the model": lambda model: model,
    "in another module": lambda model: torch.nn.Sequential(model),
    "without its head": lambda model: model.model,
    "a layer": lambda model: model.model.layers[1],
    "a linear layer": lambda model: model.model.layers[0].self_attn.o_proj,
    "experts": lambda model: model.model.layers[1].mlp.experts,
}
parts = pytest.mark.parametrize("part", PARTS)


@parts
def test_training_is_refused(part, tmp_path):
    """Before a part of the model is in training mode."""
    model = quantized(tmp_path)
    outer = PARTS[part](model)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        outer.train()
    assert not any(module.training for module in model.modules())
    assert outer.eval() is outer
    assert not outer.training
    with torch.enable_grad():
        assert not model(TOKENS, labels=TOKENS).loss.requires_grad


def test_trainer_is_refused(tmp_path):
    if not transformers.utils.is_accelerate_available():
        pytest.skip("accelerate is not installed")
    with pytest.raises(ValueError, match=r"w4a8|purely quantized models"):
        transformers.Trainer(quantized(tmp_path), transformers.TrainingArguments(str(tmp_path / "out")))


MOVES = {
    "to": lambda module: module.to("cuda"),
    "to device": lambda module: module.to(device="cuda:0"),
    "cuda": lambda module: module.cuda(),
    "to_empty": lambda module: module.to_empty(device="cuda"),
    "xpu": lambda module: module.xpu(),
}


@parts
@pytest.mark.parametrize("move", MOVES)
def test_other_devices_are_refused(move, part, tmp_path):
    """Also where torch has no such device; before a part of the model has moved."""
    model = quantized(tmp_path)
    with pytest.raises(RuntimeError, match="cannot leave the CPU"):
        MOVES[move](PARTS[part](model))
    assert all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    model(TOKENS)


@parts
def test_devices_that_are_there_are_refused(part, tmp_path):
    """Stood in for by tensors without storage that say they are on one."""
    model = quantized(tmp_path)
    with FakeTensorMode():
        elsewhere = torch.empty(0, device="cuda")
    with pytest.raises(RuntimeError, match="cannot go to cuda:0"):
        PARTS[part](model)._apply(lambda tensor: elsewhere)
    assert all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))


@parts
def test_what_is_allowed(part, tmp_path):
    model = quantized(tmp_path)
    want = model(TOKENS).logits
    outer = PARTS[part](model)
    assert outer.to("cpu") is outer
    assert outer.cpu() is outer
    assert outer.share_memory() is outer
    assert_same_bits(model(TOKENS).logits, want)
    assert outer.to(torch.float32) is outer
    assert all(tensor.dtype in (torch.float32, torch.uint8) for tensor in (*outer.parameters(), *outer.buffers()))
    outer.to("meta")
    assert all(tensor.is_meta for tensor in (*outer.parameters(), *outer.buffers()))


def test_device_maps_are_refused(tmp_path):
    save_float("qwen3", tmp_path)
    for device_map in ("cuda", {"": "cuda:0"}, {"model": "cpu", "lm_head": 0}):
        with pytest.raises((RuntimeError, ValueError)):
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4A8Config(), device_map=device_map)


def test_copies_and_pickles(tmp_path):
    """And a copy refuses for itself, also when the model that it was made of is gone."""
    model = quantized(tmp_path)
    want = model(TOKENS).logits
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))]
    del model
    for other in others:
        assert_same_bits(other(TOKENS).logits, want)
        assert other.eval() is other
        assert not other.training
        assert other.to("cpu") is other
        inner = other.model
        for module in (other, inner):
            with pytest.raises(RuntimeError, match="cannot be trained"):
                module.train()
            with pytest.raises(RuntimeError, match="cannot leave the CPU"):
                module.to("cuda")
        assert inner.eval() is inner and other.model is inner
    layer = copy.deepcopy(others[0].model.layers[1])
    others.clear()
    assert layer.eval() is layer
    with pytest.raises(RuntimeError, match="cannot be trained"):
        layer.train()


@pytest.mark.parametrize("source", ["floats", "GPTQ", "packed", "a copy", "a pickle"])
def test_a_model_is_freed_at_once(source, tmp_path):
    """Not by the garbage collector, which may take its time while the memory of two models is in use."""
    if source == "GPTQ":
        write(tmp_path, "qwen3", FORMATS["GPTQ"])
        model = load(tmp_path / "theirs", quantization_config=W4A8Config())
    else:
        model = quantized(tmp_path / "float")
    if source == "packed":
        model.save_pretrained(tmp_path / "packed")
        model = load(tmp_path / "packed")
    if source == "a copy":
        model = copy.deepcopy(model)
    if source == "a pickle":
        model = pickle.loads(pickle.dumps(model))
    model.generate(TOKENS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    experts = model.model.layers[1].mlp.experts
    left = [weakref.ref(thing) for thing in (model, experts, experts.w13_packed, model.lm_head.weight)]
    gc.collect()
    gc.disable()
    try:
        del model, experts
        assert [thing() for thing in left] == [None] * 4
    finally:
        gc.enable()


def test_groups_that_do_not_divide_the_width_of_experts(tmp_path):
    """Those of gate and up do; the tensor that they do not is named."""

    def in_groups_of_64(tensors):
        for key, tensor in tensors.items():
            if "gate_proj." in key or "up_proj." in key:
                if key.endswith(("scales", "qzeros")):
                    tensors[key] = tensor[::2]
                elif key.endswith("g_idx"):
                    tensors[key] = tensor // 2

    write(tmp_path, "qwen3", FORMATS["GPTQ"], dynamic={"+:.*experts.*": {"group_size": 64}})
    change_file(tmp_path / "theirs", in_groups_of_64)
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.qweight: \d+ input features are not groups of 64"):
        load(tmp_path / "theirs", quantization_config=W4A8Config())

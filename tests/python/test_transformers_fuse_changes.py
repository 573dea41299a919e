"""fuse(): what happens when modules or weights of a fused model change."""

import copy

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("gguf")

import torch
from common import assert_same_bits
from gguf_models import VOCAB
from test_transformers_fuse import TOKENS, differs_by, fails, load, run

from w4a8.integrations.transformers import W4A8Cache, fast_attention, fuse
from w4a8.nn.output_layer import multiply_once

pytestmark = pytest.mark.usefixtures("no_gradients")


def answer(model, change=lambda: None):
    """Logits [5, VOCAB]: the last of a prompt, then of four tokens one by one; ``change`` is called between them."""
    ids, cache = TOKENS.reshape(1, -1), W4A8Cache(model.config)
    found = [run(model, ids[:, :6], cache=cache)[:, -1]]
    for at in range(6, 10):
        if at == 8:
            change()
        found.append(run(model, ids[:, at : at + 1], cache=cache)[:, -1])
    return torch.cat(found)


def changed_answer(model, other, change):
    """Changes both in the middle of a text; returns both answers behind the change, and whether it moved them."""
    before = answer(model)
    got, expected = answer(model, lambda: change(model)), answer(other, lambda: change(other))
    assert_same_bits(got[:3], before[:3])
    assert all(differs_by(a, b) < 0.05 for a, b in zip(got[:, None], expected[:, None]))
    return all(differs_by(a, b) > 0.1 for a, b in zip(got[3:, None], before[3:, None]))


@pytest.fixture
def pair(tmp_path):
    """A fused model, and the same model with its own layers over the same cache."""
    fused, own = (load("llama", tmp_path) for _ in range(2))
    fuse(fused)
    fast_attention(own)
    return fused, own


def no_down(module, args, out):
    return out * -3


class Other(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * -3


def hook(model):
    return model.model.layers[0].mlp.down_proj.register_forward_hook(no_down).remove


def pre_hook(model):
    mlp = model.model.layers[0].mlp
    return mlp.register_forward_pre_hook(lambda module, args: (args[0] * -3,)).remove


def layer_hook(model):
    return model.model.layers[1].register_forward_hook(no_down).remove


def hook_of_all(model):
    down = model.model.layers[0].mlp.down_proj
    register = torch.nn.modules.module.register_module_forward_hook
    return register(lambda module, args, out: out * -3 if module is down else None).remove


def own_forward(model):
    down = model.model.layers[0].mlp.down_proj
    forward, down.forward = down.forward, lambda x: forward(x) * -3
    return lambda: delattr(down, "forward")


def replaced(model):
    mlp = model.model.layers[0].mlp
    before, mlp.down_proj = mlp.down_proj, Other(mlp.down_proj)
    return lambda: setattr(mlp, "down_proj", before)


def replaced_layer(model):
    layers = model.model.layers
    before, layers[0] = layers[0], copy.deepcopy(layers[1])
    layers[0].self_attn.layer_idx = 0
    return lambda: layers.__setitem__(0, before)


@pytest.mark.parametrize(
    "change", [hook, pre_hook, layer_hook, hook_of_all, own_forward, replaced, replaced_layer], ids=lambda f: f.__name__
)
def test_modules_that_change_in_a_text(change, pair, monkeypatch):
    """The model's own layers run from the next token on, over the same cache, and one call again when all is undone."""
    fused, own = pair
    plain, said, undo = answer(fused), [], []
    monkeypatch.setattr("w4a8.integrations.transformers.fused.logger.warning_once", said.append)
    assert changed_answer(fused, own, lambda model: undo.append(change(model)))
    assert len(said) == 2 and said[0] == said[1], "the two tokens behind the change"
    for each in undo:
        each()
    assert_same_bits(answer(fused), plain)
    assert len(said) == 2


def test_modules_that_change(tmp_path, monkeypatch):
    model = load("llama", tmp_path)
    model.lm_head = torch.nn.Linear(256, VOCAB, bias=False)
    multiply_once(model.lm_head)  # hangs a hook of this package on the output layer, which is no reason
    fuse(model)
    said, expected = [], run(model, TOKENS)
    assert model.lm_head._forward_pre_hooks
    monkeypatch.setattr("w4a8.integrations.transformers.fused.logger.warning_once", said.append)
    mlp = model.model.layers[1].mlp
    hook = mlp.down_proj.register_forward_hook(lambda module, args, out: out * 0)
    assert differs_by(run(model, TOKENS), expected) > 0.1
    assert "down_proj of LlamaMLP has a hook" in said[-1]
    with pytest.raises(ValueError, match="down_proj of LlamaMLP has a hook"):
        fuse(model)
    copied = copy.deepcopy(model)  # has the hook too
    assert differs_by(run(copied, TOKENS), run(model, TOKENS)) < 0.05
    hook.remove()
    up, mlp.up_proj = mlp.up_proj, copy.deepcopy(mlp.gate_proj)
    assert differs_by(run(model, TOKENS), expected) > 0.1
    assert "up_proj of LlamaMLP was replaced" in said[-1]
    mlp.up_proj = up
    said.clear()
    up.forward = up.forward  # of the class, as transformers leaves one after recording outputs
    assert_same_bits(run(model, TOKENS), expected)
    assert not said


def test_hidden_states_for_one_call(pair, monkeypatch):
    """transformers leaves its hooks in the model; later calls still run in one."""
    model, _ = pair
    expected = answer(model)
    assert len(run_out(model).hidden_states) == 3
    assert any(layer._forward_hooks for layer in model.model.layers), "otherwise there is nothing to test"
    monkeypatch.setattr(type(model.model), "forward", fails)
    decoder = model.forward.stack.decoder
    assert_same_bits(answer(model), expected)
    assert model.forward.stack.decoder is decoder, "nor is the decoder made again"


def run_out(model):
    return model(TOKENS, past_key_values=W4A8Cache(model.config), use_cache=True, output_hidden_states=True)


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def load_weights(model, other):
    model.load_state_dict(weights_of(other))


def assign_weights(model, other):
    model.load_state_dict(weights_of(other), assign=True)


def set_data(model, other):
    new = weights_of(other)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in new:
            tensor.data = new[name]


def copy_weights(model, other):
    for name, tensor in model.state_dict().items():
        tensor.copy_(weights_of(other)[name])


def copy_data(model, other):
    for name, tensor in model.state_dict().items():
        tensor.data.copy_(weights_of(other)[name])


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
@pytest.mark.parametrize(
    "change", [load_weights, assign_weights, set_data, copy_weights, copy_data], ids=lambda f: f.__name__
)
def test_weights_that_change(change, name, tmp_path, monkeypatch):
    """A fused model answers as one with the other weights, from the next call on: matrices, norms, embeddings."""
    model, other = load(name, tmp_path), load(name, tmp_path, seed=1)
    fuse(model)
    fuse(other)
    before, expected = run(model, TOKENS), run(other, TOKENS)
    assert differs_by(expected, before) > 0.1
    change(model, other)
    monkeypatch.setattr(type(model.model), "forward", fails)
    assert_same_bits(run(model, TOKENS), expected)


def test_weights_that_change_in_a_text(pair):
    assert changed_answer(*pair, lambda model: model.model.norm.weight.mul_(torch.linspace(0, 2, 256)))


def test_an_adapter_in_a_text(pair, tmp_path):
    """PEFT: loaded, switched, disabled and unloaded between tokens, each seen by the next token."""
    peft = pytest.importorskip("peft")
    import w4a8.integrations.peft  # noqa: F401

    fused, own = pair
    plain, adapted = answer(fused), {}
    for name in ("one", "two"):
        config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        peft.get_peft_model(copy.deepcopy(own), config).save_pretrained(tmp_path / name)

    def put(model):
        adapted[model] = peft.PeftModel.from_pretrained(model, tmp_path / "one", "one")
        adapted[model].load_adapter(tmp_path / "two", "two")

    assert changed_answer(fused, own, put)
    assert changed_answer(fused, own, lambda model: adapted[model].set_adapter("two"))
    assert changed_answer(fused, own, lambda model: adapted[model].base_model.disable_adapter_layers())
    assert not changed_answer(fused, own, lambda model: adapted[model].unload())
    assert_same_bits(answer(fused), plain)

"""Plain PyTorch models, and what users do with a model, beside a device without hardware. See standin_cases.py."""

import copy
import io
import json
import pickle
import sys

import pytest
import standin_device
import torch
from common import assert_same_bits, at_once
from standin_cases import TOKENS, load, only_experts, saved
from test_quantize_transformers import make_model

import w4a8
from w4a8.command import machine, main
from w4a8.core.bridge import WAYS
from w4a8.nn import QuantOptions, W4A8Experts, W4A8Linear, beside
from w4a8.nn.embedding import PackedEmbedding
from w4a8.nn.packed import PackedModule

HIDDEN, INTER, EXPERTS, TOP, WORDS = 64, 32, 6, 2, 40
pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(params=WAYS, autouse=True)
def way(request):
    """Each way to call the experts."""
    standin_device.use(request.param)
    return request.param


def make_experts(**options):
    return W4A8Experts.from_float(
        torch.randn(EXPERTS, 2 * INTER, HIDDEN) / 8, torch.randn(EXPERTS, HIDDEN, INTER) / 6, **options
    )


class Model(torch.nn.Module):
    """Every kind of module: an embedding that shares its bytes with the output layer, linear layers, experts."""

    def __init__(self, scale):
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.embedding = PackedEmbedding(
            w4a8.nn.W4A8Linear.from_float(torch.nn.Linear(HIDDEN, WORDS, bias=False)).packed,
            *(WORDS, HIDDEN, 32, torch.float32, scale),
        )
        self.second = W4A8Linear.from_float(torch.nn.Linear(HIDDEN, HIDDEN), symmetric=False)
        self.router = W4A8Linear.from_float(torch.nn.Linear(HIDDEN, EXPERTS, bias=False), QuantOptions(values="int8"))
        self.same_router = self.router
        self.experts = make_experts()
        self.output = self.embedding.output_layer()

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.second(self.first(x))
        weights, chosen = (self.router(x) + self.same_router(x)).flatten(0, -2).softmax(-1).topk(TOP)
        return self.output(x + self.experts(x, chosen, weights))


def floats(packed):
    """The float32 [N, K] that a packed matrix means, by the operator."""
    header = w4a8.read_header(packed)
    return w4a8.ops.dequantize_rows(packed, torch.arange(header["n"]), header["k"], header["n"], dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 8.3])
def test_plain_model(scale, dtype):
    model = Model(scale).to(dtype).eval()
    ids = torch.randint(WORDS, (2, 5))
    layer = lambda packed, bias=None: lambda x: torch.nn.functional.linear(x, floats(packed).to(dtype), bias)  # noqa: E731
    bias = model.second(torch.zeros(1, HIDDEN, dtype=dtype))[0]
    want = copy.deepcopy(model)
    for name, bits, row in (("second", model.second.packed, bias), ("router", model.router.packed, None)):
        want._modules.pop(name)
        setattr(want, name, layer(bits, row))
    want._modules.pop("same_router")
    want.same_router = want.router
    want._modules.pop("output")
    want.output = layer(model.embedding.rows_packed)
    expected = want(ids)

    bits = {name: tensor.clone() for name, tensor in model.experts.state_dict().items()}
    assert beside(model, "standin") == ["embedding", "second", "router", "output"]
    assert model.router is model.same_router
    assert model.output.weight is model.embedding.weight
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert (tensor.device.type == "cpu") == name.endswith("packed"), name
    assert_same_bits(model(ids.to("standin")).cpu(), expected)
    assert {name.removeprefix("experts.") for name in model.state_dict() if name.startswith("experts")} == set(bits)
    model.cpu()
    assert_same_bits(model(ids), expected)
    model.to("standin:0")
    assert_same_bits(model(ids.to("standin")).cpu(), expected)
    for name, tensor in model.experts.named_buffers():
        assert_same_bits(tensor, bits[name])
    model.to("meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_type_of_floats():
    """The type that is asked for, or the model's first."""
    model = torch.nn.Sequential(W4A8Linear.from_float(torch.nn.Linear(HIDDEN, HIDDEN)), make_experts())
    beside(model, "standin", torch.float16)
    assert model[0].weight.dtype == model[0].bias.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_alone(dtype, way):
    """Without anything else: called with tensors of the device."""
    layer, x = make_experts(), torch.randn(2, 3, HIDDEN).to(dtype)
    ids, weights = torch.randint(EXPERTS + 1, (6, TOP)), torch.rand(6, TOP)  # EXPERTS: a slot without an expert
    for given in (ids, ids.int()):
        got = layer(x.to("standin"), given.to("standin"), weights.to("standin"))
        assert got.device.type == "standin"
        assert_same_bits(got.cpu(), layer(x, given, weights))
    rows = torch.randn(4 * EXPERTS, HIDDEN).to(dtype)
    rows[3] = 0
    assert_same_bits(layer(rows.to("standin")).cpu(), layer(rows))
    empty = torch.empty(0, HIDDEN), torch.empty(0, TOP, dtype=torch.int64), torch.empty(0, TOP)
    assert layer(*(tensor.to("standin") for tensor in empty)).shape == (0, HIDDEN)
    with pytest.raises(ValueError, match="given both or not at all"):
        layer(x.to("standin"), ids.to("standin"))
    bad = [tensor.to("standin") for tensor in (x, ids + EXPERTS + 1, weights)]
    if way == "queued":
        assert layer(*bad).cpu().isnan().all()  # and the next call is an error
    with pytest.raises(RuntimeError, match="topk_ids"):
        layer(*bad)


def test_copies_of_experts_stay():
    layer = make_experts()
    beside(layer, "standin")
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other.to("standin")
        assert other.w13_packed.device.type == "cpu"
    fresh = make_experts()
    assert fresh.to("standin").w13_packed.device.type == "standin"  # nobody asked it to stay


def test_refused():
    class Other(PackedModule):
        pass

    layer = make_experts()
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=f"device is {device}, expected an accelerator"):
            beside(layer, device)
    for device in ("cuda", "nonsense"):
        with pytest.raises(RuntimeError, match=f"device is {device}, which torch cannot use here"):
            beside(layer, device)
    linear = torch.nn.Sequential(W4A8Linear.from_float(torch.nn.Linear(HIDDEN, HIDDEN)))
    with pytest.raises(ValueError, match="no packed experts, so nothing would stay on the CPU beside standin:0"):
        beside(linear, "standin")
    with pytest.raises(ValueError, match="other is a Other, which has no floats"):
        beside(torch.nn.ModuleDict({"experts": layer, "other": Other()}), "standin")
    assert isinstance(linear[0], W4A8Linear) and not layer.stays_on_cpu


def generated(model, tokens, **options):
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(tokens.to("standin"), **how).cpu()


def test_static_cache(tmp_path):
    want = saved(tmp_path)
    w4a8.quantize_(want, skip=only_experts)
    want.set_attn_implementation("eager")
    model = load(tmp_path)
    expected = want.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0, cache_implementation="static")
    assert torch.equal(generated(model, TOKENS, cache_implementation="static"), expected)


def test_threads(tmp_path):
    """Several threads use a model at once."""
    saved(tmp_path)
    model = load(tmp_path)
    texts = [torch.randint(1, 64, (1, 4 + i)) for i in range(4)]
    want = [generated(model, text) for text in texts]

    def one(text):
        with torch.no_grad():
            return generated(model, text)

    assert all(map(torch.equal, at_once(one, texts), want))


def test_adapter_beside(tmp_path):
    """LoRA on the linear layers, which are floats there; one for packed experts is refused."""
    peft = pytest.importorskip("peft")
    want = saved(tmp_path)
    w4a8.quantize_(want, skip=only_experts)
    want.set_attn_implementation("eager")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(want, config)
    adapted.save_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(load(tmp_path), tmp_path / "adapter", torch_device="cpu")
    plain = load(tmp_path)(TOKENS.to("standin")).logits.cpu()
    got = model(TOKENS.to("standin")).logits.cpu()
    assert_same_bits(got, adapted(TOKENS).logits)
    assert not torch.equal(got, plain)
    with pytest.raises(ValueError, match="whose weights are packed"):
        peft.get_peft_model(load(tmp_path), peft.LoraConfig(target_parameters=["mlp.experts.gate_up_proj"], r=2))


def test_chat(tmp_path, monkeypatch, capsys):
    """What is written is what the model generates there."""
    model = make_model("qwen3")
    model.config.vocab_size = 256
    model.resize_token_embeddings(256)
    model.bfloat16().save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    options = ["--device", "standin", "--raw", "--max-new-tokens", "5", "--temperature", "0"]
    assert main(["chat", str(tmp_path), *options]) == 0
    written = capsys.readouterr()
    prompt = torch.tensor([list(b"import os")])
    expected = load(tmp_path, attn_implementation="sdpa").generate(
        prompt.to("standin"), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    assert written.out == bytes(expected[0, prompt.shape[1] :].tolist()).decode(errors="replace") + "\n"
    assert ": 2 layers packed" in written.err and "one by one" not in written.err


def test_doctor_and_inspect_of_the_device(tmp_path, capsys):
    """A device of which torch does not know the memory is not listed, and nothing is said of what fits."""
    assert machine.accelerators() == []
    saved(tmp_path)
    assert main(["inspect", str(tmp_path), "--device", "standin", "--memory-speed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["beside"]
    tensors = [*load(tmp_path).named_parameters(), *load(tmp_path).named_buffers()]
    sizes = {True: 0, False: 0}
    for name, tensor in tensors:
        sizes[name.endswith("packed")] += 0 if "inv_freq" in name else tensor.numel() * tensor.element_size()
    assert found == {
        "device": "standin", "device_bytes": sizes[False], "cpu_bytes": sizes[True], "available_bytes": None
    }  # fmt: skip

"""w4a8.quantize_ on families of transformers 5 whose experts have its common interface, and on Llama 4.

The experts beside docs/numerics.md, the logits beside the float model with the rounded weights in it, and what stays
float beside the report.
"""

import copy
import json
from types import SimpleNamespace

import moe_blocks
import pytest
import reference
import torch
from common import assert_same_bits, assert_within
from test_quantize_experts import expected_experts, rounded
from test_quantize_transformers import FAMILIES, make_model

import w4a8
from w4a8.checkpoint.packed_as_tensors import problem_of, read_directory
from w4a8.nn import W4A8Experts
from w4a8.quantization.moe_blocks import fused_experts

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import multiplied_out  # noqa: E402 (needs transformers itself)
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402

if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("transformers 5 is needed", allow_module_level=True)

families = pytest.mark.parametrize("name", FAMILIES)


def the_experts(model):
    """Name and module, of the last layer."""
    return [(name, module) for name, module in model.named_modules() if name.endswith(".experts")][-1]


@families
@pytest.mark.parametrize("group", [32, -1])
@torch.no_grad()
def test_experts(name, group):
    """As docs/numerics.md defines them. Llama 4 calls them with T rows for each expert, multiplied by the weights."""
    model = make_model(name)
    key, experts = the_experts(model)
    x = torch.randn(9, 64)
    ids = torch.rand(9, 4).argsort(-1)[:, :2]
    weights = torch.rand(9, 2)
    floats = moe_blocks.expert_weights(experts)
    w4a8.quantize_(model, group)
    replaced = model.get_submodule(key)
    assert isinstance(replaced, W4A8Experts)
    if name != "llama 4":
        want, explained = expected_experts(floats, x, ids, weights, group)
        assert_within(replaced(x, ids, weights).numpy(), want, explained)
        return
    scores = torch.zeros(9, len(floats)).scatter_(1, ids, weights).T.reshape(-1, 1)
    rows = x.repeat(len(floats), 1) * scores
    turns = torch.arange(len(floats)).repeat_interleave(9)[:, None]
    want, explained = expected_experts(floats, rows, turns, torch.ones_like(turns), group)
    got, chosen = replaced(rows), scores[:, 0] != 0
    assert chosen.sum() == 18
    assert_within(got[chosen].numpy(), want[chosen], explained[chosen])
    assert not got[~chosen].any()


# Experts whose gate is not the usual one: class, numbers of its module, kind and numbers of docs/numerics.md.
GATES = [
    ("deepseek_v4.DeepseekV4Experts", {"limit": 0.5}, 2, {"limit": 0.5}),
    ("hy_v4.HYV4Experts", {"swiglu_limit": 0.5}, 2, {"limit": 0.5}),
    ("glm5_next.Glm5NextTextExperts", {"swiglu_limit": 10.0}, 2, {"limit": 10.0}),
    ("minimax_m3_vl.MiniMaxM3VLExperts", {"swiglu_limit": 0.75, "swiglu_alpha": 1.5}, 3, {"limit": 0.75, "alpha": 1.5}),
    ("gpt_oss.GptOssExperts", {"limit": 0.75, "alpha": 1.5}, 3, {"limit": 0.75, "alpha": 1.5}),
    ("gpt_oss.GptOssExperts", {}, 3, {}),
    ("openai_privacy_filter.OpenAIPrivacyFilterExperts", {"limit": 0.75}, 3, {"limit": 0.75}),
    ("step3p7.Step3p7Experts", {"limit": 0.5}, 4, {"limit": 0.5}),
    ("step3p7.Step3p7Experts", {}, 2, {}),
    ("nemotron_h.NemotronHExperts", {}, 7, {}),
]


@pytest.mark.parametrize(("name", "numbers", "kind", "expected"), GATES, ids=str)
@torch.no_grad()
def test_gates(name, numbers, kind, expected):
    module, _, cls = name.partition(".")
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    config = SimpleNamespace(
        num_local_experts=4, n_routed_experts=4, hidden_size=64, intermediate_size=32, moe_intermediate_size=32,
        moe_latent_size=None, hidden_act="silu", mlp_hidden_act="relu2", swiglu_limit=7.0, swiglu_alpha=1.702,
        _experts_implementation="eager",
    )  # fmt: skip
    experts = getattr(modeling, cls)(config)
    vars(experts).update(numbers)
    for tensor in experts.parameters():
        tensor.copy_(4 * torch.randn_like(tensor) / 8)
    gated = kind != 7
    rows = 4 * torch.randn(50, 64, dtype=torch.double)
    halves = list(rows.chunk(2, -1))
    turned = torch.stack(halves, -1).flatten(-2) if cls == "GptOssExperts" else rows
    own = experts._apply_gate(turned) if gated else experts.act_fn(halves[0])
    # The formula, before what is packed.
    want, error = reference.activation(kind, halves[0], halves[1] if gated else None, expected)
    assert_within(own.numpy(), want, error)
    torch.testing.assert_close(fused_experts(experts).between(rows if gated else halves[0]), own)  # of calibration
    floats, model = moe_blocks.expert_weights(experts), torch.nn.ModuleDict({"experts": experts})
    report = w4a8.quantize_(model)
    assert list(report.replaced) == ["experts"] and report.left_bytes == 0
    x, ids, weights = torch.randn(9, 64), torch.rand(9, 4).argsort(-1)[:, :2], torch.rand(9, 2)
    want, explained = expected_experts(floats, x, ids, weights, 32, kind, **expected)
    assert_within(model["experts"](x, ids, weights).numpy(), want, explained)


@torch.no_grad()
def test_without_a_gate(tmp_path):
    """The same bits when it is packed while it is loaded, saved and loaded, and read from int4 codes. For vLLM its
    experts are not cut."""
    model, tokens = make_model("nemotron h"), torch.randint(3, 64, (1, 9))
    model.save_pretrained(tmp_path / "float")
    w4a8.quantize_(model)
    want = model(tokens).logits

    def check(folder, **options):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32, **options)
        (experts,) = (module for module in found.modules() if isinstance(module, W4A8Experts))
        assert repr(experts).endswith("activation=RELU2, gated=False)")
        assert_same_bits(found(tokens).logits, want)
        return found

    check("float", quantization_config=W4A8Config()).save_pretrained(tmp_path / "packed")
    check("packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    said = read_directory(tmp_path / "packed", config["quantization_config"])
    reasons = {name: problem_of(parts, "nemotron_h") for name, parts in said.packed.items()}
    assert reasons.pop("backbone.layers.1.mixer.experts") == "experts without a gate" and set(reasons.values()) == {
        None
    }
    tensors = {}
    for key, tensor in load_file(tmp_path / "packed" / "model.safetensors").items():
        name, _, leaf = key.rpartition(".")
        part = {"w13_packed": "up_proj", "w2_packed": "down_proj"}.get(leaf)
        if leaf == "packed":
            tensors.update(linear_as_tensors(name, tensor))
        elif part is None:
            tensors[key] = tensor
        else:
            for expert, packed in enumerate(tensor):
                tensors.update(linear_as_tensors(f"{name}.{expert}.{part}", packed))
    (tmp_path / "int4").mkdir()
    save_file(tensors, tmp_path / "int4" / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    quantization = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"one": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    (tmp_path / "int4" / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    check("int4", quantization_config=W4A8Config())


def linear_as_tensors(name, packed):
    """A packed int4 matrix as compressed-tensors has it."""
    said = w4a8.read_header(packed)
    codes, scales, _ = w4a8.dyn_quant_unpack_4bit_weight(packed, 32, said["k"], said["n"])
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).unflatten(-1, (-1, 8)).long()
    words = (nibbles << 4 * torch.arange(8)).sum(-1).to(torch.uint32).view(torch.int32)
    found = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([said["n"], said["k"]])}
    return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in found.items()}


def float_model_of_the_rounded_weights(model, report):
    """A float model, and the matrices in it that were replaced, whose values are those of the report's layers."""
    floats, matrices = copy.deepcopy(model), []

    def values(weight):
        nibbles, scales = (torch.from_numpy(array) for array in rounded(weight, 32))
        codes = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(-2).float() - 8
        return codes * scales.repeat_interleave(32, 1)

    for name in report.replaced:
        module = floats.get_submodule(name)
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(values(module.weight))
            matrices.append(module.weight)
            continue
        turned = type(module).__name__.startswith("Llama4")  # [H, 2I] and [I, H]
        for stack in (module.gate_up_proj, module.down_proj):
            for matrix in stack:
                matrix.copy_(values(matrix.T).T if turned else values(matrix))
            matrices.append(stack)
    return floats, matrices


@families
@torch.no_grad()
def test_logits(name):
    """Only int8 inputs make a difference from the float model with the rounded weights. How much they do is measured in
    that model, by an emulation that shares no code with the package. What is left is inputs that float32 arithmetic
    puts on the other side of a tie: 2 % of that difference, as test_transformers_tools.py allows."""
    model = make_model(name)
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    quantized = copy.deepcopy(model)
    report = w4a8.quantize_(quantized)
    floats, matrices = float_model_of_the_rounded_weights(model, report)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in (5, 17, 40)]
    found = multiplied_out.logprobs(quantized, prompts)
    exact = multiplied_out.logprobs(floats, prompts)
    int8 = multiplied_out.logprobs(floats, prompts, matrices, 32)
    multiplied_out.assert_near(found, exact, int8, 0.02)


@families
def test_report(name):
    """Every linear layer and all experts are replaced or named, and so is every other matrix that stays float."""
    model = make_model(name)
    before = dict(copy.deepcopy(model).named_modules())
    report = w4a8.quantize_(model)
    assert the_experts(model)[0] in report.replaced
    least = sum(parameter.numel() for parameter in before[""].parameters()) / 10_000
    for key, parameter in model.named_parameters():
        if parameter.dim() >= 2 and parameter.numel() >= least:
            assert key.rpartition(".")[0] in report.skipped, key
    for key, module in before.items():
        if isinstance(module, torch.nn.Linear):
            assert (key in report.replaced) != (key in report.skipped), key
    others = {key: reason for key, reason in report.skipped.items() if reason != "skip"}
    expected = {"model.embed_tokens": "weight of Embedding, which is not replaced"}
    if name == "qwen3 next":
        expected["model.layers.0.linear_attn.conv1d"] = "weight of Conv1d, which is not replaced"
    if name == "jamba":
        expected["model.layers.0.mamba"] = "A_log of JambaMambaMixer, which is not replaced"
        expected["model.layers.0.mamba.conv1d"] = "weight of Conv1d, which is not replaced"
        expected["model.layers.0.mamba.dt_proj"] = "JambaMambaMixer reads its weight or bias itself"
    assert others == expected
    left = sum(parameter.numel() * 4 for parameter in model.parameters())
    packed = sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("packed"))
    assert (report.left_bytes, report.model_bytes) == (left, left + packed)
    assert f"{left:,} bytes stay float, {left / (left + packed):.1%} of the model now" in str(report)

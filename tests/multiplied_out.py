"""What transformers computes with the weights of a checkpoint multiplied out.

Three ways: float32; float32 with the inputs of all quantized matrices rounded to int8 (as docs/numerics.md says, by
code of its own); and the model's own dtype. How far the second and third are from the first is what int8 inputs and the
dtype cost, and so the measure for what another library may be off.
"""

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path

import tool_formats
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

TOOL_WRITTEN = Path(__file__).parent / "tool_written"
Rows = Iterable[torch.Tensor]  # [length, vocabulary] per sequence
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm)


def write(source: Path, directory: Path) -> None:
    """Makes ``directory`` a float32 checkpoint of what a quantized one means, matrix by matrix."""
    settings = json.loads((source / "config.json").read_text())
    quantization = settings.pop("quantization_config")
    form = tool_formats.form_of(quantization)
    content, modules = {}, {}
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):  # gpt-oss: [in, out] in transformers
            stack = name.removesuffix("_blocks")
            found = {"blocks": tensor, "scales": tensors[f"{stack}_scales"]}
            content[stack] = tool_formats.multiplied_out(found, "mxfp4").transpose(1, 2).float().contiguous()
        elif not name.endswith("_scales"):
            module, _, suffix = name.rpartition(".")
            modules.setdefault(module, {})[suffix] = tensor
    for module, found in modules.items():
        if not found.keys().isdisjoint(("qweight", "weight_scale")):
            weight = tool_formats.multiplied_out(found, form, _bits(quantization, module)).float()
            found = {"weight": weight} | {k: v for k, v in found.items() if k == "bias"}
        content.update({f"{module}.{suffix}": tensor.float() for suffix, tensor in found.items()})
    _stack_gpt_oss(content)
    directory.mkdir()
    save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**settings, "dtype": "float32"}))


def _bits(quantization: dict, module: str) -> int:
    """Of a matrix in GPTQ's or AutoRound's format."""
    for rule, changes in quantization.get("dynamic", {}).items():
        if rule.startswith("+:") and re.match(rule[2:], module):
            return changes.get("bits", 4)
    return quantization.get("extra_config", {}).get(module, {}).get("bits", 4)


def _stack_gpt_oss(content: dict[str, torch.Tensor]) -> None:
    """Experts whose gate and up are one matrix become [E, in, out], and their biases [E, out]."""
    fused = sorted(name for name in content if name.endswith(".0.gate_up_proj.weight"))
    for stack in [name.removesuffix(".0.gate_up_proj.weight") for name in fused]:
        for leaf in ("gate_up_proj", "down_proj"):
            count = sum(name.startswith(stack) and name.endswith(f"{leaf}.weight") for name in content)
            for suffix, end in (("weight", ""), ("bias", "_bias")):
                parts = [content.pop(f"{stack}.{expert}.{leaf}.{suffix}") for expert in range(count)]
                parts = [part.T if suffix == "weight" else part for part in parts]
                content[f"{stack}.{leaf}{end}"] = torch.stack(parts).contiguous()


def activation_group(quantization: dict) -> int:
    """Of what is loaded with nothing else asked for: -1 if a configuration says int8 per token, else 32."""
    schemes = quantization.get("config_groups", {}).values()
    inputs = [scheme.get("input_activations") or {} for scheme in schemes]
    stated = quantization.get("act_bits") == 8
    return -1 if stated or any((i.get("type"), i.get("num_bits")) == ("int", 8) for i in inputs) else 32


def rounded(x: torch.Tensor, size: int = -1) -> torch.Tensor:
    """Each row rounded to 255 steps between its least and greatest element, 0 among them; or each `size` values, where
    that divides them, to 127 steps on either side of 0."""
    if size != -1 and x.shape[-1] % size == 0:
        groups = x.unflatten(-1, (-1, size))
        most = groups.abs().amax(-1, keepdim=True)
        scale = torch.where(most == 0, torch.ones_like(most), 127 / most)
        return (torch.round(groups * scale) / scale).flatten(-2)
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = torch.where(high == low, torch.ones_like(high), 255 / (high - low))
    zero = torch.round(-128 - low * scale).clamp(-128, 127)
    q = (torch.round(x * scale) + zero).clamp(-128, 127)
    return (q - zero) / scale


class Int8Inputs(TorchFunctionMode):
    """Rounds what is multiplied by a quantized matrix."""

    def __init__(self, matrices: list[torch.Tensor], size: int) -> None:
        super().__init__()
        self.size = size
        self.storages = {matrix.untyped_storage().data_ptr() for matrix in matrices}
        self.seen: set[int] = set()

    def _quantized(self, weight: object) -> bool:
        pointer = weight.untyped_storage().data_ptr() if isinstance(weight, torch.Tensor) else None
        if pointer in self.storages:
            self.seen.add(pointer)
            return True
        return False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (func is torch.nn.functional.linear or func in PRODUCTS) and len(args) > 1 and self._quantized(args[1]):
            args = (rounded(args[0], self.size), *args[1:])
        return func(*args, **kwargs)


@functools.cache
def load(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def _is_projection(name: str, parameter: torch.Tensor) -> bool:
    """By its name: Granite calls those of its MLPs and of Mamba otherwise."""
    named = any(part in name for part in ("_proj", "input_linear", "output_linear", "per_layer_input_gate"))
    return named and parameter.dim() > 1 and not name.endswith("bias")


def quantized_matrices(model: torch.nn.Module, attention: bool, lm_head: bool = False) -> list[torch.Tensor]:
    """Parameters whose inputs are int8: all projections, or those of the experts and MLPs only; the output layer."""
    output = model.get_output_embeddings()  # its weight may be that of the embeddings
    return [
        parameter
        for name, parameter in model.named_parameters()
        if (_is_projection(name, parameter) and (attention or "self_attn" not in name))
        or (lm_head and output is not None and parameter is output.weight)
    ]


@torch.no_grad()
def logprobs(
    model: torch.nn.Module, sequences: list[list[int]], int8: list[torch.Tensor] = (), size: int = -1
) -> list[torch.Tensor]:
    """Per sequence, float32 [length - 1, vocabulary]: of every token but the first, given those before it.

    int8 are the matrices whose inputs are rounded, with one scale for a row or for `size` values.
    """
    rows = []
    for sequence in sequences:
        with Int8Inputs(int8, size) as mode:
            logits = model(torch.tensor([sequence[:-1]]), use_cache=False).logits[0]
        assert len(mode.seen) == len(mode.storages), "a quantized matrix was not used as the reference expects"
        rows.append(torch.log_softmax(logits.float(), -1))
    return rows


def assert_near(found: Rows, exact: Rows, rounded: Rows, share: float) -> tuple[float, float]:
    """That the rows of a sequence each are those of int8 inputs, but for `share` of what these cost.

    Compared is the root mean square over the vocabulary at the median position: elsewhere noise may have selected
    another expert. Returns what `found` and `rounded` are off `exact`.
    """
    pairs = ((found, exact), (rounded, exact), (found, rounded))
    off, noise, rest = (
        torch.cat([x - y for x, y in zip(a, b)]).square().mean(1).sqrt().median().item() for a, b in pairs
    )
    print(f"off by {off:.5f}, int8 {noise:.5f}, from the emulation {rest:.6f}")
    assert 0 < noise < torch.cat(tuple(exact)).std() / 4, "the noise hides what is to be seen"
    assert rest <= share * noise
    return off, noise

"""What quantize_ leaves alone, or refuses, because something would be lost: weights that are read, hooks, biases."""

import moe_blocks
import pytest
import torch
from torch import nn

import w4a8
from w4a8.quantization import QuantizationError


class Reads(nn.Module):
    """Reads weights of its layers in all the ways that are found; those of the others are read for training or GPUs."""

    def __init__(self):
        super().__init__()
        for name in ("a", "b", "c", "d", "init", "training_only", "gpu", "called"):
            setattr(self, name, nn.Linear(64, 64))
        self.block = nn.Sequential(nn.Linear(64, 64), nn.ModuleDict({"inner": nn.Linear(64, 64)}))
        self.init.weight.data.mul_(2)

    @property
    def kind(self):
        return self.b.weight.dtype

    def cuda_forward(self, x):
        return x @ self.gpu.weight

    def other(self, x):
        return sum(x.to(self.kind) + self.c.bias for _ in range(1))

    @torch.no_grad()
    def forward(self, x):
        if self.training and x is not None:
            x = x @ self.training_only.weight
        if x.is_cuda:
            return self.cuda_forward(x)
        for block in self.block:
            if hasattr(block, "inner"):
                x = x + block.inner.bias
        reads = (lambda: self.d.weight)()
        return self.called(self.other(x)) + nn.functional.linear(x, self.a.weight) + reads.sum()


def test_layers_whose_weight_is_read():
    model = nn.Sequential(nn.Linear(64, 64), Reads()).eval()
    report = w4a8.quantize_(model)
    left = ["1.a", "1.b", "1.c", "1.d", "1.block.1.inner"]
    assert report.skipped == dict.fromkeys(left, "Reads reads its weight or bias itself")
    assert list(report.replaced) == ["0", "1.init", "1.training_only", "1.gpu", "1.called", "1.block.0"]
    assert model(torch.randn(2, 64)).shape == (2, 64)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_biases_that_are_not_finite(value):
    """As weights: refused with the name, and nothing is replaced."""
    model = nn.Sequential(nn.Linear(64, 8))
    model[0].bias.data[3] = value
    with pytest.raises(QuantizationError, match="0: the bias has a NaN or an infinite element"):
        w4a8.quantize_(model)
    block = moe_blocks.MixtralSparseMoeBlock(bias=True, experts=2)
    block.experts[1].down_proj.bias.data[5] = value
    with pytest.raises(QuantizationError, match="experts: w2 of expert 1: the bias has a NaN or an infinite element"):
        w4a8.quantize_(nn.ModuleList([block]))
    assert type(model[0]) is nn.Linear and isinstance(block.experts, nn.ModuleList)


REGISTER = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "_register_state_dict_hook",
    "register_state_dict_pre_hook",
    "_register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
]


@pytest.mark.parametrize("register", REGISTER)
def test_hooks(register):
    """Of a layer, of experts in stacks, in a list, and of a layer of these: whoever hung them there wants them kept."""
    if not hasattr(nn.Module, register):
        pytest.skip(f"this torch has no {register}")
    listed = [moe_blocks.MixtralSparseMoeBlock(experts=2) for _ in range(2)]
    model = nn.ModuleDict({"a": nn.Linear(64, 8), "b": moe_blocks.FusedBlock(), "c": listed[0], "d": listed[1]})
    for module in (model["a"], model["b"].experts, listed[0].experts, listed[1].experts[1].gate_proj):
        getattr(module, register)(lambda *arguments: None)
    report = w4a8.quantize_(model)
    lost = [name for name, reason in report.skipped.items() if reason == "it has hooks, which would be lost"]
    assert lost == ["a", "b.experts", "c.experts", "d.experts", "d.experts.1.gate_proj"]
    assert "d.experts.0.gate_proj" in report.replaced

"""That `compare.check` sees what it is for: answers of a model with one wrong expert, and with noise."""

import copy

import multiplied_out
import pytest
import torch
from cases import FAMILIES
from compare import activation_group, check
from conftest import prompts

CASES = [case for case in FAMILIES if case.model in ("gpt_oss", "qwen2_moe") and case.inputs != "none"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_wrong_expert_is_seen(case, checkpoints):
    directory = checkpoints(case)
    model = copy.deepcopy(multiplied_out.load(directory / "reference", torch.float32))
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randint(2, 160, (24,), generator=generator).tolist() for _ in prompts()]
    sequences = [prompt + output for prompt, output in zip(prompts(), outputs)]
    int8 = multiplied_out.quantized_matrices(model, attention=True)

    def result() -> dict:
        logprobs = multiplied_out.logprobs(model, sequences, int8, activation_group(case))
        return {"outputs": outputs, "logprobs": logprobs, "amx": False}

    # Not what a model would choose: all but the last check, of the tokens, passes.
    with pytest.raises(AssertionError, match="token"):
        check(case, directory, prompts(), result())
    *_, stack = (stack for name, stack in model.named_parameters() if name.endswith("experts.down_proj"))
    stack.data[0] = stack.data[0].flip(-1)
    with pytest.raises(AssertionError, match="of the positions are far off"):
        check(case, directory, prompts(), result())

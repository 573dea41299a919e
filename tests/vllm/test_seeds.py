"""Requests with a seed whose prompt comes in several steps: no engine ends, and no random number is lost."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from w4a8.integrations.vllm.seeds import register_seeds


class ReachedError(Exception):
    """Behind what vLLM does with generators."""


class Requests:
    """Of a step: the second is a part of a prompt, and the first has no seed."""

    num_reqs = 3

    def __init__(self):
        self.generators = {i: torch.Generator().manual_seed(i) for i in (1, 2)}
        self.sampling_metadata = SimpleNamespace(generators=self.generators)

    def update_async_output_token_ids(self):
        pass

    @property
    def req_ids(self):
        raise ReachedError


@pytest.fixture
def runner():
    register_seeds()
    made = GPUModelRunner.__new__(GPUModelRunner)
    made.input_batch, made.use_async_scheduling = Requests(), False
    made.discard_request_mask = SimpleNamespace(np=np.array([False, True, False, True]))
    return made


def test_a_part_of_a_prompt_draws_nothing(runner):
    def sampler(logits, sampling_metadata):
        return {i: torch.rand(5, generator=each) for i, each in sampling_metadata.generators.items()}

    runner.sampler = sampler
    expected = torch.rand(5, generator=torch.Generator().manual_seed(2))
    assert runner._sample(None, None).keys() == {2}
    first = runner.input_batch.generators[1]
    assert torch.equal(first.get_state(), torch.Generator().manual_seed(1).get_state())
    runner.discard_request_mask.np[1] = False
    drawn = runner._sample(None, None)
    assert drawn.keys() == {1, 2} and not torch.equal(drawn[2], expected)
    assert torch.equal(drawn[1], torch.rand(5, generator=torch.Generator().manual_seed(1)))


def test_no_generator_is_set_back(runner):
    """vLLM's own stops there: generators of CPUs have no offset."""
    before = dict(runner.input_batch.generators)
    with pytest.raises(ReachedError):
        runner._bookkeeping_sync(None, None, None, None, 3)
    assert runner.input_batch.generators == before

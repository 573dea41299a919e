"""What the scheduler of an engine that guesses is told, so that it does not pad prompts of one token."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from w4a8.integrations.vllm.guesses import register_guesses


@pytest.mark.parametrize(
    "guesses, table, expected", [(3, None, [3] * 5), (3, [0, 3, 3, 1, 1], [0, 3, 3, 1, 1]), (0, None, None)]
)
def test_as_many_guesses_for_every_batch(guesses, table, expected, monkeypatch):
    def make(self):
        self.num_spec_tokens, self.dynamic_sd_lookup = guesses, table
        self.scheduler_config = SimpleNamespace(max_num_seqs=4)

    monkeypatch.setattr(Scheduler, "__init__", make)
    register_guesses()
    register_guesses()
    assert Scheduler().dynamic_sd_lookup == expected

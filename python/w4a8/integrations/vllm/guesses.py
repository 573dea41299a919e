"""Prompts of one token in an engine that guesses tokens.

Beside running requests vLLM's scheduler pads such a prompt with guesses that stand for nothing, to keep the shape of a
graph of GPUs. A layer with a state then takes the prompt for a sequence that goes on, and begins with what another
request has left in its page. Where the number of guesses comes from a table by batch size, vLLM does not pad.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


def register_guesses() -> None:
    """Gives schedulers a table with the same number of guesses for every batch. Once per process."""
    make = Scheduler.__init__
    if getattr(make, "w4a8", False):
        return

    @wraps(make)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None:
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.scheduler_config.max_num_seqs + 1)

    wrapped.w4a8 = True
    Scheduler.__init__ = wrapped

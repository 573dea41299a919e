"""Questions of speed, and who answers them: a model of transformers, or an engine of vLLM."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from w4a8.integrations.vllm import binding, settings

START = 8  # tokens of the prompt before decoding, if it is not asked for behind more


class Case(NamedTuple):
    """One question.

    Attributes:
        name: in words.
        batch: sequences.
        prompt: tokens of each sequence's prompt.
        decode: tokens that are decoded behind the prompt, of each sequence; 0: the prompt is measured instead.
    """

    name: str
    batch: int
    prompt: int
    decode: int

    @property
    def length(self) -> int:
        """Tokens of a sequence in all."""
        return self.prompt + self.decode

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """The tokens of each sequence's prompt, the same ones at each call."""
        return [[(7919 * (i + 1) * (b + 1)) % vocabulary for i in range(self.prompt)] for b in range(self.batch)]


class Timer:
    """Runs cases."""

    def run(self, case: Case) -> float:
        """Tokens per second of a case, of all its sequences together. Decoding begins behind the first new token."""
        first, rest = self.seconds(case)
        return case.batch * case.decode / rest if case.decode else case.batch * case.prompt / first

    def seconds(self, case: Case) -> tuple[float, float]:
        """Seconds until all sequences have their first token, and from there to the end."""
        raise NotImplementedError


class TimedModel(Timer):
    """Runs cases on a model whose ``generate`` is called. The model's own settings of generation are replaced.

    Args:
        model: of transformers, on a CPU.
    """

    def __init__(self, model: Any) -> None:
        from transformers import GenerationConfig

        from w4a8.integrations.transformers.kept_text import KeptText

        # Greedy, and without tokens that end a text.
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self.model, self._kept = model, KeptText(model)
        self._vocabulary = model.config.get_text_config(decoder=True).vocab_size

    def seconds(self, case: Case) -> tuple[float, float]:
        """See :class:`Timer`.

        Raises:
            ValueError: another number of tokens was written.
        """
        from transformers import StoppingCriteriaList

        times: list[float] = []

        def clock(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids, count = torch.tensor(case.prompts(self._vocabulary)), case.decode + 1  # the first is of the prompt's pass
        options = {"max_new_tokens": count, "stopping_criteria": StoppingCriteriaList([clock])}
        times.append(time.perf_counter())
        if case.decode and case.batch == 1:  # what is before is read once, and kept
            self._kept.generate(ids, case.prompt - 1, **options)
        else:
            self._kept.clear()
            self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        if len(times) != 1 + count:
            raise ValueError(f"transformers wrote {len(times) - 1} tokens, expected {count}")
        return times[1] - times[0], times[-1] - times[1]


class TimedEngine(Timer):
    """Runs cases on an engine of vLLM, which reads every prompt anew. The engine is as `w4a8 serve` makes it.

    Attributes:
        llm: vLLM's LLM.
        answers: of the last case, by the first token of a prompt.
    """

    def __init__(self, model: str, max_model_len: int, max_num_seqs: int = 8, **more: Any) -> None:
        from vllm import LLM

        if settings.mode() != "0":
            more.setdefault("distributed_executor_backend", binding.in_process())
        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=False,
            seed=0,
            **more,
        )
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.answers: dict[int, list[int]] = {}

    def seconds(self, case: Case) -> tuple[float, float]:
        """See :class:`Timer`."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=case.decode + 1, ignore_eos=True, detokenize=False)
        engine = self.llm.llm_engine
        firsts, self.answers = {}, {}
        begun = time.perf_counter()
        for b, ids in enumerate(case.prompts(self.vocabulary)):
            firsts[str(b)] = ids[0]
            engine.add_request(str(b), {"prompt_token_ids": ids}, parameters)
        answering: set[str] = set()
        first = begun
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if len(answering) < case.batch:
                answering |= {output.request_id for output in outputs if output.outputs[0].token_ids}
                first = time.perf_counter()
            self.answers |= {firsts[output.request_id]: list(output.outputs[0].token_ids) for output in outputs}
        return first - begun, time.perf_counter() - first

    def close(self) -> None:
        """Ends the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What this process and those that it starts write to stdout goes to stderr, where vLLM's log is not in the way."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)

"""The stub of lab/bench_speculation.py, without vLLM."""

from types import SimpleNamespace

import numpy as np
import torch
from bench_speculation import PROMPT, Stub


def proposed(stub, most, **questions):
    return stub.propose(most, questions["sampled"], questions["lengths"], questions["tokens"], slot_mappings=None)


def test_guesses_follow_the_tokens_that_are_there():
    stub = Stub()
    stub.answers, stub.guesses, stub.right = {1000: [5, 6, 7, 8], 1001: [1, 2, 3, 4]}, 3, 1.0
    tokens = np.array([[1001] + [0] * 40, [1000] + [0] * 40, [1000] + [0] * 40])
    lengths = np.array([PROMPT + 1, PROMPT + 2, PROMPT])
    found = proposed(stub, 7, sampled=[[1], [6], []], lengths=lengths, tokens=tokens)
    assert found == [[2, 3, 4], [7, 8], []]
    assert proposed(stub, 2, sampled=[[1], [6], []], lengths=lengths, tokens=tokens) == [[2, 3], [7, 8], []]


def test_guesses_take_the_place_of_those_of_a_head():
    stub = Stub()
    stub.answers, stub.guesses, stub.right = {1000: [5, 6, 7, 8], 1001: [1, 2, 3, 4]}, 2, 1.0
    tokens = np.array([[1001] + [0] * 40, [1000] + [0] * 40])
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(num_tokens_no_spec=np.array([PROMPT, PROMPT + 1]), token_ids_cpu=tokens)
    )
    scheduled, sampled = SimpleNamespace(num_spec_tokens_to_schedule=3), torch.tensor([[1, -1, -1], [6, 7, -1]])

    def head(runner, scheduled, sampled, more):
        assert more == "more"
        return torch.full((len(sampled), scheduled.num_spec_tokens_to_schedule), 9)

    # Behind the answer's end the head's own guess stays.
    assert stub.behind(head)(runner, scheduled, sampled, "more").tolist() == [[2, 3], [8, 9]]


def test_as_many_guesses_are_right_as_asked():
    stub = Stub()
    stub.answers, stub.guesses, stub.right = {1000: list(range(4000))}, 4000, 0.7
    guesses = proposed(stub, 4000, sampled=[[0]], lengths=[PROMPT], tokens=np.array([[1000]]))[0]
    right = sum(guess == token for guess, token in zip(guesses, range(4000)))
    # Five standard deviations of 4,000 draws: 5 * sqrt(4000 * 0.7 * 0.3) = 145.
    assert abs(right - 2800) < 145

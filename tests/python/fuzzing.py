"""`fuzz`: a test of hypothesis with the settings of these tests. Imported behind importorskip("hypothesis")."""

import os

import hypothesis
import torch
from common import FUZZ_SEED
from hypothesis import HealthCheck


class TorchRandom:
    """torch's generator as hypothesis wants it: the same before each example, so that a failure repeats."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps a weak reference
hypothesis.register_random(TORCH_RANDOM)

SETTINGS = hypothesis.settings(
    max_examples=int(os.environ.get("W4A8_TEST_EXAMPLES", "60")),
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def fuzz(*strategies, **named):
    """`hypothesis.given` with other inputs in each run; conftest.py prints the seed beside a failure."""
    given = hypothesis.given(*strategies, **named)
    return lambda test: hypothesis.seed(FUZZ_SEED)(SETTINGS(given(test)))

"""Fixtures of the mixture-of-experts tests."""

import pytest

from w4a8.core.threads import one_thread


@pytest.fixture(autouse=True)
def few_threads():
    """The layers here are so small that waking threads would be most of the time; the bits are the same."""
    with one_thread():
        yield

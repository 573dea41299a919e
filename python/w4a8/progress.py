"""Progress bars, where tqdm is installed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def progress_bar(total: int, wanted: bool, unit: str, description: str) -> Iterator[Callable[[], object]]:
    """A tqdm bar while the block runs, and what moves it on by one: nothing if it is not wanted or not installed."""
    if not wanted:
        yield _nothing
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        logger.info("no progress bar: tqdm is not installed")
        yield _nothing
        return
    with tqdm(total=total, unit=unit, desc=description) as bar:
        yield bar.update


def _nothing() -> None:
    pass

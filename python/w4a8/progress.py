"""Progress bars, where tqdm is installed. They leave nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def progress_bar(total: int, wanted: bool, unit: str, description: str) -> Iterator[Callable[[], object]]:
    """Shows a tqdm bar, if wanted and installed, while the block runs. Yields the function that adds one step."""
    if not wanted:
        yield _nothing
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        logger.info("no progress bar: tqdm is not installed")
        yield _nothing
        return
    with tqdm(total=total, unit=unit, desc=description, leave=False) as bar:
        yield bar.update


def _nothing() -> None:
    pass

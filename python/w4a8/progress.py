"""Progress bars, where tqdm is installed."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def progress_bar(total: int, wanted: bool, unit: str, desc: str) -> Any:
    """A tqdm bar, or None if it is not wanted or tqdm is not installed."""
    if not wanted:
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        logger.info("no progress bar: tqdm is not installed")
        return None
    return tqdm(total=total, unit=unit, desc=desc)

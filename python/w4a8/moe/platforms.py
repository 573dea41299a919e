"""Another name that vLLM has for :mod:`w4a8.moe.config`."""

import sys

from w4a8.moe.config import *  # noqa: F403

sys.modules[__name__] = sys.modules["w4a8.moe.config"]

"""Another name that vLLM has for :mod:`w4a8.moe.layer`."""

import sys

from w4a8.moe.layer import *  # noqa: F403

sys.modules[__name__] = sys.modules["w4a8.moe.layer"]

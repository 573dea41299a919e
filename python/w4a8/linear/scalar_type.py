"""Another name that vLLM has for :mod:`w4a8.linear.cpu_w4a8_int`."""

import sys

from w4a8.linear.cpu_w4a8_int import *  # noqa: F403

sys.modules[__name__] = sys.modules["w4a8.linear.cpu_w4a8_int"]

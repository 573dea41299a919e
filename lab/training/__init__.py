"""Where the checkpoint of examples/tiny_moe comes from, and what kinds of weights and formats cost on it."""

import sys

from folders import EXAMPLE

sys.path.append(str(EXAMPLE))  # data, evaluate and modeling

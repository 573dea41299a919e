import sys

from w4a8.mirror.modular_kernel import *  # noqa: F403

sys.modules[__name__] = sys.modules["w4a8.mirror.modular_kernel"]

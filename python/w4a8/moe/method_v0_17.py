import sys

from w4a8.mirror.method_v0_17 import *  # noqa: F403

sys.modules[__name__] = sys.modules["w4a8.mirror.method_v0_17"]

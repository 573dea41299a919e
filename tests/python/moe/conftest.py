"""Fixtures of the mixture-of-experts tests."""

import moe_checkpoint
import pytest

from w4a8.core.threads import one_thread


@pytest.fixture(autouse=True)
def few_threads():
    """The layers here are so small that waking threads would be most of the time; the bits are the same."""
    with one_thread():
        yield


@pytest.fixture
def checkpoint(tmp_path):
    """A correct checkpoint (g32), as parts that a test can spoil before `write`."""

    class Parts:
        def __init__(self):
            self.format = "int-quantized"
            self.reset()

        def reset(self, format_="int-quantized", group_size=32, bias=False):
            self.w13, self.w2 = moe_checkpoint.random_layer(group_size, bias)
            self.tensors = moe_checkpoint.tensors_of_layer(self.w13, self.w2, format_)
            self.config = moe_checkpoint.model_config(moe_checkpoint.quantization_config(group_size, format_))
            return self

        @property
        def group(self):
            return self.config["quantization_config"]["config_groups"]["group_0"]

        def write(self, **args):
            return moe_checkpoint.write(tmp_path / "checkpoint", self.tensors, self.config, **args)

    return Parts()

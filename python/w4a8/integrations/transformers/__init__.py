"""from_pretrained on the operators: importing this registers a quantizer with transformers 5 (docs/transformers.md)."""

from __future__ import annotations

try:
    import transformers
except ImportError as error:
    raise ImportError(f"w4a8.integrations.transformers needs transformers 5 and safetensors: {error}") from error

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"w4a8.integrations.transformers needs transformers 5, this is {transformers.__version__}: load the model "
        "with it and call w4a8.quantize_"
    )

from w4a8.integrations.transformers.config import W4A8Config
from w4a8.integrations.transformers.quantizer import W4A8HfQuantizer

__all__ = ["W4A8Config", "W4A8HfQuantizer"]

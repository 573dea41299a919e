"""from_pretrained on the operators: importing this registers a quantizer and attention with transformers 5
(docs/transformers.md).

If the import fails, the error has the reason, and transformers is unchanged. Environment:

    W4A8_TRANSFORMERS=1    also with a version of transformers 5 that this was not tested with
"""

from __future__ import annotations

try:
    import transformers
except ImportError as error:
    raise ImportError(f"w4a8.integrations.transformers needs transformers 5 and safetensors: {error}") from error

from w4a8.integrations.transformers.versions import version_problem

_problem = version_problem(transformers.__version__)
if _problem is not None:
    raise ImportError(f"w4a8.integrations.transformers {_problem}")

try:
    from w4a8.integrations.transformers.cache import W4A8Cache
    from w4a8.integrations.transformers.config import W4A8Config
    from w4a8.integrations.transformers.fast import fast_attention
    from w4a8.integrations.transformers.fused import fuse
    from w4a8.integrations.transformers.quantizer import W4A8HfQuantizer
    from w4a8.integrations.transformers.registration import register_in_transformers
    from w4a8.integrations.transformers.selftest import problems
except ImportError as error:
    raise ImportError(
        f"w4a8.integrations.transformers: transformers {transformers.__version__} is not as expected: {error}"
    ) from error

_problems = problems()
if _problems:
    raise ImportError(
        f"w4a8.integrations.transformers: the self-test failed with transformers {transformers.__version__}: "
        + "; ".join(_problems)
    )
register_in_transformers()

__all__ = ["W4A8Cache", "W4A8Config", "W4A8HfQuantizer", "fast_attention", "fuse"]

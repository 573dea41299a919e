"""Checkpoint formats, one file each, with a function that turns the tensors of one matrix into a :class:`Matrix`, facts
of the format (:class:`Format`), and the modules that its configuration quantizes (:class:`Rules`).

Nothing is dequantized or rounded, except NVFP4's 1 / weight_global_scale. Codes are reordered; scales and biases
keep their values. Codes have 4 bits, or 8 in GPTQ and pack-quantized.

    from_gptq                GPTQ, versions 1 and 2 (``checkpoint_format: gptq_v2``)
    from_awq                 AWQ (GEMM packing)
    from_auto_round          AutoRound's own format, packed as GPTQ or AWQ
    from_int_quantized       compressed-tensors, one int8 per value
    from_pack_quantized      compressed-tensors, int32 words
    from_mxfp4               MXFP4 blocks, as gpt-oss has them
    from_mxfp4_pack_quantized   MXFP4 in compressed-tensors and AutoRound
    from_quark_mxfp4         MXFP4 as AMD Quark writes it
    from_nvfp4               NVFP4, as nvidia-modelopt writes it
    from_nvfp4_pack_quantized   NVFP4 in compressed-tensors and AutoRound

Each function takes the tensors by the last part of their names, and the name of the matrix for its errors. The
``quantization_config`` of the checkpoint decides the function and the group size of a module:

    rules_of(config).of(name)    Scheme, with read(tensors, name), or NotRead, with the reason
"""

from w4a8.core.kind import E2M1_VALUES as E2M1
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix
from w4a8.formats import modelopt, quark  # noqa: F401 (their rules)
from w4a8.formats.auto_round import from_auto_round
from w4a8.formats.awq import from_awq
from w4a8.formats.compressed_tensors import from_int_quantized, from_pack_quantized
from w4a8.formats.format import FORMATS, Format, Part
from w4a8.formats.gptq import from_gptq
from w4a8.formats.mxfp4 import from_mxfp4, from_mxfp4_pack_quantized, from_quark_mxfp4
from w4a8.formats.nvfp4 import from_nvfp4, from_nvfp4_pack_quantized
from w4a8.formats.rules import RULES, Rules, find_config, method_of, rules_of, scheme_of
from w4a8.formats.scheme import NotRead, Scheme

# The values of ``quant_method`` whose checkpoints are read.
METHODS = tuple(sorted(RULES))

__all__ = [
    "E2M1",
    "FORMATS",
    "METHODS",
    "Format",
    "Kind",
    "Matrix",
    "NotRead",
    "Part",
    "Rules",
    "Scheme",
    "find_config",
    "from_auto_round",
    "from_awq",
    "from_gptq",
    "from_int_quantized",
    "from_mxfp4",
    "from_mxfp4_pack_quantized",
    "from_nvfp4",
    "from_nvfp4_pack_quantized",
    "from_pack_quantized",
    "from_quark_mxfp4",
    "method_of",
    "rules_of",
    "scheme_of",
]

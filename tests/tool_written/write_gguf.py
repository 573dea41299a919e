"""Wrote gguf/every_type.gguf; run by no test: `python write_gguf.py`, with llama-cpp-python 0.3.36 (ggml 0.25.3).

For each type of blocks a matrix [2, 512] of random weights, quantized by ggml, and beside it what ggml itself makes of
it, as F32.
"""

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

NAMES = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "NVFP4",
]
SHAPE = (2, 512)


class Traits(ctypes.Structure):
    """struct ggml_type_traits of ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def main() -> None:
    ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    ggml.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    target = Path(__file__).parent / "gguf" / "every_type.gguf"
    target.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(target, "llama")
    generator = np.random.default_rng(0)
    for name in NAMES:
        kind = gguf.GGMLQuantizationType[name]
        weights = generator.standard_normal(SHAPE).astype(np.float32)
        # Values that are not centred: without a mean, minimums say little.
        weights += generator.standard_normal((SHAPE[0], SHAPE[1] // 32)).astype(np.float32).repeat(32, 1)
        found, per_block = ggml.ggml_get_type_traits(kind.value).contents, gguf.GGML_QUANT_SIZES[kind]
        assert (found.blck_size, found.type_size) == per_block
        blocks = np.zeros((SHAPE[0], SHAPE[1] // per_block[0] * per_block[1]), np.uint8)
        written = ggml.ggml_quantize_chunk(kind.value, weights.ctypes.data, blocks.ctypes.data, 0, *SHAPE, None)
        assert written == blocks.size
        means = np.zeros(SHAPE, np.float32)
        for row in range(SHAPE[0]):
            found.to_float(blocks[row].ctypes.data, means[row].ctypes.data, SHAPE[1])
        writer.add_tensor(name, blocks, raw_dtype=kind)
        writer.add_tensor(f"{name}.as_floats", means)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()

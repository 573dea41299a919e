"""GGUF files for tests, written by the package `gguf`; what their blocks mean is what that package makes of them."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

BLOCKS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), 32),
    **dict.fromkeys(("IQ4_NL", "MXFP4"), 32),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), 256),
    "NVFP4": 64,
}
# Where a block has its float16 numbers.
_FLOAT16 = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def config_sizes(hidden, inter, layers, heads, kv_heads, head, vocab):
    """Fields of the config of a tiny model of transformers, of any family."""
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head, "rms_norm_eps": 2.0**-18,
        "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "tie_word_embeddings": False, "attn_implementation": "eager", "experts_implementation": "eager",
    }  # fmt: skip


def random_blocks(name, shape, generator, scale=0.01):
    """Blocks of a type with random bits, float16 numbers of about `scale`: uint8 [..., bytes of a row].

    Scales may be 0, negative, and larger than a quantizer makes them.
    """
    weights, size = gguf.GGML_QUANT_SIZES[Type[name]]
    assert weights == BLOCKS[name] and shape[-1] % weights == 0
    bits = generator.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    for at in _FLOAT16.get(name, ()):
        numbers = (generator.standard_normal(bits.shape[:-1]) * scale).astype("<f2")
        bits[..., at : at + 2] = numbers[..., None].view(np.uint8)
    if name == "MXFP4":  # exponents of 2^-11 to 2^-4
        bits[..., 0] = generator.integers(116, 124, bits.shape[:-1])
    if name == "NVFP4":  # float8_e4m3 without sign, no NaN
        bits[..., :4] = generator.integers(0, 127, (*bits.shape[:-1], 4))
    return bits.reshape(*shape[:-1], -1)


def meaning(name, blocks):
    """float32 [..., K] of uint8 [..., bytes of a row]."""
    return torch.from_numpy(np.array(gguf.quants.dequantize(blocks, Type[name])))


def write(path, architecture, keys, tensors, **options):
    """A file.

    Args:
        path: of the file.
        architecture: general.architecture.
        keys: name -> int, float, bool, str or a list of one of these.
        tensors: name -> float tensor, or (name of a type, blocks as of :func:`random_blocks`).
        options: of GGUFWriter.
    """
    writer = gguf.GGUFWriter(path, architecture, **options)
    for name, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            kind = "UINT32" if 0 <= value < 2**32 else "INT64"
            writer.add_key_value(name, value, gguf.GGUFValueType[kind])
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            writer.add_tensor(name, tensor.numpy())
        else:
            writer.add_tensor(name, tensor[1], raw_dtype=Type[tensor[0]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)

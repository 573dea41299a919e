"""The tensors of a Qwen3-MoE checkpoint by name, dtype and shape, and its config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SCHEMES = ("w4a8", "w4a16", "bfloat16")
BYTES = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes:
        name: in the checkpoint.
        dtype: as safetensors calls it.
        shape: of the tensor.
        content: what it holds: ones, unit (of size 1), normal (of size 1 / sqrt(columns)), words, scales, shape, or
            weights (words times scales).
        matrix: rows and columns (input features) of the matrix it belongs to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: str
    matrix: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return BYTES[self.dtype] * math.prod(self.shape)


def _norm(name: str, width: int) -> Tensor:
    return Tensor(f"{name}.weight", "BF16", (width,), "ones", (1, width))


def quantization_config(group_size: int | None, int8_activations: bool = True) -> dict[str, Any]:
    """compressed-tensors' part of config.json. group_size: None is one scale per row."""
    strategy = "channel" if group_size is None else "group"
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": {**weights, "strategy": strategy, "group_size": group_size},
                "input_activations": inputs if int8_activations else None,
            }
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model; the defaults are those of Qwen3-30B-A3B."""

    layers: int = 48
    vocabulary: int = 151936
    group: int = 128  # int4 weights per scale
    scheme: str = "w4a8"
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    intermediate: int = 768
    experts: int = 128
    top_k: int = 8
    positions: int = 40960

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme is {self.scheme!r}, expected one of {', '.join(SCHEMES)}")
        widths = (self.hidden, self.heads * self.head_dim, self.intermediate)
        if self.group % 32 != 0 or self.group < 32 or any(width % self.group for width in widths):
            raise ValueError(f"group is {self.group}, expected a multiple of 32 that divides {widths}")
        if self.layers < 1 or self.vocabulary < 3:
            raise ValueError(f"layers is {self.layers} and vocabulary {self.vocabulary}, expected at least 1 and 3")

    @classmethod
    def cut(cls, layers: int, **others: Any) -> Shapes:
        """Fewer layers and as much less of the vocabulary: the output layer's share of the time stays."""
        return cls(layers=layers, vocabulary=cls.vocabulary * layers // cls.layers // 64 * 64, **others)

    def _matrix(self, name: str, rows: int, columns: int) -> Iterator[Tensor]:
        """A linear layer, quantized or not."""
        matrix = (rows, columns)
        if self.scheme == "bfloat16":
            yield Tensor(f"{name}.weight", "BF16", matrix, "weights", matrix)
            return
        yield Tensor(f"{name}.weight_packed", "I32", (rows, columns // 8), "words", matrix)
        yield Tensor(f"{name}.weight_scale", "BF16", (rows, columns // self.group), "scales", matrix)
        yield Tensor(f"{name}.weight_shape", "I64", (2,), "shape", matrix)

    def layer(self, index: int) -> Iterator[Tensor]:
        """The tensors of one layer."""
        prefix, hidden = f"model.layers.{index}", self.hidden
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _norm(f"{prefix}.{norm}", hidden)
        for norm in ("q_norm", "k_norm"):
            yield _norm(f"{prefix}.self_attn.{norm}", self.head_dim)
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            yield from self._matrix(f"{prefix}.self_attn.{name}_proj", rows, hidden)
        yield from self._matrix(f"{prefix}.self_attn.o_proj", hidden, wide)
        router = (self.experts, hidden)
        yield Tensor(f"{prefix}.mlp.gate.weight", "BF16", router, "normal", router)
        for expert in range(self.experts):
            for name in ("gate", "up", "down"):
                size = (hidden, self.intermediate) if name == "down" else (self.intermediate, hidden)
                yield from self._matrix(f"{prefix}.mlp.experts.{expert}.{name}_proj", *size)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors in the order of the model."""
        table = (self.vocabulary, self.hidden)
        yield Tensor("model.embed_tokens.weight", "BF16", table, "unit", table)
        for index in range(self.layers):
            yield from self.layer(index)
        yield _norm("model.norm", self.hidden)
        yield Tensor("lm_head.weight", "BF16", table, "normal", table)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def config(self) -> dict[str, Any]:
        """config.json."""
        config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "head_dim": self.head_dim,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "moe_intermediate_size": self.intermediate,
            "intermediate_size": 8 * self.intermediate,  # of dense layers, of which there are none
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "bos_token_id": self.vocabulary - 2,
            "eos_token_id": self.vocabulary - 1,
        }
        if self.scheme != "bfloat16":
            config["quantization_config"] = quantization_config(self.group, self.scheme == "w4a8")
        return config

    def tokenizer(self) -> dict[str, Any]:
        """tokenizer.json: token n is the word `wn`, so that text made of tokens is split into the same tokens again."""
        words = {f"w{index}": index for index in range(self.vocabulary)}
        return {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        last = self.vocabulary - 1
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": f"w{last - 1}",
            "eos_token": f"w{last}",
            "unk_token": "w0",
            "model_max_length": self.positions,
            "clean_up_tokenization_spaces": False,
        }

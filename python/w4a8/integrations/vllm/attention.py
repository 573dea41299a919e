"""Attention by this package's operators, over a cache of int8 or bfloat16 in their layout (docs/numerics.md section 9).

vLLM asks its platform for an attention backend once for each layer. The answer is one of the two backends here, or that
of latent_attention.py, if the plugin runs the model and the operators can compute the layer; otherwise vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from w4a8.integrations.vllm import settings
from w4a8.integrations.vllm.config import is_ours
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.settings import CACHE_KINDS
from w4a8.ops import (
    BLOCK_TOKENS,
    HEAD_SIZES,
    LATENT_SIZES,
    attention_block_bytes,
    paged_attention,
    paged_attention_write,
)


@dataclass
class Metadata:
    """Arguments of a step, the same for all layers of a group."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B]
    block_table: torch.Tensor  # int32 [B, pages]
    causal: bool


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Makes the metadata of a group of layers."""

    def __init__(self, *args: Any) -> None:  # upstream's is abstract
        super().__init__(*args)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """As upstream's."""
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(f"w4a8: rows of a batch that are causal or not; {settings.ATTENTION}=0 runs them")
        rows = common.num_reqs
        return Metadata(
            common.num_actual_tokens,
            common.query_start_loc[: rows + 1],
            common.seq_lens[:rows],
            common.block_table_tensor[:rows],
            bool(common.causal),
        )


def blocks_of(kv_cache: torch.Tensor, kind: str, key_size: int, value_size: int) -> torch.Tensor:
    """uint8 [pages, heads, bytes]: vLLM's [pages, heads, tokens, content], of which the end may be unused."""
    cache = kv_cache.view(torch.uint8)
    pages, heads, tokens, _ = cache.shape
    bytes_ = tokens // BLOCK_TOKENS * attention_block_bytes(kind, key_size, value_size)
    return cache.as_strided((pages, heads, bytes_), (cache.stride(0), cache.stride(1), 1))


class Impl(AttentionImpl):
    """Attention of a layer. A subclass states the kind of cache."""

    kind: ClassVar[str]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError(f"w4a8's attention has no ALiBi; {settings.ATTENTION}=0 leaves attention to vLLM")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self.sliding_window = sliding_window or 0
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.chunk = 0  # set by attend_to_chunks
        self.attn_type = attn_type

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As upstream's."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("w4a8: outputs of attention that are quantized")
        if attn_metadata is None:  # vLLM warms up
            return output
        tokens = attn_metadata.num_actual_tokens
        output[:tokens] = paged_attention(
            query[:tokens],
            self.blocks(kv_cache, output.shape[-1]),
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            self.scale,
            kind=self.kind,
            value_size=output.shape[-1],
            causal=attn_metadata.causal,
            window=self.sliding_window,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            chunk=self.chunk,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """As upstream's. The metadata has the places of tokens: a block needs the block before, which no slot tells."""
        metadata = get_forward_context().attn_metadata
        metadata = (metadata[0] if isinstance(metadata, list) else metadata)[layer.layer_name]
        tokens = metadata.num_actual_tokens
        paged_attention_write(
            key[:tokens],
            value[:tokens],
            self.blocks(kv_cache, value.shape[-1]),
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            kind=self.kind,
            window=self.sliding_window,
        )

    def blocks(self, kv_cache: torch.Tensor, value_size: int) -> torch.Tensor:
        """See :func:`blocks_of`."""
        return blocks_of(kv_cache, self.kind, self.head_size, value_size)


def attend_to_chunks(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
    """Makes attention in chunks (Llama 4) usual attention, whose operator sees the chunks.

    vLLM cuts a sequence into one for each chunk, with tables of its own. As usual layers they have the pages of all
    tokens, the tables of the other layers, and a cache of the size that the backends here state.
    """
    for layer in model.modules():
        if type(layer) is ChunkedLocalAttention and isinstance(layer.impl, Impl):
            layer.impl.chunk = layer.attention_chunk_size
            layer.attn_backend = layer.attn_backend.__base__  # without vLLM's cuts
            layer.__class__ = Attention


class Int8Impl(Impl):
    """With a cache of int8."""

    kind = "int8"


class BFloat16Impl(Impl):
    """With a cache of bfloat16."""

    kind = "bfloat16"


class Backend(CPUAttentionBackend):
    """The common part of both backends."""

    impl: ClassVar[type[Impl]]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_KINDS)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """As upstream's."""
        return [MultipleOf(BLOCK_TOKENS)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """As upstream's."""
        return list(HEAD_SIZES)

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """As upstream's."""
        return cls.impl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """As upstream's."""
        return MetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The bytes of a token of a head, as whole elements of the cache's type."""
        if spec.state_content_bytes is not None:
            return spec
        block = attention_block_bytes(cls.impl.kind, spec.head_size, spec.head_size_v)
        element = spec.dtype.itemsize
        return replace(spec, state_content_bytes=-(-block // (BLOCK_TOKENS * element)) * element)


class Int8Backend(Backend):
    """With a cache of int8."""

    impl = Int8Impl


class BFloat16Backend(Backend):
    """With a cache of bfloat16."""

    impl = BFloat16Impl


LATENT = "latent"
LATENT_CACHE_DTYPES = ("auto", "bfloat16")  # values of --kv-cache-dtype
# By kind of cache. latent_attention.py adds its own.
BACKENDS = {each.impl.kind: f"{__name__}.{each.__name__}" for each in (Int8Backend, BFloat16Backend)}


def cpu_has_amx_for(vllm_config: Any) -> bool:
    """Whether vLLM computes an engine's latent attention by AMX."""
    chosen = getattr(vllm_config.attention_config.backend, "name", None)
    return torch.cpu._is_amx_tile_supported() and chosen != "CPU_MLA"


def reason_against(asked: Any, vllm_config: Any) -> str | None:
    """Why a layer of an engine, by vLLM's AttentionSelectorConfig, is left to vLLM's attention, or None."""
    if not settings.attends():
        return f"{settings.ATTENTION}=0"
    if asked.use_sparse:
        return "sparse attention"
    if asked.use_mla and cpu_has_amx_for(vllm_config):
        return "latent attention, which vLLM computes by AMX"
    if asked.use_mla and LATENT not in BACKENDS:
        return "latent attention"
    if asked.attn_type != AttentionType.DECODER:
        return f"attention of type {asked.attn_type}"
    if asked.head_size not in (LATENT_SIZES if asked.use_mla else HEAD_SIZES):
        return f"heads of {asked.head_size}"
    kinds = LATENT_CACHE_DTYPES if asked.use_mla else CACHE_KINDS
    if (asked.kv_cache_dtype or "auto") not in kinds:
        return f"a KV cache of {asked.kv_cache_dtype}"
    cache = vllm_config.cache_config
    if (cache.user_specified_block_size or asked.use_mla) and cache.block_size % BLOCK_TOKENS != 0:
        return f"blocks of {cache.block_size} tokens, which are no multiple of {BLOCK_TOKENS}"
    for name in ("use_mm_prefix", "use_per_head_quant_scales", "use_kv_connector", "use_dcp", "use_pcp", "use_rswa"):
        if getattr(asked, name, False):
            return name.removeprefix("use_")
    return None


def forget(arguments: Any) -> None:
    """Clears vLLM's cached answers: they stay for the whole process, and another engine may need others."""
    selector._cached_get_attn_backend.cache_clear()


def register_attention() -> None:
    """Lets the platform answer with the backends here.

    Raises:
        RuntimeError: vLLM's platform or selector is not as expected.
    """
    if getattr(CpuPlatform.get_attn_backend_cls, "w4a8", False):
        return
    for owner, name in ((selector, "_cached_get_attn_backend"), (AttentionBackend, "customize_spec")):
        if not hasattr(owner, name):
            raise RuntimeError(f"{owner.__name__} has no {name}")
    settings.read_arguments(forget)
    stock = CpuPlatform.get_attn_backend_cls.__func__

    @wraps(stock)
    def get_attn_backend_cls(cls: Any, selected: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config is not None and is_ours(config.quant_config):
            reason = reason_against(attn_selector_config, config)
            if reason is None:
                kind = CACHE_KINDS[attn_selector_config.kv_cache_dtype or "auto"]
                kind = LATENT if attn_selector_config.use_mla else kind
                logger().info_once(
                    "w4a8: attention runs here, with a KV cache of %s (%s=0: vLLM's)",
                    "bfloat16 latents" if kind == LATENT else kind,
                    settings.ATTENTION,
                )
                return BACKENDS[kind]
            logger().info_once("w4a8: attention is vLLM's: %s", reason)
        return stock(cls, selected, attn_selector_config, *args, **kwargs)

    get_attn_backend_cls.w4a8 = True
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)

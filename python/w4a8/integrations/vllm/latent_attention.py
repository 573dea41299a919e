"""Multi-head latent attention (MLA: DeepSeek, GLM-4.7-Flash) by this package's operators.

In decode steps the values are the first channels of the keys, in bfloat16. Prompts have keys and values of each head.
Behind cached tokens attention of several new tokens of a sequence is vLLM's.

vLLM's own operator takes pages of 16 tokens, which its platform sets. A page here has a multiple of 64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config.cache import CacheDType
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from w4a8 import ops
from w4a8.integrations.vllm import attention, settings
from w4a8.integrations.vllm.attention import LATENT, LATENT_CACHE_DTYPES
from w4a8.integrations.vllm.config import is_ours

_STOCK_TOKENS = 16  # of a page, of vLLM's operator


def attend_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of sequences over their own tokens alone, which are rounded to bfloat16.

    Args:
        query, key: floats [T, H, D].
        value: floats [T, H, V].
        starts: int32 [sequences + 1], rows of each sequence; the first is 0.
        scale: of scores.

    Returns:
        [T, H, V].
    """
    lengths = starts.diff()
    blocks = (lengths + ops.BLOCK_TOKENS - 1) // ops.BLOCK_TOKENS
    first = blocks.cumsum(0) - blocks
    table = first[:, None] + torch.arange(int(blocks.max()))
    heads, size, value_size = key.shape[1], key.shape[2], value.shape[2]
    bytes_ = ops.attention_block_bytes("bfloat16", size, value_size)
    cache = torch.empty(int(blocks.sum()), heads, bytes_, dtype=torch.uint8)
    pages = (table.clamp(max=len(cache) - 1).int(), lengths.int(), starts.int())
    ops.paged_attention_write(key, value, cache, *pages, kind="bfloat16")
    return ops.paged_attention(query, cache, *pages, scale, kind="bfloat16", value_size=value_size)


class Tables(NamedTuple):
    """Pages and lengths of the sequences of a step."""

    block_table: torch.Tensor  # int32 [sequences, pages]
    seq_lens: torch.Tensor  # int32 [sequences]


def latent_tables(step: Any) -> Tables:
    """Those of vLLM's metadata, which has sequences with new prompts behind the others."""
    decode, prefill = step.decode, step.prefill
    parts = [] if decode is None else [(decode.block_table, decode.seq_lens)]
    if prefill is not None:
        lengths, context = prefill.query_start_loc.diff(), prefill.chunked_context
        parts.append((prefill.block_table, lengths if context is None else lengths + context.context_lens))
    return Tables(*parts[0]) if len(parts) == 1 else Tables(*(torch.cat(each) for each in zip(*parts)))


class LatentImpl(CPUMLAImpl):
    """Attention of a layer."""

    kind: ClassVar[str] = LATENT

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        """As upstream's: float [rows, heads, kv_lora_rank] of one token of each sequence; None."""
        decode = attn_metadata.decode
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out = ops.paged_attention(
            query,
            self.blocks(kv_c_and_k_pe_cache, self.kv_lora_rank),
            decode.block_table,
            decode.seq_lens,
            attn_metadata.query_start_loc[: attn_metadata.num_decodes + 1],
            self.scale,
            kind=LATENT,
            value_size=self.kv_lora_rank,
        )
        return out, None

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """As upstream's, of prompts: output float [rows, heads * v_head_dim]."""
        prefill = attn_metadata.prefill
        fits = self.qk_head_dim in ops.HEAD_SIZES and self.v_head_dim in ops.HEAD_SIZES
        if prefill.chunked_context is not None or not fits:
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)
            return
        rows = self.kv_b_proj(kv_c_normed)[0].view(len(q), self.num_heads, -1)
        k_nope, value = rows.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key = self._concat_k_nope_k_pe(k_nope, k_pe)
        output.copy_(attend_once(q, key, value, prefill.query_start_loc, self.scale).flatten(1))

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """As upstream's. A block needs no other block, so each token is written as the last one of a page."""
        if kv_cache.numel() == 0:  # vLLM warms up
            return
        slots = slot_mapping.flatten()
        key = torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1)
        valid = slots >= 0
        if not valid.all():  # padding
            key, slots = key[valid], slots[valid]
        key = key[:, None]
        page = kv_cache.shape[1]
        ops.paged_attention_write(
            key,
            key[..., : self.kv_lora_rank],
            self.blocks(kv_cache, self.kv_lora_rank),
            (slots // page).int()[:, None],
            (slots % page + 1).int(),
            torch.arange(len(slots) + 1, dtype=torch.int32),
            kind=LATENT,
        )

    def _compute_prefill_context(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, k_scale: Any
    ) -> Any:
        """As upstream's, which reads a cache of whole rows: it gets the pages of the context as rows."""
        prefill = attn_metadata.prefill
        tokens = kv_c_and_k_pe_cache.shape[1]
        used = -(-max(prefill.chunked_context.context_lens_list) // tokens)
        pages, places = prefill.block_table[:, :used].clamp(min=0).unique(return_inverse=True)
        blocks = self.blocks(kv_c_and_k_pe_cache, self.kv_lora_rank)[pages].view(torch.bfloat16)
        items = blocks.view(len(pages), tokens // ops.BLOCK_TOKENS, self.head_size // 2, ops.BLOCK_TOKENS, 2)
        rows = items.transpose(2, 3).reshape(len(pages), tokens, self.head_size).to(kv_c_and_k_pe_cache.dtype)
        metadata = replace(attn_metadata, prefill=replace(prefill, block_table=places.int()))
        return super()._compute_prefill_context(q, rows, metadata, k_scale)

    def blocks(self, kv_cache: torch.Tensor, value_size: int) -> torch.Tensor:
        """uint8 [pages, 1, bytes]: vLLM's [pages, tokens, channels], of which the end is unused in float32."""
        return attention.blocks_of(kv_cache[:, None], LATENT, self.head_size, value_size)


class LatentBackend(CPUMLABackend):
    """As upstream's, with pages of a multiple of 64 tokens."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(LATENT_CACHE_DTYPES)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """As upstream's."""
        return [MultipleOf(ops.BLOCK_TOKENS)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """As upstream's."""
        return block_size is None or block_size % ops.BLOCK_TOKENS == 0

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """As upstream's."""
        return list(ops.LATENT_SIZES)

    @staticmethod
    def get_impl_cls() -> type[CPUMLAImpl]:
        """As upstream's."""
        return LatentImpl


def _takes(vllm_config: Any) -> bool:
    """Whether the backend here runs a model to which vLLM has given the pages of its own operator."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not getattr(model, "use_mla", False) or cache.block_size != _STOCK_TOKENS:
        return False
    if not is_ours(vllm_config.quant_config) or not settings.attends() or attention.cpu_has_amx_for(vllm_config):
        return False
    # A draft model may have latent attention that is not ours: it shares the size of pages.
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        return False
    config, parallel = model.hf_text_config, vllm_config.parallel_config
    whole = parallel.decode_context_parallel_size == 1 and vllm_config.kv_transfer_config is None
    return (
        whole
        and cache.cache_dtype in LATENT_CACHE_DTYPES
        and model.get_head_size() in ops.LATENT_SIZES
        and config.kv_lora_rank % 16 == 0
        and config.kv_lora_rank < model.get_head_size()
    )


def register_latent_attention() -> None:
    """Gives models with latent attention the pages of the backend here, which attention.py answers with.

    Raises:
        RuntimeError: attention.py has not registered itself.
    """
    if not hasattr(CpuPlatform.get_attn_backend_cls, "w4a8"):
        raise RuntimeError("attention is vLLM's")
    if getattr(CpuPlatform.check_and_update_config, "w4a8", False):
        return
    stock = CpuPlatform.check_and_update_config.__func__

    @wraps(stock)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        cache = vllm_config.cache_config
        asked = cache.block_size if cache.user_specified_block_size else ops.BLOCK_TOKENS
        stock(cls, vllm_config)
        if _takes(vllm_config) and asked % ops.BLOCK_TOKENS == 0:
            cache.block_size = asked

    check_and_update_config.w4a8 = True
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    attention.BACKENDS[LATENT] = f"{__name__}.{LatentBackend.__name__}"

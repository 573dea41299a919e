"""All layers of a model in one call of the operator ``decoder_step``, in place of vLLM's forward (docs/decoder.md).

If :mod:`decoder_layers` knows all of a loaded model, the forward of the part without the output layer is replaced, and
not compiled. Other models keep vLLM's forward, and the log says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors

from w4a8.core.product_factors import product_factors
from w4a8.decoder import Decoder, StepThreads
from w4a8.integrations.vllm import ranks, settings
from w4a8.integrations.vllm.decoder_layers import (
    Norms,
    Ropes,
    class_name,
    family_of,
    layer_fields,
    share_latents,
    vllm_attention,
)
from w4a8.integrations.vllm.decoder_parts import Unfit, packed_head
from w4a8.integrations.vllm.latent_attention import latent_tables
from w4a8.integrations.vllm.loaded import before_loading_again
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.state_layers import state_layer_of, step_states

# Methods of speculation that need no hidden states of this model, or those of its last norm, which are its results.
_DRAFTS = ("ngram", "ngram_gpu", "suffix", "draft_model", "mtp")


def attach(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
    """Replaces the forward of the layers of a loaded model (also a draft model), or logs why not."""
    layers, reason = None, reason_against(vllm_config, model_config)
    try:
        if reason is None:
            layers = _in_one_call(model, vllm_config, model_config)
    except (Unfit, RuntimeError, AttributeError) as error:  # the second: sizes that the operator does not have
        reason = str(error) if isinstance(error, (Unfit, RuntimeError)) else f"{type(error).__name__}: {error}"
    stages = not _is_draft(model_config)
    reason = ranks.agree(reason, stages)
    if layers is not None and reason is None:
        reason = ranks.agree(layers.join_ranks(), stages)
    if layers is None or reason is not None:
        logger().info("w4a8: layers run one by one: %s", reason)
        return
    layers.take_over(model)
    is_head = isinstance(layers, HeadInOneCall)
    what = "its layer of guesses runs" if is_head else f"all {len(layers.layers)} layers run"
    logger().info("w4a8: %s in one call (%s=0: one by one)", what, settings.DECODER)


def _in_one_call(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> OneCall:
    text = getattr(model, "language_model", model)  # of a model that also sees
    inner = getattr(text, "model", None)
    is_head = class_name(inner) == family_of(inner).head
    kind = (HeadInOneCall if hasattr(inner, "fc") else GlmHeadInOneCall) if is_head else OneCall
    return kind(text, vllm_config, model_config)


def _is_draft(model_config: Any) -> bool:
    """Whether the model guesses tokens: the last stage has all of it."""
    return model_config.runner_type == "draft"


def reason_against(vllm_config: Any, model_config: Any) -> str | None:
    """Why an engine keeps vLLM's forward for any model; or None."""
    if not settings.decodes():
        return f"{settings.DECODER}=0"
    parallel, speculation = vllm_config.parallel_config, vllm_config.speculative_config
    if getattr(parallel, "prefill_context_parallel_size", 1) != 1:
        return f"prefill_context_parallel_size {parallel.prefill_context_parallel_size}"
    if getattr(parallel, "decode_context_parallel_size", 1) != 1 or getattr(parallel, "use_ubatching", False):
        return "a step that is cut into parts"
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        return "kv_sharing_fast_prefill"
    if vllm_config.lora_config is not None:
        return "LoRA"
    if speculation is not None and speculation.method not in _DRAFTS:
        return f"hidden states for drafts ({speculation.method})"
    if model_config.runner_type not in ("generate", "draft"):
        return f"a {model_config.runner_type} model"
    if getattr(getattr(vllm_config, "aux_output_config", None), "enable_return_routed_experts", False):
        return "experts that are returned"
    return None


class _Head:
    """An output layer that runs in the call of the layers, for the last token of each sequence.

    vLLM asks for the logits of sampled rows. Rows with the same bits have the same logits.
    """

    def __init__(self, layer: Any) -> None:
        """Takes the place of the layer's ``apply``."""
        self._alone = layer.quant_method.apply
        layer.quant_method.apply = self.apply
        self._rows: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None

    def keep(self, rows: torch.Tensor, logits: torch.Tensor) -> None:
        """Keeps rows [sequences, hidden_size] and logits [sequences, vocabulary] of the last step."""
        self._rows, self._logits = rows, logits

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As upstream's. Logits are returned once: the caller may write to them."""
        rows, logits = self._rows, self._logits
        if rows is None or logits is None or bias is not None or x.shape != rows.shape or not torch.equal(x, rows):
            return self._alone(layer, x, bias)
        self._rows = self._logits = None
        return logits


def _of_pictures(positions: torch.Tensor) -> bool:
    """Whether positions [tokens], or [axes, tokens], are not those of a text."""
    return positions.dim() == 2 and not bool((positions == positions[0]).all())


class OneCall:
    """A loaded model whose layers run in one call.

    Attributes:
        attentions: vLLM's attention of each layer, which owns the cache.
        linear: vLLM's linear attention of the other layers, or beside attention.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
        """Reads the modules.

        Raises:
            Unfit: there is no table for a module, or the module differs from the table.
            RuntimeError: sizes that the operator does not have.
        """
        self.model, self.inner = model, getattr(model, "model", None)
        self.positions, self.hidden_size = model_config.max_model_len, model_config.get_hidden_size()
        self.dtype = model_config.dtype
        is_draft = _is_draft(model_config)
        self._is_first, self._is_last = is_draft or ranks.is_first_stage(), is_draft or ranks.is_last_stage()
        self.family = family_of(self.inner)
        config = getattr(self.inner, "config", None)
        refusal = self.family.refusal(config)
        if refusal is not None:
            raise Unfit(refusal)
        if self.family.is_latent and model_config.dtype == torch.float16:
            raise Unfit("latent attention in float16, where vLLM scales rows between layers")
        self._of_transformers = isinstance(self.inner, PreTrainedModel)
        self._find_layers()
        self.embedding_factor = float(getattr(config, "embedding_multiplier", 1.0))  # of Granite and Falcon-H1
        found = (vllm_attention(layer, self.family) for layer in self.layers)
        self.attentions = [each for each in found if each is not None]
        self.linear = [each for each in map(state_layer_of, self.layers) if each is not None]
        self.names = [each.layer_name for each in self.attentions]
        head = getattr(model, "lm_head", None)
        # Guessed tokens want logits of more rows.
        keeps_head = vllm_config.speculative_config is None and packed_head(head) is not None
        self._head_layer, self._head = head if keeps_head else None, None
        # Of a model with pictures, and without the output layer in the call, torch has all threads between the steps.
        self._threads = StepThreads()
        self._sums: tuple[torch.Tensor, Callable[[list[torch.Tensor]], None] | None] | None = None  # of all ranks
        self._kept: list[torch.Tensor] = []  # caches in vLLM's form
        self._caches: list[torch.Tensor] = []  # the same in the operator's form
        self.read()

    def _find_layers(self) -> None:
        """Finds the layers, and what makes rows of tokens."""
        if not hasattr(self.inner, "do_not_compile"):
            raise Unfit("this vLLM compiles models in another way")
        # Those of other stages are missing.
        self.layers = [layer for layer in self.inner.layers if not isinstance(layer, PPMissingLayer)]
        self.embed = self.inner.get_input_embeddings() if self._of_transformers else self.inner.embed_input_ids

    def _last_norm(self, norms: Norms) -> torch.Tensor | None:
        """The weight of the norm behind the layers."""
        return norms.weight(getattr(self.inner, self.family.name("norm")))

    def read(self) -> None:
        """Makes the decoder from the present weights. Norms and tables are copied, packed weights are not.

        Raises:
            Unfit, RuntimeError: as above.
        """
        norms = Norms(self.family.centered)
        ropes = Ropes(self.positions, self.inner.rotary_emb if self._of_transformers else None)
        fields = [layer_fields(layer, self.family, norms, ropes) for layer in self.layers]
        weight = self._last_norm(norms) if self._is_last else None
        head = None if self._head_layer is None else packed_head(self._head_layer)
        decoder = Decoder(weight, head, hidden_size=self.hidden_size, eps=norms.eps, centered=norms.centered)
        factors = product_factors(self.inner.config, ranks.count()) if self.family.scaled else {}
        for layer, linear, experts, layer_input in fields:
            decoder.add_layer(**layer)
            if linear:
                decoder.add_linear_attention(**linear)
            for product, each in factors.items():
                decoder.set_factors(product, each)
            if experts:
                decoder.add_experts(**experts)
            if layer_input:
                decoder.add_layer_input(**layer_input)
        if self.family.is_latent:
            for each, made in zip(self.attentions, fields):
                share_latents(each, made.layer)
        self._set_ranks(decoder)
        self.decoder, self.ropes, self._is_stale = decoder, ropes.tables, False
        self._has_inputs = any(made.layer_input for made in fields)

    def join_ranks(self) -> str | None:
        """Lets ranks add what each of them makes of its part; returns why this one cannot. Every rank calls this."""
        if ranks.count() == 1:
            return None
        try:
            self._sums = ranks.share_memory(Decoder.ranks_bytes(ranks.count()))
            self._set_ranks(self.decoder)
        except RuntimeError as error:
            return str(error)
        return None

    def _set_ranks(self, decoder: Decoder) -> None:
        if self._sums is not None:
            memory, gather = self._sums
            decoder.set_ranks(memory, ranks.own(), ranks.count(), gather=gather)

    def take_over(self, outer: torch.nn.Module) -> None:
        """Replaces the forward of the model's layers. Weights that are loaded later are read before the next step.

        ``outer``: what vLLM runs, this model or one around it that also sees.
        """
        before_loading_again(self.model, self._forget)
        if self._head_layer is not None:
            self._head = _Head(self._head_layer)
        self.inner.do_not_compile = True
        owner = self.model if self._of_transformers else self.inner  # whose forward has vLLM's arguments
        self._stock = owner.forward
        owner.forward = self.forward
        if not (self._is_first and self._is_last):
            self._stock_empty = outer.make_empty_intermediate_tensors
            outer.make_empty_intermediate_tensors = self._empty_rows

    def _empty_rows(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        """What a stage receives (upstream's contract), its rows in float32 as between layers."""
        stock = self._stock_empty(batch_size, dtype, device).tensors
        return IntermediateTensors(stock | {"hidden_states": torch.zeros(batch_size, self.hidden_size, device=device)})

    def _forget(self) -> None:
        self._is_stale = True

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        per_layer_inputs: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """As upstream's: rows [tokens, hidden_size] behind the last norm; of a stage, behind its last layer."""
        if _of_pictures(positions) or any(each is not None for each in more.values()):
            self._threads.restore()
            if per_layer_inputs is not None:
                more["per_layer_inputs"] = per_layer_inputs
            if intermediate_tensors is not None:
                received = intermediate_tensors.items()
                intermediate_tensors = IntermediateTensors({name: each.to(self.dtype) for name, each in received})
            return self._stock(input_ids, positions, intermediate_tensors, inputs_embeds, **more)
        if self._is_first:
            hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
            hidden = hidden if self.embedding_factor == 1 else hidden * self.embedding_factor
            numbers = self._layer_inputs(input_ids, hidden, inputs_embeds, per_layer_inputs)
        else:  # where vLLM's own forward leaves the numbers of layers out
            hidden = intermediate_tensors["hidden_states"]
            numbers = intermediate_tensors["per_layer_inputs"] if self._has_inputs else None
        return self._run(hidden, positions, inputs_embeds is None, numbers)

    def _run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        of_text: bool,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """What ``forward`` returns, of the rows in front of the first layer. numbers: as of :meth:`_layer_inputs`."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, list):
            (metadata,) = metadata
        if not metadata:  # vLLM warms up, and there is no cache yet
            return self._rows(torch.zeros_like(hidden, dtype=self.dtype), numbers)
        if self._is_stale:
            self.read()
        steps = [metadata[name] for name in self.names]
        tokens, starts = steps[0].num_actual_tokens, steps[0].query_start_loc
        if self.family.is_latent:
            known = {id(step): latent_tables(step) for step in steps}
            steps = [known[id(step)] for step in steps]
        pages = [step.block_table for step in steps]
        if all(table is pages[0] for table in pages):
            pages = pages[:1]
        tables = (pages, steps[0].seq_lens, starts)
        places = positions[0] if positions.dim() == 2 else positions
        step = (hidden[:tokens], places[:tokens].long(), self.caches(), tables, self.ropes)
        states = step_states(self.linear, metadata)
        given = None
        if numbers is not None:
            first = 0 if self._of_transformers else self.inner.start_layer
            given = numbers[:tokens, first : first + len(self.layers)].flatten(1)
        if self._head is None or not of_text:
            self._threads.restore()
            threads = 0
        else:
            threads = self._threads.before(tokens)
        dtype = self.dtype if self._is_last else torch.float32
        if self._head is None:
            found = self.decoder.step(*step, states=states, layer_inputs=given, dtype=dtype)
        else:
            found = torch.empty_like(step[0], dtype=dtype)
            # None where each token is the last of its sequence.
            last = None if tokens == len(starts) - 1 else (starts[1:].long() - 1).clamp_(min=0)
            logits = self.decoder.step(*step, last, found, threads, states, given, dtype)
            self._head.keep(found.clone() if last is None else found[last], logits)
        if tokens < len(hidden):
            found = torch.cat([found, found.new_zeros(len(hidden) - tokens, found.shape[1])])
        return self._rows(found, numbers)

    def _rows(self, rows: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor | IntermediateTensors:
        """What ``forward`` returns."""
        more = {} if numbers is None else {"per_layer_inputs": numbers}
        return rows if self._is_last else IntermediateTensors({"hidden_states": rows} | more)

    def _layer_inputs(
        self,
        input_ids: torch.Tensor | None,
        hidden: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
        given: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The numbers [rows, layers, numbers] of all stages; None: there are none. ``given``: with inputs_embeds."""
        if not self._has_inputs:
            return None
        if inputs_embeds is None:
            given = self.inner.get_per_layer_inputs(input_ids)
        return self.inner.project_per_layer_inputs(hidden, given)

    def caches(self) -> list[torch.Tensor]:
        """Of each layer, uint8 [pages, kv_heads, bytes]."""
        now = [each.kv_cache for each in self.attentions]
        if len(self._kept) != len(now) or any(a is not b for a, b in zip(now, self._kept)):
            impls = [each.impl for each in self.attentions]
            self._caches = [impl.blocks(cache, impl.head_size) for impl, cache in zip(impls, now)]
            self._kept = now
        return self._caches


class HeadInOneCall(OneCall):
    """A head for further tokens (MTP), whose layer runs in one call. vLLM's modules make the rows that it takes."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
        """As above."""
        super().__init__(model, vllm_config, model_config)
        if len(self.layers) != 1:
            raise Unfit(f"a head of {len(self.layers)} layers, of which a guess takes one")

    def take_over(self, outer: torch.nn.Module) -> None:
        """As above."""
        super().take_over(outer)
        self.model.do_not_compile = True

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """As upstream's."""
        if _of_pictures(positions) or intermediate_tensors is not None:
            return self._stock(input_ids, positions, hidden_states, intermediate_tensors, inputs_embeds, spec_step_idx)
        inner, embeds = self.inner, self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        parts = [inner.pre_fc_norm_embedding(embeds), inner.pre_fc_norm_hidden(hidden_states)]
        return self._run(inner.fc(torch.cat(parts, -1)), positions, inputs_embeds is None)


class GlmHeadInOneCall(HeadInOneCall):
    """That of GLM-4.5, whose rows are normed with its output layer."""

    def _find_layers(self) -> None:
        parts = list(self.inner.layers.values())
        self._part, self.layers = parts[0], [each.mtp_block for each in parts]
        self.embed = self.inner.embed_input_ids

    def _last_norm(self, norms: Norms) -> None:
        return None

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        previous_hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """As upstream's."""
        part, embeds = self._part, self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        embeds = torch.where(positions.unsqueeze(-1) == 0, 0, embeds)  # as upstream's
        rows = part.eh_proj(torch.cat([part.enorm(embeds), part.hnorm(previous_hidden_states)], -1))
        return self._run(rows, positions, inputs_embeds is None)

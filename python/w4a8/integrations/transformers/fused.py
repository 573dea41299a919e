"""``fuse``: a model whose layers run in one call (docs/decoder.md)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from w4a8.core.memory import move_together
from w4a8.decoder import StepThreads
from w4a8.integrations.transformers.cache import PackedLayer, W4A8Cache
from w4a8.integrations.transformers.families import NotFusedError, Stack
from w4a8.integrations.transformers.fast import fast_attention, latent_cache
from w4a8.integrations.transformers.guard import Guard
from w4a8.integrations.transformers.linear_attention import step_states
from w4a8.nn.packed import PackedLinear

logger = logging.get_logger(__name__)

# Arguments of a forward that change nothing here.
_HARMLESS = ("use_cache", "return_dict", "cache_position")


class _Forward(Guard):
    """``forward`` of one model: the Decoder if possible, otherwise the model's own."""

    def __init__(self, model: torch.nn.Module, kind: str, stack: Stack | None = None) -> None:
        super().__init__(model)
        self.kind = kind
        self.stack = stack  # the layers as a Decoder; None: a copy of the model, which makes its own at the first call
        self._generating = threading.local()

    @property
    def threads(self) -> StepThreads | None:
        """Those of the ``generate`` that the calling thread is in, or None."""
        return getattr(self._generating, "threads", None)

    @threads.setter
    def threads(self, threads: StepThreads | None) -> None:
        self._generating.threads = threads

    def _update(self, begins: bool) -> str | None:
        """Makes the Decoder anew if weights have changed. Why the layers cannot run in one call now, or None.

        ``begins``: before the first step of a text, looks for changes that torch does not count as well.
        """
        stack = self.stack
        if stack is not None and stack.watch.same_modules() and stack.watch.same_weights(begins):
            return None
        reason = None if stack is None else stack.changed()
        if reason is not None:
            return reason
        if stack is not None and stack.watch.same_weights(begins):
            stack.watch.keep_modules()
            return None
        try:
            self.stack = Stack(self._module(), self.kind)
        except NotFusedError as error:
            return str(error)
        return None

    def __reduce__(self) -> tuple[type, tuple[Any, str]]:
        return type(self), (self._module(), self.kind)

    @torch.compiler.disable
    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        model = self._module()
        reason = self._reason(model, attention_mask, position_ids, past_key_values, labels, kwargs)
        if reason is None:
            reason = self._update(past_key_values.get_seq_length() == 0)
        if reason is None and self.stack.limit < sys.maxsize:
            given = input_ids if inputs_embeds is None else inputs_embeds
            last = past_key_values.get_seq_length() + given.shape[1] if position_ids is None else position_ids.max() + 1
            if last > self.stack.limit:
                reason = f"positions from {self.stack.limit} on are computed otherwise"
        if reason is not None:
            logger.warning_once(f"the layers do not run in one call: {reason}")
            if self.threads is not None:
                self.threads.restore()
            return type(model).forward(
                model, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                past_key_values=past_key_values, inputs_embeds=inputs_embeds, labels=labels, use_cache=use_cache,
                logits_to_keep=logits_to_keep, **kwargs,
            )  # fmt: skip
        scales = self.stack.embedding_factor != 1 and (inputs_embeds is None or not self.stack.family.scaled)
        if inputs_embeds is None:
            inputs_embeds = model.get_input_embeddings()(input_ids)
        numbers = self.stack.layer_inputs(model, input_ids, inputs_embeds)
        if scales:
            inputs_embeds = inputs_embeds * self.stack.embedding_factor
        logits = self._run(model, inputs_embeds, numbers, attention_mask, position_ids, past_key_values, logits_to_keep)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    def _reason(
        self, model: Any, mask: Any, position_ids: Any, cache: Any, labels: Any, kwargs: dict[str, Any]
    ) -> str | None:
        """Why the model's own forward takes this call, or None."""
        if not isinstance(cache, W4A8Cache) or cache.kind != self.kind:
            return f"past_key_values is no W4A8Cache of kind {self.kind}"
        for layer in cache.layers:
            is_packed = isinstance(layer, PackedLayer) and layer.stock is None
            keeps_floats = isinstance(layer, CacheLayerMixin) and not is_packed
            if keeps_floats or getattr(layer, "record_past", False):
                return "the cache has layers that are not packed, or whose past states are recorded"
        if position_ids is not None and not _is_text(position_ids):
            return "positions are of pictures"
        if labels is not None or torch.is_grad_enabled():
            return "gradients are on, or labels are given"
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            return "attention_mask is not [batch, tokens]"
        if kwargs.get("return_dict") is False:
            return "return_dict is False"
        for name, value in kwargs.items():
            if name not in _HARMLESS and value is not None and value is not False:
                return f"{name} is given"
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
            return "hidden states or attentions are asked for"
        return None

    def _run(
        self, model: Any, x: torch.Tensor, numbers: torch.Tensor | None, mask: torch.Tensor | None,
        position_ids: torch.Tensor | None, cache: W4A8Cache, keep: int | torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        stack = self.stack
        batch, fresh, hidden = x.shape
        before = cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(before, before + fresh)[None]
        if position_ids.dim() == 3:
            position_ids = position_ids[0]
        positions = position_ids.expand(batch, fresh).reshape(-1)
        step, caches = cache.begin_step(stack.heads, batch, fresh, None if mask is None else mask.bool())
        columns = torch.arange(fresh)
        columns = columns[keep] if isinstance(keep, torch.Tensor) else columns[-keep:] if keep else columns
        wanted = (torch.arange(batch)[:, None] * fresh + columns).reshape(-1)  # of the rows of x
        rows, there = wanted, None
        flat, numbers = x.reshape(-1, hidden), None if numbers is None else numbers.flatten(0, 1)
        if step.rows is not None:  # without padding
            number = torch.full((batch * fresh,), -1)
            number[step.rows] = torch.arange(len(step.rows))
            there = number[wanted] >= 0
            rows, flat, positions = number[wanted][there], flat[step.rows], positions[step.rows]
            numbers = None if numbers is None else numbers[step.rows]
        states = step_states(stack.linear, cache, batch, x.dtype) if stack.linear else None
        ropes = stack.tables(int(positions.max()) + 1 if len(positions) else 1)
        everything = step.rows is None and not isinstance(keep, torch.Tensor) and len(columns) == fresh
        threads = 0 if self.threads is None else self.threads.before(len(flat))
        got = stack.decoder.step(
            flat, positions, [caches[i] for i in stack.caches], step.tables, ropes, None if everything else rows,
            threads=threads, states=states, layer_inputs=numbers,
        )  # fmt: skip
        cache.end_step(fresh)
        if stack.head is not None:
            got = stack.head(got)
        if there is not None:
            got = got.new_zeros(len(wanted), got.shape[1]).index_copy_(0, there.nonzero()[:, 0], got)
        got = got.view(batch, len(columns), -1)
        got = got if stack.logits_divisor == 1 else got / stack.logits_divisor
        got = got if stack.logits_factor == 1 else got * stack.logits_factor
        cap = getattr(model.config, "final_logit_softcapping", None)
        return got if cap is None else torch.tanh(got / cap) * cap


def _is_text(position_ids: torch.Tensor) -> bool:
    """Whether positions [batch, tokens], or [.., batch, tokens] of several axes of a picture, are those of a text."""
    return position_ids.dim() < 3 or bool((position_ids == position_ids[:1]).all())


class _Generate(Guard):
    """``generate`` of one model, with torch's threads as its steps need them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._module()
        forward = vars(model).get("forward")
        if not isinstance(forward, _Forward) or forward.threads is not None:
            return type(model).generate(model, *args, **kwargs)
        forward.threads = StepThreads()
        try:
            return type(model).generate(model, *args, **kwargs)
        finally:
            forward.threads.restore()
            forward.threads = None


def fuse(model: Any, kind: str = "int8") -> Callable[[], None]:
    """Lets a model's layers run in one call, the operator ``decoder_step``, if possible.

    ``generate`` uses a W4A8Cache (:func:`fast_attention`). A call with gradients, with another cache, or for hidden
    states or attentions runs the model's own layers, with one warning. So does each call while a module is replaced or
    has a hook, also in the middle of a text. Weights that have changed are read again.

    Args:
        model: with ``generate``, on a CPU; all linear layers of its decoder are packed.
        kind: of the cache, "int8" or "bfloat16".

    Returns:
        A function that undoes the change.

    Raises:
        ValueError: a part of the model is not known, or has a hook; or as fast_attention.
    """
    is_latent = getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None) is not None
    undo_attention = (latent_cache if is_latent else fast_attention)(model, kind)
    move_together(part.packed for part in model.modules() if isinstance(part, PackedLinear))
    try:
        forward = _Forward(model, kind, Stack(model, kind))
    except NotFusedError:
        if not isinstance(vars(model).get("forward"), _Forward):  # from before
            undo_attention()
        raise
    model.forward, model.generate = forward, _Generate(model)

    def undo() -> None:
        if vars(model).get("forward") is forward:
            del model.forward
            if isinstance(vars(model).get("generate"), _Generate):
                del model.generate
        undo_attention()

    return undo

"""Keys in a GGUF file that may be ignored: with any value, or with some values.

A key of the architecture that is neither read (``Architecture.reads``) nor in these lists is refused by name: the model
may compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, named
from w4a8.checkpoint.gguf_file import Strings
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.core.json_fields import CheckpointError, shorten

_SIZES = "feed_forward_length expert_feed_forward_length expert_shared_count expert_shared_feed_forward_length"
# Keys that change nothing in architectures that do not read them: the reason.
HARMLESS = {
    **dict.fromkeys(_SIZES.split(), "tensors have the size"),
    "expert_group_used_count": "there is one group",
    "attention.head_count_kv": "of the attention that llama.cpp computes of two parts of kv_b",
    "attention.layer_norm_epsilon": "there is no such norm",
    "attention.layer_norm_rms_epsilon": "there is no such norm",
    "attention.sliding_window_pattern": "there is no window",
    "attention.temperature_length": "there is no temperature",
    "rope.dimension_count": "nothing is rotated",
    "rope.scaling.finetuned": "says how the model was made",
    "tensor_data_layout": "says how the model was made",
}
_OFF = "attn_logit_softcapping final_logit_softcapping router_logit_softcapping swiglu_clamp_exp swiglu_clamp_shexp "
_OFF += "expert_count expert_used_count leading_dense_block_count n_deepstack_layers embedding_length_per_layer_input "
_OFF += "attention.clamp_kqv attention.max_alibi_bias attention.shared_kv_layers attention.temperature_scale "
_OFF += "attention.scale rope.dimension_sections rope.scaling.alpha rope.scaling.yarn_log_multiplier"
_ONE = "logit_scale residual_scale embedding_scale expert_group_scale attention.output_scale attention.value_scale "
_ONE += "interleave_moe_layer_step moe_every_n_layers full_attention_interval"
# Keys with values that change nothing in architectures that do not read them; in an array all elements.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF.split(), (0,)),
    **dict.fromkeys(_ONE.split(), (0, 1)),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "norm_top_k_prob": (True,),
}
# Keys that change nothing, in architectures that do not read them, if equal to another key.
EQUAL = {
    "embedding_length_out": "embedding_length",
    "rope.freq_base_swa": "rope.freq_base",
    "rope.dimension_count_swa": "rope.dimension_count",
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
}


def check_keys(keys: Mapping[str, Any]) -> None:
    """Refuses keys of a file that would be ignored and may change numbers.

    Raises:
        CheckpointError: a key of the architecture that is not applied, with a value that matters; or an array of
            strings, of which transformers takes the length for a number. Names the key.
    """
    found, name = Keys(keys), named(keys)
    prefix = f"{found.architecture}."
    for full, value in keys.items():
        key = full.removeprefix(prefix)
        if isinstance(value, Strings) and key in (ARCHITECTURES[name].reads if name else ()):
            raise CheckpointError(f"{full} is {shorten(value)} in the GGUF file, but a number is expected")
        if name is None or key == full or key in ARCHITECTURES[name].reads or key in HARMLESS:
            continue
        allowed = NEUTRAL.get(key, (found.get(EQUAL[key]),) if key in EQUAL else ())
        if key == "attention.sliding_window":  # a window over the whole text is no window
            allowed = (0, value) if found.count("context_length") <= found.count(key, least=0) else (0,)
        if not all(each in allowed for each in np.ravel(value).tolist()):
            known = f"but {' or '.join(map(str, allowed))} is expected: it is not applied"
            what = known if allowed else "which is not known here: it may change what is computed"
            raise CheckpointError(f"{full} is {shorten(value)} in the GGUF file, {what}")

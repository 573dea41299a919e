"""Features of several architectures of GGUF files, and their fields of a config.

A feature is a function of the keys, of the config so far and of the names of the tensors, and returns more fields. A
feature states the keys that it reads, without ``<architecture>.``: keys that no feature reads are refused elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from w4a8.checkpoint.gguf_keys import Keys
from w4a8.core.json_fields import CheckpointError, shorten

Feature = Callable[[Keys, Mapping[str, Any], Sequence[str]], dict[str, Any]]


def reads(names: str) -> Callable[[Feature], Feature]:
    """States the keys that a feature reads."""

    def noted(feature: Feature) -> Feature:
        feature.keys = frozenset(names.split())
        return feature

    return noted


def per_layer(keys: Keys, name: str, layers: int) -> list[int]:
    """A count for each layer; the file has one number, or a list, of which the first ``layers`` elements are taken.

    Raises:
        CheckpointError: a list of fewer elements, or no count.
    """
    value = keys.get(name)
    if not isinstance(value, (list, np.ndarray)):
        return [keys.count(name, least=0)] * layers
    found = np.asarray(value).tolist()[:layers]
    if len(found) != layers or not all(type(each) is int and 0 <= each < 2**31 for each in found):
        key = f"{keys.architecture}.{name}"
        raise CheckpointError(f"{key} is {shorten(value)}, but one count for each of {layers} layers is expected")
    return found


def flags(keys: Keys, name: str, period: int, layers: int) -> list[bool]:
    """A flag for each layer. The file has a list, or a period p: true except in every p-th layer; 0: true in all.

    ``period`` is the default for a missing key. Elements of a list beyond the first ``layers`` are ignored.

    Raises:
        CheckpointError: a list of fewer elements, or no period.
    """
    pattern = keys.get(name, period)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        period = keys.count(name, period, least=0)
        return [period == 0 or layer % period < period - 1 for layer in range(layers)]
    found = [bool(each) for each in pattern][:layers] if hasattr(pattern, "__len__") else []
    if len(found) != layers:
        raise CheckpointError(
            f"{keys.architecture}.{name} is {shorten(pattern)}, but a period or one flag for each of {layers} layers "
            "is expected"
        )
    return found


_ATTENTION = {True: "sliding_attention", False: "full_attention"}


def windows(period: int, default: int = 0) -> Feature:
    """Some layers see a sliding window alone, as llama.cpp has it (llama_hparams::set_swa_pattern).

    Args:
        period: every ``period``-th layer sees the whole text, if the file has a window and no pattern.
        default: the window if the file has none.
    """

    @reads("attention.sliding_window attention.sliding_window_pattern")
    def sliding(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        window = keys.count("attention.sliding_window", default, least=0)
        slides = flags(keys, "attention.sliding_window_pattern", period, config["num_hidden_layers"])
        found = {"layer_types": [_ATTENTION[window > 0 and each] for each in slides]}
        return found | ({"sliding_window": window} if window else {})

    return sliding


@reads("attention.head_count_kv attention.key_length attention.value_length rope.dimension_count")
def heads(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Numbers and sizes of heads that are rotated as a whole."""
    size = keys.number("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    found = {"head_dim": size}
    found["num_key_value_heads"] = keys.number("attention.head_count_kv", config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        _expect(keys, key, size, config["model_type"])
    return found


def _expect(keys: Keys, key: str, expected: float, model: str) -> None:
    """Raises CheckpointError if the key is present with another number."""
    value = keys.number(key, expected)
    if value != expected:
        raise CheckpointError(
            f"{keys.architecture}.{key} is {value} in the GGUF file, but {model} has {expected} there"
        )


@reads("attention.head_count_kv attention.key_length attention.value_length rope.dimension_count")
def heads_in_part(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Numbers and sizes of heads that are rotated in part."""
    rotated = keys.get("rope.dimension_count")
    found = heads(keys.having({"rope.dimension_count": None}), config, tensors)
    part = (found["head_dim"] if rotated is None else keys.number("rope.dimension_count")) / found["head_dim"]
    return found | {"rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": part}}


@reads(
    "attention.kv_lora_rank attention.q_lora_rank attention.key_length attention.value_length attention.key_length_mla "
    "attention.value_length_mla rope.dimension_count rope.scaling.yarn_log_multiplier"
)
def latent_attention(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Multi-head latent attention. ``key_length_mla`` and ``value_length_mla`` are the model's sizes of heads.

    In a file without these keys, ``key_length`` and ``value_length`` are. Else they describe llama.cpp's absorbed form.
    """
    rotated = keys.count("rope.dimension_count")
    key, value = (keys.get(f"attention.{each}_length_mla") for each in ("key", "value"))
    key = keys.count("attention.key_length") if key is None else keys.count("attention.key_length_mla")
    value = keys.count("attention.value_length") if value is None else keys.count("attention.value_length_mla")
    rank = keys.get("attention.q_lora_rank")
    return {
        "num_key_value_heads": keys.count("attention.head_count"),
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "q_lora_rank": None if rank is None else keys.count("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
    }


@reads(
    "ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size attention.recurrent_layers "
    "full_attention_interval"
)
def gated_delta_net(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Layers of linear attention between layers of full attention (Qwen3-Next, Qwen3.5)."""
    layers, value_heads = config["num_hidden_layers"], keys.count("ssm.time_step_rank")
    period = keys.count("full_attention_interval", 4)
    linear = flags(keys, "attention.recurrent_layers", period, layers)
    inner = keys.count("ssm.inner_size")
    if inner % value_heads != 0:
        key = f"{keys.architecture}.ssm.inner_size"
        raise CheckpointError(f"{key} is {inner} in the GGUF file, but a multiple of {value_heads} heads is expected")
    return {
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
    }


@reads("rope.dimension_sections")
def interleaved_sections(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Rotations by time, height and width of an image; the same rotation for text (Qwen3.5)."""
    sections = [int(each) for each in keys.get("rope.dimension_sections", ()) if each]
    more = {"mrope_section": sections, "mrope_interleaved": True} if sections else {}
    return {"rope_parameters": {**config["rope_parameters"], **more}}


_MAMBA = {
    "ssm.conv_kernel": ("conv_kernel", "mamba_d_conv"),
    "ssm.state_size": ("ssm_state_size", "mamba_d_state"),
    "ssm.group_count": ("n_groups", "mamba_n_groups"),
    "ssm.time_step_rank": ("mamba_num_heads", "mamba_n_heads"),
}


def mamba(names: int) -> Feature:
    """Sizes of layers of Mamba 2.

    Args:
        names: of the fields: 0 Nemotron-H's, 1 Granite's.
    """

    @reads(f"{' '.join(_MAMBA)} ssm.inner_size")
    def sizes(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        found = {fields[names]: keys.count(key) for key, fields in _MAMBA.items()}
        inner = keys.count("ssm.inner_size")
        found[("mamba_head_dim", "mamba_d_head")[names]] = inner // keys.count("ssm.time_step_rank")
        # Nemotron-H's heads need not fill a multiple of the hidden size, and its class multiplies them itself.
        return found if names == 0 else {**found, "mamba_expand": inner // config["hidden_size"]}

    return sizes


def layers_without_keys(other: str, usual: str = "full_attention") -> Feature:
    """Layers without heads of keys are of another kind.

    Args:
        other: the name of the other kind in ``layer_types``.
        usual: the name of layers of attention.
    """

    @reads("attention.head_count_kv attention.key_length attention.value_length rope.dimension_count")
    def kinds(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        counts = per_layer(keys, "attention.head_count_kv", config["num_hidden_layers"])
        found = heads(keys.having({"attention.head_count_kv": max(counts)}), config, tensors)
        return found | {"layer_types": [usual if count else other for count in counts]}

    return kinds


def blocks_of_lfm2(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Sizes that published configs have, and vLLM reads."""
    hidden = config["hidden_size"]
    return {"conv_dim": hidden, "block_dim": hidden, "block_ff_dim": config["intermediate_size"]}


@reads("attention.head_count_kv attention.key_length attention.value_length feed_forward_length")
def nemotron(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Layers that are attention, Mamba, or experts or an MLP, and nothing is rotated (Nemotron-H)."""
    layers = config["num_hidden_layers"]
    counts, inner = (per_layer(keys, name, layers) for name in ("attention.head_count_kv", "feed_forward_length"))
    size = heads(keys.having({"attention.head_count_kv": max(counts), "rope.dimension_count": None}), config, tensors)
    experts = "moe" if "n_routed_experts" in config else "mlp"
    kinds = ["attention" if count else experts if width else "mamba" for count, width in zip(counts, inner)]
    found = {**size, "layers_block_type": kinds}
    return found | ({"intermediate_size": max(inner)} if any(inner) else {})


@reads("rope.scaling.finetuned")
def rotates_if_finetuned(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Granite's key for a model without rotation."""
    return {"position_embedding_type": "rope" if keys.typed("rope.scaling.finetuned", bool, True) else None}


def rests_from_rotation(period: int) -> Feature:
    """In each layer of this period nothing is rotated (SmolLM3)."""

    def rests(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        return {"no_rope_layers": [int((layer + 1) % period != 0) for layer in range(config["num_hidden_layers"])]}

    return rests


def attention_scale(largest: int) -> Feature:
    """Of Gemma 2 and 3: by the size of a head. The largest model, known by its layers, has another scale."""

    def scale(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        whole = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": whole if config["num_hidden_layers"] == largest else config["head_dim"]}

    return scale


@reads("final_logit_softcapping")
def soft_caps(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Soft caps of the logits, if the file has one above 0."""
    cap = keys.typed("final_logit_softcapping", float, 0.0)
    return {"final_logit_softcapping": cap} if cap > 0 else {}


def two_rotations(default: float | None = None) -> Feature:
    """Layers with a window have their own base of rotation.

    Args:
        default: if the file has none; None: the base of the other layers.
    """

    @reads("rope.freq_base_swa")
    def rotations(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
        rope = config["rope_parameters"]
        base = keys.number("rope.freq_base_swa", rope["rope_theta"] if default is None else default)
        sliding = {"rope_type": "default", "rope_theta": base}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}

    return rotations


def yarn_of_gpt_oss(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Settings of YaRN that files of gpt-oss lack."""
    rope = config["rope_parameters"]
    more = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if rope["rope_type"] == "yarn" else {}
    return {"rope_parameters": more | rope}


@reads("rope.scaling.yarn_log_multiplier attention.temperature_scale")
def temperature_of_mistral(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Temperature of attention over long texts; and the multiplier, which is stored unchanged, unlike DeepSeek's."""
    rope = dict(config["rope_parameters"])
    multiplier, temperature = (
        keys.typed(name, float, 0.0) for name in ("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")
    )
    if multiplier > 0:
        rope |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    if temperature > 0:
        rope["llama_4_scaling_beta"] = round(temperature, 6)
    return {"rope_parameters": rope}


@reads("attention.sliding_window")
def long_rope(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Of Phi-3: the context of the first training, and a window in all layers, if there is one."""
    context = keys.number("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = keys.count("attention.sliding_window", 0, least=0)
    factor, rope = keys.typed("rope.scaling.attn_factor", float, 1.0), config["rope_parameters"]
    found = {"original_max_position_embeddings": context, "sliding_window": window or None}
    longer = max(1.0, config["max_position_embeddings"] / context)
    usual = math.sqrt(1 + math.log(longer) / math.log(context))  # what classes compute themselves
    return found if abs(factor - usual) < 1e-5 else {**found, "rope_parameters": {**rope, "attention_factor": factor}}


@reads("attention.sliding_window attention.sliding_window_pattern")
def windows_of_exaone4(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Only the larger model has windows, with 64 layers."""
    return windows(4, 4096 if config["num_hidden_layers"] == 64 else 0)(keys, config, tensors)


@reads("attention.sliding_window")
def chunks_of_llama4(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Layers see a chunk of the text; each fourth layer all, without rotation. A window of 0: neither."""
    found = {"use_qk_norm": config["num_local_experts"] != 128}
    chunk = keys.count("attention.sliding_window", 8192, least=0)
    if chunk == 0:
        layers = config["num_hidden_layers"]
        return found | {"attention_chunk_size": None, "no_rope_layers": [1] * layers}
    scaled = {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}
    return found | scaled | {"attention_chunk_size": chunk}


def greedy_or_grouped(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """DeepSeek-V2's name of its router."""
    return {"topk_method": "greedy" if config["n_group"] == 1 else "group_limited_greedy"}


@reads(
    "attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k attention.indexer.types "
    "context_length"
)
def indexer(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """The tokens that layers attend to, by separate scores in some layers (GLM-5)."""
    layers = config["num_hidden_layers"]
    full = [True] * layers
    if keys.get("attention.indexer.types") is not None:
        full = flags(keys, "attention.indexer.types", 0, layers)
    elif config["max_position_embeddings"] >= 1 << 20:
        raise CheckpointError(f"{keys.architecture}.attention.indexer.types is not in the GGUF file")
    return {
        "index_n_heads": keys.count("attention.indexer.head_count"),
        "index_head_dim": keys.count("attention.indexer.key_length"),
        "index_topk": keys.count("attention.indexer.top_k"),
        "indexer_types": ["full" if each else "shared" for each in full],
    }


def norms_of_heads(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Norms of heads, if there are tensors."""
    return {"use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in tensors)}


def output_bias(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Bias of attention's output, if there is a tensor."""
    return {"attention_out_bias": any(name.endswith(".attn_output.bias") for name in tensors)}


def output_layer_bias(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Bias of the output layer, if there is a tensor."""
    return {"lm_head_bias": "output.bias" in tensors}


def last_layer_of_ernie(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Experts up to the last layer."""
    return {"moe_layer_end_index": config["num_hidden_layers"] - 1}


_SWA = "attention.key_length_swa attention.value_length_swa rope.dimension_count_swa rope.freq_base_swa"


@reads(
    f"attention.head_count_kv attention.key_length attention.value_length rope.dimension_count {_SWA} "
    "attention.sliding_window attention.sliding_window_pattern attention.shared_kv_layers feed_forward_length "
    "embedding_length_per_layer_input expert_feed_forward_length"
)
def gemma4(keys: Keys, config: Mapping[str, Any], tensors: Sequence[str]) -> dict[str, Any]:
    """Layers with a window; and layers with larger heads, of which a quarter is rotated."""
    layers, vocabulary = config["num_hidden_layers"], config["vocab_size"]
    found = windows(6)(keys, config, tensors)
    slides = [each == _ATTENTION[True] for each in found["layer_types"]]
    counts, inner = (per_layer(keys, name, layers) for name in ("attention.head_count_kv", "feed_forward_length"))
    near = {count for count, each in zip(counts, slides) if each}
    far = {count for count, each in zip(counts, slides) if not each}
    widths = sorted(set(inner))
    if len(near) > 1 or len(far) > 1 or not (len(widths) == 1 or widths == [widths[0], 2 * widths[0]]):
        raise CheckpointError(f"{keys.architecture}: heads are {counts} and MLPs {inner}, which gemma4 has not")
    rope, size = config["rope_parameters"], keys.count("attention.key_length")
    small = keys.count("attention.key_length_swa", size)
    for key, expected in (("value_length", size), ("value_length_swa", small)):
        _expect(keys, f"attention.{key}", expected, "gemma4")
    for key, expected in (("dimension_count", size), ("dimension_count_swa", small)):
        _expect(keys, f"rope.{key}", expected, "gemma4")
    found |= {
        "head_dim": small,
        "global_head_dim": size,
        "num_key_value_heads": min(near or far),
        "num_global_key_value_heads": min(far) if far and far != near else None,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(widths) == 2,
        "num_kv_shared_layers": keys.count("attention.shared_kv_layers", 0, least=0),
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": vocabulary,
        "attention_k_eq_v": any(
            f"blk.{i}.attn_k.weight" in tensors and f"blk.{i}.attn_v.weight" not in tensors for i in range(layers)
        ),
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, **rope, "rope_type": "proportional"},
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)},
        },
    }
    if keys.get("expert_count"):
        found |= {"enable_moe_block": True, "num_experts": keys.count("expert_count")}
        found |= {"top_k_experts": keys.count("expert_used_count")}
        found |= {"moe_intermediate_size": keys.count("expert_feed_forward_length")}
    return found

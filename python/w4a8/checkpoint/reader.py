"""The layers of a quantized checkpoint, packed and ready to run: experts, and linear layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from w4a8.checkpoint.experts import Ranks, build_all
from w4a8.checkpoint.folder import (
    FolderExperts,
    Module,
    check_input,
    find_layers,
    linear_schemes,
    say_int8,
    without_left_out,
)
from w4a8.checkpoint.gguf_experts import layers_of
from w4a8.checkpoint.gguf_file import GGUFFile, gguf_in
from w4a8.checkpoint.gguf_linear import GGUFLinears
from w4a8.checkpoint.settings import MoESettings, settings_from_config
from w4a8.checkpoint.tensors import CheckpointTensors
from w4a8.core.activation_groups import check_activation_group, in_words
from w4a8.core.json_fields import CheckpointError, read_json
from w4a8.core.memory import on_cpu
from w4a8.formats import find_config, rules_of
from w4a8.nn import W4A8Linear, W4A8MoE, W8A8Linear, linear_from_matrix
from w4a8.progress import progress_bar

logger = logging.getLogger(__name__)
# The log line of a GGUF file.
_PACKED = "packed %d layers of %s: activations rounded to int8 %s"


def load(
    path: str | Path,
    *,
    settings: MoESettings | None = None,
    only: Callable[[str], bool] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    quantize_w4a16: bool = True,
    activation_group: int | None = None,
    w13_interleaved: bool | None = None,
    progress: bool = False,
) -> dict[str, W4A8MoE]:
    """Reads and packs the mixture-of-experts layers of a checkpoint with 4-bit weights, or 8-bit ones beside them.

    GPTQ (versions 1 and 2), AWQ, AutoRound and compressed-tensors, with zero points or without, MXFP4 and NVFP4 (of
    AMD Quark and nvidia-modelopt too), whose experts are linear modules of their own: ``<layer>.experts.<n>.up_proj``,
    ``gate_proj``, ``down_proj`` (or ``w1``, ``w3``, ``w2``, or ``gate_up_proj``); and MXFP4 as gpt-oss has it,
    ``<layer>.experts.gate_up_proj_blocks`` of all experts. Codes stay as they are.

    An expert is packed as soon as it has been read. Memory peaks at the packed layers, a few experts and about 128 MiB
    of mapped files. Of the router only the correction bias is read: a layer takes logits.
    :func:`w4a8.checkpoint.load_linear` reads linear layers.

    Experts may have codes of 8 bits in GPTQ, AutoRound (packed as GPTQ) and weight-only ``pack-quantized``: in some
    layers, or in ``down_proj`` alone, say; all experts of a layer alike. Layers with other codes (left out in
    config.json, weights without scales, other widths) are left out, and the log names them.

    Args:
        path: directory with config.json and model.safetensors (or several files and their index); or a GGUF file, the
            first of a split one, or a directory with one.
        settings: instead of those in config.json (``read_settings``), if these are missing or wrong.
        only: whether to load a layer, by its name, ``model.layers.0.mlp.experts`` say.
        tp_rank, tp_size: tensor parallel: this rank's slice of each expert.
        ep_rank, ep_size: expert parallel: only this rank's experts are read, and files with others may be missing.
        quantize_w4a16: run weight-only (W4A16) checkpoints with int8 activations, as vLLM with the plugin and
            transformers with ``W4A8Config`` do; the log says so. False refuses such checkpoints, but no GGUF file.
        activation_group: as in :class:`w4a8.nn.QuantOptions`, but None is -1 if the checkpoint says that inputs are
            quantized per token (W4A8).
        w13_interleaved: rows of ``gate_up_proj`` alternate gate and up, as in gpt-oss; None: by the settings. Without
            effect on separate gate and up projections.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Layers by name, in the order of the model, on the CPU. With tensor or expert parallelism the outputs of all
        processes are to be added.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: ``tp_size`` and ``ep_size`` are both above 1, ``ep_rank`` is outside [0, ``ep_size``), ``tp_size``
            does not divide the intermediate size, or ``activation_group`` does not fit.
        CheckpointError: a tensor is missing or has the wrong dtype, shape or values; names the key. No layer of experts
            has weights that are read here; gives the reason.
        NotImplementedError: the operator cannot run a layer, as when tensor parallelism cuts groups; names the sizes.
    """
    if tp_size > 1 and ep_size > 1:
        raise ValueError(
            f"tp_size is {tp_size} and ep_size is {ep_size}, but one of them must be 1: experts are cut or distributed"
        )
    check_activation_group(activation_group)
    file, ranks = gguf_in(path), Ranks(tp_rank, tp_size, ep_rank, ep_size)
    if file is not None:
        with on_cpu():
            loaded = build_all(layers_of(GGUFFile(file), settings, only), ranks, activation_group, progress)
        logger.info(_PACKED, len(loaded), file, in_words(activation_group))
        return loaded
    config = read_json(Path(path) / "config.json")
    rules = rules_of(find_config(config, Path(path)))
    settings = settings if settings is not None else settings_from_config(config)
    tensors = CheckpointTensors(path)
    names = find_layers(tensors.keys(), only)
    if not names:
        raise CheckpointError(
            f"{path} holds no tensors of experts (<layer>.experts.<n>.<projection>.weight); "
            "fused three-dimensional experts must be linearized before they are quantized"
        )
    interleaved = settings.w13_interleaved if w13_interleaved is None else w13_interleaved
    with on_cpu():
        layers = [FolderExperts(tensors, rules, settings, ranks, interleaved, each) for each in names]
        kept = without_left_out({layer.name: layer.reason_left_out for layer in layers})
        layers = [layer for layer in layers if layer.name in kept]
        for layer in layers:
            layer.check_files()
        for layer in layers:
            layer.check(quantize_w4a16)
        loaded = build_all(layers, ranks, activation_group, progress)
    say_int8((scheme for layer in layers for scheme in layer.schemes.values()), activation_group)
    logger.info("packed %d layers of %s", len(loaded), path)
    return loaded


def load_linear(
    path: str | Path,
    *,
    only: Callable[[str], bool] | None = None,
    quantize_w4a16: bool = True,
    activation_group: int | None = None,
    progress: bool = False,
) -> dict[str, W4A8Linear | W8A8Linear]:
    """Reads and packs the quantized linear layers of a checkpoint, all but those of experts.

    The counterpart of :func:`w4a8.load`, for the same formats, and 8-bit codes if the format has them. Layers are read
    one by one. The log names layers of other kinds, which are left out.

    Args:
        path: directory with config.json and model.safetensors (or several files and their index), or a GGUF file as
            for :func:`w4a8.load`: with transformers' names, and rows of q and k in its order.
        only: whether to load a layer, by its name, ``model.layers.0.self_attn.q_proj`` say.
        quantize_w4a16: as in :func:`w4a8.load`.
        activation_group: as in :func:`w4a8.load`.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        Layers by name, in the order of the file, on the CPU: W4A8Linear, or W8A8Linear. Empty if none is quantized.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: ``activation_group`` is no possible value.
        CheckpointError: a tensor is missing or has the wrong dtype, shape or values; names the key. No quantized layer
            has bits that are read here; gives the reason for the first.
    """
    check_activation_group(activation_group)
    file = gguf_in(path)
    if file is not None:
        linears = GGUFLinears(GGUFFile(file))
        found = {name: tensor for name, tensor in linears.layers().items() if only is None or only(name)}

        def read(name: str) -> Callable[[], W4A8Linear | W8A8Linear]:
            return partial(linears.linear, [found[name]], activation_group)

    else:
        config = read_json(Path(path) / "config.json")
        tensors = CheckpointTensors(path)
        with on_cpu():
            found = linear_schemes(tensors, rules_of(find_config(config, Path(path))), only)

        def read(name: str) -> Callable[[], W4A8Linear | W8A8Linear]:
            check_input(found[name], name, quantize_w4a16)
            matrix = Module(tensors, name).matrix(found[name], has_bias=f"{name}.bias" in tensors)
            return partial(linear_from_matrix, matrix, found[name].wanted_activation_group(activation_group))

    loaded: dict[str, W4A8Linear | W8A8Linear] = {}
    with on_cpu(), progress_bar(len(found), progress, "layer", "packing linear layers") as advance:
        for name in found:
            pack = read(name)
            try:
                loaded[name] = pack()
            except (ValueError, RuntimeError) as error:  # sizes or scales that the operators do not have
                raise CheckpointError(f"{name}: {error}") from error
            advance()
    if file is not None:
        logger.info(_PACKED, len(loaded), file, in_words(activation_group))
    else:
        say_int8(found.values(), activation_group)
    return loaded

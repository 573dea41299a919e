"""Loads MODEL, of any format, by transformers: for ``pack``, ``chat``, ``bench`` and ``inspect``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from w4a8.checkpoint.counts import check_counts
from w4a8.checkpoint.gguf_file import GGUFFile, is_gguf
from w4a8.checkpoint.gguf_linear import GGUFLinears
from w4a8.checkpoint.routers import EXPERT_COUNTS
from w4a8.checkpoint.tensors import files_of, read_index
from w4a8.command import extras
from w4a8.command.headers import Header, read_headers
from w4a8.command.report import UsageError, number
from w4a8.core.json_fields import json_field, read_json
from w4a8.formats.float8 import has_float8
from w4a8.formats.packed_directory import METHOD
from w4a8.formats.rules import config_in
from w4a8.progress import progress_bar
from w4a8.quantization import QuantizationReport, quantize_
from w4a8.quantization.texts import OWN, own_text, windows

# Options of rounding floats: name on the command line, field of W4A8Config, arguments of ``add_argument``.
_ROUNDING = (
    ("--group-size", "group_size", {"type": int, "metavar": "N", "help": "weights that share a scale (32)"}),
    ("--values", "values", {"choices": ("int4", "e2m1", "int6", "int8"), "help": "int4 (the default); e2m1: MXFP4's"}),
    (
        "--bits",
        "bits",
        {
            "type": number(float, 4, 9),
            "metavar": "B",
            "help": "of a weight on average: 5, say; what matters more gets more of them",
        },
    ),
    ("--zero-points", "symmetric", {"action": "store_const", "const": False, "help": "of int4, for each group"}),
    (
        "--scale-dtype",
        "scale_dtype",
        {"choices": ("float32", "bfloat16"), "help": "of scales (float32; with --bits bfloat16)"},
    ),
    ("--effort", "effort", {"type": int, "choices": (0, 1, 2), "help": "of the search for good scales (2)"}),
    ("--skip", "skip", {"action": "append", "metavar": "NAME", "help": "a module to leave float, or re:PATTERN"}),
)
OWN_CODE = "is of code of its own (auto_map), which w4a8 does not run"
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_NO_CODE = {"trust_remote_code": False}  # without it transformers asks the user
# Arguments of ``load`` when no option is given.
DEFAULTS = argparse.Namespace(activation_group=None, **{field: None for _, field, _ in _ROUNDING})


def add_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the options of rounding floats and of activations. Returns the group of the options of rounding."""
    group = parser.add_argument_group("rounding of floats (docs/quantization.md)")
    for name, field, how in _ROUNDING:
        group.add_argument(name, dest=field, default=None, **how)
    parser.add_argument(
        "--activation-group",
        type=int,
        choices=(-1, 32, 64, 128),
        help="values of an activation that share a scale, -1 is all of a token; the default is 32 where it fits, and "
        "what a packed directory or a W4A8 checkpoint says",
    )
    return group


def import_transformers() -> Any:
    """The package transformers, with the quantizer registered. Its progress bars are for terminals, and leave nothing.

    Raises:
        ImportError: transformers is not installed, or not as expected; says what to do.
    """
    shows = sys.stderr.isatty()
    with progress_bar(1, shows and "transformers" not in sys.modules, "package", "importing transformers"):
        try:
            import transformers
        except ImportError:
            raise ImportError(f"this needs transformers: {extras.TRANSFORMERS}") from None
        import w4a8.integrations.transformers  # noqa: F401 (registers the quantizer)
    if not shows:
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_tqdm_hook(lambda bar, args, options: bar(*args, **{**options, "leave": False}))
    return transformers


def method_of(path: Path) -> str | None:
    """How a model is quantized: ``gguf``, METHOD (packed) or another tool's method; None: its weights are floats."""
    if is_gguf(path):
        return "gguf"
    source = config_in(path)
    return None if source is None else str(source.get("quant_method"))


def is_rounded(path: Path) -> bool:
    """Whether the weights are floats, of 8 bits or more. Floats are rounded while they are loaded."""
    if is_gguf(path):
        return False
    source = config_in(path)
    return source is None or has_float8(source)


def load(
    path: Path, args: argparse.Namespace, text: str | None = None, headers: Mapping[str, Header] | None = None
) -> tuple[Any, QuantizationReport | None]:
    """The packed model, and the report of what became of its layers; a packed directory has no report (None).

    Args:
        path: of a folder or a GGUF file.
        args: with the options of :func:`add_options`, and perhaps ``device``, which everything but the experts goes to.
        text: for calibration; OWN: text that the model writes itself; None: no calibration.
        headers: of the folder's tensors; None: they are read.

    Raises:
        UsageError: options that have no effect on this model.
        ValueError: the model cannot be loaded, or lacks a weight, whose numbers transformers would make up.
    """
    given = {field: getattr(args, field) for _, field, _ in _ROUNDING if getattr(args, field) is not None}
    method, activation_group = method_of(path), args.activation_group
    packed = method == METHOD
    useless = [] if is_rounded(path) else [name for name, field, _ in _ROUNDING if field in given]
    useless += ["--calibration"] * (text is not None and method is not None)
    if useless:
        names = ", ".join(useless)
        raise UsageError(f"{path} is quantized already ({method}): leave {names} out")
    if packed and activation_group is not None:
        raise UsageError(f"{path} is packed already: leave --activation-group out")
    if is_gguf(path):
        GGUFLinears(GGUFFile(path))  # an unknown architecture is an error that lists the known ones
    else:
        _check_config(path, headers)
    transformers = import_transformers()
    from w4a8.integrations.transformers import W4A8Config
    from w4a8.integrations.transformers.names import refuse_codes

    folder, options = (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (path, {})
    config = W4A8Config(activation_group=activation_group, **given)
    if text is not None:
        options["dtype"] = "auto"
    elif not packed:
        options["quantization_config"] = config
    if getattr(args, "device", None) is not None:
        options["device_map"] = args.device
        if is_gguf(path):  # transformers would make float32 of it
            options["dtype"] = "bfloat16"
    try:
        loader = transformers.AutoModelForCausalLM if is_gguf(path) else _class_of(transformers, folder)
        model, info = loader.from_pretrained(folder, output_loading_info=True, **_NO_CODE, **options)
    except (ValueError, OSError, ImportError, RuntimeError) as error:  # their messages say what is wrong
        raise _without_code(error, path) from error
    except Exception as error:
        raise ValueError(f"transformers cannot load {path}: {type(error).__name__}: {error}") from error
    vars(model.config).pop("auto_map", None)  # the class is transformers' own
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"{path} has no tensor for {', '.join(missing[:3])}{', ...' if missing[3:] else ''}")
    if text is None:
        return model, getattr(model.hf_quantizer, "report", None)
    refuse_codes(model, [str(folder / name) for name in files_of(folder, read_index(folder))])
    tokenizer = None if text == OWN else tokenizer_of(path)
    if tokenizer is None and text != OWN:
        raise ValueError(f"{path} has no tokenizer, which --calibration needs")
    skip = {"skip": config.skip, "default_skip": config.default_skip}
    floats = {name: tensor.dtype for name, tensor in _tensors(model) if tensor.is_floating_point()}
    model.float().eval()  # few CPUs are fast at bfloat16
    batches = own_text(model) if tokenizer is None else windows(tokenizer, text)
    report = quantize_(model, config.quant_options(), calibration=batches, progress=sys.stderr.isatty(), **skip)
    for name, tensor in _tensors(model):
        if name in floats:
            tensor.data = tensor.data.to(floats[name])
    model.config.quantization_config = config
    return model, report


def top_k(get: Callable[[str], Any]) -> int | None:
    """Experts of a token, as a config says; None: it says nothing.

    Args:
        get: the value of a field by its name; None: there is no such field.
    """
    return next((value for value in map(get, TOP_K) if isinstance(value, int)), None)


def speed_up(model: Any) -> list[str]:
    """Makes all layers run in one call; in an unknown family of models, replaces attention alone (cache of int8).

    Returns:
        Why not, in sentences for the user.
    """
    from w4a8.integrations.transformers import fast_attention, fuse

    notes = []
    try:
        fuse(model)
    except ValueError as error:
        notes.append(f"the layers run one by one: {error}")
        try:
            fast_attention(model)
        except ValueError as reason:
            notes.append(f"attention is transformers' own: {reason}")
    return notes


def _without_code(error: Exception, path: Path) -> Exception:
    """The error of transformers; if it asks to trust code, an error that says what to do."""
    if "trust_remote_code" not in str(error):
        return error
    return ValueError(
        f"{path} {OWN_CODE}. If you trust the code: in Python "
        "from_pretrained(..., trust_remote_code=True, quantization_config=W4A8Config())"
    )


def _check_config(folder: Path, headers: Mapping[str, Header] | None) -> None:
    """Compares config.json with itself and the safetensors files, before transformers makes lists of so many."""
    config, source = read_json(folder / "config.json"), config_in(folder)
    json_field(config, "architectures", list, "config.json: architectures")
    if source is not None and "quant_method" not in source and {"group_size", "bits"} <= {*source}:
        raise ValueError(
            f"{folder} is in MLX's format, which is not read here: take the original model, or one in GGUF, GPTQ or AWQ"
        )
    text = json_field(config, "text_config", dict, "config.json: text_config") or config
    for name, value in text.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"config.json: {name} is nan, but a number is expected")
    experts = [text[name] for name in EXPERT_COUNTS if isinstance(text.get(name), int)]
    for name in TOP_K:
        if isinstance(text.get(name), int) and any(count > 0 and not 0 < text[name] <= count for count in experts):
            raise ValueError(f"config.json: {name} is {text[name]}, but 1..{experts[0]} is expected")
    if headers is None:
        headers = read_headers(folder) if files_of(folder, read_index(folder)) else {}
    if headers:
        shapes = {name: header.shape for name, header in headers.items()}
        check_counts(config, shapes, len(shapes), "config.json: ")


def _tensors(model: Any) -> list[tuple[str, Any]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _class_of(transformers: Any, folder: Path) -> Any:
    """AutoModelForCausalLM, or, for a config unknown to it (models that see images), the class in config.json."""
    auto, config = transformers.AutoModelForCausalLM, transformers.AutoConfig.from_pretrained(folder, **_NO_CODE)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    return named if is_model and type(config) not in auto._model_mapping else auto


def tokenizer_of(path: Path) -> Any:
    """The model's tokenizer; None: the model has no tokenizer.

    Raises:
        ValueError: transformers cannot make the tokenizer; says why.
    """
    keys = GGUFFile(path).keys if is_gguf(path) else None
    if keys is not None:
        there = "tokenizer.ggml.tokens" in keys
    else:
        there = any(next(path.glob(pattern), None) for pattern in ("tokenizer*", "vocab*", "*.model", "*.tiktoken"))
    if not there:
        return None
    transformers = import_transformers()
    try:
        if keys is None:
            return transformers.AutoTokenizer.from_pretrained(path, **_NO_CODE)
        from w4a8.integrations.transformers.gguf_tokenizer import tokenizer_of as of_gguf

        return of_gguf(path, keys)
    except Exception as error:  # transformers raises many classes
        reason = f"{type(error).__name__}: {_without_code(error, path)}"
        raise ValueError(f"transformers cannot make the tokenizer of {path} ({reason})") from error

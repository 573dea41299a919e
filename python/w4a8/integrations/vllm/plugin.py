"""Decides whether the plugin runs layers, and registers it with vLLM. Only :func:`activate` imports vLLM."""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.util import find_spec

from w4a8.integrations.vllm import compile_cache, settings
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.selftest import problems
from w4a8.integrations.vllm.versions import reasons_against, untested

# Other registrations: name in a warning, module of this package, function.
PARTS = (
    ("read packed directories", "packed_layers", "register_packed_directories"),
    ("read GGUF files", "gguf", "register_gguf"),
    ("run experts without a gate", "moe", "allow_no_gate"),
    ("cut projections of Mamba-2", "state_projections", "register_state_projections"),
    ("compute attention", "attention", "register_attention"),
    ("compute latent attention", "latent_attention", "register_latent_attention"),
    ("let replicas compute alone", "replicas", "register_replicas"),
    ("keep the random numbers of seeds", "seeds", "register_seeds"),
    ("begin prompts of one token beside guesses", "guesses", "register_guesses"),
    ("read settings of additional_config", "settings", "read_arguments"),
)
# The same, of functions for `after_loading`, in their order for each model, and for each that is quantized here.
ACTIONS = (
    ("say what runs in a loaded model", "loaded", "say_what_is_loaded"),
    ("move small matrices together", "loaded", "move_weights_together"),
    ("give LoRA a stand-in for packed weights", "loaded", "give_stand_ins"),
)
OUR_ACTIONS = (
    ("compute linear attention", "linear_attention", "attach"),
    ("compute Mamba-2 and short convolutions", "mamba", "attach"),
    ("give heads for further tokens their positions", "draft_heads", "attach"),
    ("attend to chunks", "attention", "attend_to_chunks"),
    ("watch ranks of other machines", "hosts", "watch"),
    ("let shared memory go with ranks", "ranks", "unname_memory"),
    ("share the sums of ranks", "ranks", "share_sums"),
    ("run all layers in one call", "one_call", "attach"),
)

_state = {"done": False}


def _goes_on_without(mode: str) -> bool:
    """Whether vLLM runs without the plugin; logs why."""
    import vllm

    log, off = logger(), settings.SWITCH
    reasons = reasons_against(vllm.__version__, platform.machine())
    if reasons and mode != "1":
        log.warning(
            "w4a8: vLLM goes on without the plugin: %s. %s=1 takes over all the same, %s=0 silences this.",
            "; ".join(reasons),
            off,
            off,
        )
        return True
    found = problems()
    if found:
        log.warning("w4a8: vLLM goes on without the plugin, whose self-test failed: %s", "; ".join(found))
        return True
    problem = untested(vllm.__version__)
    if problem is not None:
        log.warning("w4a8: %s; its self-test passed, so it takes over (%s=0: not)", problem, off)
    return False


def _activate() -> None:
    log, mode = logger(), settings.mode()
    if mode == "0":
        log.info("w4a8: off (%s=0)", settings.SWITCH)
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        log.debug("w4a8: nothing to do, vLLM does not run on the CPU")
        return
    settings.check()  # a bad value should be told now, not at the first layer
    if not settings.runs_w4a16():
        log.info("w4a8: leaves weight-only models to vLLM (%s=0)", settings.W4A16_SWITCH)
    if _goes_on_without(mode):
        return

    compile_cache.name_after_the_plugin()
    compile_cache.load_from_disk()
    # From here on some classes are registered, so a warning names the class that fails.
    configs = import_module("w4a8.integrations.vllm.configs")
    for cls, (_, _, names) in configs.CONFIGS.items():
        try:
            _register(getattr(configs, cls), names)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.warning("w4a8: leaves %s to vLLM, which is not as expected: %s", names[0], reason)
    for row in PARTS + ACTIONS + OUR_ACTIONS:
        what, module, function = row
        if module == "gguf" and not settings.runs_w4a16():  # GGUF files are weight-only
            continue
        if module == "latent_attention" and find_spec("vllm.v1.attention.backends.mla.cpu_mla") is None:
            continue  # this vLLM has no latent attention on CPUs
        try:
            found = getattr(import_module(f"w4a8.integrations.vllm.{module}"), function)
            if row in PARTS:
                found()
            else:
                import_module("w4a8.integrations.vllm.loaded").after_loading(found, row in ACTIONS)
        except Exception as error:
            log.warning("w4a8: cannot %s here: %s: %s", what, type(error).__name__, error)


def _register(config: type, names: tuple[str, ...]) -> None:
    """Registers a configuration class for the names that vLLM knows: vLLM would ask new names before its own."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    known = [name for name in names if name in QUANTIZATION_METHODS]
    for name in known:
        register_quantization_config(name)(config)
    if not known:
        logger().info("w4a8: this vLLM has no quantization method %s", " or ".join(names))


def activate() -> None:
    """See :func:`w4a8.integrations.vllm.register`."""
    if _state["done"]:
        return
    _state["done"] = True
    try:
        _activate()
    except Exception as error:
        logger().warning("w4a8: vLLM goes on without the plugin: %s: %s", type(error).__name__, error)

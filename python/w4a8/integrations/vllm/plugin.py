"""Decides whether to take over, and registers the configuration class with vLLM if so."""

from __future__ import annotations

import platform
from importlib import import_module

from w4a8.integrations.vllm import compiled, settings
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.selftest import problems
from w4a8.integrations.vllm.versions import reasons_against, untested

# (module of this package, its class, names under which vLLM looks it up)
CONFIGS = (
    ("config", "W4A8CompressedTensorsConfig", ("compressed-tensors",)),
    ("config_gptq", "W4A8GPTQConfig", ("auto_gptq", "gptq", "gptq_marlin")),
    ("config_awq", "W4A8AWQConfig", ("auto_awq", "awq", "awq_marlin")),
    ("config_inc", "W4A8INCConfig", ("inc",)),
    ("config_gpt_oss", "W4A8GptOssConfig", ("gpt_oss_mxfp4",)),
    ("config_modelopt", "W4A8ModelOptConfig", ("modelopt_fp4",)),
    ("config_modelopt", "W4A8ModelOptMixedConfig", ("modelopt_mixed",)),
    ("config_quark", "W4A8QuarkConfig", ("quark",)),
)

_state = {"done": False}


def _activate() -> None:
    log = logger()
    mode = settings.mode()
    if mode == "0":
        log.info("w4a8: off (%s=0)", settings.SWITCH)
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        log.debug("w4a8: nothing to do, vLLM does not run on the CPU")
        return
    import vllm

    settings.check()  # a bad value should be told now, not at the first layer
    if not settings.runs_w4a16():
        log.info("w4a8: leaves weight-only models to vLLM (%s=0)", settings.W4A16_SWITCH)
    reasons = reasons_against(vllm.__version__, platform.machine())
    if reasons and mode != "1":
        log.warning(
            "w4a8: vLLM goes on without the plugin: %s. %s=1 takes over all the same, %s=0 silences this.",
            "; ".join(reasons),
            settings.SWITCH,
            settings.SWITCH,
        )
        return
    found = problems()
    if found:
        log.warning("w4a8: vLLM goes on without the plugin, whose self-test failed: %s", "; ".join(found))
        return

    problem = untested(vllm.__version__)
    if problem is not None:
        log.warning("w4a8: %s; its self-test passed, so it takes over (%s=0: not)", problem, settings.SWITCH)

    compiled.name_after_the_plugin()
    compiled.load_from_disk()
    # From here on some classes are registered, so what fails is said of the one that fails.
    for module, cls, names in CONFIGS:
        try:
            _register(module, cls, names)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.warning("w4a8: leaves %s to vLLM, which is not as expected: %s", names[0], reason)
    _try("read packed directories", "packed_config", "register")
    if settings.runs_w4a16():  # GGUF files are weight-only
        _try("read GGUF files", "gguf", "register")
    _try("compute attention", "attention", "register")
    _try("read settings of additional_config", "arguments", "read_arguments")
    _try("say what runs in a loaded model", "summary", "say_what_is_loaded")
    _try("move small matrices together", "loaded", "move_weights_together")
    _try("run all layers in one call", "decoder", "register")


def _try(what: str, module: str, function: str) -> None:
    """Calls a function of this package; what fails is said, and the rest goes on."""
    try:
        getattr(import_module(f"w4a8.integrations.vllm.{module}"), function)()
    except Exception as error:
        logger().warning("w4a8: cannot %s here: %s: %s", what, type(error).__name__, error)


def _register(module: str, cls: str, names: tuple[str, ...]) -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    config = getattr(import_module(f"w4a8.integrations.vllm.{module}"), cls)
    known = [name for name in names if name in QUANTIZATION_METHODS]  # a new name would be asked before vLLM's own
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

"""When the plugin takes over and when it does not. Needs vLLM's modules, but no engine."""

import logging
import os
import pickle
import pkgutil
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
import tool_formats
import torch
from conftest import environment
from layers import chosen

from w4a8.formats import rules_of
from w4a8.integrations.vllm import configs, plugin, selftest, settings
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod, W4A8LinearScheme


@pytest.fixture
def fresh(monkeypatch):
    """The plugin as in a new process, and what it warns of."""
    from vllm import envs
    from vllm.model_executor.layers import quantization

    warnings, infos = [], []

    class Log:
        def warning(self, message, *args):
            warnings.append(message % args)

        def info(self, message, *args):
            infos.append(message % args)

        def debug(self, *args):
            pass

    monkeypatch.setattr(plugin, "logger", Log)
    monkeypatch.setitem(plugin._state, "done", False)
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    without = {name: read for name, read in envs.environment_variables.items() if name != settings.SWITCH}
    monkeypatch.setattr(envs, "environment_variables", without)
    for name in ("W4A8_VLLM", "W4A8_VLLM_W4A16"):
        monkeypatch.delenv(name, raising=False)

    def activate() -> str:
        plugin.activate()
        return quantization.get_quantization_config("compressed-tensors").__name__

    activate.warnings, activate.infos = warnings, infos
    return activate


def test_takes_over(fresh):
    assert fresh() == "W4A8CompressedTensorsConfig"
    assert fresh() == "W4A8CompressedTensorsConfig"  # vLLM may call it again
    assert fresh.warnings == fresh.infos == []


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        *((name, "W4A8GPTQConfig") for name in ("gptq", "auto_gptq", "gptq_marlin")),
        *((name, "W4A8AWQConfig") for name in ("awq", "auto_awq", "awq_marlin")),
        ("inc", "W4A8INCConfig"),
        ("gpt_oss_mxfp4", "W4A8GptOssConfig"),
        ("modelopt_fp4", "W4A8ModelOptConfig"),
        ("modelopt_mixed", "W4A8ModelOptMixedConfig"),
        ("quark", "W4A8QuarkConfig"),
    ],
)
def test_takes_over_weight_only_formats(fresh, name, cls):
    """Pickled, as vLLM's worker processes get them."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    fresh()
    found = get_quantization_config(name)
    assert found.__name__ == cls and pickle.loads(pickle.dumps(found)) is found


def test_a_format_that_moved(fresh, monkeypatch):
    """The others are taken over all the same."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    monkeypatch.delitem(vars(configs), "W4A8INCConfig", raising=False)
    monkeypatch.setitem(configs.CONFIGS, "W4A8INCConfig", (configs.INCLayers, "moved.INCConfig", ("inc",)))
    assert fresh() == "W4A8CompressedTensorsConfig"
    assert get_quantization_config("inc").__name__ == "INCConfig"
    assert get_quantization_config("gptq").__name__ == "W4A8GPTQConfig"
    (warning,) = fresh.warnings
    assert warning.startswith("w4a8: leaves inc to vLLM, which is not as expected: ModuleNotFoundError: ")


@pytest.mark.parametrize("error", [AttributeError, TypeError, ValueError, RuntimeError])
def test_a_format_that_vllm_does_not_take(fresh, monkeypatch, error):
    """Whatever goes wrong with one of them, the warning says what is left to vLLM: nothing but that."""
    from vllm.model_executor.layers import quantization

    right = quantization.register_quantization_config

    def register(name):
        if name == "inc":
            raise error("moved")
        return right(name)

    monkeypatch.setattr(quantization, "register_quantization_config", register)
    assert fresh() == "W4A8CompressedTensorsConfig"
    assert quantization.get_quantization_config("inc").__name__ == "INCConfig"
    assert quantization.get_quantization_config("quark").__name__ == "W4A8QuarkConfig"
    assert fresh.warnings == [f"w4a8: leaves inc to vLLM, which is not as expected: {error.__name__}: moved"]


def test_packed_directories_that_cannot_be_read(fresh, monkeypatch):
    """Nothing of them is registered then, and everything else is taken over."""
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    monkeypatch.delattr(DefaultModelLoader, "get_all_weights")
    assert fresh() == "W4A8CompressedTensorsConfig"
    (warning,) = fresh.warnings
    assert warning.startswith("w4a8: cannot read packed directories here: AttributeError: ")
    assert "w4a8" not in quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}


def test_weight_only_models_are_left_on_demand(fresh, monkeypatch):
    assert configs.W4A8GPTQConfig.from_config(GPTQ).scheme() is not None
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    assert configs.W4A8GPTQConfig.from_config({**GPTQ, "sym": True}).scheme() is None
    with pytest.raises(ValueError, match="Unsupported quantization config"):
        configs.W4A8GPTQConfig.from_config(GPTQ)


WEIGHT_ONLY = {
    "W4A8GPTQConfig": GPTQ,
    "W4A8AWQConfig": tool_formats.config("awq", 128, False, [], False),
    "W4A8INCConfig": tool_formats.config("auto_round:auto_gptq", 128, True, [], False),
    "W4A8GptOssConfig": tool_formats.config("mxfp4", 32, True, [], False),
    "W4A8ModelOptConfig": tool_formats.config("modelopt-nvfp4", 16, True, [], False),
    "W4A8QuarkConfig": tool_formats.config("quark", 32, True, [], False),
}


LINEAR = {name: found for name, found in WEIGHT_ONLY.items() if name != "W4A8GptOssConfig"}
LINEAR["AutoRound, int8 inputs"] = {**WEIGHT_ONLY["W4A8INCConfig"], "act_bits": 8}


@pytest.mark.parametrize("name", LINEAR)
def test_weight_only_is_one_rule(fresh, monkeypatch, name):
    """What is weight-only to transformers is so in vLLM, and on demand only that is left to vLLM."""
    stated = LINEAR[name]
    name = "W4A8INCConfig" if name.startswith("AutoRound") else name
    cls = getattr(configs, name)
    stated = {**stated, "sym": True} if name == "W4A8GPTQConfig" else stated
    layer = "model.layers.0.self_attn.o_proj"
    weight_only = rules_of(stated).of(layer).weight_only is not None
    assert (chosen(cls.from_config(stated), layer).filler.scheme.weight_only is not None) == weight_only
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    assert isinstance(chosen(cls.from_config(stated), layer), W4A8LinearMethod) != weight_only


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_dtypes_are_those_of_whoever_runs_the_model(fresh, monkeypatch, name):
    """The operators have three; vLLM's layers, on demand, what vLLM says of them."""
    config = WEIGHT_ONLY[name]
    cls = getattr(configs, name)
    config = {**config, "sym": True} if name == "W4A8GPTQConfig" else config
    stock = next(base for base in cls.__mro__ if base.__module__.startswith("vllm."))
    assert set(cls.from_config(config).get_supported_act_dtypes()) == {torch.float16, torch.bfloat16, torch.float32}
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    expected = stock.from_config(config).get_supported_act_dtypes()
    assert torch.float32 not in expected
    assert cls.from_config(config).get_supported_act_dtypes() == expected


def test_activation_order_is_refused(fresh):
    with pytest.raises(ValueError, match="desc_act"):
        configs.W4A8GPTQConfig.from_config({**GPTQ, "desc_act": True}).scheme()
    assert configs.W4A8GPTQConfig.from_config({**GPTQ, "desc_act": True, "group_size": -1}).scheme() is not None


@pytest.mark.parametrize("groups", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 0, 1], [1, 1, 0, 0]])
def test_input_features_in_another_order(fresh, groups):
    """The loader of every model drops g_idx; before that, it is looked at."""
    from vllm.model_executor.models.utils import WeightsMapper

    mapper = WeightsMapper(orig_to_new_prefix={"a.": "b."})
    mapper |= configs.W4A8GPTQConfig.from_config(GPTQ).get_cache_scale_mapper()
    mapper |= WeightsMapper(orig_to_new_substr={".unused": None})
    tensors = {"a.g_idx": torch.tensor(groups), "a.qweight": torch.zeros(1), "a.unused": torch.zeros(1)}
    if groups == sorted(groups):
        assert [name for name, _ in mapper.apply(tensors.items())] == ["b.qweight"]
    else:
        with pytest.raises(ValueError, match=r"w4a8: a.g_idx: groups are not consecutive input features"):
            list(mapper.apply(tensors.items()))


def test_compiled_graphs_are_named_after_what_is_on(fresh, monkeypatch):
    """The whole way, with a cache on disk: test_cache.py."""
    from vllm import envs

    monkeypatch.setenv("W4A8_VLLM", "0")
    fresh()
    off = envs.compile_factors()
    monkeypatch.delenv("W4A8_VLLM")
    plugin._state["done"] = False
    fresh()
    on = envs.compile_factors()
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    assert len({str(factors) for factors in (off, on, envs.compile_factors())}) == 3


def test_off(fresh, monkeypatch):
    monkeypatch.setenv("W4A8_VLLM", "0")
    assert fresh() == "CompressedTensorsConfig"
    assert fresh.warnings == []
    assert fresh.infos == ["w4a8: off (W4A8_VLLM=0)"]


def test_says_what_it_leaves(fresh, monkeypatch):
    """Weight-only models on demand, and a method that this vLLM does not know."""
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    monkeypatch.setitem(configs.CONFIGS, "Another", (*configs.CONFIGS["W4A8AWQConfig"][:2], ("new", "newer")))
    assert fresh() == "W4A8CompressedTensorsConfig"
    assert fresh.warnings == []
    assert fresh.infos == [
        "w4a8: leaves weight-only models to vLLM (W4A8_VLLM_W4A16=0)",
        "w4a8: this vLLM has no quantization method new or newer",
    ]


@pytest.mark.parametrize("version", ["0.27.1", "dev"])
def test_untested_version(fresh, monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    assert fresh() == "CompressedTensorsConfig"
    (warning,) = fresh.warnings
    assert f"vLLM {version} has not been tested" in warning
    assert "W4A8_VLLM=1" in warning


def test_untested_version_on_demand(fresh, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.27.1")
    monkeypatch.setenv("W4A8_VLLM", "1")
    assert fresh() == "W4A8CompressedTensorsConfig"


@pytest.mark.parametrize("version", ["0.34.0", "1.0.1rc2+cpu"])
def test_newer_version(fresh, monkeypatch, version):
    """The self-test decides."""
    monkeypatch.setattr("vllm.__version__", version)
    assert fresh() == "W4A8CompressedTensorsConfig"
    untested = f"vLLM {version} has not been tested with it (tested: 0.28 to 0.33)"
    assert fresh.warnings == [f"w4a8: {untested}; its self-test passed, so it takes over (W4A8_VLLM=0: not)"]


def test_newer_version_that_is_not_as_expected(fresh, monkeypatch):
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    monkeypatch.setattr("vllm.__version__", "0.34.0")

    def apply(self, layer, x, weights, topk_ids):
        pass

    monkeypatch.setattr(FusedMoEMethodBase, "apply", apply)
    assert fresh() == "CompressedTensorsConfig"
    assert len(fresh.warnings) == 1 and "whose self-test failed: apply has no topk_weights" in fresh.warnings[0]


def test_newer_version_that_wants_more(fresh, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    monkeypatch.setattr(W4A8LinearScheme, "__abstractmethods__", frozenset({"moved"}))
    assert fresh() == "CompressedTensorsConfig"
    assert len(fresh.warnings) == 1 and "whose self-test failed: W4A8LinearScheme wants moved" in fresh.warnings[0]


def test_other_architecture(fresh, monkeypatch):
    monkeypatch.setattr(plugin.platform, "machine", lambda: "aarch64")
    assert fresh() == "CompressedTensorsConfig"
    assert "its own W4A8 kernels on aarch64" in fresh.warnings[0]


@pytest.mark.parametrize("name", ["W4A8_VLLM", "W4A8_VLLM_W4A16"])
def test_bad_setting(fresh, monkeypatch, name):
    monkeypatch.setenv(name, "yes")
    assert fresh() == "CompressedTensorsConfig"
    assert fresh.warnings == [f"w4a8: vLLM goes on without the plugin: ValueError: {name}='yes', expected 0 or 1"]


def test_bad_activation_group(fresh, monkeypatch):
    monkeypatch.setenv("W4A8_VLLM_ACTIVATION_GROUP", "16")
    assert fresh() == "CompressedTensorsConfig"
    expected = "W4A8_VLLM_ACTIVATION_GROUP='16': activation_group is 16, expected -1 (whole rows), or 32, 64 or 128"
    assert fresh.warnings == [f"w4a8: vLLM goes on without the plugin: ValueError: {expected}"]


def test_changed_internals(fresh, monkeypatch):
    """Even on demand: what is not there cannot be used."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    monkeypatch.setenv("W4A8_VLLM", "1")
    monkeypatch.delattr(RoutedExperts, "_map_global_expert_id_to_local_expert_id")
    assert fresh() == "CompressedTensorsConfig"
    (warning,) = fresh.warnings
    assert "self-test failed: a layer could not be made and run: AttributeError: " in warning
    assert "_map_global_expert_id_to_local_expert_id" in warning


def test_missing_module(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe.fused_moe_method_base", None)
    assert fresh() == "CompressedTensorsConfig"
    assert "self-test failed" in fresh.warnings[0]


def without_top_k(right):
    def renamed(self, *args, **kwargs):
        right(self, *args, **kwargs)
        del self.top_k

    return renamed


def loads_reversed(right):
    return lambda self, param, loaded: param.data.copy_(loaded.flip(0))


# What stands at a place, what becomes of it there, and what the self-test says. It makes, loads and runs vLLM's layers.
OURS, THEIRS = "w4a8.integrations.vllm.", "vllm.model_executor.layers."
LINEAR_SUMS = "self-test failed: a linear layer of vLLM gives wrong sums"
EXPERT_SUMS = "a layer of experts of vLLM gives wrong sums"
CHANGED = [
    (f"{OURS}products.dyn_quant_matmul_4bit", lambda right: lambda x, *rest: x[:, :128] + 1, LINEAR_SUMS),
    (f"{OURS}linear_layers.W4A8LinearMethod.apply", lambda right: lambda *args: right(*args) + 1, LINEAR_SUMS),
    (f"{THEIRS}linear.ReplicatedLinear.weight_loader", loads_reversed, LINEAR_SUMS),
    (f"{OURS}moe.run_experts", lambda right: lambda *args: right(*args) * 1.1, EXPERT_SUMS),
    (f"{THEIRS}fused_moe.RoutedExperts.__init__", without_top_k, "a layer could not be made and run: AttributeError"),
]


@pytest.mark.parametrize(("place", "change", "message"), CHANGED, ids=[row[0].rpartition(".")[2] for row in CHANGED])
def test_something_in_between_has_changed(fresh, monkeypatch, place, change, message):
    owner, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    monkeypatch.setattr(owner, name, change(getattr(owner, name, None)), raising=False)
    assert fresh() == "CompressedTensorsConfig"
    assert message in fresh.warnings[0]


def test_the_self_test_leaves_nothing_behind(fresh):
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import parallel_state

    variables = dict(os.environ)
    assert selftest.problems() == []
    assert dict(os.environ) == variables
    assert parallel_state._TP is None and get_current_vllm_config_or_none() is None


def test_other_threads_keep_their_variables(fresh, monkeypatch):
    """What the self-test sets it takes back; no variable of another thread's is gone meanwhile."""
    kept, deleted = set(os.environ), set()
    right = type(os.environ).__delitem__

    def delete(self, name):
        deleted.add(name)
        right(self, name)

    monkeypatch.setattr(type(os.environ), "__delitem__", delete)
    assert selftest.problems() == []
    assert not deleted & kept


SAYS = """
import logging, sys, vllm.logger
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(f"{record.levelname} {record.name}: {record.getMessage()!r}")
logging.getLogger("vllm").addHandler(handler)
if sys.argv[1] == "self-test":
    from w4a8.integrations.vllm import selftest
    assert selftest.problems() == []
from vllm.config import VllmConfig
VllmConfig()
print("\\n".join(messages))
"""


def test_what_vllm_says_once_is_still_to_be_said():
    """In a new process each: of the first configuration vLLM says the same after the self-test, which makes one."""

    def said(what):
        done = subprocess.run(
            [sys.executable, "-c", SAYS, what], capture_output=True, text=True, env=environment(), cwd="/", check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return Counter(done.stdout.splitlines())

    stock, after = said("nothing"), said("self-test")
    assert stock  # it does say something
    assert {
        message: after[message] for message in stock
    } == stock  # of modules that only the self-test needs, perhaps more


@contextmanager
def messages_of(name):
    """What this logger of vLLM says."""
    messages, handler, base = [], logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: messages.append(record.getMessage())
    base.addHandler(handler)
    try:
        yield messages
    finally:
        base.removeHandler(handler)


def test_silence_is_of_one_thread():
    """What others log meanwhile is logged, and only errors of this one are."""
    from vllm.logger import init_logger

    from w4a8.integrations.vllm.log import logger, silence

    def say(who):
        for log in (init_logger("vllm.other"), logger()):
            log.warning("a warning of %s", who)
            log.warning_once("once, of %s", who)
            log.error("an error of %s", who)

    with messages_of("vllm") as messages:
        with silence():
            say("this thread")
            other = threading.Thread(target=say, args=("another",))
            other.start()
            other.join()
        here, messages[:] = list(messages), []
        say("this thread")
    error, warning, once = ("an error of %s", "a warning of %s", "once, of %s")
    assert here == [error % "this thread"] * 2 + [text % "another" for text in (warning, once, error)] * 2
    assert messages == [text % "this thread" for text in (warning, once, error)] * 2


def test_imports_nothing_by_itself():
    code = (
        "import sys, w4a8, w4a8.integrations.vllm\n"
        "print([name for name in ('vllm', 'transformers', 'compressed_tensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, cwd="/")
    assert done.stdout.strip() == "[]", done.stderr


def test_what_is_said_once_is_said_once():
    """However much vLLM says in between."""
    from vllm.logger import init_logger

    from w4a8.integrations.vllm.log import logger

    with messages_of("vllm.w4a8") as messages:
        for _ in range(2):
            logger().warning_once("w4a8: %s of the test", "one")
            for number in range(200):
                init_logger("vllm.other").warning_once("%d of the test", number)
        logger().warning_once("w4a8: %s of the test", "another")
    assert messages == ["w4a8: one of the test", "w4a8: another of the test"]

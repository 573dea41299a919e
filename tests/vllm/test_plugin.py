"""When the plugin takes over and when it does not. Needs vLLM's modules, but no engine."""

import os
import subprocess
import sys

import pytest

from w4a8.integrations.vllm import plugin, selftest


@pytest.fixture
def fresh(monkeypatch):
    """The plugin as in a new process, and what it warns of."""
    from vllm import envs
    from vllm.model_executor.layers import quantization

    warnings = []

    class Log:
        def warning(self, message, *args):
            warnings.append(message % args)

        def debug(self, *args):
            pass

    monkeypatch.setattr(plugin, "logger", Log)
    monkeypatch.setitem(plugin._state, "done", False)
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    for name in ("W4A8_VLLM", "W4A8_VLLM_W4A16"):
        monkeypatch.delenv(name, raising=False)

    def activate() -> str:
        plugin.activate()
        return quantization.get_quantization_config("compressed-tensors").__name__

    activate.warnings = warnings
    return activate


def test_takes_over(fresh):
    assert fresh() == "W4A8CompressedTensorsConfig"
    assert fresh() == "W4A8CompressedTensorsConfig"  # vLLM may call it again
    assert fresh.warnings == []


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
    monkeypatch.setenv("W4A8_VLLM_W4A16", "1")
    assert len({str(factors) for factors in (off, on, envs.compile_factors())}) == 3


def test_off(fresh, monkeypatch):
    monkeypatch.setenv("W4A8_VLLM", "0")
    assert fresh() == "CompressedTensorsConfig"
    assert fresh.warnings == []


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0", "dev"])
def test_untested_version(fresh, monkeypatch, version):
    monkeypatch.setattr("vllm.__version__", version)
    assert fresh() == "CompressedTensorsConfig"
    (warning,) = fresh.warnings
    assert f"vLLM {version} has not been tested" in warning
    assert "W4A8_VLLM=1" in warning


def test_untested_version_on_demand(fresh, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    monkeypatch.setenv("W4A8_VLLM", "1")
    assert fresh() == "W4A8CompressedTensorsConfig"


def test_other_architecture(fresh, monkeypatch):
    monkeypatch.setattr(plugin.platform, "machine", lambda: "aarch64")
    assert fresh() == "CompressedTensorsConfig"
    assert "its own W4A8 kernels on aarch64" in fresh.warnings[0]


@pytest.mark.parametrize("name", ["W4A8_VLLM", "W4A8_VLLM_W4A16"])
def test_bad_setting(fresh, monkeypatch, name):
    monkeypatch.setenv(name, "yes")
    assert fresh() == "CompressedTensorsConfig"
    assert fresh.warnings == [f"w4a8: vLLM goes on without the plugin: ValueError: {name}='yes', expected 0 or 1"]


def test_changed_internals(fresh, monkeypatch):
    """Even on demand: what is not there cannot be used."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    monkeypatch.setenv("W4A8_VLLM", "1")
    monkeypatch.delattr(RoutedExperts, "_map_global_expert_id_to_local_expert_id")
    assert fresh() == "CompressedTensorsConfig"
    (warning,) = fresh.warnings
    assert "self-test failed: RoutedExperts has no _map_global_expert_id_to_local_expert_id" in warning


def test_missing_module(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe.fused_moe_method_base", None)
    assert fresh() == "CompressedTensorsConfig"
    assert "self-test failed" in fresh.warnings[0]


def test_wrong_operators(fresh, monkeypatch):
    monkeypatch.setattr(selftest, "dyn_quant_matmul_4bit", lambda x, *rest: x[:, :32] + 1)
    assert fresh() == "CompressedTensorsConfig"
    assert "dyn_quant_matmul_4bit gives wrong sums" in fresh.warnings[0]


def test_wrong_experts(fresh, monkeypatch):
    right = selftest.dynamic_4bit_int_moe
    monkeypatch.setattr(selftest, "dynamic_4bit_int_moe", lambda *args: right(*args) * 1.1)
    assert fresh() == "CompressedTensorsConfig"
    assert "dynamic_4bit_int_moe gives wrong sums" in fresh.warnings[0]


def test_imports_nothing_by_itself():
    code = (
        "import sys, w4a8, w4a8.integrations.vllm\n"
        "print([name for name in ('vllm', 'transformers', 'compressed_tensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, cwd="/")
    assert done.stdout.strip() == "[]", done.stderr

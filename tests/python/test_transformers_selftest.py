"""When w4a8.integrations.transformers refuses to be imported: other versions, other internals, wrong operators."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers.quantizers import HfQuantizer  # noqa: E402
from transformers.utils.quantization_config import GPTQConfig  # noqa: E402

from w4a8.integrations import expectations as shared  # noqa: E402
from w4a8.integrations.transformers import W4A8Config, selftest, versions  # noqa: E402
from w4a8.integrations.transformers.registration import merge_prequantized  # noqa: E402

# For each case a process that begins with transformers as it was imported: imports, and says what of it transformers
# knows then.
IMPORT = """
import os, sys
import transformers
from transformers.quantizers import auto
before = auto.AutoHfQuantizer.merge_quantization_configs
for change, environment in {cases}:
    print("---", flush=True)
    if os.fork():
        assert os.wait()[1] == 0
        continue
    os.environ.update(environment)
    exec(change)
    try:
        import w4a8.integrations.transformers
    except (ImportError, ValueError) as error:
        print(type(error).__name__, error)
    print("registered", "w4a8" in auto.AUTO_QUANTIZER_MAPPING, "w4a8" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    print("wrapped", auto.AutoHfQuantizer.merge_quantization_configs != before, flush=True)
    os._exit(0)
"""
NOTHING = ["registered False False", "wrapped False"]
ALL = ["registered True True", "wrapped True"]
UNTESTED = "transformers.__version__ = '5.24.0'"
WITHOUT_METHOD = "from transformers.quantizers import HfQuantizer; del HfQuantizer.param_needs_quantization"
WITHOUT_NAME = "from transformers import core_model_loading; del core_model_loading.dot_natural_key"


def test_imports():
    """Whoever imports it is told what does not fit, and nothing is registered then. A variable goes on where only the
    version was not tested."""
    assert selftest.problems() == []
    asked = {"W4A8_TRANSFORMERS": "1"}
    cases = [
        ("", {}, None),
        (UNTESTED, {}, "ImportError w4a8.integrations.transformers has not been tested with transformers 5.24.0"),
        (UNTESTED, asked, None),
        (WITHOUT_METHOD, {}, "the self-test failed with transformers {}: HfQuantizer has no param_needs_quantization"),
        (WITHOUT_NAME, asked, "transformers {} is not as expected: cannot import name 'dot_natural_key'"),
    ]
    code = IMPORT.format(cases=[case[:2] for case in cases])
    environment = {key: value for key, value in os.environ.items() if key != versions.SWITCH}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = done.stdout.split("---\n")[1:]
    assert len(printed) == len(cases)
    for (*case, message), text in zip(cases, printed):
        *error, one, other = text.splitlines()
        assert [one, other] == (ALL if message is None else NOTHING), case
        assert message.format(transformers.__version__) in error[0] if message else not error, case


def test_another_way_to_read_gguf():
    """Only GGUF files are left to transformers then."""
    change = """
        import logging, sys
        from transformers import modeling_utils
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
        modeling_utils.get_hf_quantizer = lambda config, gguf_file: None
    """
    lacking = "get_hf_quantizer has no quantization_config, device_map, weights_only, user_agent"
    code = IMPORT.format(cases=[(textwrap.dedent(change), {})])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expected = [f"GGUF files are left to transformers {transformers.__version__}: {lacking}", *ALL]
    assert done.stdout.splitlines()[1:] == expected, done.stderr[-2000:]


@pytest.mark.parametrize("version", ["5.18.3", "5.24.0", "6.0.0", "5.24.0.dev0", "5"])
def test_untested_versions(version):
    problem = versions.version_problem(version)
    assert problem.startswith(f"has not been tested with transformers {version} (tested: 5.19 to 5.23); ")
    assert "W4A8_TRANSFORMERS=1" in problem


def test_tested_versions(monkeypatch):
    for version in ("5.19.0", "5.20.1", "5.23.0", "5.23.1.dev0"):
        assert versions.version_problem(version) is None
    for value in ("1", " 1 "):
        monkeypatch.setenv(versions.SWITCH, value)
        assert versions.version_problem("5.24.0") is None
        assert "needs transformers 5, this is 4.57.1" in versions.version_problem("4.57.1")
        assert "needs transformers 5, this is unknown" in versions.version_problem("unknown")
    for value in ("auto", ""):
        monkeypatch.setenv(versions.SWITCH, value)
        assert versions.version_problem("5.24.0") is not None
    monkeypatch.setenv(versions.SWITCH, "yes")
    with pytest.raises(ValueError, match="W4A8_TRANSFORMERS='yes', expected auto or 1"):
        versions.version_problem("5.23.0")


def test_other_interfaces(monkeypatch):
    monkeypatch.delattr(HfQuantizer, "get_quantize_ops")
    monkeypatch.setattr(
        selftest.AutoHfQuantizer, "merge_quantization_configs", lambda config, quantization_config: None
    )
    monkeypatch.setattr(selftest, "get_model_conversion_mapping", lambda: None)
    monkeypatch.setattr(selftest.W4A8HfQuantizer, "__abstractmethods__", {"new"})
    monkeypatch.delattr(transformers.PreTrainedModel, "get_expanded_tied_weights_keys")
    assert selftest.problems() == [
        "HfQuantizer has no get_quantize_ops",
        "W4A8HfQuantizer wants new",
        "merge_quantization_configs has no quantization_config_from_args",
        "get_model_conversion_mapping has no model",
        "PreTrainedModel has no get_expanded_tied_weights_keys",
    ]


def test_other_ways_of_loading(monkeypatch):
    """Each of them, however the functions look."""

    def problem(owner, name, value):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            return selftest.problems()

    rename = selftest.rename_source_key
    found = problem(selftest, "rename_source_key", lambda key, *rest: (key, rename(key, *rest)[1]))
    assert found == [
        "rename_source_key makes model.layers.0.mlp.experts.0.gate_proj.weight "
        "(mlp.experts.*.gate_proj.weight) of model.layers.0.mlp.experts.0.gate_proj.weight"
    ]
    merge = selftest.MergeModulelist
    found = problem(selftest, "MergeModulelist", type("Other", (merge,), {}))
    assert found == ["experts are stacked in another way than by MergeModulelist and Concatenate"]
    convert = selftest.WeightConverter.convert

    def without_quantizer(self, name, **options):
        return convert(self, name)

    (found,) = problem(selftest.WeightConverter, "convert", without_quantizer)
    assert found.startswith("WeightConverter.convert gives ['model.layers.0.mlp.experts.gate_up_proj'] and hands []")
    add = selftest.WeightConverter.add_tensor

    def first_come_last(self, target, source, pattern, tensor):
        add(self, target, source, pattern, tensor)
        self.collected_tensors[pattern].reverse()

    found = problem(selftest.WeightConverter, "add_tensor", first_come_last)
    assert found == ["WeightConverter.convert gives the experts in another order"]

    def other_arguments(self, name):
        return {}

    (found,) = problem(selftest.WeightConverter, "convert", other_arguments)
    assert found.startswith("loading_problems: TypeError: ")


def test_other_experts(monkeypatch):
    moe = transformers.integrations.moe

    def _default_apply_gate(self, gate_up):
        up, gate = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    monkeypatch.setattr(moe, "_default_apply_gate", _default_apply_gate)
    assert selftest.problems() == ["a layer of experts gives other sums than its replacement"]
    _default_apply_gate.__name__ = "_gate"
    assert selftest.problems() == [
        "a layer of experts is not recognized: its experts join gate and up in a way of their own"
    ]


def test_wrong_operators(monkeypatch):
    """Those of a library that belongs to another CPU, say."""
    monkeypatch.setattr(shared, "dyn_quant_matmul_4bit", lambda x, *rest: x[:, :32] + 1)
    right = shared.dynamic_4bit_int_moe
    monkeypatch.setattr(shared, "dynamic_4bit_int_moe", lambda *args: right(*args) * 1.1)
    assert selftest.problems() == [
        "dyn_quant_matmul_4bit gives wrong sums",
        "dynamic_4bit_int_moe gives wrong sums",
    ]


THEIRS = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def test_merging_passes_everything_on():
    """Whatever a later transformers gives besides, for checkpoints that this has nothing to do with as well."""
    calls = []

    def merge(quantization_config, quantization_config_from_args, model=None, *more, strict=False):
        calls.append((quantization_config, quantization_config_from_args, model, more, strict))
        return "merged"

    merged = merge_prequantized(merge)
    ours, gptq = W4A8Config(), GPTQConfig(bits=4)
    assert merged(THEIRS, gptq, "model", 1, 2, strict=True) == "merged"
    assert merged(THEIRS, None) == "merged"
    assert merged(quantization_config_from_args=gptq, quantization_config=THEIRS, strict=True) == "merged"
    assert merged({"quant_method": "w4a8"}, ours, "model") == "merged"
    assert calls == [
        (THEIRS, gptq, "model", (1, 2), True),
        (THEIRS, None, None, (), False),
        (THEIRS, gptq, None, (), True),
        ({"quant_method": "w4a8"}, ours, "model", (), False),
    ]
    calls.clear()
    for config in (
        merged(THEIRS, ours, "model"),
        merged(gptq, ours, strict=True),
        merged(quantization_config=THEIRS, quantization_config_from_args=ours),
        merged(THEIRS, quantization_config_from_args=ours),
    ):
        assert isinstance(config, W4A8Config) and config.source["bits"] == 4 and ours.source is None
    assert not calls
    assert merge_prequantized(lambda: "other")() == "other"


def test_merging_in_transformers():
    merged = transformers.quantizers.AutoHfQuantizer.merge_quantization_configs
    assert merged(THEIRS, W4A8Config()).source == THEIRS
    with pytest.raises(ValueError, match="quantized with GPTQConfig but you are passing"):
        merged(THEIRS, transformers.AwqConfig())
    assert isinstance(merged({"quant_method": "w4a8", "format": "packed", "version": 1}, None), W4A8Config)


@torch.no_grad()
def test_it_takes_no_random_numbers():
    state = torch.get_rng_state()
    selftest.problems()
    assert torch.equal(torch.get_rng_state(), state)

"""Settings by variables and by vLLM's additional_config, which goes before them."""

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from w4a8.integrations.vllm import settings

NAMES = "'w4a16', 'lm_head', 'activation_group', 'attention', 'decoder', 'values' or 'group_size'"
NONE = {"w4a16": True, "lm_head": 8, "activation_group": None}


def found():
    return {
        "w4a16": settings.runs_w4a16(),
        "lm_head": settings.lm_head_bits(),
        "activation_group": settings.activation_group(),
    }


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in settings.KEYS.values():
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("additional", [{}, {"w4a8": {}}, {"other": {"lm_head": "int8"}}])
def test_nothing_is_said(additional):
    assert found() == NONE
    with settings.of_engine(additional):
        assert found() == NONE


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"w4a16": False}, {"w4a16": False}),
        ({"w4a16": 0}, {"w4a16": False}),
        ({"w4a16": "1"}, {"w4a16": True}),
        ({"lm_head": "int8"}, {"lm_head": 8}),
        ({"lm_head": "0"}, {"lm_head": 0}),
        ({"lm_head": False}, {"lm_head": 0}),
        ({"lm_head": "int4", "activation_group": 64}, {"lm_head": 4, "activation_group": 64}),
        ({"activation_group": "-1"}, {"activation_group": -1}),
        ({"activation_group": -1, "lm_head": None}, {"activation_group": -1}),
    ],
)
def test_additional_config(given, expected):
    """While the engine's configuration is made, and in the processes that have it."""
    with settings.of_engine({"w4a8": given}):
        assert found() == {**NONE, **expected}
    assert found() == NONE
    with set_current_vllm_config(VllmConfig(additional_config={"w4a8": given})):
        assert found() == {**NONE, **expected}
    assert found() == NONE


def test_it_goes_before_variables(monkeypatch):
    monkeypatch.setenv("W4A8_VLLM_LM_HEAD", "int4")
    monkeypatch.setenv("W4A8_VLLM_ACTIVATION_GROUP", "128")
    with settings.of_engine({"w4a8": {"lm_head": "int8"}}):
        assert found() == {"w4a16": True, "lm_head": 8, "activation_group": 128}


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ({"lm-head": "int8"}, f"has 'lm-head', expected {NAMES}"),
        ({"enabled": True}, f"has 'enabled', expected {NAMES}"),
        ({"lm_head": "int3"}, r"\[\"lm_head\"\]='int3', expected 0, int4 or int8"),
        ({"lm_head": True}, r"\[\"lm_head\"\]='1', expected 0, int4 or int8"),
        ({"w4a16": "no"}, r"\[\"w4a16\"\]='no', expected 0 or 1"),
        (
            {"activation_group": 16},
            r"\[\"activation_group\"\]='16': activation_group is 16, expected -1 .whole rows., or 32, 64 or 128",
        ),
        ("int8", f"is 'int8', expected an object with {NAMES}"),
    ],
)
def test_refused(additional, message):
    with pytest.raises(ValueError, match=r'additional_config\["w4a8"\]' + f" ?{message}"):
        with settings.of_engine({"w4a8": additional}):
            pass
    assert found() == NONE


def test_an_engine_reads_them_first(monkeypatch):
    """Before vLLM looks at the model, which does not exist here."""
    load_general_plugins()  # else the first EngineArgs does, and the plugin's parts wrap the function below
    seen = []
    monkeypatch.setattr(settings, "_readers", [])
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: (found(), self.model))
    settings.read_arguments(lambda given: seen.append(given.model))
    settings.read_arguments()  # as where two parts of the plugin ask for it
    engine = EngineArgs(model="nowhere", additional_config={"w4a8": {"lm_head": "int4"}})
    assert engine.create_engine_config() == ({**NONE, "lm_head": 4}, "nowhere")
    assert seen == ["nowhere"]
    with pytest.raises(ValueError, match=r"has 'lmhead', expected"):
        EngineArgs(model="nowhere", additional_config={"w4a8": {"lmhead": 1}}).create_engine_config()
    assert seen == ["nowhere"]


def test_vllm_without_what_it_builds_on(monkeypatch):
    monkeypatch.delattr(EngineArgs, "create_engine_config")
    with pytest.raises(RuntimeError, match="EngineArgs has no create_engine_config"):
        settings.read_arguments()

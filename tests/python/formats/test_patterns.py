"""Regular expressions in a quantization_config: none runs for minutes."""

import pytest
from test_rules import GPTQ, MXFP4, QUARK, ROUND, compressed, gptq

from w4a8.core import patterns
from w4a8.core.json_fields import CheckpointError
from w4a8.formats import rules_of

SLOW = [
    "(a+)+b",
    "(a|a)*b",
    "(?:a*)*b",
    "(.*.*)+",
    ".*" * 9 + "!",
    "(?:a|b?){60}c",
    "(?=(a+)+b)a",
    "(?:){9999999}",
    "a?" * 40,
]


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_take_minutes(pattern):
    """In each place where files have expressions."""
    for config in (
        {**GPTQ, "dynamic": {f"-:{pattern}": {}}},
        {**ROUND, "extra_config": {pattern: {"bits": 8}}},
        {**ROUND, "modules_to_not_convert": [pattern]},
        {**MXFP4, "modules_to_not_convert": [pattern]},
        {**QUARK, "exclude": [f"re:{pattern}"]},
        {**QUARK, "layer_quant_config": {f"re:{pattern}": {}}},
        {**compressed(), "ignore": [f"re:{pattern}"]},
        {**compressed(), "config_groups": {"g": {"targets": [f"re:{pattern}"]}}},
    ):
        with pytest.raises(CheckpointError, match=r"^(an? \w+ of )?quantization_config\..* that may take minutes"):
            rules_of(config).of("a" * 40)


def test_patterns_of_long_names_and_many(monkeypatch):
    """What is quick for the names of models is refused for a name, or for names, that take too long."""
    rules = rules_of({**GPTQ, "dynamic": {"-:.*a.*a.*a.*!": {}}})
    assert rules.of("a" * 60) == gptq()
    with pytest.raises(CheckpointError, match="may take minutes"):
        rules.of("a" * 5000)
    monkeypatch.setattr(patterns, "_SECONDS", 0.0)
    with pytest.raises(CheckpointError, match="may take minutes"):
        rules.of("a" * 60)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.layers\.(1|2|3|14)\..*(q|k|v)_proj.*",
        r"^(?!.*(experts|lm_head)).*$",
        r"model\.layers\.\d{1,3}\.mlp\.experts\.[0-9]+\.(gate|up|down)_proj",
        r"(?:model\.)?(?:language_model\.)?layers.*",
        r".*layers.*mlp.*experts.*(gate_proj|up_proj|down_proj).*",
        "|".join(rf"(?:.*layers\.{index}\..*)" for index in range(94)),
    ],
)
def test_patterns_that_tools_write(pattern):
    rules_of({**QUARK, "exclude": [f"re:{pattern}"]}).of("model.language_model.layers.17.mlp.experts.127.down_proj" * 2)

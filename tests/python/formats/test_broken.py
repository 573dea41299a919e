"""Checkpoints that are fake or broken: an error that names the tensor, in every format; nothing is computed of them."""

import pytest
from defects import (
    CONFIGS,
    HIDDEN,
    INTER,
    TENSORS,
    assert_says,
    change_config,
    change_tensors,
    keys_of,
    rows_of,
    whole_checkpoints,
)
from format_checkpoints import FLOATS, FORMATS, LAYER, QUERY, Checkpoint, damages, model_config

from w4a8.checkpoint import CheckpointError, read_layers
from w4a8.formats import rules_of

pytest.importorskip("safetensors", reason="the safetensors package is not installed")

# A layer, and its first matrix.
LAYERS = {"experts": (LAYER, f"{LAYER}.0.down_proj"), "linear": (QUERY, QUERY)}


@pytest.fixture(scope="module")
def good():
    return whole_checkpoints()


def row_id(row):
    return "-".join(row[:2])


def refused(folder, which, words, **names):
    """A layer, by its name, if the configuration is not refused before."""
    layer, first = LAYERS[which]
    with pytest.raises(CheckpointError) as caught:
        read_layers(folder, only=lambda name: name == layer)
    assert_says(str(caught.value).removeprefix(f"{layer}: "), words, first=first, **names)
    return str(caught.value).startswith(f"{layer}: ")


@pytest.mark.parametrize("row", rows_of(TENSORS), ids=row_id)
def test_tensors(good, row, tmp_path):
    name, where, change, words, *config = row
    made, keys = good[name].changed(**(config[0] if config else {})), keys_of(name, where)
    for key in keys.values():
        assert change_tensors(made.tensors, key, change)
    made.write(tmp_path)
    for which, key in keys.items():
        new = made.tensors.get(key)
        kind = {} if new is None else {"shape": tuple(new.shape), "dtype": new.dtype}
        said = key if name != "MXFP4" else ".".join(key.rsplit("_", 1))  # readers join names by a point
        assert refused(tmp_path, which, words, key=said, **kind)
    if len(keys) == 2:  # the reader of one matrix says the same, of its own names
        stored = rules_of(made.config["quantization_config"]).of(QUERY)
        tensors = {key.rpartition(".")[2]: tensor for key, tensor in made.tensors.items() if key.startswith(QUERY)}
        with pytest.raises(ValueError) as caught:
            stored.read(tensors, "m")
        assert_says(str(caught.value), words, key=f"m.{where}", **kind)


@pytest.mark.parametrize("row", rows_of(row for row in CONFIGS if row[-1] != "model"), ids=row_id)
def test_configurations(good, row, tmp_path):
    name, where, value, words, *layers = row
    made = good[name].changed()
    change_config(made.config, where, value)
    made.write(tmp_path)
    for which in layers or LAYERS:
        refused(tmp_path, which, words, path=f"quantization_config.{where}")


def without(tensors, axis, parts):
    """The tensors of a matrix that has no output features (axis n), or no input features (k and their groups)."""
    axes = {part.suffix: part.axes for part in parts}
    made = {}
    for suffix, tensor in tensors.items():
        for dim, name in enumerate(axes[suffix]):
            if name == axis or (axis == "k" and name == "g"):
                tensor = tensor.narrow(dim, 0, 0)
        made[suffix] = tensor.contiguous()
    if "weight_shape" in made:
        made["weight_shape"][0 if axis == "n" else 1] = 0
    return made


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", ["n", "k"])
def test_features_that_are_none(name, axis, tmp_path):
    """A linear layer of nothing, and experts of nothing."""
    form, layer = FORMATS[name], QUERY
    config = model_config(form.quantization_config(32), HIDDEN, INTER, 3)
    stored = rules_of(config["quantization_config"]).of(layer)
    tensors = without(form.random(64, HIDDEN, 32), axis, stored.parts)
    made = Checkpoint({f"{layer}.{suffix}": tensor for suffix, tensor in tensors.items()}, config)
    nothing = rf"{layer}(\.\w+: shape \(.*\), which holds nothing|: k .in_features. is 0, expected an even number)"
    with pytest.raises(CheckpointError, match=nothing):
        read_layers(made.write(tmp_path / "linear"))
    with pytest.raises(ValueError, match=r"^m\.\w+: shape \(.*\), which holds nothing"):
        stored.read(tensors, "m")
    names = [f"{LAYER}.{expert}.{part}" for expert in range(3) for part in ("gate_proj", "up_proj", "down_proj")]
    experts = {f"{name}.{suffix}": tensor.clone() for name in names for suffix, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=rf"^{LAYER}: {LAYER}\.0\.\w+ is \["):
        read_layers(Checkpoint(experts, config).write(tmp_path / "experts"))


@pytest.mark.parametrize("name", [*FORMATS, *FLOATS, "MXFP4"])
def test_tensors_of_anything(good, name, tmp_path):
    """One tensor of another shape or dtype, or with other bits: it loads, or an error of the right class says why."""
    refused = 0
    for key, tensor in damages(good[name].tensors, 40):
        made = good[name].changed(key, tensor)
        try:
            read_layers(made.write(tmp_path))
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith((f"{LAYER}: ", f"{QUERY}: "))
    assert refused >= 10

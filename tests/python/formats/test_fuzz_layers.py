"""`read_layers` on checkpoints that something has damaged: it reads what is there, or says what is wrong. Nothing else
is raised, and nothing is allocated that the files only claim to hold."""

import copy
import json
import math
import os
import struct
import sys

import pytest
import torch
from damaged_json import HUGE, ODD, paths_in, put, remove
from format_checkpoints import FORMATS, LAYER, QUERY, Checkpoint, experts_checkpoint, gpt_oss_checkpoint

from w4a8.checkpoint import CheckpointError, read_layers

pytest.importorskip("safetensors")
pytest.importorskip("hypothesis")
from fuzzing import fuzz
from hypothesis import assume
from hypothesis import strategies as st

# Of experts and of layers.
NUMBERS = ["0", "3", "007", "-1", "99999999", "99999999999999999999", "x", "٣", "²", "1²"]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(HUGE),
    st.floats(),
    st.sampled_from([4.0, 8.0, 32.0]),
    st.text(max_size=5),
    st.sampled_from(ODD),
    st.lists(st.integers(-2, 2), max_size=3),
)


@pytest.fixture(autouse=True)
def little_memory():
    """1 GiB more than this process has: what takes memory for a claim of a file fails, before the machine does."""
    if not sys.platform.startswith("linux") or "libasan" in os.environ.get("LD_PRELOAD", ""):
        yield
        return
    import resource

    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


class Checkpoints(dict):
    """Tensors and config.json, for each of NAMES; hypothesis prints it in a few words."""

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(self)})"


@pytest.fixture(scope="module")
def good():
    """A layer small enough to be loaded many times: its tensors and config.json, for each of NAMES."""
    torch.manual_seed(1)
    kinds = {"int-quantized": "W4A8 int", "pack-quantized": "W4A8 pack", "zero points": "W4A8 pack asymmetric"}
    made = {name: experts_checkpoint(FORMATS[kind], 64, 32, 32, dtype=torch.bfloat16) for name, kind in kinds.items()}
    made["mxfp4"] = gpt_oss_checkpoint(64, 32)
    del made["mxfp4"].config["num_experts"]  # which gpt-oss has by another name
    for name, kind in kinds.items():
        made[name].add(QUERY, FORMATS[kind], 32, 64, 32, dtype=torch.bfloat16)
    return Checkpoints({name: (each.tensors, each.config) for name, each in made.items()})


def answer(layers):
    generator = torch.Generator().manual_seed(2)
    x, ids = torch.randn(3, 64, generator=generator), torch.tensor([[0, 1], [2, 0], [1, 2]])
    return layers[LAYER](x, ids, torch.rand(3, 2, generator=generator))


def load_or_refuse(path):
    """Layers, or None if they were refused as they must be."""
    try:
        return read_layers(path)
    except CheckpointError as error:
        assert str(error)
        assert len(str(error)) < 4000
        return None


def raw_file(header, data):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def parts(tensors):
    """Header and data of a safetensors file, written by hand so that they can be wrong."""
    header, data = {}, b""
    names = {torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16"}
    for name in sorted(tensors):
        raw = tensors[name].flatten().view(torch.uint8).numpy().tobytes() if tensors[name].dim() else b""
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {
            "dtype": names[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": offsets,
        }
        data += raw
    return header, data


def prepare(tmp_path, config, header, data=b""):
    """A checkpoint of such a header, which may be wrong, and nothing else."""
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, data))


def prepare_tensors(tmp_path, tensors, config):
    prepare(tmp_path, config, *parts(tensors))


def refused(tmp_path, message):
    with pytest.raises(CheckpointError) as caught:
        read_layers(tmp_path)
    assert message in str(caught.value)


NAMES = ["int-quantized", "pack-quantized", "zero points", "mxfp4"]
ANY_NAME = st.sampled_from(NAMES)


@pytest.mark.parametrize("format_", NAMES)
def test_undamaged(good, tmp_path, format_):
    tensors, config = good[format_]
    prepare_tensors(tmp_path, tensors, config)
    Checkpoint(tensors, config).write(tmp_path / "other")
    mine, theirs = answer(read_layers(tmp_path)), answer(read_layers(tmp_path / "other"))
    assert torch.equal(mine, theirs)
    assert torch.isfinite(mine).all()
    assert mine.abs().max() > 0


@fuzz(format_=ANY_NAME, data=st.data())
def test_config_of_anything(good, tmp_path, format_, data):
    """One to three values of config.json replaced or removed."""
    tensors, config = good[format_]
    config = copy.deepcopy(config)
    for _ in range(data.draw(st.integers(1, 3))):
        places = paths_in(config)
        assume(places)
        place = data.draw(st.sampled_from(places))
        if data.draw(st.booleans()):
            put(config, place, data.draw(JUNK))
        else:
            remove(config, place)
    prepare_tensors(tmp_path, tensors, config)
    layers = load_or_refuse(tmp_path)
    if layers is not None:
        experts = layers.get(LAYER)
        assert experts is None or (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (3, 64, 32)


@fuzz(format_=ANY_NAME, data=st.data())
def test_header_of_anything(good, tmp_path, format_, data):
    """Fields of the safetensors header replaced: huge or negative sizes, offsets that overlap or lie outside."""
    tensors, config = good[format_]
    header, body = parts(tensors)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(paths_in(header)))
        dtypes = st.sampled_from(["F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "U8", "BOOL", "I8", "I32", "C64", "X"])
        put(header, place, data.draw(dtypes if place[-1] == "dtype" else st.one_of(JUNK, st.integers(0, len(body)))))
    prepare(tmp_path, config, header, body)
    load_or_refuse(tmp_path)


@fuzz(format_=ANY_NAME, data=st.data())
def test_bytes_of_anything(good, tmp_path, format_, data):
    """The file cut off, or some of its bytes changed."""
    tensors, config = good[format_]
    prepare_tensors(tmp_path, tensors, config)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(content))
    load_or_refuse(tmp_path)


@fuzz(format_=ANY_NAME, data=st.data())
def test_tensors_of_anything(good, tmp_path, format_, data):
    """A tensor missing, of another shape, under another name, or with a value that cannot be."""
    tensors, config = good[format_]
    tensors = dict(tensors)
    key = data.draw(st.sampled_from(sorted(tensors)))
    old = tensors.pop(key)
    what = data.draw(st.sampled_from(["missing", "shape", "name", "nan", "value"]))
    if what == "shape":
        tensors[key] = torch.zeros(data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=3)), dtype=old.dtype)
    elif what == "name":
        number = data.draw(st.sampled_from(NUMBERS))
        tensors[key.replace(".0.", f".{number}.").replace(".1.", f".{number}.")] = old
    elif what == "nan":
        assume(old.is_floating_point() and not key.endswith("bias"))  # a bias may be any number
        tensors[key] = old.clone()
        tensors[key].view(-1)[data.draw(st.integers(0, old.numel() - 1))] = data.draw(
            st.sampled_from([math.nan, math.inf, -math.inf])
        )
    elif what == "value":
        assume(not old.is_floating_point())
        tensors[key] = old.clone()
        tensors[key].view(-1)[0] = data.draw(st.sampled_from([-128, 127, 8, -9]))
    prepare_tensors(tmp_path, tensors, config)
    layers = load_or_refuse(tmp_path)
    if what in ("missing", "nan"):
        assert layers is None


@fuzz(data=st.data())
def test_sizes_of_nothing(good, tmp_path, data):
    """Tensors of no byte, which a header can give any size, of all experts at once."""
    config = dict(good["mxfp4"][1])
    sizes = st.sampled_from([1, 2, 32, 64, 2**20, 2**31 - 1, 2**31, 2**62])
    experts, rows, groups = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    of_nothing = st.sampled_from([(0, rows, groups), (experts, 0, groups), (experts, rows, 0)])
    header = {}
    for name in ("gate_up_proj", "down_proj"):
        shape = list(data.draw(of_nothing))
        for kind, more in (("blocks", [data.draw(st.sampled_from([0, 1, 16]))]), ("scales", []), ("bias", None)):
            size = shape[:2] if more is None else shape + more
            assume(0 in size)
            header[f"{LAYER}.{name}_{kind}"] = {"dtype": "U8", "shape": size, "data_offsets": [0, 0]}
    config["num_local_experts"] = data.draw(st.sampled_from([experts, None]))
    prepare(tmp_path, config, header)
    assert load_or_refuse(tmp_path) is None


@fuzz(format_=ANY_NAME, data=st.data())
def test_a_tensor_of_nothing(good, tmp_path, format_, data):
    """One tensor without a byte, of any size beside."""
    tensors, config = good[format_]
    tensors, config = dict(tensors), copy.deepcopy(config)
    key = data.draw(st.sampled_from(sorted(tensors)))
    sizes = st.sampled_from([0, 1, 3, 8, 32, 64, 2**31, 2**62])
    shape = data.draw(st.lists(sizes, min_size=1, max_size=4))
    assume(0 in shape)
    header, body = parts({name: tensor for name, tensor in tensors.items() if name != key})
    header[key] = {**parts(tensors)[0][key], "shape": shape, "data_offsets": [0, 0]}
    if data.draw(st.booleans()):
        for name in ("num_experts", "num_local_experts"):
            config.pop(name, None)
    prepare(tmp_path, config, header, body)
    assert load_or_refuse(tmp_path) is None


@fuzz(format_=ANY_NAME, weight_map=st.one_of(JUNK, st.dictionaries(st.text(max_size=3), JUNK, max_size=3)), whole=JUNK)
def test_index_of_anything(good, tmp_path, format_, weight_map, whole):
    tensors, config = good[format_]
    prepare_tensors(tmp_path, tensors, config)
    names = dict.fromkeys(tensors, "model.safetensors")
    if isinstance(weight_map, dict):
        weight_map = {**names, **dict(zip(sorted(names), weight_map.values()))}
    index = {"weight_map": weight_map} if not isinstance(whole, list) else whole
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load_or_refuse(tmp_path)


GROUP = ("config_groups", "group_0")  # of a quantization_config
CLAIMS = [
    ({"num_experts": 10**9}, "3 experts, but config.json says {'num_experts': 1000000000}"),
    ({"num_experts": "3"}, "3 experts, but config.json says {'num_experts': '3'}"),
    ({"text_config": [1]}, "text_config is [1], but an object is expected"),
    ({"quantization_config": "int4"}, "quantization_config is 'int4', but an object is expected"),
    # A place in quantization_config, and what stands there.
    (("ignore", 7), "quantization_config.ignore is 7, but a list is expected"),
    (("config_groups", [1]), "quantization_config.config_groups is [1], but an object is expected"),
    ((*GROUP, 3), "config_groups.group_0 is 3, but an object is expected"),
    ((*GROUP, "targets", ["re:("]), "targets is 're:(', but a name or a regular"),
    ((*GROUP, "weights", [4]), "group_0.weights is [4], but an object"),
    ((*GROUP, "input_activations", 8), "input_activations is 8, but an object"),
    ((*GROUP, "weights", "num_bits", 4.0), "num_bits is 4.0, but 4 is expected"),
    ((*GROUP, "input_activations", "num_bits", 8.0), "input_activations.num_bits is 8.0, but 8 is expected"),
]


@pytest.mark.parametrize(("changes", "message"), CLAIMS)
def test_claims_are_checked_first(good, tmp_path, changes, message):
    """Sizes that would exhaust the memory, and values of another type, are refused by name."""
    tensors, config = good["int-quantized"]
    config = copy.deepcopy(config)
    if isinstance(changes, dict):
        config.update(changes)
    else:
        *place, value = changes
        put(config, ("quantization_config", *place), value)
    prepare_tensors(tmp_path, tensors, config)
    refused(tmp_path, message)


def test_expert_number_of_a_tensor_alone(good, tmp_path):
    tensors, config = good["int-quantized"]
    name = f"{LAYER}.999999999.gate_proj"
    prepare_tensors(tmp_path, {**tensors, f"{name}.weight": torch.zeros(32, 64, dtype=torch.int8)}, config)
    refused(tmp_path, f"{name} is there, but expert 3 is not")


@pytest.mark.parametrize("experts", [10**6, 2**31 - 1, 2**31, 2**62])
@pytest.mark.parametrize("said", [True, False])
def test_experts_of_nothing(good, tmp_path, experts, said):
    """A file of 600 bytes with any number of experts, each without a row."""
    header = {}
    for name, shape in (("gate_up_proj_blocks", [0, 2, 16]), ("down_proj_blocks", [0, 1, 16])):
        header[f"{LAYER}.{name}"] = {"dtype": "U8", "shape": [experts, *shape], "data_offsets": [0, 0]}
    config = dict(good["mxfp4"][1])
    config["num_local_experts"] = experts if said and experts < 2**31 else None
    prepare(tmp_path, config, header)
    refused(tmp_path, f"{LAYER}: ")


@pytest.mark.parametrize(
    "numbers", [["2", "10", "1²2"], ["9" * 4999, "9" * 5000, "9" * 5001], ["٣", "٤", "x", "²"], ["007", "07", "7"]]
)
def test_numbers_of_layers(good, tmp_path, numbers):
    """Any text that looks like a number stands for itself; layers come in the order of numbers."""
    tensors, config = good["int-quantized"]
    several = {
        key.replace(".layers.0.", f".layers.{number}."): tensor for number in numbers for key, tensor in tensors.items()
    }
    prepare_tensors(tmp_path, dict(reversed(several.items())), config)
    found = [name for name in read_layers(tmp_path) if "experts" in name]
    assert found == [LAYER.replace("0", number) for number in numbers]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\udcff", "", "NaN"])
def test_json_of_anything(good, tmp_path, text):
    tensors, config = good["int-quantized"]
    prepare_tensors(tmp_path, tensors, config)
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    if text.startswith("{") and sys.version_info < (3, 11):
        pytest.skip("integers of any length are read")
    with pytest.raises(CheckpointError, match=r"config.json is not"):
        read_layers(tmp_path)


@pytest.mark.parametrize("name", [5, None, ["model.safetensors"], "a\x00b", "x" * 5000, "../model.safetensors", ""])
def test_index_names_no_file(good, tmp_path, name):
    tensors, config = good["int-quantized"]
    prepare_tensors(tmp_path, tensors, config)
    index = {"weight_map": {key: name if i == 1 else "model.safetensors" for i, key in enumerate(tensors)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names .*, which is no file of|read from safetensors files only"):
        read_layers(tmp_path)

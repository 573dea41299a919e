"""w4a8.load on checkpoints that something has damaged: it loads what is there, or says what is wrong. Nothing else is
raised, and nothing is allocated that the files only claim to hold."""

import copy
import json
import math
import os
import struct
import sys

import moe_checkpoint
import pytest
import torch
from damaged_json import HUGE, ODD, paths_in, put, remove
from format_checkpoints import FORMATS, experts_checkpoint, gpt_oss_checkpoint

from w4a8.checkpoint import CheckpointError, load

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
    for name in ("num_experts", "moe_intermediate_size"):  # which gpt-oss has by other names
        del made["mxfp4"].config[name]
    return Checkpoints({name: (each.tensors, each.config) for name, each in made.items()})


def answer(layers):
    generator = torch.Generator().manual_seed(2)
    x, logits = torch.randn(3, 64, generator=generator), torch.randn(3, 3, generator=generator)
    return [layer(x, logits) for layer in layers.values()]


def load_or_refuse(path):
    """Layers, or None if they were refused as they must be."""
    try:
        return load(path, quantize_w4a16=True)
    except (CheckpointError, NotImplementedError) as error:
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


def without_number(config):
    return {key: value for key, value in config.items() if key != "num_experts"}


def refused(tmp_path, message, **options):
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, **options)
    assert message in str(caught.value)


NAMES = ["int-quantized", "pack-quantized", "zero points", "mxfp4"]
ANY_NAME = st.sampled_from(NAMES)


@pytest.mark.parametrize("format_", NAMES)
def test_undamaged(good, tmp_path, format_):
    tensors, config = good[format_]
    prepare_tensors(tmp_path, tensors, config)
    moe_checkpoint.write(tmp_path / "other", tensors, config)
    mine = answer(load(tmp_path, quantize_w4a16=True))
    theirs = answer(load(tmp_path / "other", quantize_w4a16=True))
    assert torch.equal(mine[0], theirs[0])
    assert torch.isfinite(mine[0]).all()
    assert mine[0].abs().max() > 0


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
        for layer in layers.values():
            assert layer.sizes.hidden == 64
            assert layer.sizes.intermediate == 32
            assert layer.num_experts == 3


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
    """Tensors of no byte, which a header can give any size, of all experts at once; config.json says the same."""
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
            header[f"{moe_checkpoint.FIRST}.{name}_{kind}"] = {"dtype": "U8", "shape": size, "data_offsets": [0, 0]}
    config.update(num_local_experts=data.draw(st.sampled_from([experts, None])), hidden_size=data.draw(sizes))
    config["intermediate_size"] = data.draw(st.sampled_from([rows, rows // 2, None]))
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
        config.pop("moe_intermediate_size", None)
        config.pop("num_experts", None)
        config.update(dict.fromkeys(("intermediate_size", "num_local_experts") if format_ == "mxfp4" else ()))
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
    ({"num_experts": 10**9}, "tensor 'model.layers.0.mlp.experts.3.gate_proj.weight' is missing: of 1000000000"),
    ({"num_experts": -3}, "config.json: num_experts is -3, but 1..2**31-1 is expected"),
    ({"hidden_size": 2**30}, "has shape (32, 64), but (32, 1073741824) is expected for hidden_size 1073741824"),
    ({"moe_intermediate_size": 2**30}, "has shape (32, 64), but (1073741824, 64) is expected"),
    ({"hidden_size": 2**70}, "config.json: hidden_size is 1180591620717411303424, but 1..2**31-1 is expected"),
    ({"hidden_size": True}, "config.json: hidden_size is True, but an integer is expected"),
    ({"num_experts": "3"}, "config.json: num_experts is '3', but an integer is expected"),
    ({"model_type": ["qwen3_moe"]}, "routing of model_type ['qwen3_moe'] is not known"),
    ({"hidden_act": 5}, "config.json: hidden_act is 5, but one of silu"),
    ({"text_config": [1]}, "text_config is [1], but an object is expected"),
    ({"quantization_config": "int4"}, "quantization_config is 'int4', but an object is expected"),
    ({"routed_scaling_factor": "2", "model_type": "deepseek_v2"}, "routed_scaling_factor is '2', but a number"),
    ({"n_group": 3.5, "model_type": "deepseek_v3"}, "config.json: n_group is 3.5, but an integer is expected"),
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
    """Without num_experts the names of the tensors count them: one with a huge number must not fill the memory."""
    tensors, config = good["int-quantized"]
    tensors = {
        **tensors,
        "model.layers.0.mlp.experts.999999999.gate_proj.weight": torch.zeros(32, 64, dtype=torch.int8),
    }
    prepare_tensors(tmp_path, tensors, without_number(config))
    refused(tmp_path, "experts.3.gate_proj.weight' is missing: of 1000000000 experts")


@pytest.mark.parametrize("experts", [10**6, 2**31 - 1, 2**31, 2**62])
@pytest.mark.parametrize("said", [True, False])
def test_experts_of_nothing(good, tmp_path, experts, said):
    """A file of 600 bytes with any number of experts, each without a row."""
    header = {}
    for name, shape in (("gate_up_proj_blocks", [0, 2, 16]), ("down_proj_blocks", [0, 1, 16])):
        header[f"{moe_checkpoint.FIRST}.{name}"] = {"dtype": "U8", "shape": [experts, *shape], "data_offsets": [0, 0]}
    config = dict(good["mxfp4"][1])
    config["num_local_experts"] = experts if said and experts < 2**31 else None
    prepare(tmp_path, config, header)
    message = f"gate_up_proj_blocks' has shape ({experts}, 0, 2, 16), which holds nothing"
    refused(tmp_path, message, quantize_w4a16=True)


def test_experts_that_the_index_alone_has(good, tmp_path):
    """Names of tensors that no file has make no room for their experts."""
    tensors, config = good["int-quantized"]
    prepare_tensors(tmp_path, tensors, without_number(config))
    more = {
        f"{moe_checkpoint.FIRST}.{expert}.{name}.{kind}": "model.safetensors"
        for expert in range(3, 3000)
        for name in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "weight_scale")
    }
    index = {"weight_map": {**dict.fromkeys(tensors, "model.safetensors"), **more}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    packed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("w4a8.core.stack.pack_as", lambda *arguments: packed.append(arguments))
        with pytest.raises(CheckpointError, match=r"tensor 'model.layers.0.mlp.experts.3.gate_proj.weight' cannot be"):
            load(tmp_path)
    assert not packed


@pytest.mark.parametrize(
    "numbers", [["1²2", "2", "10"], ["9" * 4999, "9" * 5000, "9" * 5001], ["x", "²", "٣", "٤"], ["007", "07", "7"]]
)
def test_numbers_of_layers(good, tmp_path, numbers):
    """Any text that looks like a number stands for itself; layers come in the order of numbers."""
    tensors, config = good["int-quantized"]
    several = {
        key.replace(".layers.0.", f".layers.{number}."): tensor for number in numbers for key, tensor in tensors.items()
    }
    prepare_tensors(tmp_path, dict(reversed(several.items())), config)
    assert list(load(tmp_path)) == [moe_checkpoint.LAYER.format(number) for number in numbers]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\udcff", "", "NaN"])
def test_json_of_anything(good, tmp_path, text):
    tensors, config = good["int-quantized"]
    prepare_tensors(tmp_path, tensors, config)
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    if text.startswith("{") and sys.version_info < (3, 11):
        pytest.skip("integers of any length are read")
    with pytest.raises(CheckpointError, match=r"config.json is not"):
        load(tmp_path)


@pytest.mark.parametrize("name", [5, None, ["model.safetensors"], "a\x00b", "x" * 5000, "../model.safetensors", ""])
def test_index_names_no_file(good, tmp_path, name):
    tensors, config = good["int-quantized"]
    prepare_tensors(tmp_path, tensors, config)
    index = {"weight_map": {key: name if i == 1 else "model.safetensors" for i, key in enumerate(tensors)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index.json names .*, which is no file of"):
        load(tmp_path)

"""`w4a8 inspect` says of a file what loading it does: every damaged or odd checkpoint of the other tests, both ways.

Loading is `from_pretrained`. What it loads, `read_layers` reads as well. The only exceptions are values
of codes, scales and floats, which inspect does not read (VALUES).
"""

import copy
import itertools
import json
import re
import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
import test_transformers  # noqa: E402
import test_transformers_files as files  # noqa: E402
import test_transformers_float8 as float8  # noqa: E402
import test_transformers_formats as formats  # noqa: E402
import test_transformers_gpt_oss as gpt_oss  # noqa: E402
from damaged_json import damaged as damaged_configs  # noqa: E402
from defects import CONFIGS, TENSORS, change_config, change_tensors, keys_of, rows_of  # noqa: E402
from format_checkpoints import ALL_FORMATS, FLOATS, FORMATS, damages  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_quantize_transformers import make_model  # noqa: E402

from w4a8.checkpoint import read_layers  # noqa: E402
from w4a8.command import main  # noqa: E402
from w4a8.formats.rules import config_in  # noqa: E402
from w4a8.integrations.transformers import W4A8Config, gguf  # noqa: E402

gguf_models = pytest.importorskip("gguf_models")
import test_transformers_gguf_errors as gguf_errors  # noqa: E402
import test_transformers_gguf_experts as gguf_experts  # noqa: E402

if gguf.gguf_problems():
    pytest.skip("GGUF files are left to transformers", allow_module_level=True)

VALUES = re.compile(
    r"not all scales are (finite|numbers)|holds values in \[|255, which is not a number|a NaN or an infin"
)


def loading_says(path, kind=Exception):
    """Why the model does not load, or loads with weights that are made up; None: it loads."""
    config = path / "config.json"
    packed = config.exists() and "w4a8" in config.read_text()
    options = {} if packed else {"quantization_config": W4A8Config()}
    options |= {"gguf_file": "model.gguf"} if (path / "model.gguf").exists() else {}
    try:
        load = transformers.AutoModelForCausalLM.from_pretrained
        _, info = load(path, output_loading_info=True, **options)
    except kind as error:
        return str(error) or type(error).__name__
    missing = sorted(info["missing_keys"])
    return f"has no tensor for {', '.join(missing[:3])}" if missing else None


def inspect_says(path, capsys):
    """The exit code, and the reasons."""
    capsys.readouterr()
    code = main(["inspect", str(path), "--json", "--layers", "--memory-speed", "1"])
    said = capsys.readouterr()
    if not said.out:
        return code, [said.err]
    layers = json.loads(said.out)["layers"]
    return code, [f"{layer['name']}: {layer['why']}" for layer in layers if layer["state"] == "refused"]


def words(text):
    return " ".join(text.split())


def read_without_a_model(path):
    """By `read_layers`, of a checkpoint that others have quantized."""
    source = config_in(path)
    if (path / "model.gguf").exists() or (source is not None and source["quant_method"] != "w4a8"):
        read_layers(path)


def check(path, capsys, what="", kind=Exception):
    """Both say the same, and so do the readers; returns what loading says, in an error of that kind."""
    wanted, (code, reasons) = loading_says(path, kind), inspect_says(path, capsys)
    if wanted is not None and VALUES.search(wanted):
        return wanted
    assert (code != 0) == (wanted is not None), f"{what}: loading says {wanted}, inspect {code} {reasons}"
    if wanted is not None:
        assert any(words(wanted) in words(reason) for reason in reasons), f"{what}: {wanted}, but inspect: {reasons}"
    else:
        read_without_a_model(path)
    return wanted


def put(path, tensors):
    tensors = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


KEY, NORM = "model.layers.1.self_attn.k_proj", "model.norm.weight"
NO_GROUPS = {f"{KEY}.g_idx": torch.zeros(0, dtype=torch.int32)}
NO_BIAS = "layers.1.self_attn.k_proj has no bias, but the model has"
# Formats, models, what becomes of the tensors, what is said of them; None: they load.
CHANGED = [
    *((name, "qwen3", change, match) for name, change, match in formats.DAMAGED),
    *(("GPTQ", "qwen3", formats.add_bias(where, 0.0), None) for where in formats.EXTRA),
    *(("GPTQ", "qwen3", formats.add_bias(where, 1e-3), "") for where in formats.EXTRA),
    # The model has a bias, so without it every number is another.
    *((name, "Qwen2", formats.without(f"{KEY}.bias"), NO_BIAS) for name in ("GPTQ", "W4A8 pack")),
    # As AWQ has them for what follows an activation function.
    ("AWQ", "qwen3", formats.add("model.layers.0.mlp.act_fn.scales"), r"act_fn\.scales' is not read"),
    ("GPTQ", "qwen3", lambda tensors: tensors.update(NO_GROUPS), rf"{KEY}.g_idx: shape \(0,\), which holds nothing"),
    *((name, "qwen3", lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)}),
       rf"tensor '{NORM}' is of I8, but the quantization_config leaves its module in floats")
      for name in ("GPTQ", "W4A8 int")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "family", "change", "match"), CHANGED)
def test_changed_tensors(name, family, change, match, tmp_path, capsys):
    formats.write(tmp_path, family, ALL_FORMATS[name])
    formats.change_file(tmp_path / "theirs", change)
    said = check(tmp_path / "theirs", capsys, kind=ValueError)
    assert (said is None) == (match is None) and (match is None or re.search(match, said))


@pytest.mark.parametrize(("name", "family", "changes", "match"), formats.REFUSED, ids=str)
def test_refused_configurations(name, family, changes, match, tmp_path, capsys):
    formats.write(tmp_path, family, ALL_FORMATS[name], **changes)
    assert re.search(match, check(tmp_path / "theirs", capsys, kind=ValueError))


@pytest.mark.parametrize(("name", "written"), formats.DENIED)
def test_zero_points_that_the_configuration_denies(name, written, tmp_path, capsys):
    formats.write(tmp_path, "Llama", FORMATS[name], denied=written)
    said = check(tmp_path / "theirs", capsys, kind=ValueError)
    assert re.search(r"layers\.0\.\S+: .*zero points in \[[01], 15\], but the configuration says", said)


def test_zero_points_of_the_other_version(tmp_path, capsys):
    """Of a symmetric GPTQ checkpoint: stored as 8 instead of 7."""
    formats.write(tmp_path, "qwen3", FORMATS["GPTQ 2"], checkpoint_format="gptq")
    assert "zero points in [9, 9]" in check(tmp_path / "theirs", capsys)


@pytest.mark.parametrize(("tensor", "change", "match"), gpt_oss.DAMAGED_GPT_OSS)
def test_gpt_oss(tensor, change, match, tmp_path, capsys):
    gpt_oss.write_gpt_oss(tmp_path)
    key = f"model.layers.1.mlp.experts.{tensor}"
    formats.change_file(tmp_path / "theirs", lambda tensors: change_tensors(tensors, key, change))
    said = check(tmp_path / "theirs", capsys, kind=ValueError)
    assert re.search(rf"layers\.1\.mlp\.experts: {match}", said)


def one_format_each(table):
    """A row of each kind for readers of experts, in the first of its formats, and in all of those of 4-bit floats."""
    short = [(names if {*names} <= {*FLOATS} else [*names][:1], *rest) for names, *rest in table]
    return [row for row in rows_of(short) if row[-1] != "linear" and not row[1].startswith("q.")]


def of_the_model(path, name, where):
    """A checkpoint of a model, and the tensor of a row in it."""
    if name == "MXFP4":
        gpt_oss.write_gpt_oss(path)
        return f"model.layers.1.mlp.experts.{where}"
    formats.write(path, "qwen3", ALL_FORMATS[name])
    return keys_of(name, where)["experts"]


@pytest.mark.parametrize("row", one_format_each(TENSORS), ids=lambda row: "-".join(row[:2]))
def test_defects_of_tensors(row, tmp_path, capsys):
    """Those of experts, of a model whose matrices are smaller."""
    name, where, change, words, *more = row
    key = of_the_model(tmp_path, name, where)
    formats.change_file(tmp_path / "theirs", lambda tensors: change_tensors(tensors, key, change))
    if more:
        config = tmp_path / "theirs" / "config.json"
        stated = json.loads(config.read_text())
        stated["quantization_config"].update(more[0])
        config.write_text(json.dumps(stated))
    assert check(tmp_path / "theirs", capsys, f"{key} {words}") is not None


@pytest.mark.parametrize("row", one_format_each(CONFIGS), ids=lambda row: "-".join(row[:2]))
def test_defects_of_configurations(row, tmp_path, capsys):
    name, where, value, words, *_ = row
    of_the_model(tmp_path, name, where)
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    change_config(config, where, value)
    path.write_text(json.dumps(config))
    assert check(tmp_path / "theirs", capsys, words) is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("W4A8 int", ".0.down_proj.weight' is of I8, but config.json has no quantization_config"),
        ("NVFP4 modelopt", ".0.down_proj.weight' is of U8, but config.json has no quantization_config"),
        ("blocks", ".0.down_proj.weight' is of F8_E4M3, but config.json has no quantization_config"),
        ("GPTQ", ".down_proj is not in the checkpoint"),
        ("W4A8 pack", ".down_proj is not in the checkpoint"),
    ],
)
def test_without_a_configuration(name, words, tmp_path, capsys):
    """Codes are not taken for floats."""
    if name in float8.FORMATS:
        float8.write(tmp_path, "qwen3", name)
    else:
        formats.write(tmp_path, "qwen3", ALL_FORMATS[name])
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    assert f"model.layers.0.mlp.experts{words}" in check(tmp_path / "theirs", capsys, kind=ValueError)


def test_missing_or_too_much(tmp_path, capsys):
    """A tensor of any part of the model that nothing reads, and any linear layer or experts without tensors."""
    want = formats.write(tmp_path, "qwen3", FORMATS["GPTQ"])
    whole = load_file(tmp_path / "theirs" / "model.safetensors")
    for name, tensors in files.missing_or_too_much(want, whole):
        put(tmp_path / "theirs", tensors)
        said = check(tmp_path / "theirs", capsys, name, ValueError)
        assert re.search(f"{name}.*(is not read|is not in the checkpoint)", said)


@pytest.mark.parametrize("name", ["GPTQ", "AWQ", "W4A8 int", "W4A16 pack asymmetric", *FLOATS])
def test_any_tensor_of_another_kind(name, tmp_path, capsys):
    """Of another shape or dtype, or with other bits: codes, scales, zero points, and what is float."""
    formats.write(tmp_path, "qwen3", ALL_FORMATS[name])
    whole = load_file(tmp_path / "theirs" / "model.safetensors")
    refused = 0
    for key, tensor in damages(whole, 40):
        put(tmp_path / "theirs", {**whole, key: tensor})
        refused += check(tmp_path / "theirs", capsys, f"{key} {tensor.dtype} {list(tensor.shape)}") is not None
    assert refused > 10


@pytest.mark.parametrize("name", ["GPTQ asymmetric", "AWQ", "AutoRound", "W4A8 pack", *FLOATS])
def test_any_configuration(name, tmp_path, capsys):
    """A sample of what test_rules_broken makes of it."""
    formats.write(tmp_path, "Llama", ALL_FORMATS[name])
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    stated = config["quantization_config"]
    made = [each for each in damaged_configs(stated) if each.get("quant_method") == stated["quant_method"]]
    refused = 0
    for quantization in itertools.islice(made, 0, None, len(made) // 24):
        path.write_text(json.dumps({**config, "quantization_config": quantization}))
        refused += check(tmp_path / "theirs", capsys, str(quantization)) is not None
    assert refused > 0


CONFIGS = {
    "key-value heads as a list": {"num_key_value_heads": [2, 2]},
    "no epsilon": {"rms_norm_eps": None},
    "negative": {"intermediate_size": -32},
    "another size": {"hidden_size": 128},
    "more layers": {"num_hidden_layers": 3},
    "fewer layers": {"num_hidden_layers": 1},
    "fewer experts": {"num_experts": 4},
    "an unknown model": {"model_type": "no_such_model", "architectures": ["NoSuchModel"]},
    "another activation": {"hidden_act": "tanh"},
    "a vocabulary": {"vocab_size": 65},
    "an odd type": {"dtype": "float64"},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("what", CONFIGS)
@pytest.mark.parametrize("kind", ["GPTQ", "floats", "packed"])
def test_odd_models(kind, what, tmp_path, capsys):
    path = tmp_path / "theirs"
    if kind == "GPTQ":
        formats.write(tmp_path, "qwen3", FORMATS[kind])
    else:
        make_model("qwen3").save_pretrained(path)
    if kind == "packed":
        model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=W4A8Config())
        shutil.rmtree(path)
        model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **CONFIGS[what]}))
    check(path, capsys, what)


@pytest.mark.parametrize("key", ["layers.1.self_attn.q_proj.weight", "layers.0.mlp.experts.", "model.norm.weight"])
@pytest.mark.parametrize("change", ["missing", "cut", "another dimension"])
def test_floats(key, change, tmp_path, capsys):
    make_model("qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(each for each in sorted(tensors) if key in each)
    old = tensors.pop(name)
    if change != "missing":
        tensors[name] = old[:-1] if change == "cut" else old[None]
    put(tmp_path, tensors)
    assert check(tmp_path, capsys, name) is not None


def test_quantized_embeddings(tmp_path, capsys):
    formats.write(tmp_path, "qwen3", FORMATS["GPTQ"])
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    made = FORMATS["GPTQ"].random(64, 64, 32)
    tensors |= {f"model.embed_tokens.{suffix}": tensor for suffix, tensor in made.items()}
    del tensors["model.embed_tokens.weight"]
    put(tmp_path / "theirs", tensors)
    assert "model.embed_tokens" in check(tmp_path / "theirs", capsys)


def test_experts_in_one_matrix(tmp_path, capsys):
    """All of a layer, one below the other."""
    formats.write(tmp_path, "qwen3", FORMATS["GPTQ"])
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    for name in ("gate_proj", "up_proj", "down_proj"):
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            keys = [f"model.layers.0.mlp.experts.{expert}.{name}.{suffix}" for expert in range(6)]
            parts = [tensors.pop(key) for key in keys]
            tensors[f"model.layers.0.mlp.experts.{name}.{suffix}"] = torch.cat(parts, -1)
    put(tmp_path / "theirs", tensors)
    assert check(tmp_path / "theirs", capsys) is not None


@pytest.mark.parametrize(("key", "options", "match"), files.IN_TWO)
def test_a_tensor_in_two_shards(key, options, match, tmp_path, capsys):
    formats.write(tmp_path, "qwen3", FORMATS["GPTQ"])
    files.in_two_shards(tmp_path / "theirs", key, **options)
    assert (check(tmp_path / "theirs", capsys, kind=ValueError) is None) == (match is None)


@pytest.mark.parametrize("what", ["no index", "a shard is gone", "a list", "an entry too many", "whole beside"])
def test_shards(what, tmp_path, capsys):
    formats.write(tmp_path, "qwen3", FORMATS["GPTQ"])
    theirs = tmp_path / "theirs"
    whole = (theirs / "model.safetensors").read_bytes()
    files.in_two_shards(theirs, files.UP_CODES)
    index = theirs / "model.safetensors.index.json"
    if what == "no index":
        index.unlink()
    elif what == "a shard is gone":
        (theirs / "model-00002-of-00002.safetensors").unlink()
    elif what == "whole beside":
        (theirs / "model.safetensors").write_bytes(whole)
    else:
        stated = json.loads(index.read_text())["weight_map"]
        more = {**stated, "model.more.weight": "model-00001-of-00002.safetensors"}
        index.write_text(json.dumps({"metadata": {}, "weight_map": list(stated) if what == "a list" else more}))
    wanted, (code, reasons) = loading_says(theirs), inspect_says(theirs, capsys)
    assert (code != 0) == (wanted is not None), (wanted, reasons)
    if what == "a list":
        assert code == 1 and f"{index} has no weight_map" in reasons[0]


@pytest.mark.parametrize(("change", "match"), test_transformers.DAMAGED)
def test_packed_directories(change, match, tmp_path, capsys):
    test_transformers.save_float("qwen3", tmp_path / "float")
    model = test_transformers.load(tmp_path / "float", quantization_config=W4A8Config())
    model.save_pretrained(tmp_path / "packed")
    assert check(tmp_path / "packed", capsys) is None
    test_transformers.damaged(tmp_path / "packed", change)
    assert re.search(match, check(tmp_path / "packed", capsys, kind=ValueError))


# Keys and tensors that are changed, or None for a file that is cut.
ODD_GGUF = {
    "nothing": ({}, {}),
    "key-value heads as an array": ({"attention.head_count_kv": [2, 2]}, {}),
    "no epsilon": ({"attention.layer_norm_rms_epsilon": None}, {}),
    "no layers": ({"block_count": 0}, {}),
    "fewer layers": ({"block_count": 1}, {}),
    "a float that is cut": ({}, {"output_norm.weight": torch.ones(3)}),
    "quantized embeddings": ({}, {"output.weight": None}),
    **{what: (keys, tensors) for what, (keys, tensors, _) in gguf_errors.BROKEN.items()},
}


@pytest.mark.parametrize("what", ODD_GGUF)
def test_gguf(what, tmp_path, capsys):
    tiny, (keys, tensors) = gguf_models.TinyModel("qwen3moe"), ODD_GGUF[what]
    if keys is not None:
        tiny.update(keys, tensors)
    path = tiny.write(tmp_path)
    if keys is None:
        path.write_bytes(path.read_bytes()[:-40])
    wanted = check(tmp_path, capsys, what, ValueError if what in gguf_errors.BROKEN else Exception)
    if what in gguf_errors.BROKEN:
        assert re.search(gguf_errors.BROKEN[what][2], wanted)


@pytest.mark.parametrize("what", gguf_experts.REFUSED)
def test_gguf_routers(what, tmp_path, capsys):
    name, changes, message = gguf_experts.REFUSED[what]
    tiny = gguf_models.TinyModel(name)
    tiny.update(changes)
    tiny.write(tmp_path)
    assert re.search(message, check(tmp_path, capsys, what, ValueError))


@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_any_tensor_of_gguf(name, tmp_path, capsys):
    """Missing, or of another shape: one after the other of one layer."""
    tiny = gguf_models.TinyModel(name)
    kept = dict(tiny.tensors)
    chosen = [key for key in kept if not key.startswith("blk.1.") or name.startswith(("deepseek", "glm"))]
    for key in chosen[:: max(1, len(chosen) // 6)]:
        tiny.tensors = copy.copy(kept)
        old = tiny.tensors.pop(key)
        tiny.write(tmp_path)
        check(tmp_path, capsys, f"{key} is missing")
        kind, rows = old if isinstance(old, tuple) else (None, old)
        tiny.tensors[key] = rows[:-1] if kind is None else (kind, rows[:-1])
        if rows.shape[0] > 1:
            tiny.write(tmp_path)
            check(tmp_path, capsys, f"{key} is cut")

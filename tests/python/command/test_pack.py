"""`w4a8 pack` and `w4a8 verify`: the directory beside the model that is loaded without it; what is damaged is found."""

import json
import os
import shutil
import subprocess
import sys

import meter
import pytest
import torch
from common import assert_same_bits

transformers = pytest.importorskip("transformers", minversion="5.0")
import multiplied_out  # noqa: E402
import safetensors.torch  # noqa: E402
from test_quantize_transformers import make_model  # noqa: E402

import w4a8  # noqa: E402
from w4a8.checkpoint.packed_as_tensors import read_directory  # noqa: E402
from w4a8.command import main, pack  # noqa: E402
from w4a8.integrations.transformers import W4A8Config  # noqa: E402
from w4a8.quantization.texts import own_text, windows  # noqa: E402

TOOL_WRITTEN = multiplied_out.TOOL_WRITTEN


def load(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def run_json(capsys, *arguments):
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def verify(capsys, folder):
    return run_json(capsys, "verify", folder)


def assert_same_model(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if tensor.dtype == torch.uint8:
            assert torch.equal(tensor, other[name]), name
        else:
            assert_same_bits(tensor, other[name], name)


@pytest.mark.parametrize("folder", ["awq_sym", "w4a8", "mxfp4", "auto_round_mixed"])
def test_quantized(folder, tmp_path, capsys):
    code, answer = run_json(capsys, "pack", TOOL_WRITTEN / folder, tmp_path / "deep" / "out")
    assert code == 0 and os.listdir(tmp_path / "deep") == ["out"]
    model = load(TOOL_WRITTEN / folder, quantization_config=W4A8Config())
    report = model.hf_quantizer.report
    assert (answer["packed_bytes"], answer["packed"]) == (report.packed_bytes, len(report.replaced))
    assert_same_model(load(tmp_path / "deep" / "out"), model)
    code, answer = verify(capsys, tmp_path / "deep" / "out")
    assert (code, answer["problems"], answer["checksums"]) == (0, [], len(os.listdir(tmp_path / "deep" / "out")) - 1)


OPTIONS = {
    "": {},
    "--group-size 16": {"group_size": 16},
    "--values e2m1 --effort 0": {"values": "e2m1", "effort": 0},
    "--zero-points --scale-dtype bfloat16": {"symmetric": False, "scale_dtype": "bfloat16"},
    "--activation-group -1 --skip re:.*q_proj --skip re:.*k_proj": {
        "activation_group": -1,
        "skip": ["re:.*q_proj", "re:.*k_proj"],
    },
}


@pytest.mark.parametrize("options", OPTIONS)
def test_floats(options, tmp_path, capsys):
    make_model("qwen3").save_pretrained(tmp_path / "floats")
    assert run_json(capsys, "pack", tmp_path / "floats", tmp_path / "out", *options.split())[0] == 0
    assert_same_model(
        load(tmp_path / "out"), load(tmp_path / "floats", quantization_config=W4A8Config(**OPTIONS[options]))
    )


@pytest.mark.parametrize(("name", "own"), [("qwen3", False), ("glm4", False), ("qwen3", True)])
def test_calibration(name, own, tmp_path, capsys):
    """What quantize_ makes of the model and windows of a text, or text of its own. The directory loads as any other."""
    model = make_model(name).bfloat16()
    model.save_pretrained(tmp_path / "floats")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w0": 0, "w1": 1, "w2": 2, "w3": 3}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.save_pretrained(tmp_path / "floats")
    (tmp_path / "text").write_text("w1 w2 w3 w2 " * 40)
    arguments = ("--calibration", "own" if own else tmp_path / "text", "--bits", "6.5")
    code, answer = run_json(capsys, "pack", tmp_path / "floats", tmp_path / "out", *arguments)
    assert code == 0 and answer["packed"] > 0
    model = load(tmp_path / "floats", dtype="float32")
    batches = own_text(model) if own else windows(tokenizer, "w1 w2 w3 w2 " * 40)
    w4a8.quantize_(model, bits=6.5, calibration=batches)
    kept = load(tmp_path / "floats")  # of what stays float, the type that the file has
    assert {tensor.dtype for tensor in kept.parameters()} >= {torch.bfloat16}
    for name, tensor in model.named_parameters():
        tensor.data = tensor.data.to(kept.get_parameter(name).dtype)
    assert_same_model(load(tmp_path / "out"), model)
    kinds = {repr(module).rpartition(", ")[2] for module in model.modules() if hasattr(module, "packed")}
    assert len(kinds) > 1  # more than one


def test_own_text():
    """Tokens are drawn from the distribution of the model: all of it, and the same each time."""
    model = make_model("Qwen3")
    model.lm_head.weight.mul_(3)  # not all tokens alike
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 1, 2
    state = torch.get_rng_state()
    one, other = own_text(model, 3000, 2), own_text(model, 3000, 2)
    assert torch.equal(state, torch.get_rng_state())
    assert len(one) == 3000 and all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, other))
    drawn = torch.cat([each["input_ids"] for each in one])
    assert drawn.shape == (3000, 2) and (drawn[:, 0] == 1).all()
    logits = model(drawn[:1, :1]).logits[0, 0].double()
    logits[2] = -torch.inf  # texts do not end early
    expected = logits.softmax(-1)
    counts = torch.bincount(drawn[:, 1], minlength=len(expected))
    # Pearson's statistic has the mean V - 1 and the variance 2 (V - 1), or a little more.
    chi = ((counts - 3000 * expected).square() / (3000 * expected).clamp(min=1e-9))[expected > 0].sum()
    freedom = len(expected) - 2
    assert abs(chi - freedom) < 6 * (2 * freedom) ** 0.5


def test_what_a_calibration_needs(tmp_path, capsys):
    make_model("qwen3").save_pretrained(tmp_path / "floats")
    shutil.copytree(tmp_path / "floats", tmp_path / "codes")
    tensors = safetensors.torch.load_file(tmp_path / "codes" / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    tensors[key] = tensors[key].to(torch.int8)
    safetensors.torch.save_file(tensors, tmp_path / "codes" / "model.safetensors", metadata={"format": "pt"})
    for text, model, message in (
        (tmp_path / "none", "floats", "none: No such file"),
        ("pydoc", "floats", "has no tokenizer, which --calibration needs"),
        ("pydoc", "codes", f"tensor '{key}' is of I8, but config.json has no quantization_config"),
        ("pydoc", TOOL_WRITTEN / "gptq", "quantized already (gptq): leave --calibration out"),
    ):
        assert main(["pack", str(tmp_path / model), str(tmp_path / "out"), "--calibration", str(text)]) != 0
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["llama, tied", "qwen3moe"])
def test_gguf(name, tmp_path, capsys):
    gguf_models = pytest.importorskip("gguf_models")
    from w4a8.integrations.transformers import gguf

    if gguf.gguf_problems():
        pytest.skip("GGUF files are left to transformers")
    (tmp_path / "in").mkdir()
    gguf_models.TinyModel(name).write(tmp_path / "in")
    code, answer = run_json(capsys, "pack", tmp_path / "in" / "model.gguf", tmp_path / "out")
    assert code == 0 and answer["packed"] > 0
    assert_same_model(load(tmp_path / "out"), load(tmp_path / "in", gguf_file="model.gguf"))


def test_a_tokenizer_that_cannot_be_made(tmp_path, capsys):
    """Is said, and the model is packed nevertheless."""
    shutil.copytree(TOOL_WRITTEN / "w4a8", tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "cannot make the tokenizer" in out and verify(capsys, tmp_path / "out")[0] == 0


def test_the_tokenizer_is_written_too(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    shutil.copytree(TOOL_WRITTEN / "gptq", tmp_path / "in")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    made.chat_template = "{{ messages[0].content }}"
    made.save_pretrained(tmp_path / "in")
    code, answer = run_json(capsys, "pack", tmp_path / "in", tmp_path / "out")
    assert code == 0 and answer["no_tokenizer"] == ""
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert written("b").input_ids == [1] and written.chat_template == made.chat_template


@pytest.fixture
def packed(tmp_path, capsys):
    assert main(["pack", str(TOOL_WRITTEN / "gptq"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "same bit for bit" in said.out and "SHA256SUMS" in said.out
    return tmp_path / "out"


def test_one_byte(packed, capsys):
    """Anywhere: of a header, of weights, at the end, in another file."""
    weights = packed / "model.safetensors"
    size = weights.stat().st_size
    places = [(weights, at) for at in (0, 100, size // 2, size - 1)] + [(packed / "config.json", 5)]
    for path, at in places:
        before = path.read_bytes()
        path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
        if path == weights:
            code, answer = verify(capsys, packed)
            assert code == 1 and f"{path} has changed: its checksum differs" in answer["problems"]
        else:
            assert main(["verify", str(packed)]) == 1
        path.write_bytes(before)
    assert main(["verify", str(packed)]) == 0
    assert capsys.readouterr().out.endswith("good\n")


def test_as_sha256sum_has_it(packed):
    if shutil.which("sha256sum") is None:
        pytest.skip("no sha256sum")
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=packed, check=True, capture_output=True)


def test_files_that_are_missing_cut_or_more(packed, capsys):
    weights = packed / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    problems = verify(capsys, packed)[1]["problems"]
    assert any("has changed" in each for each in problems) and any("its header says" in each for each in problems)
    weights.write_bytes(content)
    (packed / "more.safetensors").write_bytes(content)
    assert verify(capsys, packed)[1]["problems"] == [f"{packed / 'more.safetensors'} is not in SHA256SUMS"]
    (packed / "more.safetensors").unlink()
    for name in ("modeling_more.py", "templates/more.jinja"):
        (packed / name).parent.mkdir(exist_ok=True)
        (packed / name).touch()
        assert verify(capsys, packed)[1]["problems"] == [f"{packed / name} is not in SHA256SUMS"]
        (packed / name).unlink()
    (packed / "generation_config.json").unlink()
    assert verify(capsys, packed)[1]["problems"] == [f"{packed / 'generation_config.json'} is missing"]
    weights.unlink()
    assert verify(capsys, packed)[0] == 1


def test_headers_without_checksums(packed, capsys):
    """As save_pretrained writes a directory. The header of the last expert is looked at like that of the first."""
    (packed / "SHA256SUMS").unlink()
    code, answer = verify(capsys, packed)
    assert (code, answer["checksums"]) == (0, 0)
    weights = packed / "model.safetensors"
    content = bytearray(weights.read_bytes())
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    name = next(name for name in entries if name.endswith("w2_packed"))
    experts = entries[name]["shape"][0]
    begin, end = entries[name]["data_offsets"]
    last = 8 + size + end - (end - begin) // experts
    content[last] ^= 0xFF
    weights.write_bytes(content)
    code, answer = verify(capsys, packed)
    assert code == 1 and answer["problems"][0].startswith(f"{name}[{experts - 1}]: ")
    assert main(["verify", str(packed)]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_an_index_that_is_none(packed, capsys):
    """Which is said by name: without a traceback."""
    (packed / "SHA256SUMS").unlink()
    index = packed / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": ["model.safetensors"]}))
    code, answer = verify(capsys, packed)
    assert code == 1 and answer["problems"] == [f"{index} has no weight_map"]
    assert main(["inspect", str(packed)]) == 1
    assert capsys.readouterr().err == f"w4a8: {index} has no weight_map\n"


def test_what_is_no_packed_directory(tmp_path, capsys):
    assert main(["verify", str(TOOL_WRITTEN / "gptq")]) == 1
    assert "'gptq'" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.startswith(f"w4a8: {tmp_path / 'nowhere'} is no packed directory")


def test_folders_in_the_directory(tmp_path, monkeypatch, capsys):
    """transformers writes named chat templates to a folder of their own."""

    def write(path, folder):
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
        return ""

    monkeypatch.setattr(pack, "_write_tokenizer", write)
    out = tmp_path / "out"
    assert main(["pack", str(TOOL_WRITTEN / "gptq"), str(out)]) == 0
    assert (out / "additional_chat_templates").stat().st_mode & 0o100
    (out / "additional_chat_templates" / "tools.jinja").write_text("{{ other }}")
    assert main(["verify", str(out)]) == 1
    assert "tools.jinja has changed" in capsys.readouterr().out


def test_what_was_written_wrongly_is_not_taken(tmp_path, monkeypatch, capsys):
    model = load(TOOL_WRITTEN / "gptq", quantization_config=W4A8Config())
    save = type(model).save_pretrained

    def save_wrongly(model, folder, **options):
        save(model, folder, **options)
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(type(model), "save_pretrained", save_wrongly)
    assert main(["pack", str(TOOL_WRITTEN / "gptq"), str(tmp_path / "out")]) == 1
    assert "written wrongly" in capsys.readouterr().err and os.listdir(tmp_path) == []


def test_a_model_that_sees_images(tmp_path, capsys):
    """AutoModelForCausalLM has none for it."""
    text = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}  # fmt: skip
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    transformers.Qwen2VLForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        load(tmp_path / "in")
    assert run_json(capsys, "pack", tmp_path / "in", tmp_path / "out")[0] == 0
    want = transformers.Qwen2VLForConditionalGeneration.from_pretrained(
        tmp_path / "in", quantization_config=W4A8Config()
    )
    assert_same_model(transformers.Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "out"), want)
    for folder in ("in", "out"):
        code, answer = run_json(capsys, "inspect", tmp_path / folder, "--memory-speed", "1")
        assert (code, answer["packed_bytes"]) == (0, want.hf_quantizer.report.packed_bytes)


def test_a_weight_without_a_number(tmp_path, capsys):
    model = make_model("Qwen3")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "floats")
    assert main(["pack", str(tmp_path / "floats"), str(tmp_path / "out")]) == 1
    written = capsys.readouterr().err.splitlines()
    assert "model.layers.1.mlp.up_proj" in written[-1] and os.listdir(tmp_path) == ["floats"]


def without(folder, *parts):
    """Takes tensors out of a folder's file."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    left = {key: tensor for key, tensor in tensors.items() if not any(part in key for part in parts)}
    assert len(left) < len(tensors)
    safetensors.torch.save_file(left, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("what", ["a weight of a layer", "a norm", "a layer of GPTQ", "the embeddings"])
def test_a_tensor_that_is_missing(what, tmp_path, capsys):
    """transformers makes numbers up for it, and warns."""
    if what == "a layer of GPTQ":
        shutil.copytree(TOOL_WRITTEN / "gptq", tmp_path / "in")
        key = "layers.0.self_attn.q_proj."
    else:
        make_model("Qwen3").save_pretrained(tmp_path / "in")
        keys = {"a norm": "model.norm.weight", "the embeddings": "embed_tokens.weight"}
        key = keys.get(what, "model.layers.1.mlp.up_proj.weight")
    without(tmp_path / "in", key)
    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert key in capsys.readouterr().err.splitlines()[-1] and os.listdir(tmp_path) == ["in"]
    if what in ("a weight of a layer", "a layer of GPTQ"):  # which is to be packed
        with pytest.raises(ValueError, match=f"{key}.*is not in the checkpoint"):
            load(tmp_path / "in", quantization_config=W4A8Config())


@pytest.mark.parametrize("listed", [True, False])
def test_a_packed_tensor_that_is_missing(packed, listed, capsys):
    """Is listed in config.json, so that verify finds it without checksums; older directories have no list."""
    (packed / "SHA256SUMS").unlink()
    name = "model.layers.0.self_attn.q_proj"
    without(packed, name)
    if not listed:
        config = json.loads((packed / "config.json").read_text())
        assert f"{name}.packed" in config["quantization_config"].pop("packed")
        (packed / "config.json").write_text(json.dumps(config))
    else:
        code, answer = verify(capsys, packed)
        assert code == 1 and f"'{name}.packed' is missing" in answer["problems"][0]
        with pytest.raises(ValueError, match=f"'{name}.packed' is missing"):  # as in vLLM
            read_directory(packed, transformers.AutoConfig.from_pretrained(packed).quantization_config)
    with pytest.raises(ValueError, match=f"{name}.*(is missing|is not in)"):
        load(packed)


def test_what_transformers_cannot_load(tmp_path, capsys):
    """In one line, whatever it raises: here an EOFError of pickle."""
    (tmp_path / "in").mkdir()
    shutil.copy(TOOL_WRITTEN / "gptq" / "config.json", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    (tmp_path / "in" / "pytorch_model.bin").touch()
    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert f"w4a8: transformers cannot load {tmp_path / 'in'}: EOFError" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in"]


def test_wrong_usage(packed, tmp_path, capsys):
    cases = {
        ("pack", TOOL_WRITTEN / "gptq", packed): "is there already",
        ("pack", packed, tmp_path / "new"): "is packed already",
        ("pack", TOOL_WRITTEN / "gptq", tmp_path / "new", "--group-size", "64"): "leave --group-size out",
        ("pack", TOOL_WRITTEN / "gptq", tmp_path / "new", "--values", "int3"): "invalid choice",
        ("pack", TOOL_WRITTEN / "gptq"): "OUT",
        ("verify",): "DIR",
    }
    for arguments, message in cases.items():
        assert main(list(map(str, arguments))) == 2, arguments
        assert message in capsys.readouterr().err
    make_model("Qwen3").save_pretrained(tmp_path / "floats")
    assert main(["pack", str(tmp_path / "floats"), str(tmp_path / "new"), "--group-size", "24"]) == 1
    assert "group_size is 24" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_as_a_module(packed, tmp_path):
    command = [sys.executable, "-m", "w4a8", "pack", TOOL_WRITTEN / "w4a8", tmp_path / "other"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert subprocess.run([sys.executable, "-m", "w4a8", "verify", tmp_path / "other"], cwd="/").returncode == 0


PROGRAM = """
import torch, transformers
from shuffled_model import in_small_files as make
from w4a8.command import main

torch.set_num_threads(1)
make(f"{sys.argv[1]}/small", hidden_size=64, moe_intermediate_size=32, num_experts=4, num_hidden_layers=1)
make(f"{sys.argv[1]}/large", hidden_size=256, moe_intermediate_size=256, num_experts=64, num_hidden_layers=8)
assert main(["pack", f"{sys.argv[1]}/small", f"{sys.argv[1]}/small-packed"]) == 0
import gc; gc.collect()
before = begin()
assert main(["pack", f"{sys.argv[1]}/large", f"{sys.argv[1]}/packed"]) == 0
print(memory("VmHWM") - before)
"""


@meter.needs_proc
@meter.needs_its_allocator
def test_memory_is_bounded(tmp_path):
    """What is packed, and less than a shard and a margin for what Python keeps; not the 201 MB of floats."""
    (peak,) = meter.run(PROGRAM, tmp_path)
    floats, written = (
        sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors")) for name in ("large", "packed")
    )
    print(f"floats {floats}, written {written}, peak {peak}")
    assert floats > 200e6 and written < 0.4 * floats
    assert peak < written + (8 << 20) + (24 << 20)


def test_checked_by_mapping(tmp_path, monkeypatch, capsys):
    """W4A8_MEMORY would copy what is loaded again."""
    monkeypatch.setenv("W4A8_MEMORY", "copy")
    assert main(["pack", str(TOOL_WRITTEN / "gptq"), str(tmp_path / "out")]) == 0
    assert pack.SUMS in os.listdir(tmp_path / "out")

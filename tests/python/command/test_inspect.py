"""`w4a8 inspect`: bytes beside those of the loaded model, estimates beside sums by hand, what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
import multiplied_out  # noqa: E402
from gguf_models import TinyModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_quantize_transformers import make_model  # noqa: E402

from w4a8.checkpoint import tensors as of_a_folder  # noqa: E402
from w4a8.checkpoint.gguf_file import gguf_in  # noqa: E402
from w4a8.command import headers, inspect, machine, main  # noqa: E402
from w4a8.command.contents import EMBEDDING, EXPERTS, FLOAT, LINEAR, OTHER, OUTPUT, REFUSED, RUNS, Layer  # noqa: E402
from w4a8.command.headers import read_headers  # noqa: E402
from w4a8.integrations.transformers import W4A8Config  # noqa: E402

TOOL_WRITTEN = multiplied_out.TOOL_WRITTEN
FOLDERS = sorted(path.parent.name for path in TOOL_WRITTEN.glob("*/config.json"))


def load(path, config=None, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **options)


def examine(path):
    answer, layers = inspect.examine(str(path), memory_speed=1.0)
    json.dumps(answer)
    assert sum(each["bytes"] for each in answer["runs"]) == answer["packed_bytes"]
    assert sum(each["bytes"] for each in answer["stays_float"]) == answer["float_bytes"]
    return answer, layers


def count(answer, role, state="runs"):
    return sum(each["count"] for each in answer[state] if each["role"] == role)


@pytest.mark.parametrize("folder", FOLDERS)
def test_of_tools(folder):
    """Bytes are those of the model that transformers loads."""
    answer, _ = examine(TOOL_WRITTEN / folder)
    report = load(TOOL_WRITTEN / folder, W4A8Config()).hf_quantizer.report
    assert answer["packed_bytes"] == report.packed_bytes
    assert answer["float_bytes"] == report.left_bytes
    assert count(answer, LINEAR) + count(answer, OUTPUT) + count(answer, EXPERTS) == len(report.replaced)
    assert answer["refused"] == []


@pytest.mark.parametrize("name", ["Qwen3", "glm4", "minimax m2", "ernie 4.5", "granite"])
def test_floats_and_what_is_packed_of_them(name, tmp_path):
    make_model(name).save_pretrained(tmp_path / "floats")
    answer, _ = examine(tmp_path / "floats")
    model = load(tmp_path / "floats", W4A8Config())
    report = model.hf_quantizer.report
    assert (answer["format"], answer["packed_bytes"]) == ("floats", report.packed_bytes)
    buffers = sum(t.nbytes for n, t in model.named_buffers() if "packed" not in n and "inv_freq" not in n)
    assert report.left_bytes <= answer["float_bytes"] <= report.left_bytes + buffers
    assert count(answer, LINEAR) + count(answer, EXPERTS) == len(report.replaced)

    model.save_pretrained(tmp_path / "packed")
    packed, _ = examine(tmp_path / "packed")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    assert packed["format"] == "w4a8"
    assert packed["packed_bytes"] == sum(t.nbytes for n, t in tensors.items() if n.endswith("packed"))
    assert packed["packed_bytes"] + packed["float_bytes"] == sum(t.nbytes for t in tensors.values())
    assert packed["peak_bytes"] == packed["disk_bytes"]  # files are mapped
    for role in (LINEAR, EXPERTS):
        assert count(packed, role) == count(answer, role)


def test_gguf(tmp_path):
    gguf_models, gguf_architectures = map(pytest.importorskip, ("gguf_models", "gguf_architectures"))
    from w4a8.integrations.transformers import gguf

    if gguf.gguf_problems():
        pytest.skip("GGUF files are left to transformers")
    for name in ("llama", "llama, tied", "qwen3moe", "gpt-oss", "deepseek-v3", "olmoe"):
        gguf_models.TinyModel(name).write(tmp_path)
        answer, _ = examine(tmp_path)
        report = load(tmp_path, gguf_file="model.gguf").hf_quantizer.report
        assert answer["packed_bytes"] == report.packed_bytes, name
        assert answer["float_bytes"] == report.left_bytes, name
        assert answer["refused"] == [] and answer["format"] == "GGUF"
        assert answer["not_in_vllm"] == ""
    gguf_architectures.write("glm-dsa", gguf_architectures.model_of("glm-dsa"), tmp_path, True)
    assert "its CPU backend has no sparse attention" in examine(tmp_path)[0]["not_in_vllm"]


def test_an_output_layer_that_shares_the_embeddings(tmp_path):
    """Is of their kind."""
    gguf_models = pytest.importorskip("gguf_models")
    tiny = gguf_models.TinyModel("llama, tied")
    kind = tiny.tensors["token_embd.weight"][0]
    tiny.tensors["token_embd.weight"], _ = gguf_models.blocks("Q8_0", (96, 256), np.random.default_rng(0))
    assert kind != "Q8_0"
    tiny.write(tmp_path)
    layers = examine(tmp_path)[1]
    assert [each.what for each in layers if each.role == OUTPUT] == ["Q8_0 as int8 in groups of 32"]


def test_gguf_of_another_kind(tmp_path, capsys):
    """An unknown architecture is refused. Experts with a part in floats are floats in transformers, and not in vLLM."""
    gguf_models = pytest.importorskip("gguf_models")
    import gguf_files

    model = gguf_models.TinyModel("qwen3moe")
    tensors = {**model.tensors, "blk.0.ffn_down_exps.weight": torch.zeros(4, gguf_models.HIDDEN, gguf_models.INTER)}
    gguf_files.write(tmp_path / "model.gguf", model.architecture, model.keys, tensors)
    answer, _ = examine(tmp_path)
    report = load(tmp_path, gguf_file="model.gguf").hf_quantizer.report
    assert (answer["packed_bytes"], answer["float_bytes"]) == (report.packed_bytes, report.left_bytes)
    assert count(answer, EXPERTS) == 1 and "blk.0.ffn_down_exps.weight is F32" in answer["not_in_vllm"]

    keys = {key.replace("qwen3moe.", "other."): value for key, value in model.keys.items()}
    gguf_files.write(tmp_path / "model.gguf", "other", keys, model.tensors)
    assert main(["inspect", str(tmp_path), "--memory-speed", "1"]) == 1
    assert "general.architecture is 'other'" in capsys.readouterr().err
    assert main(["pack", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "'other'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_token_bytes_by_hand():
    layers = [
        Layer("a", LINEAR, RUNS, "", "", 100),
        Layer("b", EXPERTS, RUNS, "", "", 800, experts=8),
        Layer("c", EXPERTS, FLOAT, "", "", 80, experts=4),
        Layer("d", OTHER, FLOAT, "", "", 3),
        Layer("e", EMBEDDING, FLOAT, "", "", 1000),
    ]
    tied = 100 + 800 * 2 // 8 + 80 * 2 // 4 + 3 + 1000
    assert inspect.token_bytes(layers, 2) == tied
    head = Layer("f", OUTPUT, FLOAT, "", "", 500)
    assert inspect.token_bytes([*layers, head], 2) == tied - 1000 + 500
    assert inspect.token_bytes(layers, None) == 100 + 800 + 80 + 3 + 1000


def test_the_demo_by_hand(capsys):
    """int4 in groups of 32: half a byte and a 32nd of a scale a weight, 128 bytes for 16 rows, 64 for the header."""
    folder = Path(__file__).parents[3] / "examples/tiny_moe/checkpoints/g32"
    if not folder.is_dir():
        pytest.skip("needs the examples")
    assert main(["inspect", str(folder), "--json", "--memory-speed", "10"]) == 0
    answer = json.loads(capsys.readouterr().out)
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    heads, kv = (config[f"num_{each}_heads"] * config["head_dim"] for each in ("attention", "key_value"))
    tensors = load_file(next(folder.glob("*.safetensors")))
    scale = next(tensor for name, tensor in tensors.items() if name.endswith("weight_scale")).element_size()

    def packed(rows, columns):
        return 64 + rows * columns // 2 + rows * columns // 32 * scale + rows // 16 * 128

    linear = sum(packed(*shape) for shape in ((heads, hidden), (kv, hidden), (kv, hidden), (hidden, heads)))
    layer = experts * (packed(2 * inner, hidden) + packed(hidden, inner))
    assert answer["packed_bytes"] == config["num_hidden_layers"] * (linear + layer)
    assert count(answer, LINEAR) == 16 and count(answer, EXPERTS) == 4
    head = next(each["bytes"] for each in answer["stays_float"] if each["role"] == OUTPUT)
    other = sum(each["bytes"] for each in answer["stays_float"] if each["role"] not in (OUTPUT, EMBEDDING))
    token = 4 * (linear + layer * config["num_experts_per_tok"] // experts) + head + other
    assert answer["token_bytes"] == token
    assert answer["tokens_per_second_at_most"] == round(10e9 / token, 2)
    assert answer["peak_bytes"] == answer["packed_bytes"] + answer["float_bytes"] + answer["disk_bytes"]


@pytest.fixture
def gptq(tmp_path):
    shutil.copytree(TOOL_WRITTEN / "gptq", tmp_path / "model")
    return tmp_path / "model"


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(fields)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("source", ["floats", "packed", "GGUF"])
def test_beside_a_device(source, tmp_path, monkeypatch, capsys):
    """Packed layers as 16-bit floats; the experts on the CPU. Whether they fit is said of a device that is here."""
    path = tmp_path / "model"
    if source == "GGUF":
        path.mkdir()
        TinyModel("qwen3moe").write(path)
        model = load(path, gguf_file="model.gguf")
        path = path / "model.gguf"
    else:
        make_model("qwen3").bfloat16().save_pretrained(path)
        model = load(path, W4A8Config())
        if source == "packed":
            path = tmp_path / "packed"
            model.save_pretrained(path)
    there, here = 0, 0
    for module in model.modules():
        if hasattr(module, "w13_packed"):
            here += module.w13_packed.numel() + module.w2_packed.numel()
        elif hasattr(module, "packed"):
            there += 2 * module.in_features * module.out_features
        elif hasattr(module, "rows_packed"):
            there += 2 * module.num_embeddings * module.embedding_dim
        else:
            there += sum(each.numel() * each.element_size() for each in module.parameters(recurse=False))
    for free, says in ((there, "the floats fit"), (there - 1, "the floats DO NOT FIT"), (None, None)):
        card = [] if free is None else [{"device": "cuda:0", "name": "", "bytes": there, "available_bytes": free}]
        monkeypatch.setattr(machine, "accelerators", lambda card=card: card)
        options = ["inspect", str(path), "--memory-speed", "1", "--device", "cuda"]
        assert main([*options, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["beside"]
        assert found == {"device": "cuda", "device_bytes": there, "cpu_bytes": here, "available_bytes": free}
        assert main(options) == 0
        line = next(each for each in capsys.readouterr().out.splitlines() if each.startswith("beside it"))
        assert says in line if says else "fit" not in line.lower()


def test_nothing_is_beside_a_device(tmp_path, capsys):
    make_model("Qwen3").save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path), "--memory-speed", "1", "--device", "cuda"]) == 2
    assert "--device cuda: the model has no packed experts" in capsys.readouterr().err


def test_another_width_is_refused(gptq, capsys):
    change(gptq, dynamic={".*q_proj": {"bits": 3}})
    assert main(["inspect", str(gptq), "--memory-speed", "1"]) == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("REFUSED")]
    assert "1 linear layer" in line and "bits is 3" in line and "dynamic" in line
    assert "decoding" not in out


def test_another_method_is_refused(gptq, capsys):
    change(gptq, quant_method="bitsandbytes")
    assert main(["inspect", str(gptq), "--memory-speed", "1"]) == 1
    assert "is quantized with 'bitsandbytes'" in capsys.readouterr().err


def test_every_layer_is_listed_on_demand(capsys):
    assert main(["inspect", str(TOOL_WRITTEN / "gptq"), "--layers", "--memory-speed", "1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "q_proj" in line]
    assert len(lines) == 1 and lines[0].startswith("runs ")


def test_activation_order_is_named(gptq):
    """Whether groups are in order says the data of g_idx."""
    path = next(gptq.glob("*.safetensors"))
    tensors = load_file(path)
    change(gptq, desc_act=True)
    name = next(name for name in tensors if name.endswith("q_proj.g_idx"))
    for each in [name for name in tensors if name.endswith("g_idx")]:
        tensors[each] = torch.zeros(len(tensors[each]), dtype=torch.int32)
    tensors[name][0] = 1
    save_file(tensors, path)
    layers = examine(gptq)[1]
    (layer,) = [layer for layer in layers if layer.state == REFUSED]
    assert layer.name == name.removesuffix(".g_idx") and "g_idx" in layer.why


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "nowhere is not there"),
        (["."], "a folder without config.json"),
        ([__file__], "neither a folder nor a GGUF file"),
    ],
)
def test_what_is_no_model(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("speed", ["1e999", "-5", "0", "nan", "x"])
def test_a_speed_that_no_memory_has(speed, gptq, capsys):
    assert main(["inspect", str(gptq), "--memory-speed", speed]) == 2
    assert "--memory-speed" in capsys.readouterr().err


@pytest.mark.parametrize("fields", [{"architectures": 5}, {"text_config": 5}])
def test_a_config_of_other_types(fields, gptq, capsys):
    config = json.loads((gptq / "config.json").read_text())
    (gptq / "config.json").write_text(json.dumps(config | fields))
    assert main(["inspect", str(gptq), "--memory-speed", "1"]) == 1
    assert f"config.json: {next(iter(fields))} is 5" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [["x"], [-8, 4], [1.5], [True]], ids=str)
def test_a_shape_that_is_none(shape, tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="'a' has shape"):
        read_headers(tmp_path)


def test_a_shape_on_the_hub_that_is_none(tmp_path, monkeypatch):
    """The same check as of a file."""
    tensor = SimpleNamespace(dtype="F32", shape=[-8, 4])
    found = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors={"a": tensor})})
    monkeypatch.setattr(headers, "hub", lambda: SimpleNamespace(get_safetensors_metadata=lambda repo: found))
    with pytest.raises(ValueError, match=r"model.safetensors: tensor 'a' has shape \[-8, 4\]"):
        read_headers(tmp_path, "Someone/big")


def test_the_index_is_read_once(gptq, monkeypatch):
    index, read = gptq / "model.safetensors.index.json", []
    weight_map = dict.fromkeys(read_headers(gptq), "model.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    monkeypatch.setattr(of_a_folder, "read_json", lambda path: read.append(path) or {"weight_map": weight_map})
    assert read_headers(gptq).keys() == weight_map.keys() and read == [index]


def test_a_reader_that_has_enough(gptq):
    """`w4a8 inspect MODEL | head -1`."""
    command = [sys.executable, "-m", "w4a8", "inspect", str(gptq), "--memory-speed", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_gguf_in_capitals(tmp_path):
    (tmp_path / "MODEL.GGUF").touch()
    assert gguf_in(tmp_path) == gguf_in(tmp_path / "MODEL.GGUF") == tmp_path / "MODEL.GGUF"


def test_a_damaged_file(gptq, capsys):
    path = next(gptq.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["inspect", str(gptq)]) == 1
    assert f"{path} has" in capsys.readouterr().err
    path.write_bytes(b"\xff" * 7)
    assert main(["inspect", str(gptq)]) == 1
    assert str(path) in capsys.readouterr().err


def test_matrices_that_vllm_joins(gptq):
    """One of them is not quantized: transformers runs that, vLLM has one layer of all."""
    tensors = load_file(gptq / "model.safetensors")
    name = next(key for key in tensors if key.endswith("layers.0.self_attn.v_proj.qweight")).removesuffix(".qweight")
    rows, columns = tensors[f"{name}.qweight"].shape[1], 8 * tensors[f"{name}.qweight"].shape[0]
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{name}.")}
    save_file({**tensors, f"{name}.weight": torch.zeros(rows, columns)}, gptq / "model.safetensors", {"format": "pt"})
    change(gptq, dynamic={f"-:{name}": {}})
    answer, _ = examine(gptq)
    owner = name.removesuffix(".v_proj")
    assert answer["not_in_vllm"].startswith(
        f"{owner} has matrices of several kinds that are one layer there: q_proj int4"
    )
    assert answer["not_in_vllm"].endswith("v_proj float16")

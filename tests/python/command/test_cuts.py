"""What ranks hold of a model (`w4a8 inspect --ranks`), and what `w4a8 serve` refuses before it loads anything."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.0")
from gguf_models import TinyModel
from test_serve import QWEN, no_variables, started, write  # noqa: F401 (fixtures)

from w4a8.command import machine, main
from w4a8.command.contents import EMBEDDING, EXPERTS, FLOAT, LINEAR, OTHER, OUTPUT, ROUTER, RUNS, Layer
from w4a8.command.cuts import heads_problem, of_ranks

SIZES = {"queries": 8, "heads": 2, "latent": None}


def cut(path, ranks, capsys):
    code = main(["inspect", str(path), "--memory-speed", "1", "--json", "--layers", "--ranks", str(ranks)])
    return code, json.loads(capsys.readouterr().out)


def test_the_demo_by_hand(capsys):
    """Norms and routers are copied; of four ranks each has one of two heads of keys, the others a part of all."""
    folder = Path(__file__).parents[3] / "examples/tiny_moe/checkpoints/g32"
    if not folder.is_dir():
        pytest.skip("needs the examples")
    for ranks in (2, 4):
        code, answer = cut(folder, ranks, capsys)
        found = answer["cut"]
        copied = sum(each["bytes"] for each in answer["stays_float"] if each["role"] in (ROUTER, OTHER))
        keys = sum(each["bytes"] for each in answer["layers"] if each["name"].endswith(("k_proj", "v_proj")))
        rest = answer["packed_bytes"] + answer["float_bytes"] - copied - keys
        assert (code, found["ranks"], found["problems"], found["copied_bytes"]) == (0, ranks, [], copied)
        assert found["rank_bytes"] == round(copied + keys / 2 + rest / ranks)
    code, answer = cut(folder, 3, capsys)
    assert code == 1 and "4 heads of queries cannot be dealt out to 3 ranks alike" in answer["cut"]["problems"]
    assert main(["inspect", str(folder), "--memory-speed", "1", "--ranks", "16"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DOES NOT FIT")]
    assert any("experts: 256 input features in 16 parts, which cuts groups or blocks of 32. With" in x for x in lines)
    assert any("4 heads of queries cannot be dealt out to 16 ranks alike" in line for line in lines)


def test_layers_by_hand():
    shapes = ((64, 96, 32),)
    layers = [
        Layer("a.k_proj", LINEAR, RUNS, "", "", 100, shapes=shapes),
        Layer("a.q_proj", LINEAR, RUNS, "", "", 200, shapes=shapes),
        Layer("a.o_proj", LINEAR, FLOAT, "", "", 300),
        Layer("a.kv_a_proj_with_mqa", LINEAR, RUNS, "", "", 50, shapes=((65, 96, 32),)),
        Layer("norm", OTHER, FLOAT, "", "", 3),
        Layer("embed", EMBEDDING, FLOAT, "", "", 400),
        Layer("lm_head", OUTPUT, RUNS, "", "", 500, shapes=((97, 96, 32),)),
    ]
    assert of_ranks(layers, SIZES, 4) == {
        "ranks": 4,
        "rank_bytes": 50 + 50 + 75 + 50 + 3 + 100 + 125,
        "copied_bytes": 53,
        "problems": [],
    }


@pytest.mark.parametrize(
    "layer, problem",
    [
        (("down_proj", LINEAR, (64, 96, 32)), "down_proj: 96 input features in 2 parts, which cuts groups"),
        (("down_proj", LINEAR, (64, 96, 16)), None),
        (("down_proj", LINEAR, (64, 96, 96)), None),  # a scale for each row
        (("up_proj", LINEAR, (64, 96, 32)), None),
        (("up_proj", LINEAR, (63, 96, 32)), "up_proj: 63 output features in 2 parts"),
        (("experts", EXPERTS, (192, 64, 32), (64, 96, 32)), "experts: 96 input features in 2 parts, which cuts groups"),
        (("experts", EXPERTS, (128, 64, 32), (64, 64, 32)), None),
        (("mixer.in_proj", LINEAR, (64, 64, 32)), "in_proj of Mamba-2: quantized, it is not cut"),
    ],
)
def test_cuts_that_do_not_fit(layer, problem):
    name, role, *shapes = layer
    layers = [Layer(f"model.layers.0.{name}", role, RUNS, "", "", 8, shapes=tuple(shapes))]
    found = of_ranks(layers, SIZES, 2)["problems"]
    assert [each.startswith(problem or "") for each in found] == [True] * (problem is not None)


@pytest.mark.parametrize(
    "queries, heads, latent, ranks, fits",
    [
        (32, 4, None, 2, True),
        (32, 4, None, 8, True),  # two ranks have the same head of keys
        (32, 4, None, 3, False),
        (36, 6, None, 4, False),
        (36, 6, 576, 4, True),  # latents are not cut
        (None, None, None, 2, True),  # nothing is said
    ],
)
def test_heads(queries, heads, latent, ranks, fits):
    assert (heads_problem({"queries": queries, "heads": heads, "latent": latent}, ranks) == "") == fits


def test_blocks_of_gguf_stay_whole(tmp_path, capsys):
    TinyModel("qwen3moe").write(tmp_path)
    _, answer = cut(tmp_path / "model.gguf", 4, capsys)
    assert any("which cuts groups or blocks of" in each for each in answer["cut"]["problems"])


def test_serve_refuses_heads(tmp_path, started, capsys):  # noqa: F811
    folder = str(write(tmp_path / "m", **QWEN))
    assert main(["serve", folder, "-tp", "3"]) == 1 and started == []
    said = "--tensor-parallel-size is 3, but 32 heads of queries cannot be dealt out to 3 ranks alike"
    assert said in capsys.readouterr().err


G128 = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}


@pytest.mark.parametrize(
    "config, options, refused",
    [
        ({"intermediate_size": 1408}, "-tp 2", "down_proj: 1408 input features in 2 parts, which cuts groups"),
        ({"intermediate_size": 1408}, "-pp 2", None),
        ({"intermediate_size": 1536}, "-tp 2", None),
        ({"intermediate_size": 1408, "num_experts": 8, "moe_intermediate_size": 1536}, "-tp 2", None),
        ({"num_experts": 8, "moe_intermediate_size": 1408}, "-tp 2", "With --enable-expert-parallel each rank has"),
        ({"num_experts": 8, "moe_intermediate_size": 1408}, "-tp 2 --enable-expert-parallel", None),
        ({"intermediate_size": 1408, "quantization_config": None}, "-tp 2", None),
    ],
)
def test_serve_refuses_groups(config, options, refused, tmp_path, started, capsys):  # noqa: F811
    folder = str(write(tmp_path / "m", **{**QWEN, **G128, **config}))
    assert main(["serve", folder, *options.split()]) == (refused is not None) == (started == [])
    assert (refused or "") in capsys.readouterr().err


def test_serve_refuses_blocks_of_gguf(tmp_path, started, capsys):  # noqa: F811
    path = TinyModel("qwen3moe").write(tmp_path)
    assert main(["serve", str(path), "-tp", "4"]) == 1 and started == []
    assert "ffn_down" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, nodes, refused",
    [
        ("-tp 2", [2.4, 2.4], False),
        ("-tp 2", [2.4, 2.2], True),  # half of 2.5 GB and 1 GiB
        ("-tp 2", [4.7], False),
        ("-tp 2", [4.5], True),
        ("-dp 2", [3.6, 3.6], False),
        ("-dp 2", [3.5, 3.5], True),
        ("-pp 2", [2.2, 2.2], True),
        ("-tp 2 -n 2", [1], False),  # one rank on this machine
        ("", [1], False),
        ("-tp 2", [], False),  # the system does not say
    ],
)
def test_serve_refuses_ranks_without_memory(options, nodes, refused, tmp_path, started, monkeypatch, capsys):  # noqa: F811
    folder = write(tmp_path / "m", **QWEN, **G128)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(2_500_000_000)  # takes no space on the disk
    monkeypatch.setattr(machine, "node_memory", lambda: [round(each * 1e9) for each in nodes])
    assert main(["serve", str(folder), *options.split()]) == refused
    assert ("a NUMA node has" in capsys.readouterr().err) == refused == (started == [])


def test_memory_of_nodes(tmp_path, monkeypatch):
    """A node of CPUs alone has none."""
    for node, kib in enumerate((1024, 0, 3000)):
        (tmp_path / f"node{node}").mkdir()
        text = f"Node {node} MemTotal:       {kib} kB\nNode {node} MemFree:        12 kB\n"
        (tmp_path / f"node{node}" / "meminfo").write_text(text)
    monkeypatch.setattr(machine, "_NODES", tmp_path)
    assert sorted(machine.node_memory()) == [1024 << 10, 3000 << 10]
    monkeypatch.setattr(machine, "_NODES", tmp_path / "nowhere")
    assert machine.node_memory() == []

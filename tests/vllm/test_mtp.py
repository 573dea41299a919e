"""Guesses by a model's own head for further tokens (MTP), whose layer is beside those of the model in a checkpoint."""

import json

import pytest
import torch
from compare import assert_same
from conftest import DEFAULT_HEAD, Job, run_engines
from gguf_architectures import VOCAB, model_of, write_int4
from safetensors.torch import load_file, save_file

ONE = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "enable_prefix_caching": False}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
BY_LAYER = {"W4A8_VLLM_DECODER": "0"}


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (70, 9, 30)]


def write_mtp(architecture, folder):
    """A checkpoint of int4 whose head guesses what the model has just said: its layer adds little to the rows of the
    model's last norm, and each guess that is right is one of a word that comes twice.
    """
    write_int4(model_of(architecture), folder)
    write_int4(model_of(architecture, num_hidden_layers=1, layer_types=["full_attention"]), folder / "head")
    tensors, head = load_file(folder / "model.safetensors"), load_file(folder / "head" / "model.safetensors")
    config, of_head = (json.loads((each / "config.json").read_text()) for each in (folder, folder / "head"))
    for name, tensor in head.items():
        if "embed_tokens" not in name and "lm_head" not in name:
            small = 2**-7 if name.endswith("_proj.weight_scale") else 1
            tensors[name.replace("model.", "mtp.")] = tensor * small if small != 1 else tensor
    hidden = config["hidden_size"]
    tensors["mtp.fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    for name in ("hidden", "embedding"):
        tensors[f"mtp.pre_fc_norm_{name}.weight"] = torch.zeros(hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["mtp_num_hidden_layers"] = 1
    ignored = [each.replace("model.", "mtp.") for each in of_head["quantization_config"]["ignore"]]
    config["quantization_config"]["ignore"] += [*ignored, "mtp.fc"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe"])
def guessed(request, tmp_path_factory):
    """name -> results, and the logs: a model without guesses, and with those of its head."""
    folder = tmp_path_factory.mktemp(request.param)
    path, found, logs = write_mtp(request.param, folder / "checkpoint"), {}, {}
    how = {"prompt_logprobs": False, "tokens": 40}
    for name, arguments, environment in (
        ("alone", {}, {}), ("mtp", MTP, {}), ("head", {}, DEFAULT_HEAD), ("head, mtp", MTP, DEFAULT_HEAD),
        ("layer by layer", {}, BY_LAYER), ("mtp, layer by layer", MTP, BY_LAYER),
    ):  # fmt: skip
        job = Job(path, ONE | arguments, prompts(), environment=environment, **how)
        # vLLM makes no engine behind one that guesses in the same process.
        [found[name]], logs[name] = run_engines([job], folder / name, 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return found, logs


@pytest.mark.parametrize(("name", "guessing"), [("alone", "mtp"), ("head", "head, mtp")])
def test_guesses_change_no_bit(guessed, name, guessing):
    found, _ = guessed
    assert_same(found[name], found[guessing])


def test_guesses_layer_by_layer(guessed):
    found, _ = guessed
    assert "error" not in found["mtp, layer by layer"], found["mtp, layer by layer"]["error"]
    assert found["layer by layer"]["outputs"] == found["mtp, layer by layer"]["outputs"]


def test_the_model_runs_in_one_call(guessed):
    _, logs = guessed
    assert "w4a8: all 4 layers run in one call" in logs["mtp"]

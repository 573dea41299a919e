"""Guesses by a model's own head for further tokens (MTP), whose layer is beside those of the model in a checkpoint."""

import json

import gguf_models
import multiplied_out
import pytest
import torch
from compare import assert_same, check_rows
from conftest import DEFAULT_HEAD, Job, run_engines
from gguf_architectures import HEAD, HIDDEN, INTER, LAYERS, STEP, VOCAB, Written, model_of, put, write, write_int4
from gguf_architectures import written_by_llama_cpp as written
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from w4a8.integrations.vllm.gguf import take_file

ONE = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "enable_prefix_caching": False}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
# Sequences one after another: guesses are in the order of the tokens.
ONE_GUESS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}, "max_num_seqs": 1}
BY_LAYER = {"W4A8_VLLM_DECODER": "0"}
TOKENS = 40
# How much larger embeddings are, so that what the layers add changes few of the tokens.
LARGER = 64
# In int4 names of the head's layer, and of the tensors beside it.
QWEN = {"layer": "mtp.layers.0", "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm"}  # fmt: skip
GLM_LAYER = f"model.layers.{LAYERS}"
GLM = {"layer": GLM_LAYER, "norm": f"{GLM_LAYER}.shared_head.norm"}
GLM |= {name: f"{GLM_LAYER}.{name}" for name in ("eh_proj", "enorm", "hnorm")}


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (70, 9, 30)]


class Sharp:
    """A model whose next token mostly follows from the last one, and a head that mostly knows which.

    Attributes:
        model, head: of transformers. The head's is one layer, for rows in the place of embeddings.
        eh_proj, enorm, hnorm: what makes these rows of embeddings and of the model's rows, float32.
    """

    def __init__(self, name):
        self.name, of_head = name, {"num_hidden_layers": 1}
        of_head |= {"first_k_dense_replace": 0} if name == "glm4moe" else {"layer_types": ["full_attention"]}
        self.model, self.head = model_of(name), model_of(name, **of_head)
        generator = torch.Generator().manual_seed(1)
        embeddings = self.model.get_input_embeddings().weight.data
        self.model.lm_head.weight.data.copy_(embeddings[torch.randperm(VOCAB, generator=generator)])
        embeddings *= LARGER
        self.head.lm_head.weight = self.model.lm_head.weight
        self.of_hidden = torch.randint(-8, 8, (HIDDEN, HIDDEN), generator=generator) * STEP
        self.eh_proj = torch.cat([7 * STEP * torch.eye(HIDDEN), self.of_hidden], 1)
        # So large that what the head's layer adds changes some of the guesses.
        self.enorm = torch.randint(20, 28, (HIDDEN,), generator=generator) / (4 if name == "glm4moe" else 1)
        self.hnorm = torch.randint(8, 24, (HIDDEN,), generator=generator) / 16
        self.plus = int(name.startswith("qwen"))  # what these norms add to their weights

    def rows(self, sequence):
        """float32 [length - 1, vocabulary]: row i has the guess of token i + 2."""
        ids = torch.tensor([sequence])
        hidden = self.model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        embeddings = self.model.get_input_embeddings()(ids[:, 1:]).clone()
        if self.name == "glm4moe":
            embeddings[:, 0] = 0  # vLLM's model does so
        parts = [(embeddings, self.enorm), (hidden, self.hnorm)]
        normed = [torch.nn.functional.rms_norm(x, (HIDDEN,), weight, 2.0**-18) for x, weight in parts]
        found = torch.nn.functional.linear(torch.cat(normed, -1), self.eh_proj)
        return self.head(inputs_embeds=found, use_cache=False).logits[0].log_softmax(-1)

    def write_gguf(self, folder):
        """A file with blocks, and the keys as llama.cpp's script writes them."""
        architecture = self.name
        tensors, of_head = (Written(each, architecture).tensors for each in (self.model, self.head))
        tensors |= {key.replace("blk.0.", f"blk.{LAYERS}."): each for key, each in of_head.items() if "blk." in key}
        beside = {"eh_proj": self.eh_proj, "enorm": self.enorm, "hnorm": self.hnorm}
        beside["shared_head_norm"] = of_head["output_norm.weight"]
        tensors |= {f"blk.{LAYERS}.nextn.{key}.weight": each for key, each in beside.items()}
        if architecture == "glm4moe":
            keys = gguf_models.keys_of(architecture, self.model.config)
            sizes = {"attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD // 2}
            keys |= {f"glm4moe.{key}": size for key, size in {**sizes, "expert_feed_forward_length": INTER}.items()}
        else:
            keys = written(architecture)["keys"]
        keys = keys | {f"{architecture}.block_count": LAYERS + 1, f"{architecture}.nextn_predict_layers": 1}
        folder.mkdir()
        return put(folder, architecture, keys, tensors, token_embd=STEP * LARGER)

    def write_int4(self, folder):
        """A checkpoint as llm-compressor writes it."""
        write_int4(self.model, folder)
        write_int4(self.head, folder / "head")
        tensors, head = load_file(folder / "model.safetensors"), load_file(folder / "head" / "model.safetensors")
        config, of_head = (json.loads((each / "config.json").read_text()) for each in (folder, folder / "head"))
        names = GLM if self.name == "glm4moe" else QWEN

        def renamed(key):
            return key.replace("model.layers.0", names["layer"]).replace("model.norm", names["norm"])

        shared = "embed_tokens", "lm_head"
        tensors |= {renamed(key): each for key, each in head.items() if not any(part in key for part in shared)}
        tensors[f"{names['eh_proj']}.weight"] = self.eh_proj
        for key in ("enorm", "hnorm"):
            tensors[f"{names[key]}.weight"] = getattr(self, key) - self.plus
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config["num_nextn_predict_layers" if names is GLM else "mtp_num_hidden_layers"] = 1
        ignored = [renamed(each) for each in of_head["quantization_config"]["ignore"]]
        config["quantization_config"]["ignore"] += [*ignored, names["eh_proj"]]
        (folder / "config.json").write_text(json.dumps(config))
        return folder


class Guessed:
    """Engines without guesses and with those of a head: results by name, and logs."""

    def __init__(self, form, name, folder):
        self.form, self.sharp, self.found, self.logs = form, Sharp(name), {}, {}
        self.equal = [("alone", "mtp"), *([("head", "head, mtp")] if form == "int4" else [])]
        path = getattr(self.sharp, f"write_{form}")(folder / "checkpoint")
        if form == "int4":
            jobs = (
                ("alone", {}, {}), ("mtp", MTP, {}), ("head", {}, DEFAULT_HEAD), ("head, mtp", MTP, DEFAULT_HEAD),
                ("layer by layer", {}, BY_LAYER), ("mtp, layer by layer", MTP, BY_LAYER), ("one guess", ONE_GUESS, {}),
            )  # fmt: skip
        else:
            jobs = ("alone", {}, DEFAULT_HEAD), ("mtp", MTP, DEFAULT_HEAD), ("one guess", ONE_GUESS, DEFAULT_HEAD)
        how = {"prompt_logprobs": False, "tokens": TOKENS}
        for key, arguments, environment in jobs:
            how["guesses"] = key == "one guess"
            job = Job(path, ONE | arguments, prompts(), environment=environment, **how)
            # vLLM makes no engine behind one that guesses in the same process.
            engine = run_engines([job], folder / key, 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0")
            [self.found[key]], self.logs[key] = engine


INT4 = [("int4", "qwen35"), ("int4", "qwen35moe"), ("int4", "glm4moe")]
CASES = [*INT4, ("gguf", "qwen35"), ("gguf", "qwen35moe"), ("gguf", "glm4moe")]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def guessed(request, tmp_path_factory):
    return Guessed(*request.param, tmp_path_factory.mktemp("mtp"))


def test_guesses_change_no_bit(guessed):
    for name, guessing in guessed.equal:
        assert_same(guessed.found[name], guessed.found[guessing])


@torch.no_grad()
def test_guesses_are_those_of_the_head(guessed):
    result, sharp = guessed.found["one guess"], guessed.sharp
    assert "error" not in result, result["error"]
    assert result["outputs"] == guessed.found["alone"]["outputs"]
    sequences = [prompt + output for prompt, output in zip(prompts(), result["outputs"])]
    in_blocks = guessed.form == "gguf"
    int8 = multiplied_out.quantized_matrices(sharp.model, True, in_blocks)
    int8 += multiplied_out.quantized_matrices(sharp.head, True)
    if in_blocks and sharp.name != "glm4moe":  # where vLLM's matrix is a parameter, not a layer
        int8.append(sharp.eh_proj)
    exact = [sharp.rows(sequence) for sequence in sequences]
    with multiplied_out.Int8Inputs(int8, 32):
        rounded = [sharp.rows(sequence) for sequence in sequences]

    got, of_exact, of_rounded, right, last = [], [], [], [], 0
    sequence, rows = iter(zip(sequences, exact, rounded)), None
    for place, logits in zip(*result["guesses"]):
        if rows is None or place < last:  # of the next sequence
            tokens, *rows = next(sequence)
        last = place
        if place + 2 < len(tokens):
            got.append(logits.log_softmax(-1))
            of_exact.append(rows[0][place])
            of_rounded.append(rows[1][place])
            right.append(int(logits.argmax()) == tokens[place + 2])
    assert next(sequence, None) is None
    print(f"{sum(right)} of {len(right)} guesses are right")
    assert 0 < sum(right) < len(right)
    found = ([torch.stack(each)] for each in (got, of_exact, of_rounded))
    check_rows(f"{guessed.form} {sharp.name}", *found)


@pytest.mark.parametrize("guessed", INT4, indirect=True, ids=" ".join)
def test_guesses_layer_by_layer(guessed):
    found = guessed.found
    assert "error" not in found["mtp, layer by layer"], found["mtp, layer by layer"]["error"]
    assert found["layer by layer"]["outputs"] == found["mtp, layer by layer"]["outputs"]


def test_the_model_runs_in_one_call(guessed):
    """And the head's layer."""
    assert "w4a8: all 4 layers run in one call" in guessed.logs["mtp"]
    assert "w4a8: its layer of guesses runs in one call" in guessed.logs["mtp"]


def test_a_file_without_a_head(tmp_path):
    path = write("qwen35", model_of("qwen35"), tmp_path)
    with pytest.raises(ValueError, match=r"model\.gguf has no head that is read here, but speculative_config is \{"):
        take_file(EngineArgs(model=str(path), **MTP))

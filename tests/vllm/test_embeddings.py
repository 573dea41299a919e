"""Embeddings stay packed: beside those of transformers, cut for ranks, shared with an output layer, and in engines."""

import re

import gguf_models
import numpy as np
import pytest
import torch
import transformers
from compare import assert_same
from conftest import ALONE, DEFAULT_HEAD, Job, prompts, run_engines
from gguf_models import HIDDEN, VOCAB, TinyModel
from layers import rank  # noqa: F401 (a fixture)
from test_gguf import config_of, settings  # noqa: F401
from test_packed_layers import packed_config
from vllm.config import LoRAConfig
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

import w4a8
import w4a8.integrations.transformers  # reads GGUF files
from w4a8.core.memory import mapped_files
from w4a8.integrations.vllm.embeddings import W4A8EmbeddingMethod, pack_embeddings
from w4a8.integrations.vllm.loaded import give_stand_ins
from w4a8.integrations.vllm.pulled import pulled_layers

EMBEDDING, OF_FILE = "model.embed_tokens", "token_embd.weight"
PADDED = 128  # rows of the vocabulary, of 96, in vLLM
ALL = torch.arange(VOCAB)


class Model(torch.nn.Module):
    """What is looked at of a model of vLLM."""

    def __init__(self, config, dtype=torch.bfloat16, head=True):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=dtype)
        if head:
            self.lm_head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=dtype, quant_config=config, prefix="lm_head")


def loaded(model, weight, is_tied=False):
    """The embedding of a model, which keeps a weight packed if it can."""
    pack_embeddings(model, [(EMBEDDING, weight)], "the file", is_tied)
    for layer in pulled_layers(model):
        layer.w4a8_filler.load(layer)
    for layer in (module for module in model.modules() if hasattr(module, "quant_method")):
        layer.quant_method.process_weights_after_loading(layer)
    return model.model.embed_tokens


def written(tmp_path, kind=None, name="llama"):
    """A file, with embeddings in blocks of a type; and the model of transformers."""
    tiny = TinyModel(name)
    if kind is not None:
        tiny.tensors[OF_FILE], _ = gguf_models.blocks(kind, (VOCAB, HIDDEN), np.random.default_rng(7))
    path = tiny.write(tmp_path)
    return path, transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", [*gguf_models.TYPES, "NVFP4"])
def test_the_rows_of_transformers(kind, rank, tmp_path, monkeypatch):  # noqa: F811
    """The same bytes, and nothing beside them; a setting of multiplying changes none. Padding is zeros."""
    path, theirs = written(tmp_path, kind)
    monkeypatch.setenv("W4A8_VLLM_ACTIVATION_GROUP", "-1")
    config, theirs = config_of(path), theirs.model.embed_tokens
    layer = loaded(Model(config), config.weight(OF_FILE))
    assert isinstance(layer.quant_method, W4A8EmbeddingMethod)
    [(name, packed)] = layer.named_parameters()
    assert torch.equal(packed, theirs.rows_packed), name
    assert packed.nbytes == w4a8.read_header(packed)["bytes"] < VOCAB * HIDDEN * 2
    ids = torch.tensor([[3, VOCAB - 1, 3], [0, 50, 7]])
    assert layer(ids).dtype == torch.bfloat16 and torch.equal(layer(ids), theirs(ids))
    behind = layer(torch.tensor([VOCAB, 5, PADDED - 1]))
    assert not behind[[0, 2]].any() and torch.equal(behind[1], theirs(torch.tensor(5)))
    for outside in (PADDED, -1):
        with pytest.raises(RuntimeError, match=rf"rows has the number {outside}, expected 0\.\.{PADDED - 1}"):
            layer(torch.tensor([outside]))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", ["GGUF", "packed"])
def test_cut_for_ranks(form, ranks, rank, tmp_path):  # noqa: F811
    path, theirs = written(tmp_path, "Q6_K")
    theirs.save_pretrained(tmp_path / "packed")
    found = torch.zeros(PADDED, HIDDEN, dtype=torch.bfloat16)
    for index in range(ranks):
        rank(index, ranks)
        config = config_of(path) if form == "GGUF" else packed_config(tmp_path / "packed")
        layer = loaded(Model(config), config.weight(OF_FILE if form == "GGUF" else f"{EMBEDDING}.rows_packed"))
        size = PADDED // ranks
        assert w4a8.read_header(layer.weight_packed)["n"] == size
        found[index * size :][:size] = layer.quant_method.embedding(layer, torch.arange(size))
    assert torch.equal(found[:VOCAB], theirs.model.embed_tokens(ALL)) and not found[VOCAB:].any()


@pytest.mark.parametrize("memory", ["", "map"])
def test_a_packed_directory(memory, rank, tmp_path, monkeypatch):  # noqa: F811
    """Where W4A8_MEMORY has its matrices: the embedding may be mapped."""
    _, theirs = written(tmp_path, "Q5_K")
    theirs.save_pretrained(tmp_path / "packed")
    monkeypatch.setenv("W4A8_MEMORY", memory)
    config = packed_config(tmp_path / "packed")
    layer = loaded(Model(config), config.weight(f"{EMBEDDING}.rows_packed"))
    assert torch.equal(layer.weight_packed, theirs.model.embed_tokens.rows_packed)
    assert torch.equal(layer(ALL), theirs.model.embed_tokens(ALL))
    mapped = mapped_files({str(tmp_path / "packed" / "model.safetensors")})
    is_mapped = any(begin <= layer.weight_packed.data_ptr() < end for begin, end in mapped)
    assert is_mapped == (memory == "map")


@pytest.mark.parametrize("ranks", [1, 2])
def test_shared_with_the_output_layer(ranks, rank, tmp_path, monkeypatch):  # noqa: F811
    """One matrix, which is multiplied as a setting says; a setting of the output layer leaves both to vLLM."""
    path, theirs = written(tmp_path, "Q6_K", "llama, tied")
    monkeypatch.setenv("W4A8_VLLM_ACTIVATION_GROUP", "-1")
    rank(0, ranks)
    config, expected = config_of(path), theirs.model.embed_tokens(ALL)
    model = Model(config)
    model.lm_head = model.lm_head.tie_weights(model.model.embed_tokens)
    layer = loaded(model, config.weight(OF_FILE), is_tied=True)
    assert layer.weight_packed is model.lm_head.weight_packed and model.lm_head.w4a8_filler.names == [OF_FILE]
    assert w4a8.read_header(layer.weight_packed)["activation_group"] == -1
    mine = ALL[: PADDED // ranks]
    assert torch.equal(layer.quant_method.embedding(layer, mine), expected[: len(mine)])
    monkeypatch.setenv("W4A8_VLLM_LM_HEAD", "0")
    model = Model(config)
    model.lm_head = model.lm_head.tie_weights(model.model.embed_tokens)
    weight = model.model.embed_tokens.weight
    layer = loaded(model, config.weight(OF_FILE), is_tied=True)
    assert layer.weight is weight is model.lm_head.weight
    assert isinstance(layer.quant_method, UnquantizedEmbeddingMethod)


def test_embeddings_that_vllm_multiplies_by(rank, tmp_path):  # noqa: F811
    """In models that make no output layer, where both are one matrix."""
    path, _ = written(tmp_path, "Q6_K", "llama, tied")
    config = config_of(path)
    for is_tied in (True, False):
        layer = loaded(Model(config, head=False), config.weight(OF_FILE), is_tied)
        assert isinstance(layer.quant_method, UnquantizedEmbeddingMethod if is_tied else W4A8EmbeddingMethod)


def test_a_matrix_of_another_shape(rank, tmp_path):  # noqa: F811
    path, _ = written(tmp_path, "Q6_K")
    config = config_of(path)
    message = rf"w4a8: {EMBEDDING} of the file: token_embd.weight has shape \(96, 256\), but \(95, 256\) is expected"
    model = Model(config, head=False)
    model.model.embed_tokens = VocabParallelEmbedding(VOCAB - 1, HIDDEN, params_dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        pack_embeddings(model, [(EMBEDDING, config.weight(OF_FILE))], "the file", False)


def test_compiled(rank, tmp_path):  # noqa: F811
    """In one graph, for any number of ids."""
    path, _ = written(tmp_path, "Q4_K")
    config = config_of(path)
    layer = loaded(Model(config), config.weight(OF_FILE))
    compiled = torch.compile(lambda ids: layer(ids) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (5, 9):
        assert torch.equal(compiled(ALL[:count]), layer(ALL[:count]) * 2)


def test_lora_of_an_embedding(rank, tmp_path):  # noqa: F811
    """vLLM's is made beside the packed one, on its device."""
    path, _ = written(tmp_path, "Q4_K")
    config = config_of(path)
    model = Model(config)
    layer = loaded(model, config.weight(OF_FILE))
    give_stand_ins(model, None, None)
    lora = VocabParallelEmbeddingWithLoRA(layer)
    lora.create_lora_weights(2, LoRAConfig(max_lora_rank=8, lora_dtype=torch.bfloat16))
    assert lora.lora_a_stacked.shape == (2, VOCAB, 8) and lora.lora_a_stacked.device == layer.weight_packed.device
    for stand_in in (lora.weight, model.lm_head.weight):
        assert stand_in.shape == (PADDED, HIDDEN) and stand_in.isnan().all()
        assert stand_in.dtype == torch.bfloat16 and stand_in.untyped_storage().nbytes() == 2


# ---- engines ----


def job(path, **more):
    few = [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in prompts()]
    how = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128, **more}
    scored = "enable_lora" not in how  # vLLM 0.32 cannot, with LoRA of the output layer
    return Job(path, how, few, tokens=8, prompt_logprobs=scored, environment=DEFAULT_HEAD)


ENGINES = {
    "one call": {},
    "compiled": {"enforce_eager": False, "additional_config": {"w4a8": {"decoder": False}}},
    "LoRA": {"enable_lora": True, "max_lora_rank": 8},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Files of one model, with embeddings in blocks and as floats; and directories whose weights are reloaded."""
    jobs = {}
    for form in ("blocks", "floats"):
        tiny, folder = TinyModel("qwen3"), tmp_path_factory.mktemp(form)
        if form == "floats":
            tiny.tensors[OF_FILE] = tiny.model.model.embed_tokens.weight.data
        path = tiny.write(folder)
        jobs |= {(form, name): job(path, **how) for name, how in ENGINES.items()}
    for name in ("llama", "llama, tied"):
        packed = []
        for seed in (0, 1):
            folder = tmp_path_factory.mktemp("packed")
            path = TinyModel(name, seed).write(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name)
            model.save_pretrained(folder / "packed")
            packed.append(folder / "packed")
        jobs[name, "reloaded"], jobs[name, "loaded"] = job(packed[0]), job(packed[1])
        jobs[name, "reloaded"].reload = packed[1]
    done, log = run_engines(list(jobs.values()), tmp_path_factory.mktemp("engines"), 1800, **ALONE)
    return dict(zip(jobs, done)), log


@pytest.mark.parametrize("name", ENGINES)
def test_the_bits_of_floats(name, results):
    """The answers of a file whose embeddings are the same numbers as floats, which vLLM looks up."""
    assert_same(results[0]["blocks", name], results[0]["floats", name])


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_other_weights_are_reloaded(name, results):
    found = results[0][name, "reloaded"]
    assert_same(found["reloaded"], results[0][name, "loaded"])
    assert found["outputs"] != found["reloaded"]["outputs"]
    assert not re.search("(VocabParallelEmbedding|ParallelLMHead): Failed to load weights", results[1])

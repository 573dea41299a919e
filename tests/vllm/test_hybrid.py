"""Layers of linear attention in engines: blocks of K-quants, prompts in pieces, prefixes that are cached, two ranks."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from compare import assert_same, check, kl_divergences
from conftest import ALONE, DEFAULT_HEAD, NGRAM, Job, run_engines
from gguf_architectures import EXPERTS, VOCAB, model_of, write, write_int4

# Super-blocks of 256 fit in. A state of two heads of 64 x 64 is as large as 32 keys and values.
SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
KEYS = {
    "embedding_length": 256, "feed_forward_length": 256, "expert_feed_forward_length": 256,
    "expert_shared_feed_forward_length": 256, "attention.head_count_kv": 4, "attention.key_length": 64,
    "attention.value_length": 64, "rope.dimension_count": 32, "context_length": 512, "ssm.state_size": 64,
    "ssm.inner_size": 256,
}  # fmt: skip
# One after another, so that a prompt finds what the first has left; a step is shorter than a prompt.
CACHED = {"enable_prefix_caching": True, "max_num_seqs": 1, "max_num_batched_tokens": 192}
# Linear attention by this package's operator.
HERE = {**ALONE, "W4A8_VLLM_ATTENTION": "1"}


@dataclass(frozen=True)
class Case:
    """What compare.check reads."""

    name: str
    arguments: dict
    types: tuple = ("Q4_K", "Q6_K")
    ranks: int = 1
    dtype: str = "bfloat16"
    lm_head: bool = True
    model = "qwen35moe"
    compiled, inputs, attention = False, "none", "w4a8"
    share_of_an_expert = 2 / EXPERTS


CASES = [
    Case("together", {"enable_prefix_caching": False}, dtype="float32"),
    Case("cached", CACHED),
    Case("compiled", {"enforce_eager": False, "enable_prefix_caching": False}),
    Case("ranks", {"tensor_parallel_size": 2, "enable_prefix_caching": False}, ("Q4_0", "Q8_0"), 2),
]


def prompts():
    """The second and the third begin as the first does."""
    generator = torch.Generator().manual_seed(0)
    first, *others = (torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (230, 20, 30))
    return [first, first[:200] + others[0], first[:150] + others[1]]


def written(architecture, types, directory, change=lambda model: None):
    """The path of a GGUF file; its model is in ``reference``."""
    model = model_of(architecture, **SIZES)
    change(model)
    keys = {f"{architecture}.{key}": value for key, value in KEYS.items()}
    path = write(architecture, model, directory, True, types=types, **keys)
    model.save_pretrained(directory / "reference")
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers_are_those_of_the_weights(case, tmp_path):
    path = written(case.model, case.types, tmp_path)
    arguments = {"enforce_eager": True, "dtype": case.dtype, "max_model_len": 512, **case.arguments}
    job = Job(path, arguments, prompts(), environment=DEFAULT_HEAD)
    (done,), log = run_engines([job], tmp_path / "engines", 1800, ranks=case.ranks, **HERE)
    # A value that rounds otherwise stays in the states of all tokens behind it.
    check(case, tmp_path, job.prompts, done, size=32, ranks=case.ranks, few_layers=False)
    assert "linear attention runs here, in 3 layers" in log
    assert done["cached"] == ([0, 128, 128] if case.name == "cached" else [0, 0, 0])
    # q, k, v and z, b and a, and the output of three layers; two of the last; gate and up, and down of shared experts.
    assert re.search(r"w4a8: runs 19 linear layers \(.*\), 4 layers of experts \(", log)


# A sequence has three for its states, and one for each 128 keys; one is vLLM's own.
FEW_PAGES = {"num_gpu_blocks_override": 16}
WAYS = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
    "cached": CACHED,
    "preempted": FEW_PAGES,
}
GUESSED = {
    "guessed": {},
    "guessed in chunks": WAYS["chunks"],
    "guessed, cached": CACHED,
}


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """name -> results, and the log: one call in chunks, with cached prefixes and pages that are taken away."""
    folder = tmp_path_factory.mktemp("ways")
    path = written("qwen35moe", ("Q4_K", "Q6_K"), folder)
    one = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512, "enable_prefix_caching": False}
    jobs = {name: {**one, **way} for name, way in WAYS.items()}
    how = {"prompt_logprobs": False, "tokens": 40}
    made = [Job(path, arguments, prompts(), environment=DEFAULT_HEAD, **how) for arguments in jobs.values()]
    by_layer = DEFAULT_HEAD | {"W4A8_VLLM_DECODER": "0"}
    made.append(replace(made[0], environment=by_layer))
    found, log = run_engines(made, folder / "engines", 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    found = dict(zip([*jobs, "layer by layer"], found))
    guesses = {name: {**one, **way, "speculative_config": NGRAM} for name, way in GUESSED.items()}
    for name, arguments in {**guesses, "guessed, layer by layer": guesses["guessed"]}.items():
        environment = by_layer if name == "guessed, layer by layer" else DEFAULT_HEAD
        job = Job(path, arguments, prompts(), environment=environment, **how)
        # vLLM makes no engine behind one of these in the same process.
        [found[name]], of_guesses = run_engines([job], folder / name, 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        log += of_guesses
    return found, log


@pytest.mark.parametrize("name", [*list(WAYS)[1:], "guessed", "guessed in chunks"])
def test_the_way_of_a_step_changes_no_bit(name, ways):
    found, _ = ways
    assert_same(found["whole"], found[name])
    assert found[name]["cached"] == ([0, 128, 128] if name == "cached" else [0, 0, 0])
    assert (found[name]["preempted"] > 0) == (name == "preempted")


def test_one_call_beside_layer_by_layer(ways):
    """A value that rounds otherwise stays in the states of all tokens behind it."""
    found, log = ways
    divergences = kl_divergences(found["layer by layer"], found["whole"]).abs()
    assert divergences.median() < 5e-4  # seen: 1e-4
    assert (divergences > 5e-3).float().mean() < 0.05
    assert log.count("w4a8: all 4 layers run in one call") == len(WAYS) + len(GUESSED)
    assert log.count("linear attention runs here, in 3 layers") == len(WAYS) + len(GUESSED) + 2


def test_guesses_and_cached_prefixes_are_vllms_business(ways):
    """vLLM copies a state to the page of the next block by a kernel of Triton, which there is not for CPUs."""
    found, log = ways
    assert "'function' object is not subscriptable" in found["guessed, cached"]["error"]
    assert "in run_fused_precopy" in log


def test_guesses_layer_by_layer(ways):
    """Torch's products of a guess and of a token alone round otherwise."""
    found, _ = ways
    assert "error" not in found["guessed, layer by layer"], found["guessed, layer by layer"]["error"]
    divergences = kl_divergences(found["layer by layer"], found["guessed, layer by layer"]).abs()
    assert divergences.median() < 5e-4
    assert (divergences > 5e-3).float().mean() < 0.05


# Mamba-2 and short convolutions in two layers: fields of the config, and keys of the file.
OTHERS = {
    # A state is as large as the keys and values of 128 tokens at most.
    "granitehybrid": ({"num_key_value_heads": 2}, {"attention.head_count_kv": [0, 2, 0, 2]}),
    "nemotron_h_moe": ({}, {}),
    "lfm2": ({"tie_word_embeddings": True}, {}),
}


@pytest.fixture(scope="module", params=OTHERS)
def other(request, tmp_path_factory):
    """The results of all ways, and the log."""
    name, folder = request.param, tmp_path_factory.mktemp("other")
    fields, keys = OTHERS[name]
    model = model_of(name, max_position_embeddings=512, **fields)
    keys = {f"{name}.{key}": value for key, value in {**keys, "context_length": 512}.items()}
    path = write(name, model, folder, True, **keys)
    one = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512, "enable_prefix_caching": False}
    if name == "lfm2":  # as in conftest.arguments
        one["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    how = {"prompt_logprobs": False, "tokens": 40}
    # A step takes a whole prompt, and a state of the middle of one is cached.
    cached, jobs = {**CACHED, "max_num_batched_tokens": 256}, {}
    for decoder in ("1", "0"):
        off = DEFAULT_HEAD | {"W4A8_VLLM_DECODER": decoder}
        for way in ({}, cached):
            jobs[decoder, bool(way)] = Job(path, {**one, **way}, prompts(), environment=off, **how)
    if name == "granitehybrid":
        jobs["compiled"] = replace(jobs["0", False], arguments={**one, "enforce_eager": False})
    found, log = run_engines(list(jobs.values()), folder / "engines", 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    found = dict(zip(jobs, found))
    for decoder in ("1", "0"):
        job = jobs[decoder, False]
        job = replace(job, arguments={**job.arguments, "speculative_config": NGRAM})
        # vLLM makes no engine behind one of these in the same process.
        [found[decoder, "guessed"]], of_guesses = run_engines(
            [job], folder / decoder, 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0"
        )
        log += of_guesses
    for each in found.values():
        assert "error" not in each, each["error"]
    return found, log


def test_operators_of_other_layers(other):
    """In one call and layer by layer: cached prefixes change no bit. Guesses change none in one call; layer by layer
    torch's products of a guess and of a token alone round otherwise."""
    found, log = other
    for decoder in ("1", "0"):
        assert_same(found[decoder, False], found[decoder, True])
        assert found[decoder, True]["cached"] == [0, 128, 128]
    assert_same(found["1", False], found["1", "guessed"])
    for way in found.keys() & {("1", False), ("0", "guessed"), "compiled"}:
        divergences = kl_divergences(found["0", False], found[way]).abs()
        assert divergences.median() < 5e-4
        assert (divergences > 5e-3).float().mean() < 0.05
    assert log.count("w4a8: all 4 layers run in one call") == 3
    assert log.count("linear attention runs here, in 2 layers") == len(found)


VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
          "num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": []}  # fmt: skip


def test_int4_of_a_model_that_also_sees(tmp_path):
    """As Qwen3.5 is published: the text alone is used, the tower stays float."""
    text = model_of("qwen35moe")
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen3_5MoeConfig(text_config=text.config.to_dict(), vision_config=VISION, **tokens)
    whole = transformers.Qwen3_5MoeForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    write_int4(whole, tmp_path / "checkpoint")
    text.save_pretrained(tmp_path / "reference")
    few = [[token % 87 + 3 for token in prompt[:40]] for prompt in prompts()]
    arguments = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128, "language_model_only": True}
    (done,), log = run_engines([Job(tmp_path / "checkpoint", arguments, few)], tmp_path / "engines", 1800, **ALONE)
    check(Case("int4", {}, lm_head=False), tmp_path, few, done, size=32, few_layers=False)
    assert "Qwen3_5MoeForConditionalGeneration" in log and "4 layers of experts" in log

"""Every architecture of docs/formats.md in engines: all layers in one call beside vLLM's own forward."""

import re
from dataclasses import replace

import pytest
import transformers
from compare import kl_divergences
from conftest import DEFAULT_HEAD, Job, prompts, run_engines
from gguf_architectures import INT4, LAYERS, NO_MODEL_IN_VLLM, STACKED, VOCAB, model_of, write, write_int4

from w4a8.checkpoint.gguf_architectures import NOT_IN_VLLM

NAMES = sorted(name for name in INT4 if name.partition(",")[0] not in NOT_IN_VLLM.keys() | NO_MODEL_IN_VLLM)
# Of models that also see: fields of the config.
SEES = {
    "Gemma4": {
        "vision_config": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "num_key_value_heads": 2, "head_dim": 32, "patch_size": 4, "position_embedding_size": 16},
        "audio_config": None, "image_token_id": 90, "video_token_id": 91, "audio_token_id": 92, "boi_token_id": 93,
        "eoi_token_id": 94, "boa_token_id": 95, "eoa_token_index": 95,
    },
    "Qwen3_5": {
        "vision_config": {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                          "num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": []},
        "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
    },
}  # fmt: skip


# Keys of GGUF files of fields of the config.
KEYS = {
    "intermediate_size": "feed_forward_length", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip


def jobs_of(name, folder, of_file=False, **fields):
    """In one call, and one by one. of_file: from a GGUF file; fields: of the config."""
    model = model_of(name, **({"tie_word_embeddings": True} if name == "lfm2" else {}), **fields)
    path, environment = folder / "checkpoint", {}
    if of_file or name in STACKED:  # no int4 format has such experts
        keys = {f"{name}.{KEYS[field]}": size for field, size in fields.items()}
        path, environment = write(name, model, folder, True, **keys), DEFAULT_HEAD
    else:
        write_int4(model, path)
    # That of Phi-3 is one behind the end of short texts.
    arguments = {"enforce_eager": True, "dtype": "float32", "max_model_len": 256 if name == "phi3, long" else 128}
    if name.startswith(("deepseek", "lfm2")):  # as in conftest.arguments
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    few = [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in prompts()]
    off = environment | {"W4A8_VLLM_DECODER": "0"}
    return [Job(path, arguments, few, environment=each) for each in (environment, off)]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """By name, of the tests that run: the results of both jobs, and what the log says of the first."""
    items = [item for item in request.session.items if item.module is request.module]
    names = [item.callspec.params["name"] for item in items]
    jobs = [job for name in names for job in jobs_of(name, tmp_path_factory.mktemp("model"))]
    found, log = run_engines(jobs, tmp_path_factory.mktemp("engines"), 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    for each in found:
        assert "error" not in each, each["error"]
    said = re.findall(r"w4a8: ((?:all \d+ )?layers run (?:in one call|one by one: .*))", log)
    return dict(zip(names, zip(found[::2], found[1::2], said[::2])))


def check(on, off):
    """The same roundings to int8 but for ties, which move what attends to a token by little. Another norm, factor or
    rotation would move nearly all positions."""
    divergences = kl_divergences(off, on).abs()
    assert divergences.quantile(0.1) < 2e-7  # seen: 5e-8
    assert divergences.median() < 1e-4  # seen: 2e-5
    assert (divergences > 1e-3).float().mean() < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_in_one_call(name, results):
    on, off, said = results[name]
    assert said == f"all {LAYERS} layers run in one call"
    check(on, off)


def published(name, folder, dtype="float32", **fields):
    """As Gemma 4 and Qwen3.5 are published: the text alone, which is in ``language_model``. fields: of its config."""
    text = model_of(name, **fields)
    family = INT4[name][0]
    config = getattr(transformers, f"{family}Config")(text_config=text.config.to_dict(), **SEES[family])
    whole = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    write_int4(whole, folder / "checkpoint")
    arguments = {"enforce_eager": True, "dtype": dtype, "max_model_len": 128, "language_model_only": True}
    few = [[token % 87 + 3 for token in prompt] for prompt in prompts()]
    return Job(folder / "checkpoint", arguments, few)


@pytest.mark.parametrize("name", ["gemma4", "gemma4, shared keys", "qwen35"])
def test_of_a_model_that_also_sees(name, tmp_path):
    job = published(name, tmp_path, **({"use_bidirectional_attention": "vision"} if name == "gemma4" else {}))
    jobs = [job, replace(job, environment={"W4A8_VLLM_DECODER": "0"})]
    (on, off), log = run_engines(jobs, tmp_path / "engines", 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert "error" not in on, on["error"]
    assert "error" not in off, off["error"]
    assert f"{INT4[name][0]}ForConditionalGeneration" in log
    assert log.count(f"w4a8: all {LAYERS} layers run in one call") == 1
    check(on, off)

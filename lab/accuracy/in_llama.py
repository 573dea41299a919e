"""The rows of llama.cpp: the file as it is, and files that it makes of the floats that this stands for."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from peers.environments import python_of
from peers.ggml import ENVIRONMENT
from trained_models import FOLDER

from accuracy.ways import AS_IT_IS, SECTIONS, Case, Running, Way

SCRIPT = Path(__file__).with_name("llama_logits.py")
MADE = ("Q8_0", "Q4_0", "Q4_K_S", "Q4_K_M")
IMATRIX = "Q4_K_M with imatrix"


def types_of(file: Path) -> tuple[float, str]:
    """Bits of a weight of the layers' matrices, and what types there are: shares of these weights, the output layer."""
    from gguf import GGUFReader

    bits, weights, types, output = 0, 0, Counter(), ""
    for tensor in GGUFReader(file).tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            bits += 8 * int(tensor.n_bytes)
            weights += int(tensor.n_elements)
            types[tensor.tensor_type.name] += int(tensor.n_elements)
        elif tensor.name == "output.weight" or (tensor.name == "token_embd.weight" and not output):
            output = tensor.tensor_type.name
    shares = ", ".join(f"{100 * count / weights:.0f} % {name}" for name, count in types.most_common())
    return bits / weights, f"{shares}; output layer {output}"


def failure(log: Path) -> RuntimeError:
    lines = log.read_text(errors="replace").strip().splitlines()
    return RuntimeError(f"llama.cpp: {lines[-1] if lines else 'no message'} (all of it: {log})")


@contextmanager
def answering(case: Case, file: Path, python: str) -> Iterator[Running]:
    """Answers windows of the reference in their order."""
    tokens, log = FOLDER / "tokens.npy", FOLDER / "llama.log"
    np.save(tokens, torch.stack(case.reference.windows).numpy())
    command = [python, str(SCRIPT), "logits", str(file), str(tokens), str(case.threads)]
    with open(log, "w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    vocabulary = case.reference.logs.shape[-1]

    def logits(ids: torch.Tensor) -> torch.Tensor:
        answer = torch.empty(len(ids), vocabulary)
        if process.stdout.readinto(answer.numpy().view(np.uint8).reshape(-1)) != answer.nbytes:
            process.wait()
            raise failure(log)
        return answer

    try:
        yield Running(logits, types_of(file)[0], "llama.cpp")
    finally:
        process.kill()
        process.wait()


def importance(case: Case) -> dict[str, torch.Tensor]:
    """What llama.cpp's imatrix has: by name of a tensor, the mean square of each input channel of its layer."""
    from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

    wanted = GGUFReader(case.source.path()).get_field("general.architecture").contents()
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == wanted)
    names = get_tensor_name_map(arch, case.model.config.num_hidden_layers)
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, inputs: torch.Tensor) -> None:
        squares = inputs.flatten(0, -2).double().square().mean(0) / len(case.calibration)
        sums[name] = sums.get(name, 0) + squares

    linear = {key: module for key, module in case.model.named_modules() if isinstance(module, torch.nn.Linear)}
    known = {f"{names.get_name(key)}.weight": module for key, module in linear.items() if names.get_name(key)}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: add(name, args[0]))
        for name, module in known.items()
    ]
    with torch.no_grad():
        for batch in case.calibration:
            case.model(**batch)
    for handle in handles:
        handle.remove()
    return {name: total.float() for name, total in sums.items()}


def made(case: Case, name: str, python: str) -> Path:
    """The file in this format, made of the source's."""
    file = FOLDER / f"{case.source.name}.{name.replace(' ', '-')}.gguf"
    if not file.exists():
        part, log = file.with_suffix(".part"), FOLDER / "llama.log"
        form = name.partition(" ")[0]
        command = [python, str(SCRIPT), "quantize", str(case.source.path()), str(part), f"MOSTLY_{form}"]
        if name == IMATRIX:
            command.append(str(FOLDER / "imatrix.npz"))
            np.savez(command[-1], **{key: each.numpy() for key, each in importance(case).items()})
        with open(log, "w") as errors:
            if subprocess.run(command, stdout=errors, stderr=errors, check=False).returncode != 0:
                raise failure(log)
        part.rename(file)
    return file


def ways(case: Case) -> Iterator[Way]:
    """Raises peers.environments.Unavailable if llama-cpp-python cannot be had."""
    python = python_of(ENVIRONMENT)
    files = {AS_IT_IS: case.source.path(), **{name: made(case, name, python) for name in (*MADE, IMATRIX)}}
    for name, file in files.items():
        title = f"{name} ({types_of(file)[1]})"
        yield Way(SECTIONS[6], title, "its own", lambda file=file: answering(case, file, python))

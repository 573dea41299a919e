"""The trained model of examples/tiny_moe: with a tokenizer for vLLM, and as the demo runs it."""

import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_moe"
CHECKPOINT = EXAMPLE / "checkpoints" / "g32"
PROMPTS = ("import os\n\n\nclass ", "def ", "    for name in ")
TOKENS = 64


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level tokenizers write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def with_tokenizer(directory: Path) -> Path:
    """A copy of the checkpoint with a tokenizer whose tokens are the bytes."""
    shutil.copytree(CHECKPOINT, directory)
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def demo_model() -> torch.nn.Module:
    """The model as demo.py runs it: float32, every quantized matrix computed by the operators."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import modeling
    finally:
        sys.path.remove(str(EXAMPLE))
    return modeling.load_w4a8(CHECKPOINT)


@torch.no_grad()
def check_greedy(model: torch.nn.Module, prompt: str, answer: list[int], tie: float) -> None:
    """The answer must be the demo's greedy text; where it leaves it, two bytes must have been equally likely.

    Args:
        model: of the demo.
        prompt: text.
        answer: bytes that vLLM appended.
        tie: difference of logits that the dtype of vLLM's run can make up for.
    """
    ids = list(prompt.encode())
    logits = model(torch.tensor([ids + answer[:-1]]), use_cache=False).logits[0, len(ids) - 1 :]
    best = logits.argmax(-1).tolist()
    for i, (got, wanted) in enumerate(zip(answer, best)):
        gap = (logits[i, wanted] - logits[i, got]).item()
        text = bytes(answer[: i + 1])
        assert gap <= tie, f"after {prompt!r}: {text!r}, but byte {wanted} is more likely by {gap:.4f} (tie: {tie})"

"""Talk to a model in the terminal, on w4a8's operators.

    python examples/chat.py DIRECTORY                  # packed (save_pretrained), or quantized by others
    python examples/chat.py DIRECTORY --quantize       # floats: quantized while loading, in groups of 32
    python examples/chat.py MODEL.gguf                 # a GGUF file: packed as it is
    echo "def " | python examples/chat.py examples/tiny_moe/checkpoints/g32 --raw

An empty line, or the end of the input, ends it. Needs transformers 5.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from w4a8.integrations.transformers import W4A8Config
from w4a8.quantization import DEFAULT_GROUP_SIZE


class Bytes:
    """In place of a tokenizer, for models of bytes (vocabulary 256)."""

    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(text.encode())])}

    def decode(self, tokens: Any, **_: Any) -> str:
        return bytes(int(token) for token in tokens).decode(errors="replace")


class Counter(TextStreamer):
    """Writes text as it comes, and takes times: of the prompt, and of each token after the first."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())  # the first is the prompt, before it is read
        super().put(value)

    def summary(self, prompt_tokens: int) -> str:
        """Tokens per second of reading and of writing."""
        steps = [later - earlier for earlier, later in zip(self.times, self.times[1:])]
        if not steps:
            return "nothing written"
        text = f"prompt of {prompt_tokens} tokens: {prompt_tokens / steps[0]:.1f} tokens/s"
        written = steps[1:]
        return text + (f"; {len(steps)} written: {len(written) / sum(written):.1f} tokens/s" if written else "")


def place(directory: str) -> tuple[str, dict[str, str]]:
    """Where from_pretrained looks, and what else it is told: of a GGUF file its folder and its name."""
    path = Path(directory)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (directory, {})


def load(directory: str, group_size: int | None) -> Any:
    """The model, quantized while loading if its weights are floats."""
    folder, gguf = place(directory)
    if gguf:
        if group_size is not None:
            raise SystemExit(f"{directory} is quantized already (GGUF): leave --quantize out")
        return AutoModelForCausalLM.from_pretrained(folder, **gguf)
    config = Path(directory) / "config.json"
    theirs = json.loads(config.read_text()).get("quantization_config") if config.exists() else None
    if group_size is not None:
        if theirs:
            raise SystemExit(f"{directory} is quantized already ({theirs.get('quant_method')}): leave --quantize out")
        return AutoModelForCausalLM.from_pretrained(directory, quantization_config=W4A8Config(group_size))
    if theirs and theirs.get("quant_method") != "w4a8":
        return AutoModelForCausalLM.from_pretrained(directory, quantization_config=W4A8Config())
    return AutoModelForCausalLM.from_pretrained(directory)


def tokenizer_of(directory: str, model: Any) -> Any:
    """The directory's; bytes where there are as many tokens."""
    folder, gguf = place(directory)
    return Bytes() if model.config.vocab_size == 256 else AutoTokenizer.from_pretrained(folder, **gguf)


def answer(
    model: Any, tokenizer: Any, text: str, messages: list[dict[str, str]] | None, options: dict[str, Any]
) -> None:
    """Streams what the model writes; ``messages`` is the conversation, which grows by it."""
    if messages is None:
        inputs = dict(tokenizer(text, return_tensors="pt"))
    else:
        messages.append({"role": "user", "content": text})
        template = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **template)
    prompt = inputs["input_ids"].shape[1]
    streamer = Counter(tokenizer)
    written = model.generate(**inputs, streamer=streamer, pad_token_id=model.config.pad_token_id or 0, **options)
    if messages is not None:
        reply = tokenizer.decode(written[0, prompt:], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": reply})
    print(f"[{streamer.summary(prompt)}]", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="or a GGUF file, or a name on the Hugging Face hub")
    parser.add_argument(
        "--quantize",
        type=int,
        nargs="?",
        const=DEFAULT_GROUP_SIZE,
        metavar="GROUP",
        help="quantize float weights while loading, in groups of so many (%(const)s)",
    )
    parser.add_argument("--save", metavar="DIRECTORY", help="write the packed model, and the tokenizer, to it")
    parser.add_argument("--raw", action="store_true", help="continue the text instead of answering in the chat format")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of torch; the default is one per core")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    begin = time.perf_counter()
    model = load(args.directory, args.quantize)
    tokenizer = tokenizer_of(args.directory, model)
    print(f"[loaded in {time.perf_counter() - begin:.1f} s]", file=sys.stderr)
    report = getattr(getattr(model, "hf_quantizer", None), "report", None)
    if report is not None:
        print(f"[{str(report).splitlines()[0]}]", file=sys.stderr)
    if args.save:
        model.save_pretrained(args.save)
        if not isinstance(tokenizer, Bytes):
            tokenizer.save_pretrained(args.save)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        options["temperature"] = args.temperature
    messages = None if args.raw or getattr(tokenizer, "chat_template", None) is None else []
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return 0
        answer(model, tokenizer, line, messages, options)


if __name__ == "__main__":
    sys.exit(main())

"""Runs in the environment of llm-compressor: quantizes a folder of floats, in groups of 32.

llm_compressor.py HOW FLOATS TOKENS.json OUT THREADS    HOW: gptq or "gptq asymmetric"; TOKENS: lists
"""

import json
import sys
import time

import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier


def recipe_of(how: str) -> list:
    weights = QuantizationArgs(num_bits=4, symmetric="asymmetric" not in how, strategy="group", group_size=32)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    return [GPTQModifier(config_groups=groups, ignore=["lm_head"])]


def main(how: str, floats: str, tokens: str, out: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    with open(tokens) as file:
        rows = json.load(file)
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    model = transformers.AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    begin = time.perf_counter()
    length = max(map(len, rows))
    oneshot(model=model, dataset=data, recipe=recipe_of(how), max_seq_length=length, num_calibration_samples=len(rows))
    print(f"{how}: {time.perf_counter() - begin:.0f} s")
    model.save_pretrained(out, save_compressed=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs in the environment of AutoRound: quantizes a folder of floats, in groups of 32.

auto_rounding.py HOW FLOATS TOKENS.json OUT THREADS    HOW: signed or asymmetric; TOKENS: lists of the same length
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from auto_round import AutoRound

# AutoRound's own number of steps. Its 8 windows of 2,048 tokens a step would take two cores hours; results are made
# with what is affordable here.
STEPS = 200
WINDOWS = 2


def main(how: str, floats: str, tokens: str, out: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    with open(tokens) as file:
        rows = json.load(file)
    model = transformers.AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    scheme = {"bits": 4, "group_size": 32, "sym": how == "signed", "data_type": "int"}
    begin = time.perf_counter()
    tuned = AutoRound(
        model,
        transformers.AutoTokenizer.from_pretrained(floats),
        scheme=scheme,
        dataset=[torch.tensor([row]) for row in rows],
        nsamples=len(rows),
        seqlen=len(rows[0]),
        batch_size=WINDOWS,
        iters=STEPS,
        device_map="cpu",
        enable_torch_compile=False,
        amp=False,
    )
    _, folder = tuned.quantize_and_save(f"{out}-of", format="auto_round")  # in a folder that it names itself
    Path(folder).rename(out)
    print(f"{how}: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])

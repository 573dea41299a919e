"""Wrote the checkpoints beside this file; not run by any test: `python write.py`, in an environment with auto-round.

auto-round 0.16.1, torch 2.13.0: a Qwen3-MoE of one layer with random weights, rounded to nearest in groups of 128, with
zero points, in the formats that auto-round exports. Of its files, config.json and model.safetensors are kept.
"""

import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 160,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
# Folder: format of auto-round, symmetric.
FORMATS = {
    "gptq": ("auto_gptq", False),
    "awq": ("auto_awq", False),
    "auto_round": ("auto_round", False),
    "compressed_tensors": ("llm_compressor", False),
}


def write_float(directory: Path) -> None:
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES)).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        width = 1 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5
        parameter.data.copy_(1 + 0.1 * noise if "norm" in name else noise * width)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(SIZES["vocab_size"])}, unk_token="t0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t1", eos_token="t1")
    tokenizer.save_pretrained(directory)


def main() -> None:
    from auto_round import AutoRound

    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "float"
        write_float(source)
        for name, (form, symmetric) in FORMATS.items():
            made = Path(temporary) / name
            options = {"iters": 0, "disable_opt_rtn": True, "nsamples": 1, "seqlen": 8, "device_map": "cpu"}
            AutoRound(str(source), bits=4, group_size=128, sym=symmetric, **options).quantize_and_save(str(made), form)
            (weights,) = made.rglob("model*.safetensors")
            (HERE / name).mkdir(exist_ok=True)
            for file in (weights, weights.parent / "config.json"):
                shutil.copyfile(file, HERE / name / file.name)


if __name__ == "__main__":
    main()

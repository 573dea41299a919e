"""A model of a few hundred megabytes for tests of memory, whose tensors come in no order: each is in one of several
files by chance, so that what belongs together is far apart. Written by lab/real_size.
"""

import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "layers": 5,
    "vocabulary": 4096,
    "group": 128,
    "hidden": 1024,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 128,
    "intermediate": 512,
    "experts": 64,
    "top_k": 4,
    "positions": 1024,
}
FILES = 12


def write(folder: Path, shuffled: bool = True, **sizes: int) -> Path:
    """Makes the checkpoint, shuffled over FILES files or in the order of the model; returns its folder."""
    if str(ROOT / "lab") not in sys.path:
        sys.path.insert(0, str(ROOT / "lab"))
    from real_size.gguf_shapes import Shapes
    from real_size.write import write_files, write_settings

    shapes = Shapes(**{**SIZES, **sizes})
    tensors = list(shapes.tensors())
    if shuffled:
        random.Random(0).shuffle(tensors)
    share = -(-len(tensors) // FILES)
    folder.mkdir(parents=True)
    write_settings(shapes, folder)
    write_files(folder, [tensors[i : i + share] for i in range(0, len(tensors), share)], shapes.group, lambda _: None)
    return folder


def largest_file(folder: Path) -> int:
    """Bytes of the largest file: a reader maps one at a time."""
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def in_small_files(folder: Path, **sizes: int) -> None:
    """A Qwen3-MoE of transformers with random weights, in the order of the model, over files of 8 MB."""
    import torch
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=512, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts_per_tok=4, max_position_embeddings=512, **sizes,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.05, 0.05)
    model.save_pretrained(folder, max_shard_size="8MB")

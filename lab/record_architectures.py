#!/usr/bin/env python3
"""Converts tiny models with llama.cpp's script, and puts its keys and a digest of its tensors into
tests/gguf_architectures.json; the tests then write the same files without that script.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    .venv/bin/python lab/record_architectures.py llama_cpp_python-0.3.36/vendor/llama.cpp NAME...

Prints of each model whether ``Written`` of tests/gguf_architectures.py makes the same tensors.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

# Fields of config.json that the script reads, beside those of ON_THE_HUB (tests/gguf_architectures.py).
FIELDS = {
    "deepseek2, GLM-4.7-Flash": {"first_k_dense_replace": 1, "scoring_func": "sigmoid"},
    "glm-dsa": {"scoring_func": "sigmoid"},
    "cohere2": {"rotary_pct": 1.0},
    "granitehybrid": {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "nope"},
    "hunyuan-moe": {"moe_topk": [2] * 4, "num_shared_expert": [1] * 4, "moe_intermediate_size": [96] * 4},
    "phi3": {"original_max_position_embeddings": 128},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 128},
    "exaone-moe": {"scoring_func": "sigmoid"},
    "lfm2moe": {"tie_embedding": True},
}


def convert(name: str, model: torch.nn.Module, folder: Path, vocabulary: int) -> Path:
    """The file that the script makes of a model, without its tokenizer."""
    import gguf
    import gguf_architectures as tiny
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= tiny.ON_THE_HUB.get(config["model_type"], {}) | FIELDS.get(name, {})
    (folder / "config.json").write_text(json.dumps(config))
    words = {"model": {"vocab": {f"w{i}": i for i in range(vocabulary)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    converter = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
    converter.no_mtp = True
    for parent in converter.__mro__:
        if "set_vocab" in vars(parent):
            parent.set_vocab = lambda self: self.gguf_writer.add_vocab_size(vocabulary)
    path = folder / "model.gguf"
    with torch.inference_mode():
        converter(folder, gguf.LlamaFileType.ALL_F32, path, model_name=name).write()
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path, help="the folder of llama.cpp, with convert_hf_to_gguf.py")
    parser.add_argument("names", nargs="+", help="keys of MODELS")
    args = parser.parse_args()
    sys.path[:0] = [str(args.llama_cpp / "gguf-py"), str(args.llama_cpp)]
    logging.disable(logging.WARNING)

    import gguf
    import gguf_architectures as tiny

    found, same = json.loads(tiny.WRITTEN.read_text()), True
    for name in args.names:
        model = tiny.model_of(name)
        with tempfile.TemporaryDirectory() as folder:
            reader = gguf.GGUFReader(convert(name, model, Path(folder), tiny.VOCAB))
            architecture = reader.get_field("general.architecture").contents()
            ours = (f"{architecture}.", "xielu.")
            keys = {k: field.contents() for k, field in reader.fields.items() if k.startswith(ours)}
            tensors = {
                each.name: torch.from_numpy(np.array(each.data)).view([int(size) for size in each.shape[::-1]])
                for each in reader.tensors
            }
        digest = tiny.digest_of(tensors)
        found[name] = {"architecture": architecture, "keys": keys, "digest": digest}
        own = {k: v.float() for k, v in (tiny.Written(model, architecture).tensors | tiny.beside(name)).items()}
        both = tensors.keys() & own
        other = sorted({k for k in both if not torch.equal(own[k], tensors[k])} | (tensors.keys() ^ own))
        same = same and tiny.digest_of(own) == digest
        print(f"{name}: {len(tensors)} tensors; other ones in Written: {', '.join(other) or 'none'}")
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
    tiny.WRITTEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

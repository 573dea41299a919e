"""Wrote the checkpoints beside this file; run by no test: `python write.py TOOL`, in an environment with that tool.

Models of one layer with random weights: a Qwen3-MoE in groups of 128 (MXFP4: a gpt-oss). Of what a tool writes,
config.json, hf_quant_config.json and model.safetensors are kept. torch 2.13.0 (CPU); the tools, and what they wrote:

    auto-round        0.16.1    gptq, gptq_sym, awq, awq_sym (zero_point false), auto_round (a packing of its own),
                                auto_round_gptq, auto_round_awq, compressed_tensors, auto_round_mixed (attention in 8
                                bits), auto_round_experts and gptq_experts (experts in 8 bits, symmetric),
                                mxfp4_compressed_tensors, mxfp4_auto_round, nvfp4_auto_round: rounded to nearest
    gptqmodel         7.7.0     gptq_v2, gptq_v2_sym: calibrated with random tokens. On two cores it needs
                                GPTQMODEL_CPU_WORKERS=2
    llmcompressor     0.14.0.1  w4a16, w4a8, nvfp4_llmcompressor: rounded to nearest
    nvidia-modelopt   0.47.0    nvfp4_modelopt, its unified export (with transformers 5.23.0, accelerate, datasets and
                                requests); mxfp4: its quantizer for this format, names and config.json as its example
                                for gpt-oss has them, which is no part of the package
    amd-quark         0.13      mxfp4_quark, mxfp4_quark_gpt_oss (attention is left out), with transformers 5.23.0 and
                                accelerate

All but *_sym, auto_round_gptq, w4a16, w4a8, mxfp4* and nvfp4* have zero points. Scales of inputs (nvfp4*) come of
random tokens.
"""

import json
import shutil
import sys
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
GPT_OSS = {key: SIZES[key] for key in SIZES if key not in ("num_experts", "moe_intermediate_size", "norm_topk_prob")}
GPT_OSS.update(intermediate_size=128, num_local_experts=4, sliding_window=16)


def _random_weights(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        width = 1 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5
        parameter.data.copy_(1 + 0.1 * noise if "norm" in name else noise * width)


def write_float(directory: Path) -> None:
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES)).to(torch.bfloat16)
    _random_weights(model)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(SIZES["vocab_size"])}, unk_token="t0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t1", eos_token="t1")
    tokenizer.save_pretrained(directory)


def _random_tokens(rows: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, SIZES["vocab_size"], (rows, 64), generator=generator).tolist()


def auto_round(source: Path, made: Path) -> None:
    from auto_round import AutoRound

    formats = {
        "gptq": ("auto_gptq", False),
        "gptq_sym": ("auto_gptq", True),
        "awq": ("auto_awq", False),
        "awq_sym": ("auto_awq", True),
        "auto_round": ("auto_round", False),
        "auto_round_gptq": ("auto_round", True),
        "auto_round_awq": ("auto_round:auto_awq", False),
        "compressed_tensors": ("llm_compressor", False),
    }
    options = {"iters": 0, "disable_opt_rtn": True, "nsamples": 1, "seqlen": 8, "device_map": "cpu"}
    for name, (form, symmetric) in formats.items():
        rounded = AutoRound(str(source), bits=4, group_size=128, sym=symmetric, **options)
        rounded.quantize_and_save(str(made / name), form)
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    experts = [f"mlp.experts.{expert}.{name}_proj" for expert in range(4) for name in ("gate", "up", "down")]
    for name, form, symmetric, modules in (
        ("auto_round_mixed", "auto_round", True, attention),
        ("auto_round_experts", "auto_round", True, experts),
        ("gptq_experts", "auto_gptq", False, experts),
    ):
        eight = {f"model.layers.0.{module}": {"bits": 8} for module in modules}
        mixed = AutoRound(str(source), bits=4, group_size=128, sym=symmetric, layer_config=eight, **options)
        mixed.quantize_and_save(str(made / name), form)
    for name, form in (("mxfp4_compressed_tensors", "llm_compressor"), ("mxfp4_auto_round", "auto_round")):
        AutoRound(str(source), scheme="MXFP4", **options).quantize_and_save(str(made / name), form)
    inputs = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, 64)} for row in _random_tokens(8)]
    options.update(nsamples=8, seqlen=64, dataset=inputs)
    AutoRound(str(source), scheme="NVFP4", **options).quantize_and_save(str(made / "nvfp4_auto_round"), "auto_round")


def gptqmodel(source: Path, made: Path) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    tokens = _random_tokens(32)
    for name, symmetric in (("gptq_v2", False), ("gptq_v2_sym", True)):
        how = {"bits": 4, "group_size": 128, "desc_act": False, "offload_to_disk": False}
        model = GPTQModel.load(str(source), QuantizeConfig(sym=symmetric, format="gptq_v2", **how), device="cpu")
        model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in tokens], batch_size=1)
        model.save(str(made / name))


def llmcompressor(source: Path, made: Path) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    rows = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in _random_tokens(16)])
    calibrated = {"dataset": rows, "max_seq_length": 64, "num_calibration_samples": 16, "tokenizer": str(source)}
    for folder, scheme, inputs in (
        ("w4a16", "W4A16", {}),
        ("w4a8", "W4A8", {}),
        ("nvfp4_llmcompressor", "NVFP4", calibrated),
    ):
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        ignore = ["lm_head", "re:.*mlp.gate$"]
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=ignore), **inputs)
        model.save_pretrained(made / folder, save_compressed=True)


def modelopt(source: Path, made: Path) -> None:
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokens = torch.tensor(_random_tokens(16))
    quantization.quantize(model, quantization.NVFP4_DEFAULT_CFG, lambda model: model(tokens))
    export_hf_checkpoint(model, export_dir=made / "nvfp4_modelopt")
    _modelopt_mxfp4(made)


def _modelopt_mxfp4(made: Path) -> None:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**GPT_OSS)).to(torch.bfloat16)
    _random_weights(model)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        parts = [MXFP4QTensor.quantize(expert.T.contiguous(), block_size=32) for expert in tensor]
        codes = torch.stack([quantized._quantized_data for quantized, _ in parts])
        tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16))
        tensors[f"{name}_scales"] = torch.stack([scales.view(len(codes[0]), -1) for _, scales in parts])
    model.save_pretrained(made / "mxfp4", state_dict=tensors)
    path = made / "mxfp4" / "config.json"
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"modules_to_not_convert": skipped, "quant_method": "mxfp4"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}, indent=2) + "\n")


def quark(source: Path, made: Path) -> None:
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config.config import OCP_MXFP4Spec, QConfig, QLayerConfig
    from quark.torch.utils.llm import preprocess_for_quantization
    from torch.utils.data import DataLoader

    gpt_oss = transformers.GptOssForCausalLM(transformers.GptOssConfig(**GPT_OSS)).to(torch.bfloat16)
    _random_weights(gpt_oss)
    weight, inputs = (OCP_MXFP4Spec(ch_axis=-1, is_dynamic=dynamic).to_quantization_spec() for dynamic in (False, True))
    tokens = DataLoader(torch.tensor(_random_tokens(16)), batch_size=16)
    for folder, model, excluded in (
        ("mxfp4_quark", transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto"), ["*mlp.gate"]),
        ("mxfp4_quark_gpt_oss", gpt_oss, ["*router*", "*self_attn*"]),
    ):
        preprocess_for_quantization(model)  # a linear layer for each expert
        layers = QLayerConfig(weight=weight, input_tensors=inputs)
        quantizer = ModelQuantizer(QConfig(global_quant_config=layers, exclude=["lm_head", *excluded]))
        export_safetensors(quantizer.freeze(quantizer.quantize_model(model, tokens)), made / folder)


def main() -> None:
    tools = {
        "auto-round": auto_round,
        "gptqmodel": gptqmodel,
        "llmcompressor": llmcompressor,
        "nvidia-modelopt": modelopt,
        "amd-quark": quark,
    }
    with tempfile.TemporaryDirectory() as temporary:
        source, made = Path(temporary) / "float", Path(temporary) / "made"
        made.mkdir()
        write_float(source)
        tools[sys.argv[1]](source, made)
        for folder in made.iterdir():
            (weights,) = folder.rglob("model*.safetensors")
            (HERE / folder.name).mkdir(exist_ok=True)
            for file in (weights, weights.parent / "config.json", weights.parent / "hf_quant_config.json"):
                if file.is_file():
                    name = "model.safetensors" if file == weights else file.name
                    shutil.copyfile(file, HERE / folder.name / name)


if __name__ == "__main__":
    main()

"""What is tested. QUICK runs in `make test-vllm`, all of it in `make test-vllm-full`."""

from models import Case

QUICK = [
    Case("qwen3_moe", 32, "int-quantized", "bfloat16", "symmetric"),
    Case("qwen2_moe", 64, "pack-quantized", "float16", "asymmetric"),
    Case("mixtral", 128, "int-quantized", "float32", "symmetric"),
    Case("deepseek_v2", -1, "int-quantized", "bfloat16", "asymmetric"),
    Case("deepseek_v3", 32, "pack-quantized", "float32", "symmetric"),
    Case("gpt_oss", 64, "int-quantized", "bfloat16", "symmetric"),
    Case("qwen3_moe", -1, "pack-quantized", "bfloat16", "symmetric", attention="w8a8"),
    Case("qwen3_moe", 128, "pack-quantized", "bfloat16", "none"),
]

MORE = [
    Case("qwen3_moe", 32, "pack-quantized", "float32", "asymmetric"),
    Case("qwen3_moe", 64, "int-quantized", "float32", "symmetric", attention="float"),
    Case(
        "qwen3_moe",
        96,
        "int-quantized",
        "float32",
        "symmetric",
        changes={"hidden_size": 192, "moe_intermediate_size": 96, "num_attention_heads": 6},
    ),
    Case("qwen3_moe", 128, "pack-quantized", "float16", "symmetric"),
    Case("qwen2_moe", -1, "int-quantized", "float32", "symmetric"),
    Case("mixtral", 64, "pack-quantized", "bfloat16", "asymmetric"),
    Case("mixtral", -1, "pack-quantized", "float16", "symmetric"),
    Case("deepseek_v2", 64, "pack-quantized", "float32", "symmetric"),
    Case("deepseek_v3", -1, "int-quantized", "bfloat16", "symmetric"),
    Case("gpt_oss", 32, "int-quantized", "float32", "asymmetric"),
    Case("gpt_oss", -1, "int-quantized", "bfloat16", "symmetric"),
]

# The first of each family runs through torch.compile, as a server does.
COMPILED = list({case.model: case for case in reversed(QUICK)}.values())

# (case, compiled): other weights are loaded into the running engine. Both formats, shared experts, biases.
RELOADED = [(QUICK[0], True), (QUICK[1], True), (QUICK[5], True)]

# Two ranks: experts cut (tensor parallel) or dealt out (expert parallel). The first runs in `make test-vllm`: a bias of
# w2 must come in once, not once per rank.
PARALLEL = [
    (Case("gpt_oss", 32, "int-quantized", "float32", "symmetric"), False),
    (Case("qwen3_moe", 32, "int-quantized", "float32", "symmetric"), False),
    (Case("qwen2_moe", 32, "pack-quantized", "bfloat16", "symmetric"), False),
    (Case("mixtral", -1, "int-quantized", "float32", "symmetric"), False),
    (Case("qwen3_moe", 32, "pack-quantized", "float32", "symmetric"), True),
    (Case("deepseek_v3", 32, "int-quantized", "float32", "symmetric"), True),
    (Case("gpt_oss", 32, "int-quantized", "float32", "symmetric"), True),
]

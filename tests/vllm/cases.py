"""What is tested."""

from models import Case

FIRST_EXPERTS = r".*layers[.]0[.].*experts"

# Families and formats at once: an engine each.
FAMILIES = [
    Case("qwen3_moe", 32, "int-quantized", "bfloat16", "symmetric"),
    Case("qwen2_moe", 64, "pack-quantized", "float16", "asymmetric"),
    Case("mixtral", 128, "awq", "float32", "none", symmetric=False),
    Case("deepseek_v2", 128, "auto_round:auto_gptq", "bfloat16", "none", attention="w8a16"),
    Case("deepseek_v3", 32, "gptq", "float32", "none", symmetric=False),
    Case("gpt_oss", 32, "mxfp4", "bfloat16", "none", attention="float"),
    Case("gpt_oss", 64, "int-quantized", "bfloat16", "symmetric"),
    Case("qwen3_moe", -1, "pack-quantized", "bfloat16", "symmetric", attention="w8a8"),
    Case("qwen3_moe", 128, "pack-quantized", "bfloat16", "none", symmetric=False, attention="w8a16"),
    Case("qwen3_moe", 128, "gptq_v2", "bfloat16", "none", lm_head=True),
    Case("qwen2_moe", 16, "modelopt-nvfp4", "float32", "none", lm_head=True),
    Case("qwen3_moe", 32, "gptq", "float32", "none", symmetric=False, eight_bits=FIRST_EXPERTS),
    Case("mixtral", -1, "pack-quantized", "float32", "none", symmetric=False, eight_bits=".*experts"),
]


def written_by_a_tool(folder: str, form: str, symmetric: bool = False, inputs: str = "none", group: int = 128) -> Case:
    """A folder of tests/tool_written, of one layer."""
    options = {"symmetric": symmetric, "tool": folder, "changes": {"num_experts": 4}}
    return Case("qwen3_moe", group, form, "bfloat16", inputs, **options)


# One of each format, from four tools (tests/tool_written/write.py).
TOOLS = {
    "gptq_sym": written_by_a_tool("gptq_sym", "gptq", True),
    "gptq": written_by_a_tool("gptq", "gptq"),
    "gptq_v2_sym": written_by_a_tool("gptq_v2_sym", "gptq_v2", True),
    "gptq_v2": written_by_a_tool("gptq_v2", "gptq_v2"),
    "awq_sym": written_by_a_tool("awq_sym", "awq", True),
    "awq": written_by_a_tool("awq", "awq"),
    "auto_round": written_by_a_tool("auto_round", "gptq_v2"),
    "auto_round_gptq": written_by_a_tool("auto_round_gptq", "auto_round:auto_gptq", True),
    "auto_round_mixed": written_by_a_tool("auto_round_mixed", "auto_round:auto_gptq", True),
    "auto_round_experts": written_by_a_tool("auto_round_experts", "auto_round:auto_gptq", True),
    "gptq_experts": written_by_a_tool("gptq_experts", "gptq"),
    "auto_round_awq": written_by_a_tool("auto_round_awq", "auto_round:auto_awq"),
    "mxfp4_compressed_tensors": written_by_a_tool("mxfp4_compressed_tensors", "mxfp4-pack-quantized", True),
    "mxfp4_auto_round": written_by_a_tool("mxfp4_auto_round", "mxfp4-pack-quantized", True),
    "mxfp4_quark": written_by_a_tool("mxfp4_quark", "quark", True, group=32),
    "nvfp4_modelopt": written_by_a_tool("nvfp4_modelopt", "modelopt-nvfp4", True, group=16),
    "nvfp4_llmcompressor": written_by_a_tool("nvfp4_llmcompressor", "nvfp4-pack-quantized", True, group=16),
    "nvfp4_auto_round": written_by_a_tool("nvfp4_auto_round", "nvfp4-pack-quantized", True, group=16),
    "w4a16": written_by_a_tool("w4a16", "pack-quantized", True),
    "compressed_tensors": written_by_a_tool("compressed_tensors", "pack-quantized"),
    "w4a8": written_by_a_tool("w4a8", "int-quantized", True, "symmetric"),
    "mxfp4_quark_gpt_oss": Case(
        "gpt_oss",
        32,
        "quark",
        "bfloat16",
        "none",
        attention="float",
        tool="mxfp4_quark_gpt_oss",
        changes={"num_local_experts": 4},
    ),
    "mxfp4": Case(
        "gpt_oss", 32, "mxfp4", "bfloat16", "none", attention="float", tool="mxfp4", changes={"num_local_experts": 4}
    ),
}
FAMILIES += TOOLS.values()

# Sizes that are multiples of 16 and of nothing more.
ODD = {"hidden_size": 144, "moe_intermediate_size": 112, "intermediate_size": 176}

MORE = [
    Case("deepseek_v3", 32, "auto_round:auto_gptq", "bfloat16", "none", symmetric=False, eight_bits=".*mlp[.]"),
    Case("qwen2_moe", 16, "gptq_v2", "float32", "none", eight_bits=".*experts"),
    Case("qwen3_moe", 64, "pack-quantized", "bfloat16", "none", attention="w8a16", eight_bits=FIRST_EXPERTS),
    Case("deepseek_v3", 32, "quark", "bfloat16", "none", attention="float"),
    Case("qwen2_moe", 32, "quark", "float32", "none", lm_head=True),
    Case("qwen3_moe", 16, "nvfp4-pack-quantized", "float32", "none", changes=ODD),
    Case("deepseek_v3", 16, "modelopt-nvfp4", "bfloat16", "none"),
    Case("mixtral", 16, "nvfp4-pack-quantized", "bfloat16", "none", lm_head=True),
    Case("qwen3", 16, "modelopt-nvfp4", "float16", "none", attention="float"),
    Case("qwen3_moe", 16, "int-quantized", "float32", "symmetric", symmetric=False),
    Case("qwen3_moe", 16, "gptq", "float32", "none", symmetric=False),
    Case("mixtral", 128, "int-quantized", "float32", "symmetric"),
    Case("deepseek_v2", -1, "int-quantized", "bfloat16", "asymmetric"),
    Case("deepseek_v3", 32, "pack-quantized", "float32", "symmetric"),
    Case("qwen3_moe", 128, "pack-quantized", "bfloat16", "none"),
    Case("qwen3_moe", 128, "int-quantized", "float32", "symmetric", symmetric=False),
    Case("qwen3_moe", 128, "gptq", "bfloat16", "none"),
    Case("qwen3_moe", 128, "gptq", "float32", "none", attention="w8a16"),
    Case("qwen2_moe", 32, "gptq_v2", "float16", "none", symmetric=False, attention="w8a16"),
    Case("qwen3_moe", -1, "pack-quantized", "float32", "none", attention="w8a16"),
    Case("qwen3_moe", -1, "gptq", "float32", "none", symmetric=False),
    Case("qwen2_moe", 32, "gptq_v2", "float16", "none", symmetric=False),
    Case("qwen3_moe", 128, "awq", "bfloat16", "none"),
    Case("qwen3_moe", 128, "awq", "bfloat16", "none", symmetric=False, lm_head=True),
    Case("qwen3_moe", 128, "auto_round:auto_gptq", "float32", "none", symmetric=False, lm_head=True),
    Case("qwen3_moe", 128, "auto_round:auto_awq", "bfloat16", "none", symmetric=False),
    Case("qwen3", 128, "gptq", "bfloat16", "none", symmetric=False, lm_head=True),
    Case("gpt_oss", 32, "mxfp4", "float32", "none", attention="float"),
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

# The first of each family runs through torch.compile, as a server does; of the formats that these leave out, what a
# tool has written.
COMPILED = [
    *{case.model: case for case in reversed(FAMILIES)}.values(),
    *(TOOLS[name] for name in ("gptq_v2", "auto_round_awq", "compressed_tensors", "nvfp4_modelopt")),
]

# Other weights are loaded into the running engine. Both formats, shared experts, biases.
RELOADED = [FAMILIES[0], FAMILIES[1], FAMILIES[2], FAMILIES[5], FAMILIES[6], FAMILIES[10], FAMILIES[11]]

# Two ranks: experts cut (tensor parallel) or dealt out (expert parallel).
PARALLEL = [
    (Case("gpt_oss", 32, "int-quantized", "float32", "symmetric"), False),
    (Case("qwen3_moe", 32, "int-quantized", "float32", "symmetric"), False),
    (Case("qwen3_moe", 32, "gptq", "float32", "none", attention="w8a16"), False),
    (Case("qwen3_moe", 16, "modelopt-nvfp4", "float32", "none", changes={"moe_intermediate_size": 96}), False),
    (Case("qwen3_moe", 32, "gptq", "float32", "none", symmetric=False, eight_bits=FIRST_EXPERTS), False),
    (Case("mixtral", 64, "pack-quantized", "float32", "none", symmetric=False, eight_bits=".*experts"), True),
    (Case("gpt_oss", 32, "quark", "float32", "none", attention="float"), False),
    (Case("deepseek_v3", 16, "nvfp4-pack-quantized", "float32", "none"), True),
    (Case("qwen2_moe", 32, "pack-quantized", "bfloat16", "symmetric"), False),
    (Case("mixtral", -1, "int-quantized", "float32", "symmetric"), False),
    (Case("qwen3_moe", 32, "pack-quantized", "float32", "symmetric"), True),
    (Case("deepseek_v3", 32, "int-quantized", "float32", "symmetric"), True),
    (Case("gpt_oss", 32, "int-quantized", "float32", "symmetric"), True),
]

"""What can be wrong with a checkpoint: tables of changes, each with the message of w4a8.load."""

import torch
from format_checkpoints import LAYER

# --- experts of compressed-tensors, [256, 128] and [128, 256] in groups of 32 ----------------------------------------


def with_element(index, value):
    """A change of one element."""

    def change(tensor):
        tensor[index] = value
        return tensor

    return change


def int8(*shape):
    return torch.zeros(shape, dtype=torch.int8)


PACKED = {"weight_packed", "weight_shape"}
# A tensor of the layer, what becomes of it (None: it is missing), and the message; {} is its name.
WRONG_TENSORS = [
    ("3.up_proj.weight", None, "tensor '{}' is missing"),
    ("7.down_proj.weight_scale", None, "tensor '{}' is missing"),
    ("0.up_proj.bias", torch.ones(256), f"tensor '{LAYER}.0.gate_proj.bias' is missing"),
    ("3.up_proj.weight", int8(255, 128), "tensor '{}' has shape (255, 128), but (256, 128) is expected"),
    ("0.down_proj.weight", int8(128, 128), "tensor '{}' has shape (128, 128), but (128, 256) is expected"),
    ("0.down_proj.weight", int8(128), "tensor {}: shape (128,), but 2 dimensions are expected"),
    (
        "2.gate_proj.weight_scale",
        torch.ones(256, 1),
        "tensor {}: shape (256, 1), but 128 x 256 features in groups of 32",
    ),
    ("2.gate_proj.weight_scale", with_element((3, 1), float("nan")), "tensor {}: not all scales are finite"),
    ("2.gate_proj.weight_scale", int8(256, 4), "tensor {}: dtype torch.int8, but float16 or"),
    (
        "1.gate_proj.weight",
        with_element((5, 7), 8),
        "tensor {} holds values in [-8, 8], but int4 values are in [-8, 7]",
    ),
    ("1.gate_proj.weight", torch.zeros(256, 128), "tensor {}: dtype torch.float32, but int8 is expected"),
    ("1.gate_proj.weight_g_idx", torch.arange(128), "tensor {}: groups are not consecutive input features"),
    ("1.gate_proj.weight_zero_point", int8(256, 4) + 1, "tensor {}: zero points in [9, 9], but the configuration"),
    ("8.gate_proj.weight", int8(256, 128), f"{LAYER} has an expert 8, but config.json says 8 experts"),
    (
        "4.up_proj.weight_packed",
        torch.zeros(256, 15).int(),
        "{}: shape (256, 15), but 256 x 128 features make (256, 16)",
    ),
    ("4.up_proj.weight_packed", torch.zeros(256, 16).long(), "{}: dtype torch.int64, but int32 is expected"),
    ("4.up_proj.weight_shape", torch.tensor([256, 120]), "'{}' says [256, 120], but [256, 128] is expected"),
    ("4.up_proj.weight_shape", None, "'{}' is missing"),
    ("4.up_proj.weight_packed", None, "'{}' is missing"),
]

WEIGHTS = "quantization_config.config_groups.group_0.weights"
INPUT = "quantization_config.config_groups.group_0.input_activations"
WRONG_SCHEMES = [
    ("weights", {"symmetric": False}, f"tensor '{LAYER}.0.gate_proj.weight_zero_point' is missing"),
    ("weights", {"symmetric": "no"}, f"{WEIGHTS}.symmetric is 'no', but true or false is expected"),
    ("weights", {"num_bits": 8}, f"{WEIGHTS}.num_bits is 8, but 4 is expected"),
    ("weights", {"type": "float"}, f"{WEIGHTS}.type is 'float', but 'int' is expected"),
    ("weights", {"strategy": "tensor"}, f"{WEIGHTS}.strategy is 'tensor', but 'group' or 'channel' is expected"),
    ("weights", {"group_size": 48}, f"{WEIGHTS}.group_size is 48, but 16 or a multiple of 32 is expected"),
    ("weights", {"dynamic": True}, f"{WEIGHTS}.dynamic is True, but false is expected"),
    ("weights", {"actorder": "group"}, f"{WEIGHTS}.actorder is 'group': reordered input features"),
    ("input_activations", {"num_bits": 4}, f"{INPUT}.num_bits is 4, but 8 is expected"),
    ("input_activations", {"type": "float"}, f"{INPUT}.type is 'float', but 'int' is expected"),
    ("input_activations", {"strategy": "tensor"}, f"{INPUT}.strategy is 'tensor', but 'token' is expected"),
    ("input_activations", {"dynamic": False}, f"{INPUT}.dynamic is False, but true is expected"),
]

# --- matrices of 4-bit floats ----------------------------------------------------------------------------------------


def with_nan(scales):
    scales = scales.clone()
    scales.view(torch.uint8)[5, 1] = 0xFF
    return scales


CODES = {
    "MXFP4 Quark": "weight",
    "MXFP4 pack": "weight_packed",
    "NVFP4 modelopt": "weight",
    "NVFP4 pack": "weight_packed",
}
OF_ALL = {"NVFP4 modelopt": "weight_scale_2", "NVFP4 pack": "weight_global_scale"}
# Which tensor, what becomes of it, and the message; of both kinds of floats, and of each.
FLOAT_CHANGES = [
    (CODES, None, "is missing"),
    (CODES, lambda t: t[:, :16], "which is (64, 32), but (64, 64) is expected"),
    (CODES, lambda t: t.to(torch.int32), "dtype torch.int32, but uint8 is expected"),
    ("weight_scale", None, "is missing"),
    ("weight_scale", lambda t: t[:, ::2], " features in blocks of "),
    ("weight_scale", lambda t: t[:7], "shape (7, "),
    ("weight_scale", lambda t: t.float(), "dtype torch.float32, but "),
    ("weight_scale", lambda t: t.view(torch.int8), "dtype torch.int8, but "),
    ("weight_scale", with_nan, "not "),
]
NVFP4_CHANGES = [
    (OF_ALL, None, "is missing"),
    (OF_ALL, lambda t: t.to(torch.bfloat16), "dtype torch.bfloat16, but float32 is expected"),
    (OF_ALL, lambda t: torch.ones(64), "shape (64,), but one number is expected"),
    (OF_ALL, lambda t: torch.tensor(float("nan")), "is nan, of which no finite scales can be made"),
]
# Of gpt-oss: the experts of a layer in one tensor.
MXFP4_CHANGES = [
    ("gate_up_proj_scales", None, "' is missing"),
    ("down_proj_blocks", None, "' is missing"),
    ("down_proj_bias", None, "' is missing"),
    ("gate_up_proj_blocks", lambda t: t[:2], "' has 2 experts, but config.json says 3"),
    ("gate_up_proj_blocks", lambda t: t[:, :-1], "has shape (127, 2, 16), which is (127, 64), but (128, 64) is"),
    ("gate_up_proj_blocks", lambda t: t[..., :8], "shape (128, 2, 8), but blocks of 32 make (128, 2, 16) (exp"),
    ("gate_up_proj_blocks", lambda t: t[..., 0], "has shape (3, 128, 2), but 4 dimensions are expected"),
    ("gate_up_proj_scales", lambda t: t[..., :1], "shape (128, 1), but 128 x 2 blocks make (128, 2) (expert 0)"),
    ("gate_up_proj_scales", lambda t: t[:2], "cannot be read from"),
    ("down_proj_scales", lambda t: t.float(), "dtype torch.float32, but uint8 is expected (expert 0)"),
    ("down_proj_scales", lambda t: t.index_fill(0, torch.tensor([1]), 255), "255, which is not a number (exp"),
    ("down_proj_bias", lambda t: t[:, :-1], "shape (63,), but 64 output features make (64,) (expert 0)"),
]  # fmt: skip

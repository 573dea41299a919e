"""What can be wrong with a checkpoint, and the words in which `read_layers` refuses it, behind the layer's name.

formats/test_broken.py runs the tables over read_layers, command/test_dry_run.py over from_pretrained and
`w4a8 inspect`.

Words: "{key}" is the tensor, "{shape}" its shape, "{first}" the first matrix of the layer. Parts between "..." come in
this order; "^" stands for the start, and "=" for all of the message.
"""

import math
from fnmatch import fnmatchcase

import torch
from format_checkpoints import FLOATS, FORMATS, LAYER, QUERY, experts_checkpoint, gpt_oss_checkpoint

HIDDEN, INTER, EXPERTS = 64, 128, 3  # of gpt-oss both are 64

GPTQ = ["GPTQ", "GPTQ asymmetric", "GPTQ 2", "GPTQ 2 asymmetric"]
WORDS = [*GPTQ, "AWQ", "AWQ zero_point false", "AutoRound", "AutoRound asymmetric", "AutoRound as AWQ"]
WITH_ZEROS = [name for name, form in FORMATS.items() if not form.symmetric]
COMPRESSED = [name for name, form in FORMATS.items() if "config_groups" in form.config]
INT, PACK, NVFP4 = ["W4A8 int"], ["W4A8 pack"], ["NVFP4 modelopt", "NVFP4 pack"]
ABSENT = object()


# --- changes of a tensor ----------------------------------------------------------------------------------------------


def element(index, value, operation=None):
    """With one element that is another, or that an operation with `value` makes of it."""

    def change(tensor):
        tensor = tensor.clone()
        part = tensor.view(torch.uint8) if str(tensor.dtype).startswith("torch.float8") else tensor
        part[index] = value if operation is None else getattr(part[index], operation)(value)
        return tensor

    return change


def shorter(dim):
    return lambda tensor: tensor.narrow(dim, 0, tensor.shape[dim] - 1)


def to(dtype):
    return lambda tensor: tensor.to(dtype)


def int8(*shape):
    return torch.zeros(shape, dtype=torch.int8)


def shapes(*numbers):
    return torch.tensor(numbers)


MISSING, DTYPE = "^{key} is missing", "{key} ... dtype {dtype}, but "
EMPTY = "{key}: shape (0,), which holds nothing"
ORDER = "{key}: groups are not consecutive input features"
SYMMETRIC = "{key}: zero points in [ ... but the configuration says symmetric"
# Formats; a tensor; what becomes of it (None: it is missing); the words; other words in the quantization_config.
# "scales" is that of expert 1's up_proj, and of q_proj; "1.up_proj.scales" and what else has a
# dot is that of an expert alone, "q.scales" of q_proj alone. "*" is anything.
TENSORS = [
    (WORDS, "qweight", None, MISSING),
    (WORDS, "scales", None, MISSING),
    (WITH_ZEROS, "qzeros weight_zero_point", None, "{key} is missing"),
    # The layer is quantized all the same: none of its experts is taken for a float one.
    (INT, "*.weight_scale", None, "^{first}.weight_scale is missing"),
    (["GPTQ", "AWQ"], "*.qweight", None, "^{first}.qweight is missing"),
    (["AutoRound"], "*.scales", None, "^{first}.scales is missing"),
    (["GPTQ asymmetric", "AWQ"], "1.*", None, f"{LAYER}.2.down_proj is there, but expert 1 is not"),
    (INT, "2.*", None, "2 experts, but config.json says {{'num_experts': 3}}"),
    (["GPTQ", *INT], "1.up_proj.bias", torch.ones(INTER), f"{LAYER}.1.up_proj has a bias, but the model has none"),
    *((WORDS, suffix, shorter(dim), "{key} ... {shape}") for suffix in ("qzeros", "scales") for dim in (0, 1)),
    *((WORDS, "2.down_proj.qweight", shorter(dim), f"{LAYER}.2.down_proj is [ ... ], but [64, 128] is expected") for dim in (0, 1)),
    *((WORDS, "q.qweight", shorter(dim), f"{QUERY}.") for dim in (0, 1)),
    *((WORDS, suffix, to(torch.int64), DTYPE) for suffix in ("qweight", "qzeros", "scales")),
    # Version 1 of GPTQ stores it less one.
    (["GPTQ", "GPTQ asymmetric", "AutoRound asymmetric"], "qzeros", element((1, 3), 0xF000, "__or__"),
     "{key}: zero points in [ ... 16], but [0, 15] is expected"),
    (["GPTQ 2 asymmetric"], "0.down_proj.qzeros", lambda t: t | 15, "{key}: zero points in [ ... 16], but [0, 15]",
     {"checkpoint_format": "gptq"}),
    (["W4A16 int asymmetric"], "weight_zero_point", element((5, 1), 8), "{key}: zero points in [ ... 16"),
    (["W4A16 int asymmetric"], "weight_zero_point", element((5, 1), -9), "{key}: zero points in [ ... -1"),
    # Stock would not look at the zero points, and compute something else.
    (["GPTQ", "GPTQ 2", "AWQ zero_point false", "AutoRound"], "qzeros", element((0, 0), 1, "__xor__"),
     f"{SYMMETRIC}, which is 8"),
    *((GPTQ, "g_idx", lambda t: t.flip(0), f"{ORDER} (activation order, desc_act)", {"desc_act": said}) for said in (True, False)),
    (GPTQ, "g_idx", None, "{key} is missing", {"desc_act": True}),
    (GPTQ, "g_idx", shorter(0), "{key}: shape (63,)"),
    *((FORMATS, "scales weight_scale", element((1, 1), value), "{key}: not all scales are finite") for value in (math.nan, math.inf)),
    # int8 codes of compressed-tensors.
    (INT, "weight", None, "{key} is missing"),
    (INT, "2.down_proj.weight_scale", None, MISSING),
    (INT, "weight_scale", None, "{key} is missing"),
    (INT, "1.up_proj.weight", int8(127, 64), f"{LAYER}.1.up_proj is [127, 64], but [128, 64] is expected"),
    (INT, "0.down_proj.weight", int8(64, 64), f"{LAYER}.1.down_proj is [64, 128], but [64, 64] is expected"),
    (INT, "0.down_proj.weight", int8(64), "{key}: shape (64,), but 2 dimensions are expected"),
    (INT, "weight_scale", torch.ones(128, 1), "{key}: shape (128, 1), but 64 x 128 features in groups of 32"),
    (INT, "weight_scale", int8(128, 2), "{key}: dtype torch.int8, but float16 or"),
    (INT, "weight", element((5, 7), 8), "{key} holds values in [-8, 8], but int4 values are in [-8, 7]"),
    (INT, "weight", torch.zeros(128, 64), "{key}: dtype torch.float32, but int8 is expected"),
    (INT, "weight_g_idx", torch.arange(64), ORDER),
    (INT, "weight_zero_point", int8(128, 2) + 1, "{key}: zero points in [9, 9], but the configuration"),
    (INT, "8.gate_proj.weight", int8(128, 64), f"{LAYER}.8.gate_proj is there, but expert 3 is not"),
    (INT, "3.gate_proj.weight", int8(128, 64), f"{LAYER}.0.gate_proj is of 4 experts, but 3 are expected"),
    (INT, "q.bias", torch.ones(127), "{key}: shape (127,), but 128 output features make (128,)"),
    # Words of compressed-tensors.
    (PACK, "weight_packed", torch.zeros(128, 7).int(), "{key}: shape (128, 7), but 128 x 64 features make (128, 8)"),
    (PACK, "weight_packed", torch.zeros(128, 8).long(), "{key}: dtype torch.int64, but int32 is expected"),
    (PACK, "weight_packed", None, "{key} is missing"),
    (PACK, "weight_shape", None, "{key} is missing"),
    (PACK, "weight_shape", shapes([128, 64]), "{key}: shape (1, 2), but 1 dimensions are expected"),
    (PACK, "weight_shape", shapes(128, 64, 1), "{key}: shape (3,), but rows and columns make (2,)"),
    (PACK, "weight_shape", shapes(64.0, math.nan), "{key}: dtype torch.float32, but int64 or int32 is expected"),
    (PACK, "weight_shape", torch.zeros(0, dtype=torch.int64), EMPTY),
    (PACK, "1.up_proj.weight_shape", shapes(128, 60), f"{LAYER}.1.up_proj is [128, 60], but [128, 64] is expected"),
    (PACK, "1.up_proj.weight_shape", shapes(128, -64), f"{LAYER}.1.up_proj is [128, -64], but [128, 64] is expected"),
    (PACK, "1.up_proj.weight_shape", shapes(2**62, 64), f"{LAYER}.1.up_proj is [4611686018427387904, 64], but [128, 64] is expected"),
    (PACK, "weight_zero_point", torch.zeros(16, 2).int(), "{key}: zero points in [0, 0], but the configuration says symmetric"),
    # Floats of 4 bits.
    (FLOATS, "weight weight_packed", None, "{key} ... is missing"),
    (FLOATS, "weight weight_packed", to(torch.int32), "{key} ... dtype torch.int32, but uint8 is expected"),
    (FLOATS, "1.up_proj.weight 1.up_proj.weight_packed", lambda t: t[:, :16], f"{LAYER}.1.up_proj is [128, 32], but [128, 64] is expected"),
    ([name for name in FLOATS if name != "MXFP4 Quark"], "weight_scale", None, "{key} ... is missing"),
    # Without one it is no quantized matrix.
    (["MXFP4 Quark"], "1.up_proj.weight_scale", None, f"{LAYER}.2.up_proj is there, but expert 1 is not"),
    (FLOATS, "weight_scale", lambda t: t[:, ::2], "{key} ...  features in blocks of "),
    (FLOATS, "weight_scale", lambda t: t[:7], "{key} ... shape (7, "),
    (FLOATS, "weight_scale", to(torch.float32), DTYPE),
    (FLOATS, "weight_scale", lambda t: t.view(torch.int8), DTYPE),
    (["MXFP4 pack", "MXFP4 Quark"], "weight_scale", element((5, 1), 0xFF), "{key} ... 255, which is not a number"),
    (NVFP4, "weight_scale", element((5, 1), 0xFF), "{key} ... not all scales are numbers without a sign"),
    (NVFP4, "weight_scale_2 weight_global_scale", None, "{key} ... is missing"),
    (NVFP4, "weight_scale_2 weight_global_scale", to(torch.bfloat16), "{key} ... dtype torch.bfloat16, but float32 is expected"),
    (NVFP4, "weight_scale_2 weight_global_scale", torch.ones(64), "{key} ... shape (64,), but one number is expected"),
    (NVFP4, "weight_scale_2 weight_global_scale", torch.tensor(math.nan), "{key} ... is nan, of which no finite scales can be made"),
    # What inputs would be multiplied by: NVFP4_AWQ, and an online rotation.
    (["NVFP4 modelopt"], "pre_quant_scale", torch.ones(64), "{key}: inputs that are scaled"),
    (["MXFP4 Quark"], "input_rotation", torch.ones(64, 64).double(), "{key}: inputs that are rotated"),
    # gpt-oss: the experts of a layer in one tensor.
    *((["MXFP4"], f"{name}_proj_{suffix}", change, words) for name, suffix, change, words in (
        ("gate_up", "scales", None, "{key} is missing"),
        ("down", "blocks", None, "^matrices w13, but "),
        ("down", "bias", None, f"{LAYER}.gate_up_proj has a bias, but the model has none"),
        ("gate_up", "blocks", lambda t: t[:2], "^model.layers.0.mlp.experts.gate_up_proj is of {{'bias': (3,), 'blocks': (2,), 'scales': (3,)}} experts, expected 2"),
        ("gate_up", "blocks", lambda t: t[:, :-1], f"{LAYER}.gate_up_proj is [127, 64], but [128, 64] is expected"),
        ("gate_up", "blocks", lambda t: t[..., :8], "{key} ... shape (128, 2, 8), but blocks of 32 make (128, 2, 16)"),
        ("gate_up", "blocks", lambda t: t[..., 0], "{key} ... shape (128, 2), but 3 dimensions are expected"),
        ("gate_up", "scales", lambda t: t[..., :1], "{key} ... shape (128, 1), but 128 x 2 blocks make (128, 2)"),
        ("gate_up", "scales", lambda t: t[:2], "'scales': (2,)}} experts, expected 3"),
        ("down", "scales", to(torch.float32), "{key} ... dtype torch.float32, but uint8 is expected"),
        ("down", "scales", lambda t: t.index_fill(0, torch.tensor([1]), 255), "{key} ... 255, which is not a number"),
        ("down", "bias", lambda t: t[:, :-1], "{key} ... shape (63,), but 64 output features make (64,)"),
    )),
]  # fmt: skip

G = "config_groups.group_0"
FP8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}}
NO_TARGET = "is not quantized: no target in quantization_config.config_groups matches it"
GROUP = FORMATS["W4A8 int"].quantization_config(32)["config_groups"]["group_0"]
ANOTHER = {**GROUP, "targets": ["re:.*experts.2.up_proj"], "weights": {**GROUP["weights"], "group_size": 64}}
# Formats; a place in the quantization_config, behind "/" in config.json; its value; the words, "{path}" is the place; the
# layer, if it is one alone; "model": only a model says what is wrong.
CONFIGS = [
    # A symmetric checkpoint of GPTQ says by its zero points which version it is; an asymmetric one only at the ends.
    (["GPTQ"], "checkpoint_format", "gptq_v2", "{first}.qzeros: zero points in [7, 7], but the configuration says symmetric"),
    (["GPTQ 2"], "checkpoint_format", "gptq", "{first}.qzeros: zero points in [9, 9], but the configuration says symmetric"),
    *((WORDS, "group_size", size, "{first}. ... groups of") for size in (64, -1)),
    (WORDS, "group_size", 96, "=kernel does not support hidden size 64: group (block_size) is 96, expected k = 64 (channelwise), or 16 or a multiple of 32 that divides it", "experts"),
    (WORDS, "group_size", 96, "={first}.qweight: 64 input features are not groups of 96", "linear"),
    (COMPRESSED, f"{G}.weights.group_size", 64, "{first}.weight_scale: shape ( ... features in groups of 64 make ("),
    (WORDS, "/moe_intermediate_size", 96, "", "model"),
    # A stack is of one kind.
    (["GPTQ"], "dynamic", {".*down_proj": {"group_size": 64}}, "{first}.scales: shape (4, 64), but", "experts"),
    (["GPTQ"], "dynamic", {r".*\.1\.down_proj": {"bits": 8}}, f"{LAYER}.1.down_proj is [64, 64], but", "experts"),
    (INT, "config_groups.group_1", ANOTHER, f"{LAYER}.2.up_proj.weight_scale: shape (128, 2), but", "experts"),
    (INT, f"{G}.weights.symmetric", False, "{first}.weight_zero_point is missing"),
    (INT, f"{G}.weights.symmetric", "no", "{path} is 'no', but true or false is expected"),
    (INT, f"{G}.weights.num_bits", 8, "{path} is 8, but 4 is expected"),
    (INT, f"{G}.weights.type", "float", "{path} is 'float', but 'int' is expected"),
    (INT, f"{G}.weights.strategy", "tensor", "{path} is 'tensor', but 'group' or 'channel' is expected"),
    (INT, f"{G}.weights.group_size", 48, "{path} is 48, but 16 or a multiple of 32 is expected"),
    (INT, f"{G}.weights.dynamic", True, "{path} is True, but false is expected"),
    (INT, f"{G}.weights.actorder", "group", "{path} is 'group': reordered input features"),
    (INT, f"{G}.input_activations.num_bits", 4, "{path} is 4, but 8 is expected"),
    (INT, f"{G}.input_activations.type", "float", "{path} is 'float', but 'int' is expected"),
    (INT, f"{G}.input_activations.strategy", "tensor", "{path} is 'tensor', but 'token' is expected"),
    (INT, f"{G}.input_activations.dynamic", False, "{path} is False, but true is expected"),
    (INT, "/quantization_config", ABSENT, "config.json has no quantization_config: this is not a quantized checkpoint"),
    (INT, "quant_method", "fp8", "^floats of 8 bits are rounded with a model alone"),
    (INT, f"{G}.format", "marlin-24", "group_0 is 'marlin-24', but one of 'int-quantized', 'pack-quantized', "),
    (INT, f"{G}.weights", None, "{path} is missing"),
    (INT, f"{G}.output_activations", {"num_bits": 8}, "{path} is set"),
    (INT, "transform_config", {"config_groups": {"u": {}}}, "{path} is set: rotated weights are not supported"),
    (INT, "sparsity_config", {"format": "sparse-24-bitmask"}, "{path} is set: sparse weights are not supported"),
    (INT, "ignore", ["re:.*experts.2.*"], f"{LAYER}.2.down_proj is not quantized: {{path}} has 're:.*experts.2.*'", "experts"),
    (INT, f"{G}.targets", ["re:.*self_attn.*"], f"{LAYER}.0.down_proj {NO_TARGET}", "experts"),
    (INT, f"{G}.targets", ["re:.*experts.*"], f"{QUERY} {NO_TARGET}", "linear"),
    *((["NVFP4 modelopt"], "quant_algo", name, f"{{path}} is '{name}', but ", "experts") for name in ("NVFP4_SVD", "W4A8_NVFP4_FP8", "FP8")),
    (["NVFP4 modelopt"], "group_size", 32, "{path} is 32, but ", "experts"),
    (["MXFP4 Quark"], "global_quant_config", FP8, "{path}.weight.dtype is 'fp8_e4m3', but 'fp4'", "experts"),
]  # fmt: skip


# --- checkpoints with them --------------------------------------------------------------------------------------------


def whole_checkpoints():
    """A layer of experts and a linear one of their up_proj's size, in every format: {name: Checkpoint}."""
    torch.manual_seed(3)
    made = {"MXFP4": gpt_oss_checkpoint(64, 64)}
    for name, form in (FORMATS | FLOATS).items():
        made[name] = experts_checkpoint(form, HIDDEN, INTER, 32, EXPERTS)
        made[name].add(QUERY, form, INTER, HIDDEN, 32)
    return made


def rows_of(table):
    """A row for each format, by its name: those tensors that it has, or that the row adds."""
    rows = []
    for formats, where, change, *rest in table:
        for name in formats:
            stored = {} if name == "MXFP4" else (FORMATS | FLOATS)[name].random(8, 64, 32)
            suffixes = [each for each in where.split() if each.rpartition(".")[2] in stored]
            rows += [(name, suffix, change, *rest) for suffix in (suffixes if " " in where else [where])]
    return rows


def keys_of(name, where):
    """The tensor of a row for each reader."""
    if where.startswith("q."):
        return {"linear": f"{QUERY}.{where[2:]}"}
    if name == "MXFP4" or "." in where:
        return {"experts": f"{LAYER}.{where}"}
    return {"experts": f"{LAYER}.1.up_proj.{where}", "linear": f"{QUERY}.{where}"}


def change_tensors(tensors, key, change):
    """Changes, adds or removes a tensor; what is removed may be a pattern."""
    if change is None:
        gone = [name for name in tensors if fnmatchcase(name, key)]
        for name in gone:
            del tensors[name]
        return bool(gone)
    if callable(change) and key not in tensors:
        return False
    tensors[key] = (change(tensors[key]) if callable(change) else change).clone().contiguous()
    return True


def change_config(config, where, value):
    """Changes a place in config.json."""
    *path, last = where[1:].split(".") if where[0] == "/" else ["quantization_config", *where.split(".")]
    for name in path:
        config = config[name]
    config[last] = value
    if value is ABSENT:
        del config[last]


def assert_says(message, words, **names):
    """A message is, begins with, or has the parts of the words in their order."""
    words = words.format(**names)
    if words[0] == "=":
        assert message == words[1:]
        return
    assert message.startswith(words[1:].split(" ... ")[0]) or words[0] != "^", f"{message!r}, expected {words!r}"
    at = 0
    for part in words.removeprefix("^").split(" ... "):
        assert part in message[at:], f"{message!r}, expected {words!r}"
        at = message.index(part, at) + len(part)

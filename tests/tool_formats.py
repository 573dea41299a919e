"""Matrices as other tools store them, by the documented bit layouts: codes written, tensors read, floats rounded.

Nothing of w4a8 is used: all is integer arithmetic on one code per element, and float64, in which products are exact.
A form is a format of compressed-tensors (``pack-quantized``), ``gptq``, ``gptq_v2``, ``awq``, AutoRound's packing
(``auto_round:auto_gptq``), ``mxfp4`` (gpt-oss), ``quark`` or ``modelopt-nvfp4``.
"""

from dataclasses import dataclass

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMS = ("gptq", "gptq_v2", "awq", "auto_round:auto_gptq", "auto_round:auto_awq", "mxfp4", "quark")
MXFP4 = ("mxfp4", "quark", "mxfp4-pack-quantized", "auto_round:llm_compressor")
NVFP4 = ("modelopt-nvfp4", "nvfp4-pack-quantized")
# AutoRound's packings whose zero points are stored as they are; the others', and those of gptq, are stored less 1.
_AS_THEY_ARE = ("gptq_v2", "auto_round", "auto_round:gptqmodel")

_BYTES = torch.arange(256)
_SIZES = torch.where(
    _BYTES >> 3 & 15 == 0,
    (_BYTES & 7) / 512.0,
    (1 + (_BYTES & 7) / 8.0) * torch.exp2((_BYTES >> 3 & 15) - 7.0),
)
# float32 [256], by the bits of a float8_e4m3fn: a sign, four bits of exponent (bias 7, denormals), three of mantissa.
E4M3 = torch.where(_BYTES >= 128, -_SIZES, _SIZES).masked_fill(_BYTES & 127 == 127, float("nan"))


def least_zero(form: str) -> int:
    """The least zero point that a form can store."""
    return 0 if form.endswith(("awq", "-quantized")) or form in _AS_THEY_ARE else 1


# --- codes to tensors -------------------------------------------------------------------------------------------------


def words(codes: torch.Tensor, order: tuple = tuple(range(8)), bits: int = 4) -> torch.Tensor:
    """[rows, columns] to int32 words, the last one filled up with zeros: code ``order[i]`` of every c = 32 / bits is in
    bits ``bits * i`` and on."""
    order = order[: 32 // bits]
    codes = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % len(order)))
    together = codes.unflatten(1, (-1, len(order)))
    word = sum(together[..., which] << bits * i for i, which in enumerate(order))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., K] to uint8 [..., K/2], the low half of a byte first."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def store(
    form: str, codes: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, bits: int = 4
) -> dict[str, torch.Tensor]:
    """The tensors of a matrix of integers by the last part of their names.

    Args:
        form: one of integers.
        codes: integers [N, K] of ``bits`` bits.
        zeros: zero points [N, G]; None: no tensor for them.
        scales: [N, G], of the type that is stored.
    """
    stored = {}
    if form == "int-quantized":
        stored = {"weight": (codes - 8).to(torch.int8), "weight_scale": scales}
        if zeros is not None:
            stored["weight_zero_point"] = (zeros - 8).to(torch.int8)
        return stored
    if form == "pack-quantized":
        stored = {"weight_packed": words(codes, bits=bits), "weight_scale": scales}
        stored["weight_shape"] = torch.tensor(codes.shape)
        if zeros is not None:
            stored["weight_zero_point"] = words(zeros.T, bits=bits).T.contiguous()
        return stored
    stored["scales"] = scales.T.contiguous()
    awq = form.endswith("awq")
    stored["qweight"] = words(codes.T, AWQ_ORDER) if awq else words(codes, bits=bits).T.contiguous()
    if zeros is not None:
        order = AWQ_ORDER if awq else tuple(range(8))
        stored["qzeros"] = words(zeros.T.to(torch.int64) - least_zero(form), order, bits)
    if form.startswith("gptq"):
        k, groups = codes.shape[1], scales.shape[1]
        stored["g_idx"] = (torch.arange(k) * groups // k).to(torch.int32)
    return stored


def store_mxfp4(form: str, codes: torch.Tensor, exponents: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of codes [N, K] of e2m1 and exponents [N, K/32], bytes b of 2^(b - 127)."""
    packed, exponents = pairs(codes), exponents.to(torch.uint8)
    if form == "mxfp4":
        return {"blocks": packed.unflatten(-1, (-1, 16)), "scales": exponents}
    return {"weight" if form == "quark" else "weight_packed": packed, "weight_scale": exponents}


def store_nvfp4(form: str, codes: torch.Tensor, scales: torch.Tensor, of_all: float) -> dict[str, torch.Tensor]:
    """The tensors of codes [N, K] of e2m1, bits of float8_e4m3fn [N, K/16], and what is stored for the scale of all:
    that number, or of compressed-tensors its reciprocal."""
    names = ("weight_packed", "weight_global_scale") if form == "nvfp4-pack-quantized" else ("weight", "weight_scale_2")
    scales = scales.to(torch.uint8).view(getattr(torch, "float8_e4m3fn", torch.uint8))
    of_all = torch.tensor([of_all] if form == "nvfp4-pack-quantized" else of_all, dtype=torch.float32)
    return {names[0]: pairs(codes), "weight_scale": scales, names[1]: of_all}


# --- tensors to numbers -----------------------------------------------------------------------------------------------


def codes_of(stored: torch.Tensor, order: tuple = tuple(range(8)), bits: int = 4) -> torch.Tensor:
    """The inverse of :func:`words`."""
    order = order[: 32 // bits]
    found = torch.empty(*stored.shape, len(order), dtype=torch.int64)
    for i, which in enumerate(order):
        found[..., which] = stored.to(torch.int64) >> bits * i & (1 << bits) - 1
    return found.flatten(1)


def halves(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pairs`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()


def integers(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [N, K]: (code - zero) * scale, with zeros and scales [N, G]."""
    centred = codes.long().unflatten(-1, (zeros.shape[-1], -1)) - zeros.long().unsqueeze(-1)
    return (centred.double() * scales.double().unsqueeze(-1)).flatten(-2).contiguous()


def floats(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [..., N, K] of codes of e2m1 and scales [..., N, G]."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)[codes.long()]
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales.double().unsqueeze(-1)).flatten(-2)


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """float64: 2^(b - 127)."""
    return torch.exp2(exponents.double() - 127)


@dataclass
class Parts:
    """What the tensors of a matrix say: integers with zero points [N, G] and scales [N, G]; or e2m1 with ``exponents``
    (MXFP4), or bits of float8_e4m3fn in ``scales`` and a ``factor`` for all (NVFP4)."""

    codes: torch.Tensor  # [N, K]
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    exponents: torch.Tensor | None = None
    factor: torch.Tensor | None = None  # float32 [1]


def parts_of(stored: dict[str, torch.Tensor], form: str, bits: int = 4) -> Parts:
    """Of the tensors of a matrix, by the last part of their names."""
    if "weight_global_scale" in stored or "weight_scale_2" in stored:
        packed = "weight_packed" in stored
        factor = 1 / stored["weight_global_scale"] if packed else stored["weight_scale_2"]  # rounded to float32, once
        scales = stored["weight_scale"].view(torch.uint8)
        return Parts(halves(stored["weight_packed" if packed else "weight"]), scales, factor=factor.reshape(1))
    if form == "mxfp4":
        return Parts(halves(stored["blocks"].flatten(-2)), exponents=stored["scales"])
    if form in MXFP4:
        return Parts(halves(stored["weight" if form == "quark" else "weight_packed"]), exponents=stored["weight_scale"])
    scales = stored["weight_scale"] if form.endswith("-quantized") else stored["scales"].T
    zeros = torch.full(scales.shape, 1 << bits - 1)
    if form == "int-quantized":
        codes = stored["weight"].long() + 8
        zeros = stored["weight_zero_point"].long() + 8 if "weight_zero_point" in stored else zeros
    elif form == "pack-quantized":
        rows, columns = stored["weight_shape"].tolist()
        codes = codes_of(stored["weight_packed"], bits=bits)[:, :columns]
        if "weight_zero_point" in stored:
            zeros = codes_of(stored["weight_zero_point"].T, bits=bits).T[:rows]
    else:
        awq = form.endswith("awq")
        order = AWQ_ORDER if awq else tuple(range(8))
        codes = codes_of(stored["qweight"], order).T if awq else codes_of(stored["qweight"].T, bits=bits)
        if "qzeros" in stored:
            zeros = codes_of(stored["qzeros"], order, bits).T + least_zero(form)
    return Parts(codes, scales, zeros)


def multiplied_out(stored: dict[str, torch.Tensor], form: str, bits: int = 4, one_level: bool = False) -> torch.Tensor:
    """float64 [N, K] of the tensors of a matrix, by the last part of their names.

    one_level: of NVFP4, the product of its two scales is rounded to float32 first.
    """
    parts = parts_of(stored, form, bits)
    if parts.exponents is not None:
        return floats(parts.codes, powers(parts.exponents))
    if parts.factor is not None:
        scales = E4M3[parts.scales.long()].double() * parts.factor.double()
        return floats(parts.codes, scales.float() if one_level else scales)
    return integers(parts.codes, parts.zeros, parts.scales)


# --- floats to tensors ------------------------------------------------------------------------------------------------


def rounded(
    weight: torch.Tensor, form: str, group: int = -1, symmetric: bool = True, bits: int = 4
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a float32 matrix [N, K], and float32 [N, K] of what they mean.

    ``group``, ``symmetric`` and ``bits`` are of integers; -1 is one group.
    """
    if form in NVFP4:
        stored = _rounded_nvfp4(weight, form)
    elif form in MXFP4:
        exponents = (torch.log2(weight.unflatten(1, (-1, 32)).abs().amax(-1) / 6).ceil() + 127).to(torch.uint8)
        stored = store_mxfp4(form, _nearest_e2m1(weight, powers(exponents).float()), exponents)
    else:
        codes, zeros, scales = _rounded_integers(weight, group, symmetric, bits)
        zero_point_false = form == "awq" and symmetric
        stored = store(form, codes, None if zero_point_false else zeros, scales, bits)
    return stored, multiplied_out(stored, form, bits).float()


def _rounded_integers(weight: torch.Tensor, group: int, symmetric: bool, bits: int) -> tuple[torch.Tensor, ...]:
    """Codes [N, K], zero points [N, G] and float16 scales [N, G]."""
    middle, most = 1 << bits - 1, (1 << bits) - 1
    grouped = weight.unflatten(1, (-1, weight.shape[1] if group == -1 else group))
    if symmetric:
        scales = (grouped.abs().amax(-1) / (middle - 1)).half()
        zeros = torch.full(scales.shape, middle)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(1, most).long()  # GPTQ's first version has no 0
    codes = (grouped / scales.float().unsqueeze(-1)).round().long() + zeros.unsqueeze(-1)
    return codes.clamp(0, most).flatten(1), zeros, scales


def _nearest_e2m1(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] of the nearest numbers, with float32 scales [N, G]."""
    scaled = weight.unflatten(1, (scales.shape[1], -1)) / scales.unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - torch.tensor(E2M1)).abs().argmin(-1)
    return (codes + 8 * (scaled < 0)).flatten(1)


def _rounded_nvfp4(weight: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    """With the scale of inputs, which these files have and nothing reads."""
    of_all = weight.abs().amax() / (6 * 448)
    wanted = weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 / of_all
    scales = (wanted.unsqueeze(-1) - E4M3[:127]).abs().argmin(-1).clamp(min=1)
    packed = form == "nvfp4-pack-quantized"
    factor = 1 / (1 / of_all) if packed else of_all
    codes = _nearest_e2m1(weight, E4M3[scales] * factor)
    inputs = {"input_global_scale": torch.tensor([500.0])} if packed else {"input_scale": torch.tensor(0.002)}
    return {**store_nvfp4(form, codes, scales, float(1 / of_all if packed else of_all)), **inputs}


# --- configurations ---------------------------------------------------------------------------------------------------


def form_of(config: dict) -> str:
    """How a quantization_config says that codes are stored: ``pack-quantized``, or one of FORMS or NVFP4."""
    method = config["quant_method"]
    if method == "modelopt":
        return "modelopt-nvfp4"
    if method == "gptq":
        return config.get("checkpoint_format", "gptq")
    if method == "auto-round":
        form = config["packing_format"]
        return "gptq_v2" if form == "auto_round" else form
    return config["format"] if method == "compressed-tensors" else method


def config(
    form: str, group: int, symmetric: bool, skipped: list[str], lm_head: bool, eight_bits: list[str] = ()
) -> dict:
    """The quantization_config of a checkpoint.

    Linear modules that are not quantized have the names ``skipped``; those of 8 bits ``eight_bits``.
    """
    if form == "mxfp4":
        skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    if form == "quark":
        weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
        layers = {"weight": {**weight, "is_dynamic": False}, "input_tensors": {**weight, "is_dynamic": True}}
        export = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}
        found = {"quant_method": "quark", "global_quant_config": layers, "exclude": skipped, "export": export}
        return {**found, "layer_quant_config": {}, "layer_type_quant_config": {}}
    if form == "modelopt-nvfp4":
        args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        groups = {"group_0": {"input_activations": args, "weights": args, "targets": ["Linear"]}}
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups, "ignore": skipped}
    if form == "nvfp4-pack-quantized":
        args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        inputs, weights = {**args, "dynamic": "local"}, {**args, "dynamic": False}
        targets = ["Linear", "lm_head"] if lm_head else ["Linear"]
        groups = {"group_0": {"input_activations": inputs, "weights": weights, "targets": targets, "format": form}}
        return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": skipped}
    found = {"bits": 4, "group_size": group}
    if form in ("gptq", "gptq_v2"):
        found.update(quant_method="gptq", desc_act=False, sym=symmetric, checkpoint_format=form, lm_head=lm_head)
        if eight_bits:
            found["dynamic"] = {f"+:{name.replace('.', '[.]')}$": {"bits": 8} for name in eight_bits}
    elif form == "awq":
        found.update(quant_method="awq", version="gemm", zero_point=not symmetric, lm_head=lm_head)
        found["modules_to_not_convert"] = skipped
    else:
        found.update(quant_method="auto-round", data_type="int", sym=symmetric, packing_format=form, iters=0)
        found["block_name_to_quantize"] = "model.layers"
        found["extra_config"] = {name: {"bits": 16, "data_type": "float"} for name in skipped if name != "lm_head"}
        found["extra_config"].update({name: {"bits": 8} for name in eight_bits})
        if lm_head:
            found["extra_config"]["lm_head"] = {"bits": 4}
    return found

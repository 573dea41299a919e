"""Writes matrices in the formats of other tools, by their documented bit layouts, reads them, and multiplies them out.

It shares nothing with w4a8.formats: all is integer arithmetic on one code per element.
"""

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMATS = ("gptq", "gptq_v2", "awq", "auto_round:auto_gptq", "auto_round:auto_awq", "mxfp4", "quark")
NVFP4 = ("modelopt-nvfp4", "nvfp4-pack-quantized")


def _words(codes: torch.Tensor, order: tuple = tuple(range(8)), bits: int = 4) -> torch.Tensor:
    """[rows, columns] to int32 words: code `order[i]` of every 32 / bits is in bits `bits` i and on."""
    order = order[: 32 // bits]
    together = codes.to(torch.int64).unflatten(1, (-1, len(order)))
    word = sum(together[..., which] << bits * i for i, which in enumerate(order))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def round_to_int(
    weight: torch.Tensor, group: int, symmetric: bool, bits: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], zero points [N, G] and float16 scales [N, G] of float32 [N, K]."""
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


def write_int(weight: torch.Tensor, group: int, symmetric: bool, form: str, bits: int = 4) -> tuple[dict, torch.Tensor]:
    """The tensors of a matrix by the last part of their names, and the matrix multiplied out, float32 [N, K]."""
    codes, zeros, scales = round_to_int(weight, group, symmetric, bits)
    centred = codes.unflatten(1, (zeros.shape[1], -1)) - zeros.unsqueeze(-1)
    plain = (centred.float() * scales.float().unsqueeze(-1)).flatten(1)
    stored = {"scales": scales.T.contiguous()}
    if form.endswith("awq"):
        stored["qweight"] = _words(codes.T, AWQ_ORDER)
        stored["qzeros"] = _words(zeros.T, AWQ_ORDER)
        if form == "awq" and symmetric:
            del stored["qzeros"]  # zero_point: false
        return stored, plain
    stored["qweight"] = _words(codes, bits=bits).T.contiguous()
    stored["qzeros"] = _words(zeros.T - (0 if form == "gptq_v2" else 1), bits=bits)
    if not form.startswith("auto_round"):
        stored["g_idx"] = (torch.arange(weight.shape[1]) * zeros.shape[1] // weight.shape[1]).to(torch.int32)
    return stored, plain


def _codes(words: torch.Tensor, order: tuple = tuple(range(8)), bits: int = 4) -> torch.Tensor:
    """The inverse of `_words`."""
    order = order[: 32 // bits]
    found = torch.empty(*words.shape, len(order), dtype=torch.int64)
    for i, which in enumerate(order):
        found[..., which] = words.to(torch.int64) >> bits * i & (1 << bits) - 1
    return found.flatten(1)


def multiplied_out(stored: dict[str, torch.Tensor], form: str, bits: int = 4) -> torch.Tensor:
    """float32 [N, K] of the tensors of a matrix, by the last part of their names."""
    if "weight_global_scale" in stored or "weight_scale_2" in stored:
        return read_nvfp4(stored)
    if form in ("mxfp4-pack-quantized", "auto_round:llm_compressor", "quark"):
        packed = stored["weight" if form == "quark" else "weight_packed"]
        return read_mxfp4(packed.unflatten(1, (-1, 16)), stored["weight_scale"])
    if form.endswith("-quantized"):
        scales = stored["weight_scale"]
        zeros = torch.full(scales.shape, 8)
        if form == "int-quantized":
            codes = stored["weight"].long() + 8
        else:
            rows, columns = stored["weight_shape"].tolist()
            codes = _codes(stored["weight_packed"])[:, :columns]
            if "weight_zero_point" in stored:
                zeros = _codes(stored["weight_zero_point"].T).T[:rows]
    elif form.endswith("awq"):
        codes, scales = _codes(stored["qweight"], AWQ_ORDER).T, stored["scales"].T
        zeros = _codes(stored["qzeros"], AWQ_ORDER).T
    else:
        codes, scales = _codes(stored["qweight"].T, bits=bits), stored["scales"].T
        zeros = _codes(stored["qzeros"], bits=bits).T + (0 if form == "gptq_v2" else 1)
    centred = codes.unflatten(1, (zeros.shape[1], -1)) - zeros.unsqueeze(-1)
    return (centred.float() * scales.float().unsqueeze(-1)).flatten(1).contiguous()


def write_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks uint8 [N, K/32, 16], exponents uint8 [N, K/32], and float32 [N, K] multiplied out."""
    blocks = weight.unflatten(1, (-1, 32))
    exponents = (torch.log2(blocks.abs().amax(-1) / 6).ceil() + 127).to(torch.uint8)
    scaled = blocks / torch.exp2(exponents.float() - 127).unsqueeze(-1)
    values = torch.tensor(E2M1)
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1)
    plain = (values[codes] * scaled.sign() * torch.exp2(exponents.float() - 127).unsqueeze(-1)).flatten(1)
    codes = codes + 8 * (scaled < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), exponents, plain


def read_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The inverse: float32 [..., N, K] of blocks uint8 [..., N, K/32, 16] and exponents uint8 [..., N, K/32]."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return (values[codes] * torch.exp2(exponents.float() - 127).unsqueeze(-1)).flatten(-2)


def write_quark(weight: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """The tensors of a matrix of AMD Quark by the last part of their names, and the matrix multiplied out."""
    blocks, exponents, plain = write_mxfp4(weight)
    return {"weight": blocks.flatten(1), "weight_scale": exponents}, plain


def _e4m3_values() -> torch.Tensor:
    """float32 [256]: sign, four bits of exponent, three of mantissa; NaN is 1.875 * 2^8 here, and never written."""
    byte = torch.arange(256)
    exponent, mantissa = byte >> 3 & 15, (byte & 7).float()
    size = torch.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * torch.exp2(exponent.float() - 7))
    return torch.where(byte >= 128, -size, size)


def write_nvfp4(weight: torch.Tensor, form: str) -> tuple[dict, torch.Tensor]:
    """The tensors of a matrix by the last part of their names, and the matrix multiplied out, float32 [N, K].

    ``form`` is one of NVFP4. Inputs that are quantized have a scale too, which these files have and nothing reads.
    """
    blocks = weight.unflatten(1, (-1, 16))
    of_all = weight.abs().amax() / (6 * 448)
    numbers = _e4m3_values()[:127]
    wanted = blocks.abs().amax(-1) / 6 / of_all
    scales = (wanted.unsqueeze(-1) - numbers).abs().argmin(-1).clamp(min=1)
    # As stored: in one of the two the reciprocal is.
    stored_of_all = 1 / of_all if form == "nvfp4-pack-quantized" else of_all
    factors = numbers[scales] * (1 / stored_of_all if form == "nvfp4-pack-quantized" else of_all)
    scaled, values = blocks / factors.unsqueeze(-1), torch.tensor(E2M1)
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1)
    codes = (codes + 8 * (scaled < 0)).flatten(1)
    packed, scales = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales.to(torch.uint8)
    scales = scales.view(getattr(torch, "float8_e4m3fn", torch.uint8))
    if form == "nvfp4-pack-quantized":
        stored = {"weight_packed": packed, "weight_global_scale": stored_of_all.reshape(1)}
        stored["input_global_scale"] = torch.tensor([500.0])
    else:
        stored = {"weight": packed, "weight_scale_2": of_all, "input_scale": torch.tensor(0.002)}
    stored["weight_scale"] = scales
    return stored, read_nvfp4(stored)


def read_nvfp4(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """The inverse: float32 [N, K]."""
    if "weight_packed" in stored:
        packed, factor = stored["weight_packed"], 1 / stored["weight_global_scale"]
    else:
        packed, factor = stored["weight"], stored["weight_scale_2"]
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long().unflatten(1, (-1, 16))
    scales = _e4m3_values()[stored["weight_scale"].view(torch.uint8).long()] * factor
    return (values[codes] * scales.unsqueeze(-1)).flatten(1)


def form_of(config: dict) -> str:
    """How a quantization_config says that codes are stored: ``pack-quantized``, or one of FORMATS or NVFP4."""
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

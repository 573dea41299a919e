"""Good calls of every operator, by the names of its arguments."""

import torch
from attention_data import Sequences
from common import make_layer, make_matrix, route

import w4a8


def pack_arguments(kind, sizes):
    matrix = make_matrix(24, 64, 32, bias=True, kind=kind)
    given = {"weights": matrix.weights, "scales_zeros": matrix.scales, "bias": matrix.bias, **sizes}
    given["values"] = matrix.values
    return given if matrix.zero_points is None else {**given, "zero_points": matrix.zero_points}


def given(matrix):
    """The arguments of the pack operator, without those that are None and need not be given."""
    return {name: value for name, value in matrix.arguments().items() if value is not None or name == "bias"}


def op_samples():
    """name -> (operator, {argument: value})."""
    ops = torch.ops.w4a8
    matrix = make_matrix(24, 64, 32, bias=True)
    sizes = {"block_size": 32, "in_features": 64, "out_features": 24}
    layer = make_layer(4, 64, 32)
    ids, router = route(5, 2, 4)
    moe = {
        "x": torch.randn(5, 64), "topk_ids": ids, "topk_weights": router,
        "w13_packed": layer.w13_packed, "w2_packed": layer.w2_packed, "H": 64, "I": 32, "I2": 64,
        "group_size": 32, "apply_router_weight_on_input": False, "activation_kind": 0,
    }  # fmt: skip
    q, scale, zero = w4a8.dynamic_per_token_int8_quant(torch.randn(5, 64), False, 8)
    gemm = {
        "quant_x": q, "x_scale": scale, "x_zero": zero,
        "weight": torch.randint(-(2**31), 2**31, (8, 24), dtype=torch.int32),
        "weight_scale": matrix.scales.t(), "weight_zero_point": torch.tensor([8], dtype=torch.int8),
        "group_size": 32, "g_idx": None, "bias": torch.randn(24), "out_dtype": torch.float32,
    }  # fmt: skip
    in_groups = make_matrix(24, 64, 32, activation_group=32)
    group_rows = w4a8.dynamic_per_token_int8_quant(torch.randn(5, 64), True, 8, activation_group=32)
    routing = {
        "router_logits": torch.randn(5, 8), "top_k": 2, "renormalize": True, "scoring_func": "sigmoid",
        "e_score_correction_bias": torch.rand(8),
    }  # fmt: skip
    stack = make_matrix(24, 64, 64, torch.bfloat16, experts=3)
    sequences = Sequences([70, 5], [3, 5]).write()
    lens, starts, rows = sequences.call([67, 0], [70, 5])
    attention = {
        "query": sequences.query[rows], "cache": sequences.cache, "block_table": sequences.table, "seq_lens": lens,
        "query_start_loc": starts, "scale": 0.125,
    }  # fmt: skip
    two_levels = make_matrix(24, 64, 16, bias=True, kind="e2m1 of two levels")
    return {
        "pack": (
            ops.dyn_quant_pack_4bit_weight.default,
            {"weights": matrix.weights, "scales_zeros": matrix.scales, "bias": matrix.bias, **sizes},
        ),
        "pack a stack": (ops.dyn_quant_pack_4bit_weight.default, given(stack)),
        "pack two levels": (ops.dyn_quant_pack_4bit_weight.default, given(two_levels)),
        "unpack any of two levels": (
            ops.dyn_quant_unpack_any_4bit_weight.default,
            {"packed_weights": two_levels.pack(), **sizes, "block_size": 16},
        ),
        "unpack a stack": (
            ops.dyn_quant_unpack_4bit_weight.default,
            {"packed_weights": stack.pack(), **sizes, "block_size": 64},
        ),
        "matmul no rows": (
            ops.dyn_quant_matmul_4bit.default,
            {"inp": torch.randn(0, 64), "packed_weights": matrix.pack(), **sizes},
        ),
        "matmul bfloat16": (
            ops.dyn_quant_matmul_4bit.default,
            {"inp": torch.randn(2, 3, 64).bfloat16(), "packed_weights": matrix.pack(), **sizes},
        ),
        "pack with zero points": (ops.dyn_quant_pack_4bit_weight.default, pack_arguments("zeros", sizes)),
        "pack e2m1": (ops.dyn_quant_pack_4bit_weight.default, pack_arguments("e2m1", sizes)),
        "pack int8": (ops.dyn_quant_pack_4bit_weight.default, pack_arguments("int8", sizes)),
        "matmul int8": (
            ops.dyn_quant_matmul_4bit.default,
            {"inp": torch.randn(5, 64), "packed_weights": make_matrix(24, 64, 32, kind="int8").pack(), **sizes},
        ),
        "unpack any int8": (
            ops.dyn_quant_unpack_any_4bit_weight.default,
            {"packed_weights": make_matrix(24, 64, 32, bias=True, kind="int8").pack(), **sizes},
        ),
        "unpack any": (
            ops.dyn_quant_unpack_any_4bit_weight.default,
            {"packed_weights": make_matrix(24, 64, 32, bias=True, kind="zeros").pack(), **sizes},
        ),
        "unpack": (ops.dyn_quant_unpack_4bit_weight.default, {"packed_weights": matrix.pack(), **sizes}),
        "matmul": (
            ops.dyn_quant_matmul_4bit.default,
            {"inp": torch.randn(5, 64), "packed_weights": matrix.pack(), **sizes},
        ),
        "quantize": (
            ops.dynamic_per_token_int8_quant.default,
            {"x": torch.randn(5, 64), "use_sym_quant": True, "bits": 8},
        ),
        "pack for groups": (
            ops.dyn_quant_pack_4bit_weight.default,
            {**pack_arguments("zeros", sizes), "activation_group": 32},
        ),
        "matmul in groups": (
            ops.dyn_quant_matmul_4bit.default,
            {"inp": torch.randn(5, 64), "packed_weights": in_groups.pack(), **sizes},
        ),
        "quantize in groups": (
            ops.dynamic_per_token_int8_quant.default,
            {"x": torch.randn(5, 64), "use_sym_quant": True, "bits": 8, "activation_group": 32},
        ),
        "gemm in groups": (
            ops.int4_gemm_w4a8.default,
            {
                **gemm,
                **dict(zip(("quant_x", "x_scale", "x_zero"), group_rows)),
                "weight": in_groups.pack(),
                "weight_scale": torch.empty(0, 24),
            },
        ),
        "gemm of words": (ops.int4_gemm_w4a8.default, gemm),
        "gemm of packed": (
            ops.int4_gemm_w4a8.default,
            {**gemm, "weight": make_matrix(24, 64, 32).pack(), "weight_scale": torch.empty(0, 24)},
        ),
        "gemm to bfloat16": (ops.int4_gemm_w4a8.default, {**gemm, "out_dtype": torch.bfloat16, "bias": None}),
        "quantize to 4 bits": (
            ops.dynamic_per_token_int8_quant.default,
            {"x": torch.randn(2, 3, 64).half(), "use_sym_quant": False, "bits": 4},
        ),
        "moe": (ops.dynamic_4bit_int_moe.default, moe),
        "moe float16": (
            ops.dynamic_4bit_int_moe.default,
            {**moe, "x": torch.randn(5, 64).half(), "topk_ids": ids.int()},
        ),
        "moe with numbers": (
            ops.dynamic_4bit_int_moe.default,
            {**moe, "activation_kind": 3, "limit": 0.5, "alpha": 1.5, "beta": 0.25},
        ),
        "moe of 10 arguments": (
            ops.dynamic_4bit_int_moe.gated,
            {name: value for name, value in moe.items() if name != "I2"},
        ),
        "routing": (ops.topk_routing.default, routing),
        "routing in groups": (
            ops.topk_routing.default,
            {
                **routing,
                "router_logits": torch.randn(5, 8).half(),
                "num_expert_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
            },
        ),
        "attention": (ops.paged_attention.default, attention),
        "attention with sinks": (
            ops.paged_attention.default,
            {**attention, "window": 9, "soft_cap": 3.0, "sinks": torch.randn(6), "causal": False},
        ),
        "rounding": (
            ops.round_weights.default,
            {"weights": torch.randn(24, 64), "block_size": 32, "zero_points": True, "importance": torch.rand(64)},
        ),
        "rounding of a stack": (
            ops.round_weights.default,
            {
                "weights": torch.randn(3, 24, 64).bfloat16(),
                "block_size": 64,
                "values": "e2m1",
                "effort": 1,
                "scale_dtype": torch.bfloat16,
                "importance": torch.rand(3, 64),
            },
        ),
    }


def tensor_arguments(arguments):
    """The names of those that are tensors."""
    return [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]


def results(op, arguments):
    """What a call returns, as a list of tensors."""
    out = op(**arguments)
    return [part for part in out if isinstance(part, torch.Tensor)] if isinstance(out, (tuple, list)) else [out]

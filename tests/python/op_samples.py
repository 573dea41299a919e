"""Good calls of every operator, by the names of its arguments."""

import torch
from attention_data import Sequences
from common import make_layer, make_matrix, route
from gated_delta_data import Layer as GatedDelta
from state_space_data import ShortConv, StateSpace

import w4a8


def given(matrix, **more):
    """The arguments of the pack operator, without those that are None and need not be given."""
    named = {name: value for name, value in matrix.arguments().items() if value is not None or name == "bias"}
    return {**named, **more}


def op_samples():
    """name -> (operator, {argument: value})."""
    ops = torch.ops.w4a8
    pack, matmul = ops.dyn_quant_pack_4bit_weight.default, ops.dyn_quant_matmul_4bit.default
    unpack, unpack_any = ops.dyn_quant_unpack_4bit_weight.default, ops.dyn_quant_unpack_any_4bit_weight.default
    quantize, gemm = ops.dynamic_per_token_int8_quant.default, ops.int4_gemm_w4a8.default
    fused, attend, rounded = ops.dynamic_4bit_int_moe, ops.paged_attention.default, ops.round_weights.default

    matrix = make_matrix(24, 64, 32, bias=True)
    plain, in_groups = make_matrix(24, 64, 32), make_matrix(24, 64, 32, activation_group=32)
    zeros, e2m1, int8 = (make_matrix(24, 64, 32, bias=True, kind=kind) for kind in ("zeros", "e2m1", "int8"))
    stack = make_matrix(24, 64, 64, torch.bfloat16, experts=3)
    two_levels = make_matrix(24, 64, 16, bias=True, kind="e2m1 of two levels")
    ids, router = route(5, 2, 4)
    layer, x = make_layer(4, 64, 32), torch.randn(5, 64)
    moe = {
        "x": x, "topk_ids": ids, "topk_weights": router,
        "w13_packed": layer.w13_packed, "w2_packed": layer.w2_packed, "H": 64, "I": 32, "I2": 64,
        "group_size": 32, "apply_router_weight_on_input": False, "activation_kind": 0,
    }  # fmt: skip
    rows = ("quant_x", "x_scale", "x_zero")
    words = {
        **dict(zip(rows, w4a8.dynamic_per_token_int8_quant(torch.randn(5, 64), False, 8))),
        "weight": torch.randint(-(2**31), 2**31, (8, 24), dtype=torch.int32),
        "weight_scale": matrix.scales.t(), "weight_zero_point": torch.tensor([8], dtype=torch.int8),
        "group_size": 32, "g_idx": None, "bias": torch.randn(24), "out_dtype": torch.float32,
    }  # fmt: skip
    packed = {**words, "weight": plain.pack(), "weight_scale": torch.empty(0, 24)}
    group_rows = zip(rows, w4a8.dynamic_per_token_int8_quant(torch.randn(5, 64), True, 8, activation_group=32))
    routing = {
        "router_logits": torch.randn(5, 8), "top_k": 2, "renormalize": True, "scoring_func": "sigmoid",
        "e_score_correction_bias": torch.rand(8),
    }  # fmt: skip
    in_four = {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    sequences = Sequences([70, 5], [3, 5]).write()
    lens, starts, tokens = sequences.call([67, 0], [70, 5])
    attention = {
        "query": sequences.query[tokens], "cache": sequences.cache, "block_table": sequences.table, "seq_lens": lens,
        "query_start_loc": starts, "scale": 0.125,
    }  # fmt: skip
    to_round = {"weights": torch.randn(24, 64), "block_size": 32, "zero_points": True, "importance": torch.rand(64)}
    stack_to_round = {
        "weights": torch.randn(3, 24, 64).bfloat16(), "block_size": 64, "values": "e2m1", "effort": 1,
        "scale_dtype": torch.bfloat16, "importance": torch.rand(3, 64),
    }  # fmt: skip

    def with_states(op, layer):
        # Fresh, so that a second call computes the same.
        return op.default, layer.arguments(layer.inputs(5), layer.states(3), [4, 1], [2, 0], True)

    def with_guesses(op, layer):
        where = {"out_slots": torch.arange(6, dtype=torch.int32).view(2, 3)}
        where["accepted"] = torch.tensor([1, 2], dtype=torch.int32)
        return op.default, layer.arguments(layer.inputs(5), layer.states(6, drafts=2), [3, 2], None, True, **where)

    def of(matrix, **more):
        sizes = {"block_size": matrix.group, "in_features": 64, "out_features": 24}
        return {**more, "packed_weights": matrix.pack(), **sizes}

    def quantized(x, symmetric, bits, **more):
        return quantize, {"x": x, "use_sym_quant": symmetric, "bits": bits, **more}

    rows = {**of(int8), "rows": torch.tensor([[3, 0], [23, 3]])}
    del rows["block_size"]
    return {
        "pack": (pack, given(matrix)),
        "pack a stack": (pack, given(stack)),
        "pack two levels": (pack, given(two_levels)),
        "pack with zero points": (pack, given(zeros)),
        "pack e2m1": (pack, given(e2m1)),
        "pack int8": (pack, given(int8)),
        "pack for groups": (pack, given(zeros, activation_group=32)),
        "unpack": (unpack, of(matrix)),
        "unpack a stack": (unpack, of(stack)),
        "unpack any": (unpack_any, of(zeros)),
        "unpack any int8": (unpack_any, of(int8)),
        "unpack any of two levels": (unpack_any, of(two_levels)),
        "rows": (ops.dequantize_rows.default, rows),
        "rows in bfloat16": (ops.dequantize_rows.default, {**rows, "dtype": torch.bfloat16}),
        "matmul": (matmul, of(matrix, inp=x)),
        "matmul no rows": (matmul, of(matrix, inp=torch.randn(0, 64))),
        "matmul bfloat16": (matmul, of(matrix, inp=torch.randn(2, 3, 64).bfloat16())),
        "matmul int8": (matmul, of(int8, inp=x)),
        "matmul in groups": (matmul, of(in_groups, inp=x)),
        "quantize": quantized(x, True, 8),
        "quantize in groups": quantized(x, True, 8, activation_group=32),
        "quantize to 4 bits": quantized(torch.randn(2, 3, 64).half(), False, 4),
        "gemm of words": (gemm, words),
        "gemm to bfloat16": (gemm, {**words, "out_dtype": torch.bfloat16, "bias": None}),
        "gemm of packed": (gemm, packed),
        "gemm in groups": (gemm, {**packed, **dict(group_rows), "weight": in_groups.pack()}),
        "moe": (fused.default, moe),
        "moe float16": (fused.default, {**moe, "x": x.half(), "topk_ids": ids.int()}),
        "moe with numbers": (fused.default, {**moe, "activation_kind": 3, "limit": 0.5, "alpha": 1.5, "beta": 0.25}),
        "moe of 10 arguments": (fused.gated, {name: value for name, value in moe.items() if name != "I2"}),
        "routing": (ops.topk_routing.default, routing),
        "routing in groups": (
            ops.topk_routing.default,
            {**routing, "router_logits": torch.randn(5, 8).half(), **in_four},
        ),
        "attention": (attend, attention),
        "attention with sinks": (
            attend,
            {**attention, "window": 9, "soft_cap": 3.0, "sinks": torch.randn(6), "causal": False},
        ),
        "gated delta": with_states(ops.gated_delta, GatedDelta()),
        "gated delta of channels": with_states(
            ops.gated_delta, GatedDelta(of_channels=True, gate="sigmoid", dtype=torch.bfloat16)
        ),
        "state space": with_states(ops.state_space, StateSpace()),
        "short convolution": with_states(ops.short_conv, ShortConv(bias=True)),
        "gated delta with guesses": with_guesses(ops.gated_delta, GatedDelta(beta_scale=2.0)),
        "state space with guesses": with_guesses(ops.state_space, StateSpace()),
        "short convolution with guesses": with_guesses(ops.short_conv, ShortConv()),
        "rounding": (rounded, to_round),
        "rounding of a stack": (rounded, stack_to_round),
    }


def tensor_arguments(arguments):
    """The names of those that are tensors."""
    return [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]


def changes_arguments(op):
    """Whether a call writes to what it is given. Such an operator itself refuses what requires gradients."""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments)


def results(op, arguments):
    """What a call returns, as a list of tensors."""
    out = op(**arguments)
    return [part for part in out if isinstance(part, torch.Tensor)] if isinstance(out, (tuple, list)) else [out]

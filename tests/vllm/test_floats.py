"""``--quantization w4a8``: floats, of 8 bits too, are rounded to the bits that transformers' W4A8Config gives."""

import float8_files
import pytest
import torch
import transformers
from compare import assert_same
from conftest import ALONE, Job, prompts, run_engines
from layers import EXPERTS, HIDDEN, NAME, make_layer, rank  # noqa: F401
from test_packed import write_packed
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear, UnquantizedLinearMethod

import w4a8
from w4a8.integrations.transformers import W4A8Config
from w4a8.integrations.vllm import settings
from w4a8.integrations.vllm.floats import RoundedScheme, floats_of
from w4a8.integrations.vllm.moe import ReceivedExperts, W4A8MoEMethod
from w4a8.integrations.vllm.packed_layers import W4A8MethodConfig, W4A8PackedConfig

BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 80], "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
# Key of models.MODELS, options, and quantization_config, name of scales and blocks of an FP8 checkpoint.
CASES = {
    "floats": ("qwen3_moe", {}, None),
    "floats to int8": ("qwen3_moe", {"values": "int8", "group_size": 64}, None),
    "blocks": ("qwen3_moe", {}, (BLOCKS, "weight_scale_inv", (48, 80))),
    "one scale": ("mixtral", {"group_size": 64}, (STATIC, "weight_scale", None)),
}
BIASES = ("qwen2_moe", {"group_size": 64}, None)
RELOADED = ("floats", "blocks")


def write(directory, model, options, float8, seed=0):
    """What is rounded while it is loaded, and the same packed by transformers."""
    packed = write_packed(directory, model, options, seed)
    if float8 is None:
        return directory / "float", packed
    theirs = float8_files.write(directory / "float", directory / "theirs", *float8)
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(theirs, quantization_config=W4A8Config(**options)).save_pretrained(directory / "again")
    return theirs, directory / "again"


def jobs_of(directory, model, options, float8, reload=None, **more):
    """Both engines; reload: a folder for other weights, which both take after their answers."""
    floats, packed = write(directory, model, options, float8)
    how = {"enforce_eager": True, "dtype": "bfloat16", **more}
    asked = {"quantization": "w4a8", "additional_config": {"w4a8": options}}
    jobs = [Job(floats, {**how, **asked}, tokens=8), Job(packed, how, tokens=8)]
    if reload is not None:
        for job, path in zip(jobs, write(reload, model, options, float8, seed=1)):
            job.reload = path
    return jobs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    jobs = []
    for name, case in CASES.items():
        reload = tmp_path_factory.mktemp("reloaded") if name in RELOADED else None
        jobs += jobs_of(tmp_path_factory.mktemp("floats"), *case, reload)
    jobs += jobs_of(tmp_path_factory.mktemp("floats"), *BIASES, dtype="float32")
    return run_engines(jobs, tmp_path_factory.mktemp("engines"), 1800, **ALONE)


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_a_packed_directory(case, results):
    index = 2 * list(CASES).index(case)
    assert_same(*results[0][index : index + 2])


@pytest.mark.parametrize("case", RELOADED)
def test_other_weights_are_reloaded(case, results):
    """In the same memory: the bits of the other packed directory."""
    index = 2 * list(CASES).index(case)
    found, expected = results[0][index : index + 2]
    assert_same(found["reloaded"], expected["reloaded"])
    assert found["reloaded"]["outputs"] != found["outputs"]


def test_biases(results):
    """vLLM adds them itself, packed directories within the operator: in float32 that is the same up to its rounding,
    and what becomes of it where an activation is between two int8."""
    found, expected = results[0][-2:]
    for ours, theirs, tokens in zip(found["logprobs"], expected["logprobs"], map(len, prompts())):
        assert (ours - theirs)[: tokens - 1].abs().mean() < 5e-3


def test_says_what_it_runs(results):
    assert "2 layers of experts (int8 in groups of 64)" in results[1]


def test_two_ranks(tmp_path):
    """Rounded before or after they are cut: groups are whole."""
    jobs = jobs_of(tmp_path, *CASES["one scale"], tensor_parallel_size=2)
    done, _ = run_engines(jobs, tmp_path / "engines", 1800, ranks=2, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert_same(*done)


@pytest.fixture
def experts():
    """A layer of experts that are rounded, and what loads one of its tensors."""
    layer, _ = make_layer()
    method = W4A8MoEMethod(ReceivedExperts(RoundedScheme.of(w4a8.nn.QuantOptions())), layer, "experts")
    method.create_weights(layer, EXPERTS, HIDDEN, 64, torch.bfloat16)

    def load(tensor, name, shard, expert):
        param = layer.w2_weight if shard == "w2" else layer.w13_weight
        param.weight_loader(param, tensor, f"model.layers.0.mlp.experts.{name}", shard_id=shard, expert_id=expert)

    return layer, method, load


def test_experts_by_the_names_of_their_matrices(experts):
    """As vLLM's Granite 4 names what it cuts out of a tensor of all experts."""
    layer, method, load = experts
    w13, w2 = torch.randn(EXPERTS, 128, HIDDEN).bfloat16(), torch.randn(EXPERTS, HIDDEN, 64).bfloat16()
    for expert in range(EXPERTS):
        w1, w3 = w13[expert].chunk(2)
        for shard, tensor in (("w1", w1), ("w3", w3), ("w2", w2[expert])):
            load(tensor, f"{expert}.{shard}.weight", shard, expert)
    method.process_weights_after_loading(layer)
    for packed, floats in ((layer.w13_weight_packed, w13), (layer.w2_weight_packed, w2)):
        for expert, weight in enumerate(floats):
            linear = torch.nn.Linear(*weight.shape[::-1], bias=False)
            linear.weight.data = weight
            assert torch.equal(packed[expert], w4a8.nn.W4A8Linear.from_float(linear, 32).packed)


def test_all_experts_in_one_tensor(experts):
    """As vLLM's Llama 4 hands them over."""
    with pytest.raises(ValueError, match=r"w4a8: .+\.w13_weight: shape \(2, 64, 128\), but .* of one expert is"):
        experts[2](torch.ones(EXPERTS, 64, HIDDEN), "w13_weight", "w1", 0)


def layer_of(cls=RowParallelLinear, **more):
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    layer.__dict__.update(more)
    return layer


def test_which_layers(rank, caplog):  # noqa: F811
    """Not routers, nor what groups do not divide, or two do not share."""
    config, o_proj = W4A8MethodConfig(), "model.layers.0.self_attn.o_proj"
    assert isinstance(config.get_quant_method(layer_of(input_size=96), o_proj).filler.scheme, RoundedScheme)
    for name, size in ((o_proj, 100), ("model.layers.0.mlp.gate", 96), ("model.layers.0.mlp.shared_expert_gate", 96)):
        assert type(config.get_quant_method(layer_of(input_size=size), name)) is UnquantizedLinearMethod
    moe = make_layer(intermediate=96)[0].moe_config
    name = "model.layers.0.mlp.experts"
    assert isinstance(config.get_quant_method(layer_of(RoutedExperts, moe_config=moe), name), W4A8MoEMethod)
    moe.moe_parallel_config.tp_size = 2
    with pytest.raises(ValueError, match=rf"w4a8: {name}: kernel does not support .*48"):
        config.get_quant_method(layer_of(RoutedExperts, moe_config=moe), name)
    rank(0, 2)
    method = config.get_quant_method(layer_of(input_size=96), o_proj)
    with pytest.raises(
        ValueError, match=rf"w4a8: {o_proj}: 48 input features per rank \(of 96\): group .block_size. is"
    ):
        method.create_weights(layer_of(), 48, [64], 96, 64, torch.bfloat16, weight_loader=None)


def test_what_is_packed_is_known():
    assert type(W4A8MethodConfig.from_config({"quant_method": "w4a8"})) is W4A8PackedConfig
    override = W4A8MethodConfig.override_quantization_method
    assert override(BLOCKS, "w4a8") == "w4a8"
    for config, asked in ((BLOCKS, None), (BLOCKS, "fp8"), ({"quant_method": "gptq"}, "w4a8")):
        assert override(config, asked) is None


def test_codes_beside_8_bit_floats_are_refused():
    """With the option, which they run right without: their codes would be taken for floats."""
    floats = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
    for codes in ({"type": "int", "num_bits": 4}, {"type": "float", "num_bits": 4}):
        mixed = {"quant_method": "compressed-tensors", "config_groups": {"a": floats, "b": {"weights": codes}}}
        with pytest.raises(ValueError, match="codes beside its 8-bit floats: leave --quantization w4a8 out"):
            W4A8MethodConfig.override_quantization_method(mixed, "w4a8")
        assert W4A8MethodConfig.override_quantization_method(mixed, None) is None
    alone = {"quant_method": "compressed-tensors", "config_groups": {"a": floats, "b": floats, "c": {"weights": None}}}
    assert W4A8MethodConfig.override_quantization_method(alone, "w4a8") == "w4a8"


def test_a_linear_layer_is_packed_when_its_last_part_has_come(rank):  # noqa: F811
    """And its floats are let go."""
    layer = QKVParallelLinear(HIDDEN, 32, 4, 2, bias=False, quant_config=W4A8MethodConfig(), prefix=NAME)
    floats = {shard: torch.randn(rows, HIDDEN).bfloat16() for shard, rows in (("q", 128), ("k", 64), ("v", 64))}
    with pytest.raises(
        ValueError, match=rf"w4a8: {NAME}.weight: dtype torch.float8_e4m3fn, but torch.float32 is expec"
    ):
        layer.weight.weight_loader(layer.weight, floats["q"].to(torch.float8_e4m3fn), "q")
    for shard, tensor in floats.items():
        assert not hasattr(layer, "weight_packed")
        layer.weight.weight_loader(layer.weight, tensor, shard)
    assert not hasattr(layer, "weight")
    linear = torch.nn.Linear(HIDDEN, 256, bias=False)
    linear.weight.data = torch.cat(list(floats.values()))
    assert torch.equal(layer.weight_packed, w4a8.nn.W4A8Linear.from_float(linear, 32).packed)


A, B = "model.layers.0.mlp.a", "model.layers.0.mlp.b"


def test_floats_of_8_bits():
    """In any order; what has no scales stays what it is."""
    made, meant = float8_files.float8(torch.randn(100, 90) / 10, "weight_scale_inv", (48, 80))
    tensors = [(f"{A}.weight_scale_inv", made["weight_scale_inv"]), (f"{B}.weight", torch.ones(2, 2))]
    tensors += [(f"{A}.bias", torch.ones(100)), (f"{A}.weight", made["weight"]), (f"{A}.input_scale", torch.ones(1))]
    found = dict(floats_of(tensors, BLOCKS))
    assert found.keys() == {f"{A}.weight", f"{A}.bias", f"{B}.weight"}
    assert torch.equal(found[f"{A}.weight"], meant)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight_scale_inv": None}, f"w4a8: {A}.weight_scale_inv is missing"),
        ({"weight": None}, f"w4a8: {A}.weight is missing"),
        (
            {"weight_scale_inv": torch.ones(2, 2)},
            rf"w4a8: {A}.weight_scale_inv: shape \(2, 2\), but 100 x 90 weights in",
        ),
        ({"weight_scale_inv": torch.full((3, 2), torch.nan)}, f"w4a8: {A}.weight_scale_inv: not all scales are finite"),
        ({"gate_up_proj": torch.ones(2, 2, 2).to(torch.float8_e4m3fn)}, f"w4a8: {A}.gate_up_proj: torch.float8_e4m3fn"),
    ],
)
def test_broken_floats_of_8_bits(change, match):
    made, _ = float8_files.float8(torch.randn(100, 90) / 10, "weight_scale_inv", (48, 80))
    tensors = {key: tensor for key, tensor in {**made, **change}.items() if tensor is not None}
    with pytest.raises(ValueError, match=match):
        list(floats_of([(f"{A}.{key}", tensor) for key, tensor in tensors.items()], BLOCKS))


def test_settings(monkeypatch):
    assert settings.rounding() == w4a8.nn.QuantOptions()
    with settings.of_engine({"w4a8": {"values": "int8", "group_size": -1}}):
        assert settings.rounding() == w4a8.nn.QuantOptions(-1, values="int8")
    for given in ({"group_size": 48}, {"group_size": "many"}, {"values": "e2m1"}):
        with pytest.raises(ValueError, match=rf'additional_config\["w4a8"\]\["{next(iter(given))}"\]='):
            with settings.of_engine({"w4a8": given}):
                pass
    monkeypatch.setenv("W4A8_VLLM_GROUP_SIZE", "128")
    assert settings.rounding().group_size == 128

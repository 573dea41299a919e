"""What vLLM says to the same checkpoints without the plugin, which is why there is one."""

import pytest
import torch
from cases import FAMILIES, TOOLS
from compare import check
from conftest import AVX2, HIDE_AMX, Job, arguments, run_engines
from models import Case

INT, PACK = FAMILIES[0], Case("qwen3_moe", 32, "pack-quantized", "bfloat16", "symmetric")
WEIGHT_ONLY = Case("qwen3_moe", 128, "pack-quantized", "bfloat16", "none")

NO_BACKEND = "NotImplementedError: No W4A8 Int8 MoE backend supports the deployment configuration."
NOT_ARM = "kernel only supports Arm CPU"
NO_WNA16 = "NotImplementedError: No WNA16 MoE backend supports the deployment configuration."

NO_MXFP4 = "Failed to find a kernel that can implement the MXFP4 linear layer"
NO_MXFP4_MOE = "No MXFP4 MoE backend supports the deployment configuration."
NO_NVFP4 = "Failed to find a kernel that can implement the NVFP4 linear layer"
NO_NVFP4_MOE = "No NvFp4 MoE backend supports the deployment configuration."

# Weight-only experts in other formats, without AMX.
OTHER_FORMATS = {
    Case("qwen3_moe", 128, "gptq", "bfloat16", "none"): NO_WNA16,
    Case("qwen3_moe", 128, "gptq_v2", "bfloat16", "none"): NO_WNA16,
    Case("qwen3_moe", 128, "gptq", "bfloat16", "none", symmetric=False): "Unsupported quantization config: bits=4",
    Case("qwen3_moe", 128, "awq", "bfloat16", "none"): NO_WNA16,
    Case("qwen3_moe", 128, "awq", "bfloat16", "none", symmetric=False): NO_WNA16,
    Case("qwen3_moe", 128, "auto_round:auto_gptq", "bfloat16", "none"): "has no parameter 'w2_qweight'",
    Case("qwen3_moe", 128, "pack-quantized", "bfloat16", "none", symmetric=False): NO_WNA16,
    Case("qwen3_moe", 128, "auto_round:auto_gptq", "bfloat16", "none", attention="w8a16"): "INC on CPU: unsupported",
    Case("qwen3_moe", 128, "pack-quantized", "bfloat16", "none", attention="w8a16"): "Quant type (uint8b128) not supp",
    Case("gpt_oss", 32, "mxfp4", "bfloat16", "none", attention="float"): "No MXFP4 MoE backend supports",
    TOOLS["mxfp4_quark"]: NO_MXFP4,
    Case("qwen3_moe", 32, "quark", "bfloat16", "none", attention="float"): NO_MXFP4_MOE,
    Case("gpt_oss", 32, "quark", "bfloat16", "none", attention="float", tool="mxfp4_quark_gpt_oss"): NO_MXFP4_MOE,
    TOOLS["nvfp4_modelopt"]: NO_NVFP4,
    TOOLS["nvfp4_llmcompressor"]: NO_NVFP4,
    TOOLS["nvfp4_auto_round"]: "Unsupported data_type: nv_fp",
    Case("qwen3_moe", 16, "modelopt-nvfp4", "bfloat16", "none", attention="float"): NO_NVFP4_MOE,
    Case("qwen3_moe", 16, "nvfp4-pack-quantized", "bfloat16", "none", attention="float"): NO_NVFP4_MOE,
}

AMX = torch.cpu._is_amx_tile_supported() and not HIDE_AMX
ON_EITHER = {"int-quantized": NO_BACKEND, "moe_backend=cpu": NOT_ARM, "pack-quantized": NO_BACKEND}


def _run(checkpoints, directory, hide_amx: bool) -> dict[str, tuple[Job, dict]]:
    def job(case: Case, **arguments) -> Job:
        return Job(checkpoints(case) / "checkpoint", {"enforce_eager": True, "dtype": case.dtype, **arguments})

    jobs = {
        "int-quantized": job(INT),
        "moe_backend=cpu": job(INT, moe_backend="cpu"),
        "pack-quantized": job(PACK),
        "weight-only": job(WEIGHT_ONLY),
    }
    off = {"W4A8_VLLM": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done, log = run_engines(list(jobs.values()), directory, 600, hide_amx, **off)
    assert "w4a8: runs" not in log
    assert all(result["amx"] != hide_amx for result in done)
    return {name: (job, result) for (name, job), result in zip(jobs.items(), done)}


@pytest.fixture(scope="module")
def without_amx(checkpoints, tmp_path_factory):
    """On a CPU that has AMX, it is hidden."""
    return _run(checkpoints, tmp_path_factory.mktemp("stock"), hide_amx=True)


@pytest.fixture(scope="module")
def with_amx(checkpoints, tmp_path_factory):
    if not AMX:
        pytest.skip("this CPU has no AMX (amx_int8), or it is hidden")
    return _run(checkpoints, tmp_path_factory.mktemp("stock-amx"), hide_amx=False)


@pytest.mark.parametrize("name", [*ON_EITHER, "weight-only"])
def test_refusal(without_amx, name):
    assert {**ON_EITHER, "weight-only": NO_WNA16}[name] in without_amx[name][1].get("error", "no error")


@pytest.mark.parametrize("name", ON_EITHER)
def test_refusal_with_amx(with_amx, name):
    assert ON_EITHER[name] in with_amx[name][1].get("error", "no error")


def test_runs_weight_only_with_amx(with_amx, checkpoints):
    """With int8 activations, so the same noise is allowed as for the plugin."""
    job, result = with_amx["weight-only"]
    check(WEIGHT_ONLY, checkpoints(WEIGHT_ONLY), job.prompts, result, stock=True)


@pytest.fixture(scope="module")
def other_formats_without_amx(checkpoints, tmp_path_factory):
    jobs = [
        Job(checkpoints(case) / "checkpoint", {"enforce_eager": True, "dtype": case.dtype}) for case in OTHER_FORMATS
    ]
    off = {"W4A8_VLLM": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done, _ = run_engines(jobs, tmp_path_factory.mktemp("stock-other-formats"), 900, True, **off)
    return dict(zip(OTHER_FORMATS, done))


@pytest.mark.parametrize("case", OTHER_FORMATS, ids=lambda case: case.name)
def test_refusal_of_other_formats(case, other_formats_without_amx):
    assert OTHER_FORMATS[case] in other_formats_without_amx[case].get("error", "no error")


@pytest.mark.skipif(
    AVX2 or not torch.cpu._is_avx512_supported(), reason="the engine's own library for AVX2 lacks these operators"
)
def test_the_wrong_answer_to_gptq_v2(checkpoints, tmp_path):
    """One file of each version, through the operators that stock takes where there is AMX: it adds 1 to the zero points
    of both. The plugin's answers to the same files are test_models'."""
    cases = [TOOLS["gptq_sym"], TOOLS["gptq_v2_sym"]]
    jobs = [Job(checkpoints(case) / "checkpoint", arguments(case)) for case in cases]
    off = {"W4A8_VLLM": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "W4A8_TEST_EXPERTS_AS_WITH_AMX": "1"}
    (first, second), log = run_engines(jobs, tmp_path, 600, **off)
    assert "w4a8: runs" not in log
    check(cases[0], checkpoints(cases[0]), jobs[0].prompts, first, stock=True)
    with pytest.raises(AssertionError, match="off by"):
        check(cases[1], checkpoints(cases[1]), jobs[1].prompts, second, stock=True)
    assert "error" not in second


@pytest.mark.parametrize("amx", [False, True])
def test_selection_of_weight_only_experts(monkeypatch, amx):
    """That it is AMX which decides, shown on every CPU: nothing is run."""
    from compressed_tensors.quantization import QuantizationArgs
    from layers import moe_config
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import select_wna16_moe_backend
    from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kInt4StaticGroupScale
    from vllm.scalar_type import scalar_types

    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    config = moe_config(8, 128, torch.bfloat16)

    def select():
        weights = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=128)
        key = QuantKey(scalar_types.uint4b8, kInt4StaticGroupScale, symmetric=True)
        return select_wna16_moe_backend(config, key, weights, may_have_zp=False, may_have_bias=False)

    if amx:
        assert "CPU" in select()[1].__name__
    else:
        with pytest.raises(NotImplementedError, match="No WNA16 MoE backend"):
            select()

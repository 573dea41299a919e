"""vLLM keeps compiled graphs on disk. One made with the plugin calls its operators, one made without it does not."""

import re

import pytest
from compare import check
from conftest import Job, arguments, run_engines
from models import Case

# Dense: without the plugin vLLM runs it as well, through scalar code.
DENSE = Case("qwen3", 32, "int-quantized", "float32", "symmetric")


@pytest.fixture(scope="module")
def runs(checkpoints, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    found = []
    for i, plugin in enumerate(("off", "on", "off")):
        job = Job(checkpoints(DENSE) / "checkpoint", arguments(DENSE, compiled=True))
        (result,), log = run_engines(
            [job],
            directory / str(i),
            600,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CACHE_ROOT=str(directory / "cache"),
            TORCHINDUCTOR_CACHE_DIR=str(directory / "cache" / "inductor"),
            **({"W4A8_VLLM": "0"} if plugin == "off" else {}),
        )
        found.append((job, result, log))
    return found


@pytest.mark.full
@pytest.mark.parametrize("i", range(3), ids=["off", "on", "off again"])
def test_answers(i, runs, checkpoints):
    job, result, log = runs[i]
    check(DENSE, checkpoints(DENSE), job.prompts, result, stock=i != 1)
    assert ("w4a8: runs int4 linear layers" in log) == (i == 1)


@pytest.mark.full
def test_each_way_has_a_place_of_its_own(runs):
    off, on, again = (set(re.findall(r"torch_aot_compile/(\w+)", log)) for _, _, log in runs)
    assert len(off) == len(on) == 1
    assert off == again != on

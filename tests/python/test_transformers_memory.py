"""Memory of w4a8.integrations.transformers, in processes of their own: what loading peaks at, what mapping leaves
anonymous, what two processes share."""

import os
import subprocess
import sys
import textwrap

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("transformers 5 is needed", allow_module_level=True)
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self"),
    pytest.mark.skipif(SANITIZED, reason="the sanitizer's allocator keeps freed memory"),
]

MIB = 1024  # KiB
SHARD = 16 * MIB

PRELUDE = """
    import sys
    import torch, transformers
    from transformers import AutoModelForCausalLM
    from w4a8.integrations.transformers import W4A8Config

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    names = ("small", "large", "packed", "small-packed")
    small, large, packed, small_packed = (f"{sys.argv[1]}/{name}" for name in names)

    def kib(field, file="/proc/self/status"):  # sums what /proc/self/smaps has several of
        with open(file) as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

    def of_file(name):  # KiB of /proc/self/smaps, summed over the mappings of files with this in their name
        found, inside = {}, False
        with open("/proc/self/smaps") as lines:
            for line in lines:
                first = line.split()[0]
                if not first.endswith(":"):
                    inside = name in line
                elif inside and line.endswith("kB\\n"):
                    found[first[:-1]] = found.get(first[:-1], 0) + int(line.split()[1])
        return found

    def read(model):  # every weight, once: all tokens and enough of them for all experts
        with torch.no_grad():
            return model(torch.arange(0, 512)[None]).logits
"""

MAKE = """
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 64, "num_hidden_layers": 2}
    tiny = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_hidden_layers": 1}
    for directory, chosen in ((small, tiny), (large, sizes)):
        config = transformers.Qwen3MoeConfig(
            vocab_size=512, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            num_experts_per_tok=8, max_position_embeddings=512, **chosen
        )
        with torch.device("meta"):
            model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.uniform_(-0.05, 0.05)
        model.save_pretrained(directory, max_shard_size="16MB")
    AutoModelForCausalLM.from_pretrained(small, quantization_config=W4A8Config()).save_pretrained(small_packed)
"""


def start(code, directory):
    """A process that runs the code."""
    # glibc gives freed blocks back at once: what is measured is what is alive.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(code), str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def run(code, directory):
    """The numbers it prints."""
    process = start(code, directory)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return [int(word) for word in out.split()]


def size(directory):
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) // 1024


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders small and large of floats, packed and small-packed; and the peak of making packed from large, in KiB."""
    directory = tmp_path_factory.mktemp("checkpoints")
    run(MAKE, directory)
    code = """
        AutoModelForCausalLM.from_pretrained(small, quantization_config=W4A8Config())  # imports, scratch
        before = kib("VmRSS")
        model = AutoModelForCausalLM.from_pretrained(large, quantization_config=W4A8Config())
        print(kib("VmHWM") - before)
        model.save_pretrained(packed)
    """
    return directory, run(code, directory)[0]


def test_peak_while_quantizing(checkpoints):
    """The packed weights and the largest shard, though a layer is three shards. Imports came before, so little more is
    needed."""
    directory, peak = checkpoints
    assert len(list((directory / "large").glob("*.safetensors"))) > 5
    bound = size(directory / "packed") + SHARD + 24 * MIB
    assert size(directory / "large") > bound, "then the bound says nothing"
    assert peak < bound, f"{peak} KiB, expected less than {bound}"


def test_packed_directory_is_mapped(checkpoints):
    """Before the first token almost nothing is anonymous; after it all of the weights are pages of the file still."""
    directory, _ = checkpoints
    code = """
        AutoModelForCausalLM.from_pretrained(small_packed)
        before = kib("RssAnon")
        model = AutoModelForCausalLM.from_pretrained(packed)
        print(kib("RssAnon") - before)
        read(model)
        found = of_file("/packed/model.safetensors")
        print(found["Rss"], found["Anonymous"])
    """
    anonymous, resident, copied = run(code, directory)
    file = size(directory / "packed")
    assert anonymous < 0.05 * file, f"{anonymous} KiB anonymous, the file has {file}"
    assert resident > 0.9 * file
    assert copied == 0


def test_two_processes_share_the_pages(checkpoints):
    directory, _ = checkpoints
    code = """
        model = AutoModelForCausalLM.from_pretrained(packed)
        logits = read(model)
        print("ready", flush=True)
        sys.stdin.readline()
        found = of_file("/packed/model.safetensors")
        # Dirty is what has not reached the disk yet since it was written to the file.
        shared, private = (found[kind + "_Clean"] + found[kind + "_Dirty"] for kind in ("Shared", "Private"))
        print(shared, private, found["Anonymous"], found["Pss"], logits.view(torch.int16).sum().item())
    """
    processes = [start(code, directory) for _ in range(2)]
    file = size(directory / "packed")
    try:
        for process in processes:
            line = process.stdout.readline()
            assert line == "ready\n", line + process.stderr.read()
        sums = set()
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
            shared, private, copied, proportional, checksum = map(int, process.stdout.readline().split())
            assert shared > 0.9 * file
            assert private < 0.01 * file
            assert copied == 0
            assert proportional < 0.55 * file
            sums.add(checksum)
        assert len(sums) == 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()

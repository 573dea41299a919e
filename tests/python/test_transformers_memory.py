"""Memory of w4a8.integrations.transformers, in processes of their own: what loading peaks at, what mapping leaves
anonymous, what two processes share."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import meter
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = [meter.needs_proc, meter.needs_its_allocator]

MIB = 1 << 20
SHARD = 8 * MIB

# One interpreter imports everything and loads a small model, so that imports, scratch and allocator are warm, and then
# forks a process for each piece of code it is sent: to this test they are processes like others, only sooner there.
SERVER = (
    meter.PRELUDE
    + """
import os, socket
import torch, transformers
from shuffled_model import in_small_files as make
from transformers import AutoModelForCausalLM
from w4a8.integrations.transformers import W4A8Config

torch.set_num_threads(1)  # before anything runs: a child would wait for threads that it does not have
transformers.logging.disable_progress_bar()
names = ("small", "large", "packed", "small-packed")
small, large, packed, small_packed = (f"{sys.argv[1]}/{name}" for name in names)

def of_file(name):  # bytes of /proc/self/smaps, summed over the mappings of files with this in their name
    found, inside = {}, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if not first.endswith(":"):
                inside = name in line
            elif inside and line.endswith("kB\\n"):
                found[first[:-1]] = found.get(first[:-1], 0) + (int(line.split()[1]) << 10)
    return found

def read(model):  # every weight, once: all tokens and enough of them for all experts
    with torch.no_grad():
        return model(torch.arange(0, 512)[None]).logits

torch.manual_seed(0)
make(small, hidden_size=64, moe_intermediate_size=32, num_experts=4, num_hidden_layers=1)
AutoModelForCausalLM.from_pretrained(small, quantization_config=W4A8Config()).save_pretrained(small_packed)
AutoModelForCausalLM.from_pretrained(small_packed)
while line := sys.stdin.readline():
    code, path = eval(line)
    if os.fork() == 0:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            stream = connection.makefile("rw")
            sys.stdin, sys.stdout = stream, stream
            try:
                exec(code)
            except BaseException as error:
                print("failed:", repr(error))
            stream.flush()
        os._exit(0)
os._exit(0)
"""
)


class Server:
    """The interpreter, and the processes that it forks."""

    def __init__(self, directory):
        self.directory = directory
        command = [sys.executable, "-c", SERVER, str(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=meter.environment())

    def start(self, code):
        """A process that runs the code; its stdin and stdout."""
        path = str(self.directory / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(300)
            self.process.stdin.write(f"{(textwrap.dedent(code), path)!r}\n")
            self.process.stdin.flush()
            connection, _ = listener.accept()
        os.unlink(path)
        connection.settimeout(500)
        return connection.makefile("rw")

    def run(self, code):
        """The numbers it prints."""
        with self.start(code) as stream:
            lines = stream.read()
        assert "failed:" not in lines, lines
        return [int(word) for word in lines.split()]


def resident(path):
    """KiB of a file that are mapped here and in memory."""
    found = inside = 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if not line.split()[0].endswith(":"):
                inside = line.rstrip("\n").endswith(str(path))
            elif inside and line.startswith("Rss:"):
                found += int(line.split()[1])
    return found


def test_release_leaves_what_is_beside(tmp_path):
    """A tensor that begins and ends within pages of others, which were written to since they were mapped."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from w4a8.core.pages import Pages

    path = tmp_path / "model.safetensors"
    stored = {name: torch.randint(256, (size,), dtype=torch.uint8) for name, size in zip("abc", (5001, 1 << 20, 5003))}
    save_file(stored, path)
    with safe_open(path, framework="pt") as file:
        mapped = {name: file.get_tensor(name) for name in "abc"}
        pages = Pages([str(path)])
        assert Pages([str(tmp_path / "another.safetensors")]).mappings == []
        assert all(mapped[name].data_ptr() % 4096 for name in "bc"), "then nothing is shared"
        for name in "ac":
            mapped[name] += 1
        assert torch.equal(mapped["b"], stored["b"])  # read once
        before = resident(path)
        pages.release([mapped["b"]])
        assert before - resident(path) >= 1024 - 2 * 4
        for name in "ac":
            assert torch.equal(mapped[name], stored[name] + 1), name
        assert torch.equal(mapped["b"], stored["b"])


def size(directory):
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # Short, for the name of a socket.
    with tempfile.TemporaryDirectory(prefix="w4a8-") as directory:
        server = Server(Path(directory))
        yield server
        server.process.stdin.close()
        server.process.wait(60)


@pytest.fixture(scope="module")
def peak(server):
    """Bytes that making the folder packed from the folder large took at most."""
    server.run("make(large, hidden_size=512, moe_intermediate_size=256, num_experts=32, num_hidden_layers=2)")
    code = """
        # A forked process finds the pages of libraries one by one, when they are needed.
        AutoModelForCausalLM.from_pretrained(small, quantization_config=W4A8Config())
        before = memory("VmRSS")
        model = AutoModelForCausalLM.from_pretrained(large, quantization_config=W4A8Config())
        print(memory("VmHWM") - before)
        model.save_pretrained(packed)
    """
    return server.run(code)[0]


def test_peak_while_quantizing(server, peak):
    """The packed weights and the largest shard, though a layer is three shards. Imports came before, so little more is
    needed."""
    directory = server.directory
    assert len(list((directory / "large").glob("*.safetensors"))) > 5
    bound = size(directory / "packed") + SHARD + 16 * MIB
    assert size(directory / "large") > bound, "then the bound says nothing"
    assert peak < bound, f"{peak} bytes, expected less than {bound}"


def test_packed_directory_is_mapped(server, peak):
    """Before the first token almost nothing is anonymous; after it all of the weights are pages of the file still."""
    code = """
        before = memory("RssAnon")
        model = AutoModelForCausalLM.from_pretrained(packed)
        print(memory("RssAnon") - before)
        read(model)
        found = of_file("/packed/model.safetensors")
        print(found["Rss"], found["Anonymous"])
    """
    anonymous, resident, copied = server.run(code)
    file = size(server.directory / "packed")
    assert anonymous < 0.05 * file, f"{anonymous} bytes anonymous, the file has {file}"
    assert resident > 0.9 * file
    assert copied == 0


def test_packed_directory_copied(server, peak):
    """W4A8_MEMORY=copy: packed weights are anonymous memory, no page of the file, and the logits are the same."""
    code = """
        mapped = read(AutoModelForCausalLM.from_pretrained(packed))
        os.environ["W4A8_MEMORY"] = "copy"
        before = memory("RssAnon")
        model = AutoModelForCausalLM.from_pretrained(packed)
        print(memory("RssAnon") - before)
        found = of_file("/packed/model.safetensors").get("Rss", 0)
        same = torch.equal(read(model), mapped)
        print(int(same), of_file("/packed/model.safetensors").get("Rss", 0) - found)
    """
    anonymous, same, read_from_file = server.run(code)
    floats = 2 * 2 * 512 * 512  # embedding and output layer, bfloat16
    file = size(server.directory / "packed")
    assert same == 1
    assert anonymous > file - floats - MIB, f"{anonymous} bytes anonymous, the file has {file}"
    assert read_from_file <= floats


def test_a_wrong_word_is_said(server, peak):
    code = """
        os.environ["W4A8_MEMORY"] = "copied"
        expected = "environment variable W4A8_MEMORY is 'copied', expected map, copy or interleave"
        try:
            AutoModelForCausalLM.from_pretrained(packed)
        except ValueError as error:
            print(int(str(error) == expected))
    """
    assert server.run(code) == [1]


def test_two_processes_share_the_pages(server, peak):
    code = """
        model = AutoModelForCausalLM.from_pretrained(packed)
        logits = read(model)
        print("ready", flush=True)
        sys.stdin.readline()
        found = of_file("/packed/model.safetensors")
        # Dirty is what has not reached the disk yet since it was written to the file.
        shared, private = (found[kind + "_Clean"] + found[kind + "_Dirty"] for kind in ("Shared", "Private"))
        print(shared, private, found["Anonymous"], found["Pss"], logits.view(torch.int16).sum().item(), flush=True)
        sys.stdin.readline()
    """
    file = size(server.directory / "packed")
    streams = [server.start(code) for _ in range(2)]
    for stream in streams:
        assert stream.readline() == "ready\n"
    sums = set()
    for stream in streams:
        stream.write("\n")
        stream.flush()
        shared, private, copied, proportional, checksum = map(int, stream.readline().split())
        assert shared > 0.9 * file
        assert private < 0.01 * file
        assert copied == 0
        assert proportional < 0.55 * file
        sums.add(checksum)
    assert len(sums) == 1
    for stream in streams:
        stream.close()

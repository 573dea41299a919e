"""Two machines: two namespaces of network, processes and shared memory, with the commands of docs/several_ranks.md."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from conftest import DEFAULT_HEAD, Job, environment, run_engines
from example import CHECKPOINT, PROMPTS, check_greedy, demo_model, with_tokenizer
from torch import distributed

from w4a8.integrations.vllm import hosts as watcher

IPV4 = ("10.67.0.1/24", "10.67.0.2/24")
IPV6 = ("fd67::1/64 nodad", "fd67::2/64 nodad")  # at once, without looking for another machine that has the address
TOKENS = 16
TIE = 0.1  # as in test_example.py: float32, and sums of two parts in another order
NOTICED = 60  # seconds within which a machine ends after the other one

ASK = """
import json, sys, urllib.request
url, question = json.loads(sys.argv[1])
body = None if question is None else json.dumps(question).encode()
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=240).read().decode())
"""


def run(command):
    subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=60)


class Host:
    """A namespace of network; in it a server's process has one of processes, and shared memory of its own."""

    def __init__(self, number, folder):
        self.number, self.name = number, f"w4a8-{os.getpid()}-{number}"
        self.folder = folder / f"host{number}"
        self.process = None

    @property
    def log(self):
        return (self.folder / "log.txt").read_text()

    def start(self, model, master, options):
        """As the document says, but for the model's name and what makes the test small."""
        memory = self.folder / "shm"
        shutil.rmtree(self.folder, ignore_errors=True)
        memory.mkdir(parents=True)
        options = [*options, "--nnodes", "2", "--master-addr", master, "--node-rank", str(self.number)]
        options += ["--headless"] if self.number else []
        command = [sys.executable, "-m", "w4a8", "serve", str(model), *options]
        shell = f'mount --bind {memory} /dev/shm && exec "$@"'
        namespaces = f"nsenter --net=/run/netns/{self.name} unshare --pid --fork --kill-child --mount-proc --ipc"
        variables = environment(VLLM_CPU_OMP_THREADS_BIND=str(self.number % os.cpu_count()))
        with open(self.folder / "log.txt", "w") as log:
            self.process = subprocess.Popen(
                [*namespaces.split(), "sh", "-c", shell, "sh", *command],
                stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def kill(self):
        """All processes at once, as kill -9 does: with the first one of a namespace the others are killed."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)

    def shared_memory(self):
        """But for vLLM's queue: with the server, here the first process, Linux kills what would remove that."""
        return [name for name in os.listdir(self.folder / "shm") if not name.startswith("psm_")]

    def ask(self, path, question=None):
        """The answer of the server here; None: there is none, or another status than 200."""
        asked = json.dumps([f"http://127.0.0.1:8000{path}", question])
        command = ["nsenter", f"--net=/run/netns/{self.name}", sys.executable, "-I", "-c", ASK, asked]
        found = subprocess.run(command, capture_output=True, text=True, timeout=300)
        return found.stdout if found.returncode == 0 else None


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    both = [Host(number, tmp_path_factory.mktemp("hosts")) for number in range(2)]
    with ExitStack() as stack:
        try:
            for host in both:
                run(f"ip netns add {host.name}")
                stack.callback(run, f"ip netns del {host.name}")
            run(f"ip link add w0 netns {both[0].name} type veth peer name w1 netns {both[1].name}")
            for host in both:
                for link in ("lo", f"w{host.number}"):
                    run(f"ip -n {host.name} link set {link} up")
            run("unshare --pid --fork --mount-proc --ipc true")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"namespaces of network and processes: {getattr(error, 'stderr', None) or error}")
        for host in both:
            stack.callback(host.kill)
        yield both


@contextmanager
def serving(hosts, addresses, model, *options):
    """Until both hosts have ended."""
    options = ["--dtype", "float32", "--max-model-len", "256", "--served-model-name", "tiny", *options]
    for host, address in zip(hosts, addresses):
        run(f"ip -n {host.name} addr flush dev w{host.number}")
        run(f"ip -n {host.name} addr add {address} dev w{host.number}")
    for host in hosts:
        host.start(model, addresses[0].partition("/")[0], options)
    try:
        deadline = time.monotonic() + 600
        while hosts[0].ask("/health") is None:
            for host in hosts:
                assert host.process.poll() is None, host.log[-6000:]
            assert time.monotonic() < deadline, hosts[0].log[-4000:] + hosts[1].log[-4000:]
            time.sleep(0.5)
        yield
    finally:
        for host in hosts:
            host.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("model") / "tiny")


def complete(host, prompt):
    """Text, and the log-probabilities of its tokens."""
    question = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = host.ask("/v1/completions", {**question, "logprobs": 1})
    assert answer is not None, host.log[-4000:]
    choice = json.loads(answer)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def in_time(host):
    """Waits for the end of a host's process."""
    try:
        host.process.wait(NOTICED)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still there after {NOTICED} s:\n{host.log[-4000:]}")


def test_two_stages_have_the_bits_of_one(hosts, model, tmp_path):
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    job = Job(CHECKPOINT, {"dtype": "float32"}, prompts, TOKENS, prompt_logprobs=False, environment=DEFAULT_HEAD)
    (expected,), _ = run_engines([job], tmp_path / "one", 900, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    with serving(hosts, IPV6, model, "--pipeline-parallel-size", "2"):
        for prompt, tokens, rows in zip(PROMPTS, expected["outputs"], expected["logprobs"]):
            text, chances = complete(hosts[0], prompt)
            assert list(text.encode()) == tokens
            assert chances == [row[token].item() for row, token in zip(rows, tokens)]
        for host in hosts:
            assert "layers run in one call" in host.log
        hosts[1].kill()  # while nobody asks
        in_time(hosts[0])
        assert "w4a8: rank 1 has ended: this rank ends, too" in hosts[0].log
        assert hosts[0].shared_memory() == []


def test_cut_layers(hosts, model):
    with serving(hosts, IPV4, model, "--tensor-parallel-size", "2"):
        reference = demo_model()
        for prompt in PROMPTS:
            text, _ = complete(hosts[0], prompt)
            check_greedy(reference, prompt, list(text.encode()), TIE)
        for host in hosts:
            assert "w4a8: ranks add by vLLM's group: the ranks share no memory: " in host.log
            assert "layers run in one call" in host.log
        question = {"model": "tiny", "prompt": "def ", "max_tokens": 200, "n": 16, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(hosts[0].ask, "/v1/completions", question)
            time.sleep(1)
            assert not answer.done()
            hosts[0].kill()
            assert answer.result() is None
        in_time(hosts[1])
        assert "w4a8: rank 0 has ended: this rank ends, too" in hosts[1].log
        assert hosts[1].shared_memory() == []


@pytest.mark.parametrize("rank", range(2))
def test_a_first_rank_that_cannot_listen(rank, monkeypatch):
    """The others do not wait for its address."""
    sent, said = [], []
    group = SimpleNamespace(rank_in_group=rank, ranks=[0, 1], cpu_group=None)
    monkeypatch.setattr(watcher, "get_world_group", lambda: group)
    monkeypatch.setattr(watcher, "get_ip", lambda: "192.0.2.1")  # of no machine
    monkeypatch.setattr(watcher, "logger", lambda: SimpleNamespace(warning=lambda *message: said.append(message)))
    monkeypatch.setattr(distributed, "broadcast_object_list", lambda place, src, group: sent.append(place[0]))
    watcher.watch(None, SimpleNamespace(parallel_config=SimpleNamespace(nnodes_within_dp=2)), None)
    assert sent == [None]
    assert len(said) == 1 and "are not watched" in said[0][0]

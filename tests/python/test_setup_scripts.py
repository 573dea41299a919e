"""What scripts/common.sh and setup.py find out before anything is built: where torch comes from, and which is there."""

import contextlib
import http.server
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.search(r"^torch==(\S+)$", (ROOT / "scripts/requirements/build.txt").read_text(), re.MULTILINE).group(1)


def run_in_common(command: str, **settings: str) -> subprocess.CompletedProcess:
    """``command`` after common.sh, in an environment whose only settings of pip are these."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1"} | settings
    command = f'source "{ROOT}/scripts/common.sh"; {command}'
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120)


def index_option(url: str, **settings: str) -> str:
    result = run_in_common(f'cpu_torch_option "{sys.executable}" "{url}"', **settings)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@contextlib.contextmanager
def index_of(*versions: str):
    """A package index on this machine with wheels of torch of these versions; yields its address and the requests."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            wheels = (f"torch-{version.replace('+', '%2B')}-py3-none-any.whl" for version in versions)
            body = "".join(f'<a href="{wheel}">{wheel}</a>' for wheel in wheels).encode()
            self.send_response(200 if self.path.rstrip("/") == "/torch" else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's torch has no CUDA")


@linux
def test_an_index_with_the_pinned_torch_is_used():
    with index_of("2.0.0+cpu", f"{PINNED}+cpu") as (url, requests):
        assert index_option(url) == f"--extra-index-url={url}"
        assert requests


@linux
@pytest.mark.parametrize("versions", [(), (PINNED, "2.0.0+cpu", f"1{PINNED}+cpu", f"{PINNED}+cpu.more")])
def test_an_index_without_it_is_not_used(versions):
    with index_of(*versions) as (url, requests):
        assert index_option(url) == ""
        assert requests


@linux
def test_an_index_that_does_not_answer_is_not_used():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert index_option(url) == ""  # refuses
        silent.listen()
        assert index_option(url) == ""  # takes the connection and says nothing


@linux
@pytest.mark.parametrize("setting", ["INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "a file"])
def test_where_the_user_told_pip_to_look_is_left_alone(setting, tmp_path):
    with index_of(f"{PINNED}+cpu") as (url, requests):
        if setting == "a file":
            (tmp_path / "pip.conf").write_text("[install]\nextra-index-url = http://127.0.0.1:9\n")
            assert index_option(url, PIP_CONFIG_FILE=str(tmp_path / "pip.conf")) == ""
        else:
            assert index_option(url, **{f"PIP_{setting}": "http://127.0.0.1:9"}) == ""
        assert not requests


def test_torch_is_found_without_importing_it():
    result = run_in_common(f'torch_version "{sys.executable}"')
    assert result.stdout.strip() == torch.__version__
    rules = runpy.run_path(str(ROOT / "setup.py"), run_name="rules")
    assert rules["TORCH_VERSION"] == torch.__version__
    assert rules["TORCH_FOLDER"] == Path(torch.__file__).parent


def test_setup_and_scripts_build_in_one_folder():
    rules = runpy.run_path(str(ROOT / "setup.py"), run_name="rules")
    result = run_in_common("select_flavour >&2; echo $BUILD_DIR", PYTHON=sys.executable, TORCH="")
    assert result.stdout.strip() == str(rules["build_dir"]().relative_to(ROOT)), result.stderr


SCRIPTS = [*ROOT.glob("scripts/*.sh"), ROOT / ".ci/run", ROOT / "pyproject.toml"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_files_that_a_script_names_exist(script):
    """pytest runs no test when one of the files that it is given is not there, and accepts any name in --ignore."""
    for before, names, after in re.findall(r"\b(tests/[\w/]*)(\{[\w,]+\})?(\w*\.py)\b", script.read_text()):
        for name in names.strip("{}").split(","):
            assert (ROOT / (before + name + after)).is_file(), before + name + after


def test_kernels_of_this_cpu():
    """By Linux' word, and by w4a8's own detection: the best first, without AMX. `make demo` builds the first one."""
    import w4a8

    told = run_in_common("kernels_of_this_cpu").stdout.split()
    own = [kernel["name"] for kernel in w4a8.kernels() if kernel["supported"]]
    assert told == [name for name in own if name.startswith("x86_") and name != "x86_amx"]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
@pytest.mark.parametrize("kernels", ["x86_avx2", "none;scalar"])
def test_a_build_of_some_kernels(kernels, tmp_path):
    """scalar must be among them; what is not in the list is not built."""
    options = ["-DW4A8_BUILD_TORCH=OFF", f"-DW4A8_KERNELS={kernels}"]
    found = subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *options], capture_output=True, text=True, check=False)
    if "scalar" not in kernels:
        assert found.returncode != 0
        assert "W4A8_KERNELS=x86_avx2: scalar must be among them" in found.stderr
        return
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "generated/kernels_built.inc").read_text().split() == ["W4A8_KERNEL(scalar)"]

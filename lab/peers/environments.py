"""Virtual environments of the peers: build/peers/<name>, made from PyPI with the pinned versions of each module."""

import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from folders import ROOT

from peers.base import Environment

FOLDER = ROOT / "build/peers"


class Unavailable(Exception):
    """This peer cannot be had here; the message says why."""


def own_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def python_of(environment: Environment) -> str:
    """The interpreter of an environment, which is made if need be. Raises Unavailable."""
    if environment.machines and platform.machine() not in environment.machines:
        raise Unavailable(f"has no wheels for {platform.machine()}")
    if environment.torch not in ("", "any"):
        torch = own_version("torch")
        if torch is None or torch.split("+")[0] != environment.torch:
            raise Unavailable(f"needs torch {environment.torch}, here is {torch}")
    if environment.python:
        if not Path(environment.python).exists():
            raise Unavailable(f"{environment.python} is missing")
        return environment.python
    if not environment.requirements:
        return sys.executable
    folder = FOLDER / environment.name
    stamp = folder / "complete"
    # The interpreter is part of it: a compiled package fits one version.
    wanted = f"{sys.version}\n{sys.prefix}\n{environment}\n"
    if not stamp.exists() or stamp.read_text() != wanted:
        make(environment, folder)
        stamp.write_text(wanted)
    return str(folder / "bin/python")


def make(environment: Environment, folder: Path) -> None:
    print(f"== making build/peers/{environment.name}: {', '.join(environment.requirements)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    log = FOLDER / "log" / f"{environment.name}-setup.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as output:
        run([sys.executable, "-m", "venv", str(folder)], output, {})
        for requirement in environment.requirements:
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
            run([*pip, *requirement.split()], output, environment.build_variables)
    # torch and numpy are large: those of another environment serve here too, after the peer's packages.
    paths = {environment.packages} if environment.packages else set()
    if environment.torch:
        paths |= {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    if paths:
        target = next((folder / "lib").glob("python*")) / "site-packages/of_another_environment.pth"
        target.write_text("".join(f"{path}\n" for path in sorted(paths) if Path(path).is_dir()))


def run(command: list[str], output, variables: dict[str, str]) -> None:
    result = subprocess.run(
        command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables}, check=False
    )
    if result.returncode != 0:
        output.flush()
        lines = [line.strip() for line in Path(output.name).read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines[-1:]
        raise Unavailable(f"{' '.join(command[3:])} failed: {errors[0]} (all of it: {output.name})")

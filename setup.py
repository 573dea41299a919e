"""Builds the compiled part of w4a8 by driving the CMake build, so that pip and cmake never differ.

Environment:
    CMAKE_ARGS                  extra arguments for the configure step.
    CMAKE_BUILD_PARALLEL_LEVEL  number of compile jobs; default: the number of CPUs.
"""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# Found without importing it, which takes seconds. Metadata-only commands (sdist) work without it.
_TORCH = importlib.util.find_spec("torch")
TORCH_FOLDER = Path(_TORCH.origin).parent if _TORCH and _TORCH.origin else None
TORCH_VERSION = runpy.run_path(str(TORCH_FOLDER / "version.py"))["__version__"] if TORCH_FOLDER else None


def project_version() -> str:
    """The version of `project(w4a8 VERSION x.y.z)` in CMakeLists.txt, its only source."""
    match = re.search(r"project\(\s*w4a8\s+VERSION\s+([0-9][0-9.]*)", (ROOT / "CMakeLists.txt").read_text())
    if match is None:
        raise RuntimeError("CMakeLists.txt has no project(w4a8 VERSION x.y.z ...)")
    return match.group(1)


def build_dir() -> Path:
    """One build tree per interpreter and torch, so that two flavours never mix; scripts/common.sh has the same rule."""
    key = f"{sys.implementation.cache_tag}-torch{TORCH_VERSION}" if TORCH_VERSION else "no-torch"
    return ROOT / "build" / key.replace("+", "-")


def runtime_requirements() -> list:
    """The torch the extension was compiled against: its C++ ABI changes with every minor version."""
    if TORCH_VERSION is None:
        return []
    major, minor = TORCH_VERSION.split(".")[:2]
    return [f"torch=={major}.{minor}.*"]


def torch_cmake_dir() -> list:
    """-DTorch_DIR for a torch that ships its CMake package; Debian's is on CMake's default path."""
    path = TORCH_FOLDER / "share/cmake/Torch"
    return [f"-DTorch_DIR={path}"] if (path / "TorchConfig.cmake").is_file() else []


def pybind11_cmake_dir() -> list:
    """-Dpybind11_DIR for a pybind11 from pip; a distribution's is on CMake's default path."""
    try:
        import pybind11
    except ImportError:
        return []
    return [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]


def tool(name: str) -> str:
    """The program of the running environment if it has one, else that of PATH; empty if there is none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which(name, path=path) or ""


class Build(build):
    def initialize_options(self):
        super().initialize_options()
        self.build_base = str((build_dir() / "setuptools").relative_to(ROOT))


class CMakeBuild(build_ext):
    """Builds the targets `w4a8_torch` and `w4a8_python` and installs the component `python` beside the Python files."""

    def run(self):
        if TORCH_FOLDER is None:
            raise RuntimeError(
                "w4a8 is compiled against the installed torch, but this environment has none. Install torch first, "
                "then run `pip install --no-build-isolation .`"
            )
        cmake = tool("cmake")
        if not cmake:
            raise RuntimeError(
                "cmake 3.22 or newer is needed to build w4a8 (`pip install cmake` or your distribution's)"
            )
        binary_dir = build_dir()
        configure = [
            cmake,
            f"-S{ROOT}",
            f"-B{binary_dir}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DPYTHON_EXECUTABLE={sys.executable}",
            *torch_cmake_dir(),
            *pybind11_cmake_dir(),
        ]
        ninja = tool("ninja")
        if ninja and not (binary_dir / "Makefile").exists():
            configure += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += os.environ.get("CMAKE_ARGS", "").split()
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        package_parent = Path(self.get_ext_fullpath("w4a8._C")).resolve().parent.parent

        subprocess.run(configure, check=True)
        compile_ = [cmake, "--build", str(binary_dir), "-j", jobs, "--target", "w4a8_torch", "w4a8_python"]
        subprocess.run(compile_, check=True)
        install = [cmake, "--install", str(binary_dir), "--component", "python", "--prefix", str(package_parent)]
        subprocess.run(install, check=True)

    # An in-place (editable) build puts its files straight into python/w4a8/: nothing is left to copy.
    def get_output_mapping(self):
        return {}


if __name__ == "__main__":
    setup(
        version=project_version(),
        install_requires=runtime_requirements(),
        ext_modules=[Extension("w4a8._C", sources=[])],
        cmdclass={"build": Build, "build_ext": CMakeBuild},
    )

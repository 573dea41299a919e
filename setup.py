"""Builds the compiled part of w4a8 by driving the CMake build, so that pip and cmake never differ.

Two builds (docs/versions.md): the extension for one torch and one Python, or the library of the wheel for all of them.

Environment:
    W4A8_STABLE_ABI             1: the library of the wheel (scripts/build_wheel.sh sets it).
    W4A8_KERNELS                which kernels to build, as in "x86_avx2;scalar"; default: all.
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
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel  # since setuptools 70.1
except ImportError:
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:  # only building in place needs none
        bdist_wheel = None

ROOT = Path(__file__).resolve().parent

STABLE = os.environ.get("W4A8_STABLE_ABI") == "1"
LEAST_TORCH = "2.10"  # of the stable ABI that csrc/torch/tensor_stable.h asks for


def torch_folder() -> Path | None:
    """Where torch is, without importing it, which takes seconds; None: nowhere. Metadata (sdist) needs none.

    pip's isolated build has its own modules, but runs the interpreter of the environment that it installs into.
    """
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        return Path(spec.origin).parent
    folders = [Path(sysconfig.get_path(kind)) / "torch" for kind in ("platlib", "purelib")]
    return next((folder for folder in folders if (folder / "version.py").exists()), None)


TORCH_FOLDER = torch_folder()
TORCH_VERSION = runpy.run_path(str(TORCH_FOLDER / "version.py"))["__version__"] if TORCH_FOLDER else None


def license_metadata() -> dict:
    """An SPDX expression, in the field that this setuptools has for it."""
    expression = "Apache-2.0"
    new = int(setuptools.__version__.split(".")[0]) >= 77
    return {"license_expression": expression} if new else {"license": expression}


def project_version() -> str:
    """The version of `project(w4a8 VERSION x.y.z)` in CMakeLists.txt, its only source."""
    match = re.search(r"project\(\s*w4a8\s+VERSION\s+([0-9][0-9.]*)", (ROOT / "CMakeLists.txt").read_text())
    if match is None:
        raise RuntimeError("CMakeLists.txt has no project(w4a8 VERSION x.y.z ...)")
    return match.group(1)


def build_dir() -> Path:
    """One build tree per interpreter and torch, so that two flavours never mix; scripts/common.sh has the same rule."""
    if STABLE:
        return ROOT / "build" / f"stable-{sysconfig.get_platform()}"
    key = f"{sys.implementation.cache_tag}-torch{TORCH_VERSION}" if TORCH_VERSION else "no-torch"
    return ROOT / "build" / key.replace("+", "-")


def runtime_requirements() -> list:
    """The torch the extension was compiled against: its C++ ABI changes with every minor version. Else any new one.

    And NumPy, which torch does not bring.
    """
    numpy = "numpy>=1.24"
    if STABLE:
        return [f"torch>={LEAST_TORCH}", numpy]
    if TORCH_VERSION is None:
        return [numpy]
    major, minor = TORCH_VERSION.split(".")[:2]
    return [f"torch=={major}.{minor}.*", numpy]


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


def wheel_command() -> dict:
    """The library of the wheel knows no Python: `py3-none`, and the platform that it was compiled for."""
    if bdist_wheel is None:
        return {}

    class Wheel(bdist_wheel):
        def get_tag(self):
            python, abi, platform = super().get_tag()
            return ("py3", "none", platform) if STABLE else (python, abi, platform)

    return {"bdist_wheel": Wheel}


class CMakeBuild(build_ext):
    """Builds the targets of one of the builds and installs their component beside the Python files."""

    def run(self):
        if TORCH_FOLDER is None:
            raise RuntimeError(
                "w4a8 is compiled against the installed torch, but this environment has none. Install torch first, "
                f"then this again; or the wheel that `make wheel` leaves in dist, which needs torch {LEAST_TORCH}"
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
            f"-DW4A8_KERNELS={os.environ.get('W4A8_KERNELS', 'all')}",
            *torch_cmake_dir(),
        ]
        if STABLE:
            configure += ["-DW4A8_STABLE_ABI=ON", "-DW4A8_BUILD_PYTHON=OFF"]
        else:
            configure += pybind11_cmake_dir()
        ninja = tool("ninja")
        if ninja and not (binary_dir / "Makefile").exists():
            configure += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += os.environ.get("CMAKE_ARGS", "").split()
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        package_parent = Path(self.get_ext_fullpath("w4a8._C")).resolve().parent.parent

        targets = ["w4a8_stable"] if STABLE else ["w4a8_torch", "w4a8_python"]
        component = "stable" if STABLE else "python"
        subprocess.run(configure, check=True)
        compile_ = [cmake, "--build", str(binary_dir), "-j", jobs, "--target", *targets]
        subprocess.run(compile_, check=True)
        install = [cmake, "--install", str(binary_dir), "--component", component, "--prefix", str(package_parent)]
        if STABLE:
            install.append("--strip")
        subprocess.run(install, check=True)

    # An in-place (editable) build puts its files straight into python/w4a8/: nothing is left to copy.
    def get_output_mapping(self):
        return {}


if __name__ == "__main__":
    setup(
        version=project_version(),
        **license_metadata(),
        install_requires=runtime_requirements(),
        ext_modules=[Extension("w4a8._C", sources=[])],
        cmdclass={"build": Build, "build_ext": CMakeBuild, **wheel_command()},
    )

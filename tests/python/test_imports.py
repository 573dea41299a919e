"""The modules of the package import each other without a circle, and what is shared does not know its users."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "python"
COMPILED = "w4a8._C"


def _modules(root):
    """Module name -> file."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(tree, modules):
    """Names of the modules that a file imports, anywhere in it: inside functions and for type checkers alone, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules or inner == COMPILED else node.module


def import_graph(root):
    """Module -> the modules of the same tree that it names in imports."""
    modules = _modules(root)
    return {
        name: {other for other in _imported(ast.parse(path.read_text()), modules) if other in modules and other != name}
        for name, path in modules.items()
    }


def find_circle(graph):
    """A list of modules, each importing the next and the last the first, or None."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return None
        path.append(name)
        for other in sorted(graph[name]):
            circle = visit(other)
            if circle is not None:
                return circle
        path.pop()
        done.add(name)
        return None

    for name in sorted(graph):
        circle = visit(name)
        if circle is not None:
            return circle
    return None


@pytest.fixture(scope="module")
def graph():
    if not (ROOT / "w4a8").is_dir():
        pytest.skip("needs the source tree")
    return import_graph(ROOT)


def test_find_circle():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_no_circle(graph):
    assert len(graph) > 40
    assert find_circle(graph) is None


MIRROR = ("w4a8.moe", "w4a8.linear")


def is_in(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_core_knows_no_user(graph):
    users = (*MIRROR, "w4a8.nn", "w4a8.checkpoint", "w4a8.integrations", "w4a8.quantization")
    for name, imported in graph.items():
        if is_in(name, ("w4a8.core",)):
            assert not [other for other in imported if is_in(other, users)], name


def test_modules_know_no_files(graph):
    """A reader gives a Matrix, and a layer is made of one."""
    for name, imported in graph.items():
        if is_in(name, ("w4a8.nn",)):
            assert not [other for other in imported if is_in(other, ("w4a8.formats", "w4a8.checkpoint"))], name


def test_nothing_imports_the_mirror_of_vllm(graph):
    for name, imported in graph.items():
        if not is_in(name, MIRROR):
            assert not [other for other in imported if is_in(other, MIRROR)], name


def test_import_w4a8_imports_no_readers():
    """The operators alone; what reads checkpoints comes when it is first asked for."""
    code = """
import sys, w4a8
late = ("checkpoint", "formats", "nn", "quantization", "moe", "linear", "integrations")
there = [name for name in sys.modules if name.split(".")[:2] in [["w4a8", package] for package in late]]
assert not there, there
assert {"checkpoint", "quantize_", "nn"} <= set(dir(w4a8))
from w4a8 import quantize_
assert w4a8.checkpoint.read_layers and w4a8.quantize_ is w4a8.quantization.quantize_
assert w4a8.nn.W4A8Linear and w4a8.formats.rules_of
try:
    w4a8.lod
except AttributeError as error:
    assert str(error) == "module 'w4a8' has no attribute 'lod'"
else:
    raise AssertionError("w4a8.lod")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_starts_with_required_packages_alone(tmp_path):
    """Without those of the extras; what needs one says how to install it."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    absent = ["transformers", "safetensors", "gguf", "accelerate", "tqdm", "huggingface_hub", "matplotlib", "vllm"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent})); from w4a8.command import main; "
        f"print(main(['--version']), main(['chat', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["0", "1"], done.stderr
    assert done.stderr.startswith("w4a8: this needs transformers: pip install ")

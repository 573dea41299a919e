"""What documents name is there: functions, classes and files of the code, and where the links of all documents lead."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATH = re.compile(r"(?:python|csrc|docs|tests|scripts|examples|benchmarks|lab)/[\w./-]+")


def rows(text):
    """(names, files) of each row of the tables, whose columns are names, files and a sentence."""
    for line in text.splitlines():
        if line.startswith("| `"):
            names, files, _ = line.strip("| ").split(" | ", 2)
            yield re.findall(r"`([^`]+)`", names), re.findall(r"`([^`]+)`", files)


def python_names(source):
    """What a module defines: ``function``, ``CONSTANT``, ``Class`` and ``Class.method``."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def cpp_defines(source, name):
    """Whether each part of ``Type::member`` is a type, or a function behind the type that it returns."""
    code = re.sub(r"//.*", "", source)
    return all(
        re.search(rf"\b(?:struct|class|concept|using)\s+{part}\b", code)
        or re.search(rf"(?<!return)(?<!else)(?:[\w>&*]\s+|[&*]){part}\(", code)
        for part in name.split("::")
    )


def defines(path, name):
    """Whether a file defines a name; of a list (.inc, .toml) whether it has the name."""
    source = path.read_text()
    if path.suffix == ".py":
        return name in python_names(source)
    if path.suffix in (".cpp", ".h"):
        return cpp_defines(source, name)
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source) is not None


@pytest.mark.parametrize("document", ["docs/code_map.md", "docs/adding_a_format.md", "docs/adding_an_architecture.md"])
def test_names_of_the_code(document):
    """Each name is defined in one of the files of its row, and each file has one of the names."""
    text = (ROOT / document).read_text()
    table = list(rows(text))
    assert table
    for names, files in table:
        there = [ROOT / file for file in files]
        assert files and all(path.is_file() for path in there), f"{names}: not all of {files} are files"
        for name in names:
            assert any(defines(path, name) for path in there), f"{name} is not in {', '.join(files)}"
        for path, file in zip(there, files):
            assert any(defines(path, name) for name in names), f"{file} has none of {', '.join(names)}"
    for path in PATH.findall(text):
        assert (ROOT / path).exists(), path


def documents():
    folders = [ROOT / folder for folder in ("docs", "tests", "benchmarks", "examples", "lab")]
    return sorted([*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))])


def without_code(text):
    return re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = path.parent / target if target else path
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file), link

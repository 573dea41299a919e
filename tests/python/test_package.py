"""The package as a user meets it: version, command line, choosing a kernel, the examples of the documents."""

import ast
import importlib.metadata
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import TORCH_VERSION, assert_same_bits, make_matrix
from op_samples import op_samples, results

import w4a8
from w4a8 import compiled
from w4a8.command import doctor, extras

ROOT = Path(__file__).parents[2]


def run(*arguments, **environment):
    """Python in a process of its own, from a folder that is not the project's."""
    env = {k: v for k, v in os.environ.items() if k != "W4A8_KERNEL"}
    env.update(environment)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)


def test_version():
    match = re.search(r"project\(\s*w4a8\s+VERSION\s+([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert w4a8.__version__ == match.group(1)


def test_everything_exported_exists():
    for name in w4a8.__all__:
        assert getattr(w4a8, name) is not None


def test_the_stub_of_the_compiled_part():
    """_C.pyi names what either build has, and its functions' arguments; the fields of its dicts are those returned."""
    module = compiled.library
    stub = ast.parse((Path(w4a8.__file__).parent / "_C.pyi").read_text())
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    dicts = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    extension = module.__name__ == "w4a8._C"
    here = module.__name__
    own = [name for name, value in vars(module).items() if extension or getattr(value, "__module__", "") == here]
    assert set(functions) == {name for name in own if callable(getattr(module, name)) and not name.startswith("_")}
    for name, node in functions.items():
        function = getattr(module, name)
        arguments = [argument.arg for argument in node.args.args]
        documented = re.findall(r"(\w+):", function.__doc__.partition(")")[0])
        assert (documented if extension else list(inspect.signature(function).parameters)) == arguments, name
    assert module.__version__ == w4a8.__version__
    header = module.read_header(make_matrix(16, 64, 32).pack().numpy())
    for name, value in {"_KernelInfo": module.kernels()[0], "_Header": header}.items():
        fields = {field.target.id: field.annotation.id for field in dicts[name].body}
        assert fields == {key: type(entry).__name__ for key, entry in value.items()}


def test_kernels():
    kernels = w4a8.kernels()
    names = [kernel["name"] for kernel in kernels]
    assert len(set(names)) == len(names)
    assert names[-1] == "scalar"
    assert kernels[-1]["supported"]
    features = w4a8.cpu_features().split()
    for kernel in kernels:
        assert set(kernel) == {"name", "supported", "needs", "turned_off"}
        assert kernel["turned_off"] == "" or not kernel["supported"]
        assert kernel["supported"] == (set(kernel["needs"].split()) <= set(features))


@pytest.mark.skipif("W4A8_KERNEL" in os.environ, reason="W4A8_KERNEL is set")
def test_the_best_kernel_runs_by_default():
    assert w4a8.active_kernel() == next(kernel["name"] for kernel in w4a8.kernels() if kernel["supported"])


def test_use_kernel_as_a_call():
    before = w4a8.active_kernel()
    w4a8.use_kernel("scalar")
    assert w4a8.active_kernel() == "scalar"
    w4a8.use_kernel("")
    assert w4a8.active_kernel() == before


def test_use_kernel_as_a_context(supported_kernels):
    before = w4a8.active_kernel()
    for outer in supported_kernels:
        with w4a8.use_kernel(outer) as name:
            assert name == w4a8.active_kernel() == outer
            with w4a8.use_kernel("scalar"):
                assert w4a8.active_kernel() == "scalar"
            assert w4a8.active_kernel() == outer
    assert w4a8.active_kernel() == before


def test_use_kernel_is_restored_after_an_exception():
    before = w4a8.active_kernel()
    with pytest.raises(KeyError), w4a8.use_kernel("scalar"):
        raise KeyError
    assert w4a8.active_kernel() == before


def test_use_kernel_refuses_what_it_does_not_know():
    before = w4a8.active_kernel()
    with pytest.raises(ValueError, match="doesnotexist") as error:
        w4a8.use_kernel("doesnotexist")
    for kernel in w4a8.kernels():
        assert (kernel["name"] in str(error.value)) == kernel["supported"]
    assert w4a8.active_kernel() == before


def test_use_kernel_refuses_what_the_cpu_cannot_run():
    unsupported = [kernel for kernel in w4a8.kernels() if not kernel["supported"]]
    if not unsupported:
        pytest.skip("this CPU runs every kernel")
    for kernel in unsupported:
        with pytest.raises(ValueError, match=kernel["name"]):
            w4a8.use_kernel(kernel["name"])


def test_command_line():
    result = run("-m", "w4a8", "doctor")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert w4a8.__version__ in result.stdout
    assert torch.__version__ in result.stdout
    assert w4a8.cpu_features() in result.stdout
    for kernel in w4a8.kernels():
        line = next(line for line in result.stdout.splitlines() if re.search(rf"\b{kernel['name']}\b.*needs", line))
        assert ("not supported" in line) != kernel["supported"]
    best = next(kernel["name"] for kernel in w4a8.kernels() if kernel["supported"])
    assert re.search(rf"^active +{best} ", result.stdout, re.MULTILINE)


def test_command_line_says_what_is_turned_off(monkeypatch):
    kernels = [{**kernel} for kernel in w4a8.kernels()]
    kernels[0].update(supported=False, turned_off="it gave other products than another when they were compared")
    monkeypatch.setattr(w4a8, "kernels", lambda: kernels)
    lines = doctor.text_of(doctor.examine())
    at = next(i for i, line in enumerate(lines) if kernels[0]["name"] in line)
    assert "turned off" in lines[at]
    assert lines[at + 1].strip() == "since it gave other products than another when they were compared"
    assert sum("turned off" in line for line in lines if "AMX" not in line) == 1


def test_import_prints_nothing():
    """An empty variable is none."""
    result = run("-c", "import w4a8; w4a8.kernels(); w4a8.active_kernel()", W4A8_KERNEL="")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_environment_and_use_kernel(supported_kernels):
    """The variable's kernel, unless use_kernel names one. Which names there are: RegistryTest."""
    best = supported_kernels[0]
    code = f"import w4a8\nfor name in ('', {best!r}, ''):\n    w4a8.use_kernel(name)\n    print(w4a8.active_kernel())\n"
    result = run("-c", code, W4A8_KERNEL="scalar")
    assert result.stdout.split() == ["scalar", best, "scalar"], result.stderr


def test_a_bad_environment_is_an_error():
    result = run("-m", "w4a8", "doctor", W4A8_KERNEL="doesnotexist")
    assert result.returncode == 1
    problem = next(line for line in result.stdout.splitlines() if line.startswith("PROBLEM"))
    assert "doesnotexist" in problem and "scalar" in problem
    assert "Traceback" not in result.stderr


def test_a_bad_environment_stops_the_operators():
    code = (
        "import torch, w4a8\n"
        "p = w4a8.dyn_quant_pack_4bit_weight(torch.zeros(2, 32).byte(), torch.ones(2, 2), None, 32, 64, 2)\n"
        "w4a8.dyn_quant_matmul_4bit(torch.ones(1, 64), p, 32, 64, 2)\n"
    )
    result = run("-c", code, W4A8_KERNEL="doesnotexist")
    assert result.returncode != 0
    assert "doesnotexist" in result.stderr
    assert "scalar" in result.stderr


def operators():
    """Name -> schema of every operator of torch.ops.w4a8, of overloads the default one, but for w4a8.Decoder's and the
    one that w4a8.core.bridge calls."""
    schemas = {schema.name: schema for schema in torch._C._jit_get_all_schemas() if not schema.overload_name}
    names = {name[6:]: name for name in schemas if name.startswith("w4a8::")}
    return {short: schemas[name] for short, name in names.items() if not short.startswith(("decoder_", "queue_"))}


def test_every_operator_has_a_wrapper_and_a_sample():
    assert len(operators()) >= 8
    sampled = {op._schema.name[6:] for op, _ in op_samples().values()}
    # These return nothing: test_attention.py, test_pack_blocks.py and test_pack_words.py have what the samples are for.
    sampled |= {"paged_attention_write", "pack_blocks", "pack_words"}
    sampled |= {"form_problem", "form_bytes"}  # without tensors: test_forms.py
    assert sampled == set(operators()) == {name for name in operators() if name in w4a8.__all__}


@pytest.mark.parametrize("name", sorted(operators()))
def test_wrappers_are_the_operators(name, monkeypatch):
    """Same arguments in the same order with the same defaults, each given on as it is."""
    wrapper, schema = getattr(w4a8, name), operators()[name]
    parameters = inspect.signature(wrapper).parameters.values()
    for parameter, argument in itertools.zip_longest(parameters, schema.arguments):
        assert parameter.name == argument.name
        assert (parameter.kind == parameter.KEYWORD_ONLY) == argument.kwarg_only
        default = argument.default_value if argument.has_default_value() else parameter.empty
        # An optional argument without a default in the schema may have None in Python, and the other way round.
        assert parameter.default == default or {parameter.default, default} == {None, parameter.empty}, parameter.name

    given = {parameter.name: index + 100 for index, parameter in enumerate(parameters)}
    calls = []

    def returned(*args, **kwargs):
        calls.append((args, kwargs))
        return [None] * len(schema.returns)

    monkeypatch.setattr(getattr(torch.ops.w4a8, name), "default", returned)
    wrapper(**given)
    ((args, kwargs),) = calls
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert {**dict(zip(positional, args)), **kwargs} == given


@pytest.mark.parametrize("sample", [name for name, (op, _) in op_samples().items() if op._overloadname == "default"])
def test_wrappers_compute_what_the_operators_do(sample):
    op, arguments = op_samples()[sample]
    for actual, expected in zip(results(getattr(w4a8, op._schema.name[6:]), arguments), results(op, arguments)):
        assert_same_bits(actual, expected)


def python_examples(document, count):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S)
    assert len(blocks) == count
    return blocks


def run_example(document, code):
    scope = {}
    exec(compile(code, document, "exec"), scope)
    return scope


def test_the_pytorch_example_of_the_readme(capsys):
    scope = run_example("README.md", python_examples("README.md", 2)[0])
    assert capsys.readouterr().out.startswith("2 replaced")
    assert scope["y"].shape == (3, 10)
    assert all(type(scope["model"][index]) is w4a8.nn.W4A8Linear for index in (0, 2))


def test_the_transformers_example_of_the_readme(monkeypatch, capsys):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 5 is needed")
    monkeypatch.chdir(ROOT)
    run_example("README.md", python_examples("README.md", 2)[1])
    assert "import os\n\n\ndef " in capsys.readouterr().out


def test_the_example_of_the_operators():
    (code,) = python_examples("docs/operators.md", 1)
    statements = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(statements) <= 10
    scope = run_example("docs/operators.md", code)
    assert scope["y"].shape == scope["x"].shape
    assert scope["y"].abs().max() > 0


def test_the_checkpoint_example_of_the_formats(monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(ROOT)
    scope = run_example("docs/formats.md", python_examples("docs/formats.md", 2)[0])
    assert scope["y"].shape[0] == 5
    assert scope["y"].abs().max() > 0


def test_the_table_of_operators():
    """The table has every operator with its arguments, in order, and those of its defaults that it gives."""
    table = (ROOT / "docs/operators.md").read_text().partition("# Operators")[2].partition("## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", table, re.MULTILINE))
    assert set(rows) == set(operators())
    for name, arguments in rows.items():
        parameters = inspect.signature(getattr(w4a8, name)).parameters
        listed = ast.parse(f"def f({arguments}): pass").body[0].args
        assert [argument.arg for argument in [*listed.args, *listed.kwonlyargs]] == list(parameters)
        defaults = dict(zip([argument.arg for argument in reversed(listed.args)], reversed(listed.defaults)))
        defaults.update({a.arg: value for a, value in zip(listed.kwonlyargs, listed.kw_defaults) if value is not None})
        for argument, parameter in parameters.items():
            assert (argument in defaults) == (parameter.default is not parameter.empty), f"{name}: {argument}"
            if argument in defaults:
                assert ast.literal_eval(defaults[argument]) == parameter.default, f"{name}: {argument}"


def test_one_least_python():
    """What is installed, checked before, linted and documented is one version: that of the pinned torch."""
    project = (ROOT / "pyproject.toml").read_text()
    (least,) = re.findall(r'^requires-python = ">=3\.(\d+)"$', project, flags=re.MULTILINE)
    assert f'target-version = "py3{least}"' in project
    assert f'"Programming Language :: Python :: 3.{least}"' in project
    checked = f"sys.version_info < (3, {least}))' || die \"Python 3.{least} or newer"
    assert checked in (ROOT / "scripts/common.sh").read_text()
    assert f"Python 3.{least} or newer" in (ROOT / "README.md").read_text()
    if TORCH_VERSION >= (2, 13):  # an older one may take an older Python
        assert f">=3.{least}" in importlib.metadata.metadata("torch")["Requires-Python"]


def test_optional_requirements():
    """The extras have what the code asks for when it is missing, and the command names the same packages."""
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    of_pyproject = dict(re.findall(r'^(\w+) = \["(\w+)', text, flags=re.MULTILINE))
    names = {name: name for name in ("gguf", "transformers", "vllm")}
    assert of_pyproject == {"load": "safetensors", "progress": "tqdm", **names, "all": "w4a8"}
    for extra, said in (("transformers", extras.TRANSFORMERS), ("vllm", extras.VLLM)):
        line = re.search(rf"^{extra} = \[(.*?)\]", text, flags=re.MULTILINE)[1]
        assert said == "pip install " + " ".join(f"'{package}'" for package in re.findall(r'"([^"]+)"', line))

"""`w4a8 bench`: what is fed and counted, by a clock of the test. Nothing here depends on how fast it is."""

import contextlib
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("gguf")
import multiplied_out  # noqa: E402
from gguf_models import TinyModel  # noqa: E402

import w4a8  # noqa: E402
from w4a8.command import bench, inspect, machine, main, model_loading, plot, serve, timing  # noqa: E402
from w4a8.integrations.transformers import W4A8Config  # noqa: E402
from w4a8.integrations.vllm import binding  # noqa: E402

SMALL = ("--prompts", "5,9", "--decode", "3", "--behind", "11", "--batch", "4", "--repetitions", "3")


@pytest.fixture
def tiny(tmp_path):
    """A mixture of experts."""
    return TinyModel("qwen3moe").write(tmp_path)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """The memory's speed is 1 GB/s for each thread."""
    monkeypatch.setattr(machine, "read_speed", lambda: 1e9 * torch.get_num_threads())


class Clock:
    """Each look at it is half a second after the one before."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 0.5
        return self.now


def asked(capsys, *arguments):
    code = main(["bench", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_what_is_counted(tiny, monkeypatch, capsys):
    """Rates by a clock that goes on by half a second for each token, and bytes as inspect says them."""
    monkeypatch.setattr(timing, "time", Clock())
    before = torch.get_num_threads()
    answer = asked(capsys, tiny, *SMALL, "--threads", "1,2")
    assert torch.get_num_threads() == before
    names = ["prompt of 5", "prompt of 9", "decode 3", "decode 3 behind 11", "decode 3, batch 4"]
    rates = [10.0, 18.0, 2.0, 2.0, 8.0]  # tokens in half a second; one token, or four, in half a second
    expected = [(name, count, rate) for count in (1, 2) for name, rate in zip(names, rates)]
    assert [(each["case"], each["threads"], each["tokens_per_second"]) for each in answer["measured"]] == expected
    assert all(each["least"] == each["most"] == each["tokens_per_second"] for each in answer["measured"])
    token = inspect.examine(str(tiny), memory_speed=1.0)[0]["token_bytes"]
    assert answer["token_bytes"] == token and answer["kernel"] == w4a8.active_kernel()
    shares = [None, None, 2.0 * token / 1e9, 2.0 * token / 1e9, None, None, None, token / 1e9, token / 1e9, None]
    assert [each["memory_share"] for each in answer["measured"]] == pytest.approx(shares)
    assert [each["threads"] for each in answer["memory"]] == [1, 2]
    assert answer["left_out"] == answer["notes"] == []


def test_what_is_fed(tiny, monkeypatch, capsys):
    """Each forward pass: sequences, tokens, threads. What is before decoding is read once."""
    seen, load = [], model_loading.load

    def watched(*args, **options):
        model, report = load(*args, **options)

        def note(module, given, named):
            seen.append((*named["input_ids"].shape, torch.get_num_threads()))

        model.register_forward_pre_hook(note, with_kwargs=True)
        return model, report

    monkeypatch.setattr(model_loading, "load", watched)
    asked(capsys, tiny, *SMALL, "--threads", "2", "--repetitions", "2")
    passes = [each[:2] for each in seen]
    steps = [(1, 1)] * 3
    assert passes[:6] == [(1, 5)] * 3 + [(1, 9)] * 3
    assert passes[6:18] == [(1, 8), *steps, (1, 1), *steps, (1, 1), *steps]
    # 8 of the 11 tokens are known from the case before.
    assert passes[18:30] == [(1, 3), *steps, (1, 1), *steps, (1, 1), *steps]
    assert passes[30:] == [(4, 8), (4, 1), (4, 1), (4, 1)] * 3
    assert {threads for (_, tokens, threads) in seen if tokens > 1} == {2}


def test_progress(tiny, monkeypatch, capsys):
    """One step for each run, on a terminal alone."""
    totals, steps = [], []

    @contextlib.contextmanager
    def bar(total, wanted, *_):
        totals.append((total, wanted))
        yield lambda: steps.append(1)

    monkeypatch.setattr(bench, "progress_bar", bar)
    monkeypatch.setattr(timing.TimedModel, "run", lambda *_: 1.0)
    asked(capsys, tiny, "--threads", "1,2", "--behind", "", "--repetitions", "3", "--prompts", "5,9", "--decode", "3")
    assert totals == [(2 * 4 * 4, False)] and len(steps) == 32


def test_medians(tiny, monkeypatch, capsys):
    """Of the repetitions without the first run."""
    rates = iter([100.0, 3.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr(timing.TimedModel, "run", lambda *_: next(rates))
    arguments = (tiny, "--prompts", "5", "--decode", "", "--repetitions", "4")
    (found,) = asked(capsys, *arguments)["measured"]
    assert (found["least"], found["tokens_per_second"], found["most"]) == (1.0, 2.5, 9.0)
    assert next(rates, None) is None


def test_text_and_what_is_left_out(tiny, monkeypatch, capsys):
    """A case that is as long as the context runs; a longer one is left out, in a line that says why."""
    model = model_loading.load(tiny, model_loading.DEFAULTS)[0]
    context = model.config.max_position_embeddings
    monkeypatch.setattr(timing.TimedModel, "run", lambda *_: 12.34)
    assert main(["bench", str(tiny), "--prompts", f"{context},{context + 1}", "--decode", "3", "--threads", "1"]) == 0
    out, _ = capsys.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"prompt of {context} 1 12.3 12.3 to 12.3" in lines
    assert f"left out prompt of {context + 1}: {context + 1} tokens, the model's context is {context}" in lines
    assert any(line.startswith("decode 3 1 12.3 12.3 to 12.3 ") and line.endswith("%") for line in lines)
    runs_in = f"transformers {transformers.__version__}"
    assert f"w4a8 {w4a8.__version__}, kernel {w4a8.active_kernel()}; in {runs_in}" in lines
    assert "memory 1.0 GB/s (1 thread)" in lines and f"CPU {machine.cpu_model()}" in lines


def test_packed_and_the_end_of_a_text(tmp_path, capsys):
    """A packed directory counts as inspect does; a token that ends a text does not end the measurement."""
    folder = tmp_path / "model"
    shutil.copytree(multiplied_out.TOOL_WRITTEN / "gptq", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4A8Config())
    model.generation_config = transformers.GenerationConfig(eos_token_id=[*range(model.config.vocab_size)])
    model.save_pretrained(tmp_path / "packed")
    answer = asked(capsys, tmp_path / "packed", "--prompts", "", "--behind", "", "--decode", "3", "--batch", "1,2")
    assert [each["case"] for each in answer["measured"]] == ["decode 3", "decode 3, batch 2"]
    said = inspect.examine(str(tmp_path / "packed"), memory_speed=1.0)[0]
    assert answer["token_bytes"] == said["token_bytes"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prompts", "5,x"), "argument --prompts: invalid list of whole numbers value: '5,x'"),
        (("--threads", "0"), "argument --threads: 0 is no finite number from 1 on"),
        (("--repetitions", "0"), "argument --repetitions: 0 is no finite number from 1 on"),
        (("--prompts", "", "--decode", ""), "nothing is asked for: --prompts and --decode are empty"),
        (("--group-size", "32"), "leave --group-size out"),
        (("--vllm", "--threads", "1"), "--vllm goes without --threads and options of rounding"),
        (("--vllm", "--activation-group", "32"), "--vllm goes without --threads and options of rounding"),
        (("--plot", "a.txt"), "--plot is a.txt, expected a name that ends in .png, .svg, .pdf"),
        (("--plot", "nowhere/a.png"), "--plot is nowhere/a.png, but there is no folder nowhere"),
    ],
)
def test_refusals(options, said, tiny, capsys):
    assert main(["bench", str(tiny), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "module", "name", "absent", "said"),
    [
        ("--vllm", bench, "installed", lambda *_: None, "--vllm needs vLLM in this environment: pip install"),
        ("--plot=a.png", plot, "find_spec", lambda _: None, "--plot needs matplotlib: pip install"),
    ],
)
def test_what_is_not_installed(option, module, name, absent, said, tiny, monkeypatch, capsys):
    monkeypatch.setattr(module, name, absent)
    assert main(["bench", str(tiny), option]) == 1
    assert said in capsys.readouterr().err


@pytest.fixture
def engines(monkeypatch):
    """Stands in for vLLM: an engine that gives each request a token at each step. What each was made with."""
    made = []

    class LLM:
        def __init__(self, model, **options):
            made.append((model, options, {name: os.environ.get(name) for name in (serve.CACHE, binding.RESERVED)}))
            self.llm_engine = self.model_config = self.engine_core = self
            self.requests = {}

        def get_vocab_size(self):
            return 1000

        def add_request(self, name, prompt, parameters):
            assert parameters["ignore_eos"]
            self.requests[name] = (prompt["prompt_token_ids"], parameters["max_tokens"], [])

        def has_unfinished_requests(self):
            return bool(self.requests)

        def step(self):
            found = []
            for name, (_, most, written) in list(self.requests.items()):
                written.append(len(written))
                found.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(written))]))
                if len(written) == most:
                    del self.requests[name]
            return found

        def shutdown(self):
            made.append("ended")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=dict))
    monkeypatch.setattr(bench, "installed", lambda name: "9.9" if name == "vllm" else None)
    monkeypatch.setattr(timing, "time", Clock())
    for name in (serve.CACHE, binding.RESERVED, binding.BIND):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return made


def test_an_engine(tiny, engines, capsys, monkeypatch):
    """Its settings are those of `w4a8 serve`, and rates count as in transformers. What is too long is left out."""
    monkeypatch.setattr(binding, "has_module", lambda name: True)
    sizes = serve.sizes_of(tiny)
    context = sizes["longest"]
    expected = {**dict.fromkeys((serve.CACHE, binding.RESERVED)), **serve.variables_of(tiny, sizes, 4 * 12)}
    answer = asked(capsys, tiny, "--vllm", *SMALL, "--prompts", f"5,{context}")
    assert answer["runs_in"] == "vllm 9.9"
    # The clock is looked at before the prompts, behind the first tokens, and at the end: half a second each.
    rates = {"prompt of 5": 10.0, "decode 3": 6.0, "decode 3 behind 11": 6.0, "decode 3, batch 4": 24.0}
    assert {each["case"]: each["tokens_per_second"] for each in answer["measured"]} == rates
    assert answer["left_out"] == [{"case": f"prompt of {context}", "tokens": context + 1}]
    (model, options, variables), ended = engines
    assert model == str(tiny) and ended == "ended"
    assert (options["max_model_len"], options["max_num_seqs"], options["enable_prefix_caching"]) == (15, 4, False)
    assert options["distributed_executor_backend"] == binding.in_process()
    assert variables == expected


def test_a_picture(tiny, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(timing.TimedModel, "run", lambda *_: 12.34)
    assert main(["bench", str(tiny), *SMALL, "--threads", "1,2", "--plot", str(tmp_path / "a.svg")]) == 0
    assert "prompt of 5" in capsys.readouterr().out
    drawn = (tmp_path / "a.svg").read_text()
    assert all(
        f"<!-- {text} -->" in drawn for text in ("prompt of 5, threads 2", "decode 3, batch 4, threads 1", "12.3")
    )

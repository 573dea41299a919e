"""`w4a8 verify-server`: beside servers whose answers do, and do not, depend on others. The real one: tests/vllm."""

import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from w4a8.command import main


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, differs=False, logprobs=True, longest=300, key=""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.differs, self.logprobs, self.longest, self.key = differs, logprobs, longest, key
        self.asked, self.at_once, self.most, self.lock = [], 0, 0, threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def reply(self, answer, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_GET(self):
        assert self.path == "/v1/models"
        self.reply({"data": [{"id": "tiny", "max_model_len": self.server.longest}, {"id": "path/tiny"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.reply({"error": "no key"}, 401)
            return
        with self.server.lock:
            self.server.asked.append(asked)
            self.server.at_once += 1
            self.server.most = max(self.server.most, self.server.at_once)
            beside = self.server.differs and len(self.server.asked) > 20 and not asked["stream"]
            self.server.differs &= not beside  # once
        digest = hashlib.sha256(asked["prompt"].encode()).digest()[: asked["max_tokens"]]
        logprobs = [-each / 256 for each in digest]
        if beside:
            logprobs[2] -= 2**-40
        answer = {"tokens": [str(each) for each in digest], "token_logprobs": logprobs}
        self.reply({"choices": [{"logprobs": answer if self.server.logprobs else None}]})
        with self.server.lock:
            self.server.at_once -= 1


@pytest.fixture
def serving():
    started = []

    def start(**how):
        server = Server(**how)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


SMALL = ["--requests", "40", "--prompts", "6", "--clients", "4", "--tokens", "8"]


def test_the_same_answers(serving, capsys):
    """Each prompt alone first; all lengths, as long as the model takes; one of five is stopped."""
    server = serving()
    assert main(["verify-server", server.url, *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["server", f"{server.url},", "tiny"]
    assert lines[1].split(maxsplit=1)[1] == "32 answers of 4 clients, beside 8 that were stopped"
    assert lines[-1].endswith("same tokens and log probabilities as alone")
    prompts = [asked["prompt"] for asked in server.asked[:6]]
    assert [len(prompt) for prompt in prompts] == [291 * (i + 1) // 6 for i in range(6)] and len(set(prompts)) == 6
    assert not any(asked["stream"] for asked in server.asked[:6])
    assert {asked["prompt"] for asked in server.asked[6:]} == set(prompts) and len(server.asked) == 46
    assert all(asked["temperature"] == 0 and asked["ignore_eos"] for asked in server.asked)


@pytest.mark.parametrize("as_json", [False, True])
def test_an_answer_that_differs(as_json, serving, capsys):
    """In the last bits of one log probability."""
    server = serving(differs=True)
    assert main(["verify-server", server.url, *SMALL, *(["--json"] if as_json else [])]) == 1
    text = capsys.readouterr().out
    if as_json:
        (found,) = json.loads(text)["different"]
        assert found["alone"]["tokens"] == found["beside"]["tokens"]
        pairs = enumerate(zip(found["alone"]["logprobs"], found["beside"]["logprobs"]))
        assert [i for i, (alone, beside) in pairs if alone != beside] == [2]
    else:
        assert text.count("PROBLEM") == 1 and "token 2 of the answer differs" in text
        assert text.splitlines()[-1].split(maxsplit=1)[1] == "DEPENDS ON OTHERS"


def test_a_key_and_another_name(serving, capsys):
    server = serving(key="secret")
    assert main(["verify-server", server.url + "/", *SMALL, "--api-key", "secret", "--model", "path/tiny"]) == 0
    assert {asked["model"] for asked in server.asked} == {"path/tiny"}
    assert main(["verify-server", server.url, *SMALL]) == 1
    assert f"{server.url}/completions answers 401: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "how, options, message",
    [
        ({"logprobs": False}, [], "gives no log probabilities"),
        ({}, ["--model", "other"], "--model is other, but http://127.0.0.1:{} has tiny, path/tiny"),
        ({"longest": 9}, [], "--tokens is 8, but the model has 9 for prompt and answer"),
    ],
)
def test_refused(how, options, message, serving, capsys):
    server = serving(**how)
    assert main(["verify-server", server.url, *SMALL, *options]) == 1
    assert message.format(f"{server.server_port}/v1") in capsys.readouterr().err


def test_no_server(serving, capsys):
    server = serving()
    url = server.url
    server.shutdown()
    server.server_close()
    assert main(["verify-server", url]) == 1
    assert f"w4a8: {url}/models does not answer: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "reply, message",
    [
        (b'HTTP/1.0 200 OK\r\n\r\n{"data": []}', "http://127.0.0.1:{} has no model"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "OpenAI's servers do (KeyError: "),
        (b"HTTP/1.0 200 OK\r\n\r\n[]", "OpenAI's servers do (TypeError: "),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "OpenAI's servers do (JSONDecodeError: "),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{", "OpenAI's servers do (IncompleteRead: "),
        (b"SSH-2.0-other\r\n", "OpenAI's servers do (BadStatusLine: 'SSH-2.0-other"),
    ],
)
def test_another_server(reply, message, capsys):
    """Which speaks something else, or stops in the middle."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            with listening.accept()[0] as client:
                client.recv(65536)
                client.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        port = listening.getsockname()[1]
        assert main(["verify-server", f"http://127.0.0.1:{port}"]) == 1
    assert message.format(port) in capsys.readouterr().err

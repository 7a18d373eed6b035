"""`bench serve` against an HTTP server whose timing is known; the real one is in tests/engines/vllm."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from ridgefill.bench import serve
from ridgefill.errors import PromptError, SettingError
from tests.command import call

PREFILL = {"exact": 0.30, "filled": 0.10}  # seconds before the first token of a long prompt
STEP = 0.01
TEXT = "word " * 2000


class Handler(BaseHTTPRequestHandler):
    """Streams completions as vLLM does; a token is 5 characters. While a long prompt prefills, nobody gets one."""

    busy = threading.Lock()
    seen: ClassVar[list[dict]] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if body["model"] != "known":
            return self._refuse()
        self.send_response(200)
        self.end_headers()
        tokens = len(body["prompt"]) // 5
        try:
            if tokens > 100:
                with self.busy:
                    time.sleep(PREFILL[body.get("arm", "exact")])
            for _ in range(body["max_tokens"]):
                with self.busy:
                    pass
                self._say({"choices": [{"text": "x"}]})
                time.sleep(STEP)
            self._say({"choices": [], "usage": {"prompt_tokens": tokens}})
            self.wfile.write(b"data: [DONE]\n\n")
        except BrokenPipeError:  # a user who was told to stop
            pass

    def _say(self, chunk):
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _refuse(self):
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b'{"error": "no such model"}')

    def log_message(self, *args):
        pass


@pytest.fixture
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Handler.seen.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def arms(address):
    return {name: serve.Endpoint(address, "known", {"arm": name}) for name in PREFILL}


def test_it_measures_what_the_server_does(address):
    found = serve.measure(arms(address), TEXT, 500, [1, 3], repeats=2, new_tokens=4)
    alone, among = serve.to_json(found)
    assert alone["users"] == 1 and "itl_p50_ms" not in alone["median"]["exact"]
    for row in (alone, among):
        for arm, seconds in PREFILL.items():
            assert seconds < row["median"][arm]["ttft_s"] < seconds + 0.15
            assert 450 < row["median"][arm]["tokens"] < 550
        assert row["exact_over_filled"]["ttft_s"] > 1.3
    for arm, seconds in PREFILL.items():
        own = among["median"][arm]
        assert own["itl_max_ms"] > seconds * 900  # the stall of the others is the prefill
        assert STEP * 900 < own["itl_p50_ms"] < seconds * 900
        assert own["others_tokens_per_s"] < 2 / STEP
    assert among["median"]["filled"]["others_tokens_per_s"] > among["median"]["exact"]["others_tokens_per_s"]


def test_no_two_long_prompts_begin_alike_and_the_arms_take_turns(address):
    serve.measure(arms(address), TEXT, 300, [1], repeats=2, new_tokens=2)
    long = [body for body in Handler.seen if len(body["prompt"]) > 1000]
    assert len({body["prompt"][:30] for body in long}) == len(long) == 6
    assert [body["arm"] for body in long[2:]] == ["exact", "filled", "filled", "exact"]


def test_what_goes_wrong_is_named(address):
    with pytest.raises(SettingError, match="no such model"):
        list(serve.Endpoint(address, "other").stream("x", 1))
    with pytest.raises(SettingError, match="start the server"):
        list(serve.Endpoint("http://127.0.0.1:9", "known").stream("x", 1))
    with pytest.raises(PromptError, match="more text"):
        serve.measure(arms(address), TEXT[:500], 500, [1])


def test_the_command_writes_every_figure(address, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "serve.json"
    text.write_text(TEXT)
    given = ("bench", "serve", address, "--model", "known", "--tokens", "300", "--users", "1,2", "--repeats", "1",
             "--exact-body", '{"arm": "exact"}', "--filled-body", '{"arm": "filled"}', "--texts", text,
             "-o", out)  # fmt: skip
    assert call(*given) == 0
    assert "speedup" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [row["users"] for row in found["users"]] == [1, 2] and found["environment"]["ridgefill"]
    assert call("bench", "serve", address, "--model", "known", "--exact-body", "{") == 2
    assert call("bench", "serve", address, "--model", "other", "--tokens", "300") == 2
    assert "no such model" in capsys.readouterr().err

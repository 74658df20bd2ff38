"""Inference servers that speak vLLM's and SGLang's wire formats, and misbehave to order.

What an adapter answers is read from the manifest in its folder when it is loaded, so a swapped or missing
folder shows. The ways of misbehaving are those of ../shared/reference/adapters.md §1 and §8.
"""

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BASE_LOGPROBS = [-1.0, -2.0, -3.0]


@dataclass
class Engine:
    """What the server holds, and how it misbehaves."""

    slots: int = 2
    adapters: dict[str, tuple[str, list[float]]] = field(default_factory=dict)
    """Listed: name -> path and what it answers."""
    burnt: int = 0
    """Engine slots that unload did not free."""
    loads: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    in_place: int = 0
    busy: int = 0
    most_busy: int = 0
    # misbehaviour
    serves_base: bool = False
    unload_is_ignored: bool = False
    unload_burns_slots: bool = False
    loses_loads: bool = False
    mixes_up: bool = False
    answers_nan: bool = False
    noise: float = 0.0
    fails_loads: int = 0
    other_tokenizer: bool = False
    is_down: bool = False

    def load(self, name: str, path: str) -> str:
        """Load an adapter; return the error, or nothing."""
        if self.fails_loads:
            self.fails_loads -= 1
            return "the engine failed"
        if name in self.adapters:
            return f"{name} has already been loaded"
        manifest = Path(path, "manifest.json")
        if not manifest.exists():
            return f"no adapter at {path}"
        self.loads.append(name)
        if self.loses_loads:
            return ""
        if len(self.adapters) + self.burnt >= self.slots:
            if not self.adapters:
                return "no slot is left"
            oldest = next(iter(self.adapters))
            self.evicted.append(oldest)
            del self.adapters[oldest]
        self.adapters[name] = (path, json.loads(manifest.read_text())["probe"]["logprobs"])
        return ""

    def unload(self, name: str) -> bool:
        """Unload an adapter; False if it is unknown."""
        if name not in self.adapters:
            return False
        if self.unload_is_ignored:
            return True
        del self.adapters[name]
        self.burnt += self.unload_burns_slots
        return True

    def answer(self, name: str | None) -> list[float] | None:
        """Return the logprobs under an adapter; None: no such model."""
        if name is None:
            return BASE_LOGPROBS
        if name not in self.adapters:
            return None
        if self.serves_base:
            return BASE_LOGPROBS
        found = self.adapters[name][1]
        if self.mixes_up:
            found = next(iter(self.adapters.values()))[1]
        if self.answers_nan:
            return [float("nan")] * len(found)
        return [value + self.noise for value in (found[:-1] if self.other_tokenizer else found)]

    def restart(self) -> None:
        """Forget everything, as a new process does."""
        self.adapters.clear()
        self.burnt = 0


class FakeServer(ThreadingHTTPServer):
    """One server process; `kind` is `vllm` or `sglang`."""

    daemon_threads = True

    def __init__(self, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.engine, self.lock = kind, Engine(), threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        """Stop it."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self._down():
            return
        cards = [{"id": "base", "object": "model", "root": "/models/base", "parent": None}]
        cards += [
            {"id": name, "object": "model", "root": path, "parent": "base"}
            for name, (path, _) in self.server.engine.adapters.items()
        ]
        self._json(200, {"object": "list", "data": cards})

    def do_POST(self) -> None:
        if self._down():
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine, route = self.server.engine, (self.server.kind, self.path)
        with self.server.lock:
            if route == ("vllm", "/v1/load_lora_adapter"):
                engine.in_place += bool(body.get("load_inplace"))
                error = engine.load(body["lora_name"], body["lora_path"])
                status = 200 if not error else 500 if "engine" in error else 400
                said = error or f"Success: LoRA adapter '{body['lora_name']}' added successfully."
                self._text(status, said)
            elif route == ("sglang", "/load_lora_adapter"):
                error = engine.load(body["lora_name"], body["lora_path"])
                self._json(200 if not error else 400, {"success": not error, "error_message": error})
            elif self.path.endswith("/unload_lora_adapter"):
                known = engine.unload(body["lora_name"])
                self._text(200 if known else 404, "ok" if known else "not found")
            elif route == ("vllm", "/v1/completions"):
                self._completion(engine.answer(None if body["model"] == "base" else body["model"]))
            elif route == ("sglang", "/generate"):
                self._generation(engine.answer(body.get("lora_path")))
            else:
                self._text(404, "no such route")

    def _completion(self, logprobs: list[float] | None) -> None:
        if logprobs is None:
            self._json(404, {"error": {"message": "The model does not exist"}})
            return
        values = [None, *logprobs, -0.5]  # the first token has none; the last is the one generated
        self._json(200, {"choices": [{"text": "…", "logprobs": {"token_logprobs": values}}]})

    def _generation(self, logprobs: list[float] | None) -> None:
        if logprobs is None:
            self._json(400, {"error": {"message": "no such LoRA"}})
            return
        entries = [[None, 1, None], *([value, 1, None] for value in logprobs)]
        self._json(200, {"text": "…", "meta_info": {"input_token_logprobs": entries}})

    def _down(self) -> bool:
        if self.server.engine.is_down:
            self._text(503, "starting")
        return self.server.engine.is_down

    def _json(self, status: int, document: Any) -> None:
        self._send(status, json.dumps(document).encode(), "application/json")

    def _text(self, status: int, text: str) -> None:
        self._send(status, text.encode(), "text/plain")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

"""Inference servers as serve-sync sees them: what is loaded, load, unload, and logprobs of a text.

Knows no policy. Wire formats are those of ../shared/reference/adapters.md §1; nothing here was run against
a real server. Invariants: a name is never loaded in place; what is loaded is what the server lists.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import httpx

LOAD_SECONDS = 120.0


class ReplicaError(Exception):
    """The server refused, failed or said what cannot be understood."""


class Replica(Protocol):
    """One server process; loading is a matter of each one."""

    @property
    def url(self) -> str:
        """Return where it answers."""
        ...

    def loaded(self) -> Mapping[str, str]:
        """Return the path by name of each adapter that the server lists. Raises ReplicaError."""
        ...

    def load(self, name: str, path: str) -> None:
        """Load an adapter under a name never used before. Raises ReplicaError."""
        ...

    def unload(self, name: str) -> None:
        """Unload an adapter; one that is not there is no error. Raises ReplicaError."""
        ...

    def logprobs(self, name: str | None, text: str) -> list[float]:
        """Return the logprobs of a text's tokens but the first; None: under the base. Raises ReplicaError."""
        ...


class _Server:
    """What both kinds share: JSON over HTTP, and the OpenAI list of models."""

    def __init__(self, url: str, key: str = "") -> None:
        """Open no connection yet."""
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=LOAD_SECONDS)

    def loaded(self) -> Mapping[str, str]:
        """Return the path by name of each adapter that the server lists."""
        return {str(each["id"]): str(each.get("root")) for each in self._models() if each.get("parent")}

    def _base(self) -> str:
        for each in self._models():
            if not each.get("parent"):
                return str(each["id"])
        raise ReplicaError(f"{self.url} lists no base model")

    def _models(self) -> list[dict[str, Any]]:
        listed = self._call("GET", "/v1/models").get("data")
        if not isinstance(listed, list):
            raise ReplicaError(f"{self.url} lists no models")
        return listed

    def _post(
        self, path: str, document: Mapping[str, Any], *, absent_is_fine: bool = False
    ) -> dict[str, Any]:
        return self._call("POST", path, document, absent_is_fine=absent_is_fine)

    def _call(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        *,
        absent_is_fine: bool = False,
    ) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, json=document)
        except httpx.HTTPError as error:
            raise ReplicaError(f"{self.url} does not answer: {error}") from error
        if answer.is_error and not (absent_is_fine and answer.status_code == 404):
            raise ReplicaError(f"{self.url}{path}: {answer.status_code} {answer.text[:300]}")
        try:
            found = answer.json()
        except ValueError:  # vLLM says success in plain text
            return {}
        return found if isinstance(found, dict) else {}


class Vllm(_Server):
    """vLLM's OpenAI server with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`."""

    def load(self, name: str, path: str) -> None:
        """Load an adapter; never `load_inplace`, which re-reads the folder and keeps old caches."""
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload(self, name: str) -> None:
        """Unload an adapter."""
        self._post("/v1/unload_lora_adapter", {"lora_name": name}, absent_is_fine=True)

    def logprobs(self, name: str | None, text: str) -> list[float]:
        """Echo the text with its logprobs; the token that is generated beside it is left out."""
        document = {
            "model": name or self._base(), "prompt": text, "max_tokens": 1, "temperature": 0.0,
            "echo": True, "logprobs": 1,
        }  # fmt: skip
        answer = self._post("/v1/completions", document)
        try:
            return _numbers(answer["choices"][0]["logprobs"]["token_logprobs"][1:-1])
        except (KeyError, IndexError, TypeError) as error:
            raise ReplicaError(f"{self.url} sent no logprobs of the prompt") from error


class Sglang(_Server):
    """SGLang's server with `--enable-lora`, `--max-lora-rank` and `--lora-target-modules`."""

    def load(self, name: str, path: str) -> None:
        """Load an adapter; SGLang says in the body whether it did."""
        self._succeeded(self._post("/load_lora_adapter", {"lora_name": name, "lora_path": path}))

    def unload(self, name: str) -> None:
        """Unload an adapter."""
        self._post("/unload_lora_adapter", {"lora_name": name}, absent_is_fine=True)

    def logprobs(self, name: str | None, text: str) -> list[float]:
        """Return the input's logprobs by the native route."""
        document = {
            "text": text, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True, "logprob_start_len": 0,
        } | ({"lora_path": name} if name else {})  # fmt: skip
        answer = self._post("/generate", document)
        try:
            return _numbers([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])
        except (KeyError, IndexError, TypeError) as error:
            raise ReplicaError(f"{self.url} sent no logprobs of the prompt") from error

    def _succeeded(self, answer: Mapping[str, Any]) -> None:
        if answer.get("success") is False:
            raise ReplicaError(f"{self.url}: {str(answer.get('error_message'))[:300]}")


def _numbers(values: list[Any]) -> list[float]:
    return [float(value) for value in values]

"""Schemathesis against our own OpenAPI document: whatever it makes up, no answer is a 5xx."""

import json
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.config import SchemathesisConfig

EXAMPLES = int(os.environ.get("YORO_TEST_EXAMPLES", "10"))


@schemathesis.serializer("application/x-ndjson")
def _lines(_: Any, value: Any) -> bytes:
    """Send any made-up value as a line."""
    return value if isinstance(value, bytes) else json.dumps(value).encode()


@pytest.fixture(scope="module")
def contract(url: str) -> Any:
    """The OpenAPI document that the running API serves."""
    return schemathesis.openapi.from_url(f"{url}/openapi.json", config=SchemathesisConfig())


WITH_BODY = [
    (f"/v1/{name}", "POST")
    for name in ("traces", "traces/batch", "rewards", "rewards/batch", "keys", "dead-letters/replay")
]
WITHOUT = [
    ("/v1/limits", "GET"),
    ("/v1/keys", "GET"),
    ("/v1/keys/{prefix}", "DELETE"),
    ("/v1/dead-letters", "GET"),
]
CASES = [
    *((path, method, GenerationMode.POSITIVE) for path, method in WITH_BODY + WITHOUT),
    *((path, method, GenerationMode.NEGATIVE) for path, method in WITH_BODY),
]


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_no_made_up_request_is_answered_with_a_5xx(
    contract: Any, key: str, path: str, method: str, mode: GenerationMode
) -> None:
    """Driven by hand: schemathesis' own pytest plugin does not know pytest 9.2."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(contract[path][method].as_strategy(generation_mode=mode))
    def every_case(case: Case) -> None:
        answer = case.call(headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.headers["content-type"][0] == "application/problem+json"

    every_case()

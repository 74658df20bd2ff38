"""What docs/agents.md and docs/graders.md show is posted as they show it, and answered as they say."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def blocks(name: str, language: str) -> list[str]:
    """Fenced blocks of a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)


def run(snippet: str, names: dict[str, Any]) -> None:
    """Run a page's Python."""
    exec(snippet, names)  # noqa: S102 - our own page


def post(url: str, key: str, path: str, document: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}{path}", json=document, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 201, answer.text
    return answer.json()


def example() -> dict[str, Any]:
    """The documented trace with exact evidence."""
    document: dict[str, Any] = json.loads(blocks("agents", "json")[1])
    return document


@pytest.mark.parametrize(("name", "path"), [("agents", "/v1/traces"), ("graders", "/v1/rewards")])
def test_first_calls_and_snippets_work_in_the_order_in_which_they_stand(
    name: str, path: str, url: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (body,) = re.findall(rf'"\$YORO_URL{path}" .*?-d \'(.*?)\'', page(name), re.DOTALL)
    assert post(url, key, path, json.loads(body)) == json.loads(blocks(name, "json")[0])
    monkeypatch.setenv("YORO_URL", url)
    monkeypatch.setenv("AGENT_KEY", key)
    monkeypatch.setenv("GRADER_KEY", key)
    names: dict[str, Any] = {}
    first, second = blocks(name, "python")[:2]
    run(first, names)
    assert [result["status"] for result in names["results"]] == ["duplicate", "accepted"]
    run(second, names)


def test_an_answer_of_vllm_makes_the_documented_trace_which_is_exact(url: str, key: str) -> None:
    names: dict[str, Any] = {}
    run(blocks("agents", "python")[2], names)
    document = example()
    (call,) = document["calls"]
    answer = {  # as vLLM sends it, with what nobody here reads
        "id": document["trace_id"], "object": "chat.completion", "model": names["asked"]["model"],
        "choices": [
            {
                "index": 0, "stop_reason": None, "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Yes.", "tool_calls": [], "refusal": None},
                "logprobs": {
                    "content": [{"token": "?", "logprob": value, "bytes": [], "top_logprobs": []}
                                for value in call["logprobs"]]
                },
                "token_ids": call["completion_token_ids"],
            }
        ],
        "prompt_token_ids": call["prompt_token_ids"], "prompt_logprobs": None,
        "usage": {"prompt_tokens": 23, "completion_tokens": 3, "total_tokens": 26},
    }  # fmt: skip
    assert names["exact_trace"]("support", 0, names["asked"], answer) == document
    said = json.loads(blocks("agents", "json")[2])
    assert said["trainability"] == {"verdict": "exact", "reasons": []}
    assert post(url, key, "/v1/traces", document) == said


LESS_THAN_EXACT: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"logprobs": None}, "ids", "logprobs_missing"),
    ({}, {"logprobs": [-0.5]}, "ids", "logprobs_misaligned"),
    ({}, {"logprobs": [-0.5, None, -0.5]}, "ids", "logprobs_not_finite"),
    ({}, {"temperature": 0.7}, "ids", "logprobs_raw_at_other_temperature"),
    ({}, {"prompt_token_ids": None}, "text", "token_ids_incomplete"),
    ({"policy_version": None}, {}, "untrainable", "no_version"),
    ({"policy_version": 77}, {}, "untrainable", "unknown_version"),
    ({"messages": [{"role": "user", "content": "Is ice cold?"}]}, {}, "untrainable", "no_assistant_turn"),
    ({}, {"message_index": 1}, "untrainable", "call_misplaced"),
    ({}, {"top_p": 0.9}, "untrainable", "sampling"),
    ({"sampling": {"constrained": True}}, {}, "untrainable", "sampling"),
]


@pytest.mark.parametrize(("trace", "call", "verdict", "reason"), LESS_THAN_EXACT)
def test_every_documented_reason_for_less_than_exact_is_given(
    trace: dict[str, Any], call: dict[str, Any], verdict: str, reason: str,
    url: str, key: str,
) -> None:  # fmt: skip
    document = example()
    document["calls"][0].update(call)
    document |= {"trace_id": f"case-{LESS_THAN_EXACT.index((trace, call, verdict, reason))}", **trace}
    assert post(url, key, "/v1/traces", document)["trainability"] == {"verdict": verdict, "reasons": [reason]}
    (row,) = [line for line in page("agents").splitlines() if line.startswith(f"| `{verdict}` |")]
    assert f"`{reason}`" in row

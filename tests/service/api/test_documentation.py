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

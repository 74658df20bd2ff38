"""Webhooks: written with what makes them true, signed, tried again, and never sent inside."""

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from sqlalchemy import Engine, text

from service.database.engine import transaction
from service.webhooks.relay import Relay, send
from tests.conftest import Api
from tests.service.batches.ground import Ground, make_ground


class Endpoint:
    """A receiver that remembers what it got and answers as it is told."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.answer = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.received.append((dict(self.headers), body))
                self.send_response(outer.answer)
                self.send_header("Location", "http://localhost/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://localhost:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


def with_a_version(engine: Engine, api: Api, url: str) -> tuple[Ground, str]:
    ground = make_ground(engine)
    document = {"url": url, "events": ["version.published", "version.promoted", "alert.raised"]}
    made = api.call("ops", "POST", f"/v1/policies/{ground.name}/webhooks", json=document)
    assert made.status_code == 201, made.text
    for number in range(2):
        ground.trace(f"t{number}")
        ground.grade(f"t{number}", number)
    ground.form()
    ground.train()
    return ground, made.json()["secret"]


def deliveries(engine: Engine) -> list[Any]:
    with transaction(engine) as connection:
        return list(connection.execute(text("SELECT * FROM webhook_deliveries ORDER BY id")).all())


def make_due(engine: Engine) -> None:
    with transaction(engine) as connection:
        connection.execute(text("UPDATE webhook_deliveries SET due_at = now() WHERE due_at IS NOT NULL"))


def test_events_are_delivered_signed_once(engine: Engine, api: Api, endpoint: Endpoint) -> None:
    ground, secret = with_a_version(engine, api, endpoint.url)
    relay = Relay(engine, hosts=["localhost"])
    assert [relay.tick(), relay.tick()] == [2, 0]
    bodies = {json.loads(body)["event"]: json.loads(body)["data"] for _, body in endpoint.received}
    assert bodies["version.published"]["version"] == 1
    assert bodies["version.promoted"] == {"policy": ground.name, "version": 1, "before": 0}
    headers, body = endpoint.received[0]
    moment, _, given = headers["Yoro-Signature"].removeprefix("t=").partition(",v1=")
    expected = hmac.new(secret.encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
    assert given == expected


@pytest.mark.parametrize("answer", [500, 302])
def test_what_fails_is_tried_again_with_the_same_id_and_a_redirect_is_not_followed(
    engine: Engine, api: Api, endpoint: Endpoint, answer: int
) -> None:
    with_a_version(engine, api, endpoint.url)
    endpoint.answer = answer
    relay = Relay(engine, hosts=["localhost"])
    relay.tick()
    assert relay.tick() == 0, "the next try is later"
    assert {row.last_error for row in deliveries(engine)} == {f"the endpoint answered {answer}"}
    endpoint.answer = 204
    make_due(engine)
    relay.tick()
    ids = [json.loads(body)["id"] for _, body in endpoint.received]
    assert len(ids) == 4
    assert len(set(ids)) == 2
    assert all(row.delivered_at and row.due_at is None for row in deliveries(engine))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/x", "http://localhost:1/x", "http://169.254.169.254/latest", "http://10.0.0.1/",
        "http://[::1]:1/", "http://[::ffff:127.0.0.1]:1/", "http://0.0.0.0:1/", "http://2130706433:1/",
    ],
)  # fmt: skip
def test_no_connection_goes_to_an_address_that_is_not_public(url: str) -> None:
    assert "not a public address" in send(url, "secret", b"{}", ())


def test_a_webhook_is_listed_without_its_secret_and_removed_with_its_deliveries(
    engine: Engine, api: Api, endpoint: Endpoint
) -> None:
    ground, secret = with_a_version(engine, api, endpoint.url)
    path = f"/v1/policies/{ground.name}/webhooks"
    answer = api.call("ops", "GET", path)
    assert secret not in answer.text
    (listed,) = answer.json()["webhooks"]
    assert listed["pending"] == 2
    assert api.call("ops", "DELETE", f"{path}/{listed['id']}").status_code == 200
    assert deliveries(engine) == []
    bad = {"url": "ftp://example.com", "events": ["version.published"]}
    assert api.call("ops", "POST", path, json=bad).status_code == 422

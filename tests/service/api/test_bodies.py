"""Encodings and content types: inflated in a stream under a cap, after authentication."""

import functools
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import pytest
import zstandard

from tests.conftest import Api
from tests.documents import trace
from tests.service.api.conftest import send

BOMB = 100_000_000


def body() -> bytes:
    return json.dumps(trace(metadata={"x": "y" * 3000})).encode()


def in_two_members(text: bytes) -> bytes:
    return gzip.compress(text[:100]) + gzip.compress(text[100:])


def in_two_frames(text: bytes) -> bytes:
    return zstandard.compress(text[:100]) + zstandard.compress(text[100:])


def undeclared(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(text)


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress), ("gzip", in_two_members), ("x-gzip", gzip.compress), ("GZIP", gzip.compress),
        ("zstd", zstandard.compress), ("zstd", in_two_frames), ("zstd", undeclared), ("identity", bytes),
    ],
)  # fmt: skip
def test_compressed_bodies_are_read(door: Api, encoding: str, pack: Any) -> None:
    assert send(door, "/v1/traces", pack(body()), **{"Content-Encoding": encoding}).status_code == 201


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(body())[:-20]),
        ("gzip", gzip.compress(body())[:5]),
        ("gzip", b"not gzip"),
        ("gzip", gzip.compress(body()) + b"trailing"),
        ("zstd", zstandard.compress(body())[:-5]),
        ("zstd", b"not zstd"),
        ("zstd", zstandard.compress(body()) + b"trailing"),
        ("gzip", zlib.compress(body())),
        ("gzip", b""),
    ],
)
def test_damaged_bodies_are_malformed(door: Api, encoding: str, packed: bytes) -> None:
    answer = send(door, "/v1/traces", packed, **{"Content-Encoding": encoding})
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed")


@functools.cache
def bombs() -> dict[str, tuple[str, bytes]]:
    declared = zstandard.compress(b"a" * BOMB)
    packer = zlib.compressobj(9, wbits=31)
    piece = b"a" * 1_000_000
    packed = b"".join(packer.compress(piece) for _ in range(BOMB // len(piece))) + packer.flush()
    return {"zstd": ("zstd", declared), "gzip": ("gzip", packed), "gzip members": ("gzip", packed * 3)}


@pytest.mark.parametrize("kind", ["zstd", "gzip", "gzip members"])
def test_a_bomb_is_refused_without_unpacking_it(door: Api, kind: str) -> None:
    encoding, packed = bombs()[kind]
    tracemalloc.start()
    answer = send(door, "/v1/traces", packed, **{"Content-Encoding": encoding})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (answer.status_code, answer.json()["code"]) == (413, "inflated_bytes")
    assert peak < 64 * 1.7e6, "the cap itself and one step beyond it"


def test_nothing_is_unpacked_for_strangers(door: Api) -> None:
    headers = {"Content-Encoding": "zstd", "Authorization": "Bearer yoro_unknown"}
    answer = send(door, "/v1/traces", bombs()["zstd"][1], **headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-protobuf", "multipart/form-data", "nonsense"])
def test_another_content_type_is_415(door: Api, kind: str) -> None:
    answer = send(door, "/v1/traces", body(), **{"Content-Type": kind})
    assert (answer.status_code, answer.json()["code"]) == (415, "content_type")


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"]
)
def test_json_by_any_of_its_names_is_read(door: Api, kind: str) -> None:
    assert send(door, "/v1/traces", body(), **{"Content-Type": kind}).status_code == 201


def test_ndjson_is_for_batches(door: Api) -> None:
    ndjson = {"Content-Type": "application/x-ndjson"}
    assert send(door, "/v1/traces", body(), **ndjson).status_code == 415
    assert send(door, "/v1/traces/batch", body(), **ndjson).status_code == 207


def test_an_unknown_encoding_is_415(door: Api) -> None:
    assert send(door, "/v1/traces", body(), **{"Content-Encoding": "br"}).status_code == 415
    assert send(door, "/v1/traces", body(), **{"Content-Encoding": "gzip, gzip"}).status_code == 415


def test_25_megabytes_are_answered_not_cut_off(door: Api) -> None:
    """A body in chunks, without Content-Length."""
    chunks = (b"x" * 1_000_000 for _ in range(25))
    answer = door.call("agent", "POST", "/v1/traces", content=chunks)
    assert (answer.status_code, answer.json()["code"]) == (413, "body_bytes")

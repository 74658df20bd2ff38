"""Binary arrays: Postgres reads back what was encoded, whatever the values."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from service.database.engine import transaction
from service.ingest import arrays

TEXT = st.text(st.characters(blacklist_characters="\x00", blacklist_categories=["Cs"]), max_size=10)
MOMENT = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC))  # noqa: DTZ001
CASES: list[tuple[str, Any, Any]] = [
    ("bigint", arrays.bigints, st.integers(-(2**63), 2**63 - 1)),
    ("integer", arrays.integers, st.integers(-(2**31), 2**31 - 1)),
    ("float8", arrays.floats, st.floats(allow_nan=False)),
    ("text", arrays.texts, TEXT),
    ("bytea", arrays.byteas, st.binary(max_size=10)),
    ("timestamptz", arrays.moments, MOMENT),
]


@pytest.mark.parametrize(("kind", "encode", "values"), CASES, ids=[kind for kind, *_ in CASES])
def test_arrays_come_back_as_they_went(engine: Engine, kind: str, encode: Any, values: Any) -> None:
    @settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.lists(st.none() | values, max_size=5) | st.lists(values, max_size=5))
    def round_trip(column: list[Any]) -> None:
        with transaction(engine) as connection:
            found = connection.execute(
                text(f"SELECT value FROM unnest(CAST(:a AS {kind}[])) AS value"),  # noqa: S608
                {"a": encode(column)},
            ).scalars()
            assert [bytes(v) if isinstance(v, memoryview) else v for v in found] == column

    round_trip()


def test_booleans_come_back(engine: Engine) -> None:
    with transaction(engine) as connection:
        found = connection.execute(
            text("SELECT * FROM unnest(CAST(:a AS boolean[]))"), {"a": arrays.booleans([True, False])}
        )
        assert list(found.scalars()) == [True, False]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_what_does_not_fit_is_an_overflow_of_its_item(value: int) -> None:
    for column in ([value], [None, value]):
        with pytest.raises(OverflowError):
            arrays.integers(column)

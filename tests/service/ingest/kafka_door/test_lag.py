"""How far the consumer is behind, as readyz, Prometheus, status and alerts have it."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine, text

from service import telemetry
from service.batches import alerts
from service.batches.outlook import outlook
from service.database.engine import transaction
from service.ingest import consumer_lag
from service.ingest.consumer_lag import Lag, LagMeter
from service.ingest.messages import Message, Partition, Reach
from tests.conftest import MakePolicy

HERE = Partition("yoro.traces", 0)
HOUR = timedelta(hours=1)


def at(offset: int, produced_at: datetime | None) -> Message:
    return Message(HERE, offset, None, b"{}", (), produced_at)


def measured(meter: LagMeter, reaches: Mapping[Partition, Reach]) -> Mapping[Partition, Lag]:
    meter._measured_at = 0.0
    meter.tick(lambda: reaches)
    return meter.lags()


def test_what_is_in_hand_is_behind_until_it_is_stored() -> None:
    meter, produced = LagMeter(limit_seconds=60), datetime.now(UTC) - HOUR
    batch = [at(10, produced), at(11, produced + HOUR)]
    assert measured(meter, {HERE: Reach(10, 10)}) == {HERE: Lag(0, None)}
    meter.polled(batch)
    assert measured(meter, {HERE: Reach(12, 20)}) == {HERE: Lag(10, produced)}
    assert not meter.is_ready()
    assert telemetry.CONSUMER_LAG.labels("yoro.traces", "0")._value.get() == 10
    assert telemetry.CONSUMER_OLDEST.labels("yoro.traces", "0")._value.get() >= 3600
    meter.stored(batch)
    assert measured(meter, {HERE: Reach(12, 12)}) == {HERE: Lag(0, None)}
    assert meter.is_ready()


def test_what_was_not_read_yet_is_as_old_as_the_last_message_before_it() -> None:
    meter, produced = LagMeter(limit_seconds=60), datetime.now(UTC) - HOUR
    meter.polled([at(10, produced)])
    meter.stored([at(10, produced)])
    assert measured(meter, {HERE: Reach(11, 15)}) == {HERE: Lag(4, produced)}
    assert not meter.is_ready()
    assert measured(meter, {}) == {}
    assert meter.is_ready(), "what another consumer owns is the other's to tell"


def test_a_loop_that_stopped_turning_is_not_ready() -> None:
    meter = LagMeter(limit_seconds=60)
    assert meter.is_ready()
    meter._ticked_at -= consumer_lag.STUCK_SECONDS + 1
    assert not meter.is_ready()


def test_alerts_name_dead_letters_lag_and_consumers_that_fell_silent(
    engine: Engine, make_policy: MakePolicy
) -> None:
    policy, other = make_policy(), make_policy("other")

    def found(of: int = policy.id) -> dict[str, str]:
        with transaction(engine) as connection:
            view = outlook(connection, of)
            return {alert.code: alert.detail for alert in alerts.find(connection, view)}

    def run(statement: str, **named: object) -> None:
        with transaction(engine) as connection:
            connection.execute(text(statement), named)

    meter = LagMeter(limit_seconds=60)
    measured(meter, {HERE: Reach(5, 5)})
    consumer_lag.report(engine, meter, "me")
    assert found() == {}
    meter.polled([at(5, datetime.now(UTC) - HOUR)])
    measured(meter, {HERE: Reach(6, 6)})
    consumer_lag.report(engine, meter, "me")
    assert "1 partitions are behind, the oldest message is 36" in found()["consumer_lag"]
    run("UPDATE consumer_lags SET reported_at = reported_at - interval '2 minutes'")
    assert "nobody consumes 1 partitions" in found()["consumer_lag"]
    run("UPDATE consumer_lags SET reported_at = reported_at - interval '2 days'")
    consumer_lag.report(engine, LagMeter(60), "another")
    assert found() == {}, "a partition that nobody spoke of for a day is forgotten"

    add = """
    INSERT INTO dead_letters
        (topic, partition, message_offset, digest, policy_id, code, detail, kept, headers)
    VALUES ('t', 0, :offset, '', :policy, 'invalid', '', 'whole', '[]')
    """
    run(add, offset=1, policy=policy.id)
    assert found(other.id) == {}
    run(add, offset=2, policy=None)
    assert "2 Kafka messages" in found()["dead_letters"]
    assert "1 Kafka messages" in found(other.id)["dead_letters"]
    run("UPDATE dead_letters SET replayed_at = now()")
    assert found() == {}

"""What kafka-python is told: pure functions of the settings.

Knows no broker. What kafka-python 3 does by default and we do not want is said here: a new group would
begin at the end, positions would be committed though nothing is stored yet, a message beyond 1 MB would
not get through, and topics would come to be by being asked for.
"""

from typing import Any

from service.settings import KafkaSettings, Limits

ENVELOPE_BYTES = 1 << 20
"""What a message may have beside a document of the largest size: key, headers, framing."""
REQUEST_SECONDS = 30.0


def largest_message(limits: Limits) -> int:
    """Return how large a message may be on the broker: any body that HTTP takes, and its envelope."""
    return limits.body_bytes + ENVELOPE_BYTES


def connection_arguments(settings: KafkaSettings) -> dict[str, Any]:
    """Return what consumer, producer and admin client are all told."""
    secret = {
        "sasl_plain_password": settings.sasl_password,
        "ssl_password": settings.ssl_password,
    }
    given = {
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.sasl_username,
        "ssl_cafile": settings.ssl_cafile and str(settings.ssl_cafile),
        "ssl_certfile": settings.ssl_certfile and str(settings.ssl_certfile),
        "ssl_keyfile": settings.ssl_keyfile and str(settings.ssl_keyfile),
        **{name: value and value.get_secret_value() for name, value in secret.items()},
    }
    return {
        "bootstrap_servers": [broker.strip() for broker in settings.bootstrap.split(",")],
        "security_protocol": settings.security_protocol,
        "ssl_check_hostname": settings.ssl_check_hostname,
        "request_timeout_ms": milliseconds(REQUEST_SECONDS),
        "bootstrap_timeout_ms": milliseconds(10.0),
        "reconnect_backoff_max_ms": 2_000,
        **{name: value for name, value in given.items() if value is not None},
    }


def consumer_arguments(settings: KafkaSettings, limits: Limits) -> dict[str, Any]:
    """Return what the consumer is told."""
    return connection_arguments(settings) | {
        "group_id": settings.group,
        "client_id": "yoro-consumer",
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "max_poll_records": settings.poll_messages,
        "max_poll_interval_ms": milliseconds(settings.poll_interval_seconds),
        "session_timeout_ms": milliseconds(settings.session_seconds),
        "heartbeat_interval_ms": min(3_000, milliseconds(settings.session_seconds / 3)),
        "max_partition_fetch_bytes": largest_message(limits),
        "fetch_max_bytes": largest_message(limits),
        "allow_auto_create_topics": False,
    }


def producer_arguments(settings: KafkaSettings, limits: Limits) -> dict[str, Any]:
    """Return what the producer is told. Idempotence is off: after one refusal it would refuse for good."""
    return connection_arguments(settings) | {
        "client_id": "yoro-producer",
        "acks": "all",
        "enable_idempotence": False,
        "max_request_size": largest_message(limits) + ENVELOPE_BYTES,
        "max_block_ms": 5_000,
        "delivery_timeout_ms": milliseconds(REQUEST_SECONDS + 10),
        "linger_ms": 5,
        "allow_auto_create_topics": False,
    }


def milliseconds(seconds: float) -> int:
    """Return a time as Kafka counts it."""
    return int(seconds * 1000)

"""How the demo's agent and grader send what they have: by HTTP (yoro.client.Client) or by Kafka."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from service.ingest.messages import Message, Partition
from service.settings import Settings


class Sender(Protocol):
    """Whoever sends traces and rewards."""

    def post_trace(self, trace: Mapping[str, Any]) -> Any:
        """Send one trace; it is safe when this returns."""
        ...

    def post_reward(self, grade: Mapping[str, Any]) -> Any:
        """Send one grade; it is safe when this returns."""
        ...


class KafkaSender:
    """A producer as any agent may have one: JSON values, the trace's id as the key."""

    def __init__(self, settings: Settings, port: int) -> None:
        """Connect to the broker of `yoro up --kafka`."""
        from service.ingest.kafka import Publisher

        self._kafka = settings.kafka.model_copy(update={"bootstrap": f"127.0.0.1:{port}"})
        self._publisher = Publisher(self._kafka, settings.limits)

    def post_trace(self, trace: Mapping[str, Any]) -> None:
        """Publish a trace. Raises OSError when the broker did not confirm it."""
        self._publish(self._kafka.traces_topic, trace)

    def post_reward(self, grade: Mapping[str, Any]) -> None:
        """Publish a grade. Raises OSError when the broker did not confirm it."""
        self._publish(self._kafka.rewards_topic, grade)

    def _publish(self, topic: str, document: Mapping[str, Any]) -> None:
        key = str(document["trace_id"]).encode()
        value = json.dumps(document, separators=(",", ":")).encode()
        (error,) = self._publisher.send([Message(Partition(topic, -1), 0, key, value)])
        if error:
            raise OSError(f"Kafka did not confirm a message to {topic}: {error}")

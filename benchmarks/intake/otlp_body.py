"""One OTLP export of the benchmark's document, as protobuf, by a rival's interpreter: it has the schema.

    python otlp_body.py DOCUMENT.json COUNT > BODY

One root span a trace, the fewest rows that a tracing server can make of it. Trace and span ids are
placeholders of the right length (16 and 8 bytes), which the load generator replaces.
"""

import json
import sys
from pathlib import Path

TRACE_PLACE, SPAN_PLACE = b"\x01TRACE-ID-HERE-\x01", b"\x01SPANID\x01"
START, NANOSECONDS = 1_790_000_000_000_000_000, 5_000_000_000


def main() -> None:
    """Write the body to stdout."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    document = json.loads(Path(sys.argv[1]).read_text())
    export = ExportTraceServiceRequest()
    spans = export.resource_spans.add()
    _put(spans.resource.attributes, "service.name", "agent")
    scope = spans.scope_spans.add()
    for _ in range(int(sys.argv[2])):
        span = scope.spans.add(trace_id=TRACE_PLACE, span_id=SPAN_PLACE, name="agent", kind=1)
        span.start_time_unix_nano, span.end_time_unix_nano = START, START + NANOSECONDS
        span.status.code = 1
        for name, value in _attributes(document):
            _put(span.attributes, name, value)
    sys.stdout.buffer.write(export.SerializeToString())


def _attributes(document):  # type: ignore[no-untyped-def]
    *before, last = document["messages"]
    yield "gen_ai.operation.name", "invoke_agent"
    yield "gen_ai.input.messages", json.dumps(before)
    yield "gen_ai.output.messages", json.dumps([last])
    yield "gen_ai.tool.definitions", json.dumps(document["tools"])
    for name in ("context", "sampling", "metadata"):
        yield f"yoro.{name}", json.dumps(document[name])
    yield "yoro.policy", document["policy"]


def _put(attributes, name, value):  # type: ignore[no-untyped-def]
    attributes.add(key=name).value.string_value = value


if __name__ == "__main__":
    main()

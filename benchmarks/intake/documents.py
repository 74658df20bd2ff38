"""The documents that the intake benchmark sends: a support conversation with tools, about 4 KB."""

import json
from typing import Any

POLICY = "bench"


def trace(trace_id: str) -> dict[str, Any]:
    """Return a trace of about 4 KB with eleven messages."""
    turns = [message for turn in range(3) for message in _turn(turn)]
    return {
        "policy": POLICY,
        "trace_id": trace_id,
        "policy_version": 0,
        "messages": [
            {"role": "system", "content": "You are a support agent of a shop. " * 20},
            *turns,
            {"role": "assistant", "content": "Your refund is on its way, it takes three days. " * 4},
        ],
        "tools": [_tool("lookup_order"), _tool("refund_order")],
        "context": {"customer": "acme", "workflow": "refund", "documents": 3},
        "sampling": {"temperature": 1.0, "top_p": 1.0},
        "status": "completed",
        "metadata": {"environment": "production", "region": "eu-central-1"},
    }


def grade(trace_id: str) -> dict[str, Any]:
    """Return a grade of a trace."""
    return {
        "policy": POLICY,
        "trace_id": trace_id,
        "grader": "unit-tests",
        "value": 0.75,
        "comment": "three of four checks passed",
    }


def encoded(document: dict[str, Any]) -> bytes:
    """Return the document as httpx, and so our Client, would send it."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _turn(number: int) -> list[dict[str, Any]]:
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "lookup_order", "arguments": '{"order": "8812", "deep": true}'},
    }
    return [
        {
            "role": "user",
            "content": "My order 8812 did not arrive, please look into it; I paid by card. " * 3,
        },
        {"role": "assistant", "content": "I will look that up for you. " * 3, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": f"call_{number}",
            "content": '{"state": "lost", "carrier": "x"}' * 3,
        },
    ]


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
    described = {"name": name, "description": "Works on one order of the shop.", "parameters": parameters}
    return {"type": "function", "function": described}

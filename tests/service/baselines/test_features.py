"""What enters a task's features, and who is excluded as a neighbour."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np

from service.baselines.features import FIELDS, TaskFeatures, excluded_neighbours, task_features
from tests.service.baselines.synthetic_tasks import synthetic_task


def test_features_have_no_room_for_a_response_or_a_reward():
    assert {field.name for field in fields(TaskFeatures)} == {"text", "prompt_length", "context"}


def test_text_holds_prompt_context_system_and_tools_in_a_fixed_order():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Refund 7"}, {"type": "image_url"}]},
    ]
    tools = [{"type": "function", "function": {"name": "refund", "description": "Pay back"}}]
    features = task_features(messages, tools, {"tier": 2, "customer": "acme"})
    assert features.text == (
        "Refund 7\n[image_url]\n\ncustomer=acme\ntier=2.0\n\nBe brief.\n\nrefund: Pay back"
    )
    assert features.prompt_length == len("Refund 7\n[image_url]")
    assert features == task_features(messages, tools, {"customer": "acme", "tier": 2})


def test_fields_that_flatten_to_one_name_are_no_error():
    features = task_features([], [], {"a.b": 1, "a": {"b": "x"}})
    assert features.context == {"a.b": "x"}


def test_context_is_bounded_whatever_was_sent():
    context = {"k" * 1_000 + f"{number}": "v" * 10_000 for number in range(1_000)}
    features = task_features([{"role": "user", "content": "hello"}], [], context)
    assert features.text.startswith("hello")
    assert len(features.text) < 5_000
    assert len(features.context) <= FIELDS
    assert all(len(name) < 300 and len(str(value)) < 300 for name, value in features.context.items())


def test_odd_content_and_context_are_flattened_never_refused():
    messages = [{"role": "user", "content": None}, {"content": {"text": "hello"}}, {"content": 7}]
    context = {
        "a": {"b": 1},
        "c": [1, {"z": None}],
        "n": None,
        "x": math.nan,
        "h": 10**400,
        "t": True,
    }
    features = task_features(messages, [{"name": "f"}, {}], context)
    assert features.context["a.b"] == 1.0
    assert features.context["t"] is True
    assert features.context["c"] == '[1, {"z": null}]'
    assert "n" not in features.context
    assert isinstance(features.context["x"], str)
    assert isinstance(features.context["h"], str)


def test_long_prompts_keep_their_ends_and_their_true_length():
    features = task_features([{"role": "user", "content": "a" * 50_000 + "b" * 50_000}], [], {})
    assert features.prompt_length == 100_000
    assert len(features.text) < 10_000
    assert features.text.startswith("a")
    assert features.text.endswith("b")


def test_excluded_neighbours_are_self_redelivery_session_and_containing_prompt():
    tasks = [
        synthetic_task("one", "a", session_id="s"),
        synthetic_task("two", "b", session_id="s"),
        synthetic_task("one", "a"),
        synthetic_task("three", "c", contains=["b"]),
    ]
    expected = np.array(
        [
            [1, 1, 1, 0],
            [1, 1, 0, 1],
            [1, 0, 1, 0],
            [0, 0, 0, 1],
        ],
        dtype=bool,
    )
    np.testing.assert_array_equal(excluded_neighbours(tasks), expected)

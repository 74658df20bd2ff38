"""Presets: plain values, stored and shown; what is given beside them wins."""

from typing import Any

import pytest

from service import presets
from service.errors import Invalid
from service.policies import PolicySettings
from tests.conftest import Api


def create(api: Api, **document: Any) -> Any:
    return api.call("ops", "POST", "/v1/policies", json={"base_model": "smollm2-135m", **document})


def test_a_preset_is_stored_as_its_values_and_what_is_given_beside_it_wins(api: Api) -> None:
    answer = create(api, name="p", preset="flashreinforce", objective={"gate_delta": 1e-3, "weight_cap": 2})
    assert answer.status_code == 201
    settings = answer.json()["settings"]
    assert "preset" not in settings
    objective = settings["objective"]
    assert (objective["aggregation"], objective["reference_kl"]) == ("sequence_mean", 0.0)
    assert (objective["gate_delta"], objective["weight_cap"]) == (1e-3, 2.0)
    assert settings["baseline"]["estimator"] == "leave_one_out"
    assert settings["optimizer"] == PolicySettings(base_model="x").optimizer.model_dump(mode="json")


def test_another_preset_leaves_nothing_of_the_first(api: Api) -> None:
    create(api, name="p", preset="flashreinforce", objective={"expected_tokens": 8})
    path = "/v1/policies/p"
    changed = api.call("ops", "PATCH", path, json={"preset": "gs1", "objective": {"weight_cap": None}})
    settings = changed.json()["settings"]
    expected = PolicySettings.model_validate(
        {"base_model": "x", "objective": {"expected_tokens": 8, "weight_cap": None}}
    )
    assert settings["objective"] == expected.objective.model_dump(mode="json")
    assert settings["baseline"]["estimator"] == "auto"


@pytest.mark.parametrize("name", ["grpo", 7, ["gs1"]])
def test_an_unknown_preset_is_refused_by_name(api: Api, name: Any) -> None:
    refused = create(api, name="p", preset=name)
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/body/preset")
    with pytest.raises(Invalid) as error:
        presets.expand({"preset": name})
    assert [each.pointer for each in error.value.errors] == ["/preset"]


def test_presets_name_the_same_fields() -> None:
    first, *others = [
        {(part, name) for part, fields in preset.items() for name in fields}
        for preset in presets.PRESETS.values()
    ]
    assert all(fields == first for fields in others)

"""Named settings of the objective and its baseline: what a published method uses, spelled out.

Knows no database. A preset is expanded once, where a document comes in: what is stored and shown are
plain values, which a later release of this module cannot change. Invariant: every preset names the same
fields, so that choosing another one leaves nothing of the first behind.
"""

from collections.abc import Mapping
from typing import Any, Literal

from service.errors import FieldError, Invalid

PresetName = Literal["gs1", "flashreinforce"]

# "You Only Rollout Once" (Trajectory Labs, November 2026): token-level, with a KL penalty, over
# FlashREINFORCE's gate. Deviations: the post states neither the penalty's coefficient and estimator nor
# its kernel, so these are ours; so is the cap on single weights, which the gate's mean does not bound.
_GS1: Mapping[str, Any] = {
    "objective": {
        "aggregation": "token_level", "gate": "binary_kl", "gate_delta": 3e-3, "weight_cap": 5.0,
        "ppo_clip": None, "reference_kl": 1e-3, "reference_kl_estimator": "k2",
    },
    "baseline": {"estimator": "auto"},
}  # fmt: skip

# yifanzhang-pro/FlashREINFORCE, loss.py and examples/settings/common.json. Deviation: its baseline is
# the batch mean with the rollout itself, which is (B-1)/B of this one's advantage.
_FLASHREINFORCE: Mapping[str, Any] = {
    "objective": {
        "aggregation": "sequence_mean", "gate": "binary_kl", "gate_delta": 3e-3, "weight_cap": None,
        "ppo_clip": None, "reference_kl": 0.0, "reference_kl_estimator": "k2",
    },
    "baseline": {"estimator": "leave_one_out"},
}  # fmt: skip

PRESETS: Mapping[PresetName, Mapping[str, Any]] = {"gs1": _GS1, "flashreinforce": _FLASHREINFORCE}


def expand(document: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `preset` by its values; fields given beside it win. Raises Invalid for an unknown name."""
    given = {name: value for name, value in document.items() if name != "preset"}
    if document.get("preset") is None:
        return given
    for name, values in PRESETS.items():
        if name == document["preset"]:
            return _over(values, given)
    raise Invalid("", [FieldError("/preset", f"must be one of {', '.join(PRESETS)}")])


def _over(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in given.items():
        inner = values.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[name] = _over(inner, value)
        else:
            merged[name] = value
    return merged

"""Settings of the demo's policy, chosen by measurement; everything else is the product's default.

Knows nothing of tasks or processes. Invariant: valid `service.policies.PolicySettings` together with
`base_model`.
"""

from collections.abc import Mapping
from typing import Any

DEFAULT_STEPS = 24
SETTINGS: Mapping[str, Any] = {
    "adapter": {"rank": 16, "alpha": 16.0},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
    "objective": {"expected_tokens": 8.0, "reference_kl": 0.0, "gate_delta": 0.05},
    "baseline": {"temperature": 0.1},
    "batching": {"size": 32},
}

"""Settings of the demo's policy, chosen by measurement; everything else is the product's default.

Knows nothing of tasks or processes. Invariant: valid `service.policies.PolicySettings` together with
`base_model`. The agent waits for each version before it samples again: one version behind, the gate
rejected up to half of the rollouts, and in two of five runs the reward fell back to where it began.
"""

from collections.abc import Mapping
from typing import Any

DEFAULT_STEPS = 16
SETTINGS: Mapping[str, Any] = {
    "adapter": {"rank": 16, "alpha": 16.0},
    "optimizer": {"learning_rate": 8e-4, "warmup_steps": 4, "betas": [0.9, 0.99], "clip_norm": 0.2},
    "objective": {"expected_tokens": 8.0, "reference_kl": 0.0, "gate_delta": 0.05},
    "batching": {"size": 32},
}

"""Which estimator scores the next batch, and with which hyperparameters: `baseline: auto`.

Pure state in, pure state out; the caller stores it between batches. Every candidate scores every
batch, so that their errors on single rollouts can be compared. Does not know what the estimators
do. Invariant: what scores a batch was chosen and fitted on earlier batches only.

    state ──predictions──> baselines of batch t          state ──advanced──> state for batch t+1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np

from service.baselines.estimators import ESTIMATORS, Baselines, Estimator, Scored, make_estimator
from service.baselines.gaussian_process import GaussianProcess
from service.baselines.marginal_likelihood import fitted

AUTO = "auto"
"""Name in settings of what this module does."""
FIRST_CHOICE = "gaussian_process"
CANDIDATES = tuple(name for name in ESTIMATORS if name != "zero")
COMPARED_BATCHES = 32
"""The choice rests on the last so many batches."""
MINIMUM_BATCHES = 8
"""Fewer batches switch nothing."""
MINIMUM_GAIN = 0.02
"""A challenger must lower the mean squared advantage by this share, or the incumbent stays."""
MINIMUM_DEVIATIONS = 2.0
"""And by so many standard errors of the paired difference."""
REFIT_EVERY = 4
"""Batches between hyperparameter fits, after the first, second and fourth batch."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What the choice for the next batch rests on; a JSON document through `as_document`."""

    chosen: str = FIRST_CHOICE
    batches: int = 0
    """Batches seen."""
    errors: tuple[Mapping[str, float], ...] = ()
    """Mean squared advantage by candidate, for each of the last `COMPARED_BATCHES`."""
    parameters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Fitted hyperparameters by candidate; one without has its defaults."""

    def as_document(self) -> dict[str, Any]:
        """The state as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """The state from `as_document`'s values, after a trip through JSON."""
        return cls(**{**document, "errors": tuple(document["errors"])})

    def candidate(self, name: str) -> Estimator:
        """The estimator of that name as fitted so far."""
        return make_estimator(name, **self.parameters.get(name, {}))


def predictions(state: Selection, batch: Scored, history: Scored) -> dict[str, Baselines]:
    """Every candidate's baselines; the one to train with is `[state.chosen]`."""
    return {name: state.candidate(name).predict(batch, history) for name in CANDIDATES}


def advanced(state: Selection, made: Mapping[str, Baselines], batch: Scored, history: Scored) -> Selection:
    """The state for the next batch, now that this batch's rewards have been scored."""
    after = scored(state, squared_errors(made, batch))
    if not refit_is_due(after):
        return after
    seen = Scored([*history.tasks, *batch.tasks], np.concatenate([history.rewards, batch.rewards]))
    return refitted(after, seen)


def squared_errors(made: Mapping[str, Baselines], batch: Scored) -> dict[str, float]:
    """Mean squared advantage of each candidate on a batch."""
    return {name: float(np.mean((batch.rewards - b.values) ** 2)) for name, b in made.items()}


def scored(state: Selection, squared: Mapping[str, float]) -> Selection:
    """The state with one more batch's errors, and the choice that follows from them."""
    errors = (*state.errors, squared)[-COMPARED_BATCHES:]
    return Selection(choice(state.chosen, errors), state.batches + 1, errors, state.parameters)


def refit_is_due(state: Selection) -> bool:
    """Tell whether hyperparameters are to be fitted after the newest batch."""
    return state.batches in (1, 2) or state.batches % REFIT_EVERY == 0


def refitted(state: Selection, seen: Scored) -> Selection:
    """The state with hyperparameters fitted to these rollouts, oldest first."""
    name = GaussianProcess.name
    process = GaussianProcess.from_parameters(**state.parameters.get(name, {}))
    fit = {key: float(value) for key, value in fitted(process, seen).parameters.items()}
    return replace(state, parameters={**state.parameters, name: fit})


def choice(incumbent: str, errors: tuple[Mapping[str, float], ...]) -> str:
    """The best challenger that is surely and noticeably better, else the incumbent.

    Hysteresis: errors of 32 batches are noisy, and each switch changes what training sees.
    """
    rows = [row for row in errors if incumbent in row]
    if len(rows) < MINIMUM_BATCHES:
        return incumbent
    held = np.array([row[incumbent] for row in rows])
    gains = {}
    for name in set.intersection(*(set(row) for row in rows)) - {incumbent}:
        gained = held - np.array([row[name] for row in rows])
        deviation = gained.std(ddof=1) / np.sqrt(len(gained))
        if gained.mean() > max(MINIMUM_GAIN * held.mean(), MINIMUM_DEVIATIONS * deviation):
            gains[name] = float(gained.mean())
    return max(sorted(gains), key=gains.__getitem__, default=incumbent)

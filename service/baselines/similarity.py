"""Estimators that average the rewards of similar tasks: softmax kernels and prompt-length buckets.

Do not know the scale of the rewards or of the similarities: temperatures are given, not learned
(`gaussian_process` learns). Invariants: those of `linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from service.baselines.features import Task, exclusions
from service.baselines.linear import (
    HALF_LIFE_VERSIONS,
    Baselines,
    Scored,
    ageing,
    linear_baselines,
    seen_by_all_members,
)
from service.baselines.terms import tfidf


def softmax_affinities(
    logits: NDArray[np.float64], tasks: Sequence[Task], half_life: float
) -> NDArray[np.float64]:
    """exp(logit) · 2^(−version gap / half_life), each row scaled by its greatest allowed entry."""
    rows = len(logits)
    allowed = np.where(exclusions(tasks, rows), -np.inf, logits)
    greatest = allowed.max(axis=1, keepdims=True)
    shifted = allowed - np.where(np.isfinite(greatest), greatest, 0.0)
    return np.asarray(np.exp(shifted) * ageing(tasks, rows, half_life))


@dataclass(frozen=True, slots=True)
class EmbeddingSoftmax:
    """w_ij ∝ exp(cos(e_i, e_j) / T), j ≠ i, over sentence embeddings of the task features.

    Source: "You Only Rollout Once", App. B's softmax kernel, with embeddings for TF-IDF vectors.
    Deviation: weights halve every `half_life` policy versions.
    """

    temperature: float = 0.1
    half_life: float = HALF_LIFE_VERSIONS
    name: ClassVar[str] = "embedding_softmax"

    def predict(self, batch: Scored, history: Scored) -> Baselines:
        """Average the others of batch and history, the most similar weighing most."""
        tasks = [*batch.tasks, *history.tasks]
        vectors = np.stack([task.embedding for task in tasks]).astype(np.float64)
        logits = vectors[: len(batch.tasks)] @ vectors.T / self.temperature
        affinities = softmax_affinities(logits, tasks, self.half_life)
        parameters = {"temperature": self.temperature, "half_life": self.half_life}
        return linear_baselines(self, batch, history, affinities, parameters)


@dataclass(frozen=True, slots=True)
class TfidfSoftmax:
    """w_ij ∝ exp(cos(tfidf_i, tfidf_j) / T), j ≠ i, T = 0.1.

    Source: "You Only Rollout Once", App. B. Deviations: those of `terms.tfidf`; document
    frequencies come from history alone; weights halve every `half_life` policy versions.
    """

    temperature: float = 0.1
    half_life: float = HALF_LIFE_VERSIONS
    name: ClassVar[str] = "tfidf_softmax"

    def predict(self, batch: Scored, history: Scored) -> Baselines:
        """Average the others of batch and history, the most similar weighing most."""
        tasks = [*batch.tasks, *history.tasks]
        fitted_on = [task.features.text for task in seen_by_all_members(batch, history)]
        vectors = tfidf([task.features.text for task in tasks], fitted_on)
        logits = (vectors[: len(batch.tasks)] @ vectors.T).toarray() / self.temperature
        affinities = softmax_affinities(logits, tasks, self.half_life)
        parameters = {"temperature": self.temperature, "half_life": self.half_life}
        return linear_baselines(self, batch, history, affinities, parameters)


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Mean reward of the other rollouts whose prompt length lies in the same quantile bucket.

    Source: "You Only Rollout Once", App. B: five buckets of log prompt length (quantiles are the
    same with and without the logarithm), this batch and the previous 16. Deviations: bucket edges
    come from history alone, so that no rollout places its own edge; without history there is one
    bucket, which is the leave-one-out mean; weights halve every `half_life` policy versions.
    """

    buckets: int = 5
    half_life: float = HALF_LIFE_VERSIONS
    name: ClassVar[str] = "length_buckets"

    def predict(self, batch: Scored, history: Scored) -> Baselines:
        """Average the others of the same bucket."""
        tasks = [*batch.tasks, *history.tasks]
        lengths = np.array([task.features.prompt_length for task in tasks])
        seen = [task.features.prompt_length for task in seen_by_all_members(batch, history)]
        quantiles = np.linspace(0, 1, self.buckets + 1)[1:-1]
        edges = np.quantile(seen, quantiles) if seen else np.empty(0)
        bucket = np.searchsorted(edges, lengths, side="right")
        same = bucket[: len(batch.tasks), None] == bucket[None, :]
        worth = ageing(tasks, len(batch.tasks), self.half_life)
        parameters = {"buckets": self.buckets, "half_life": self.half_life}
        return linear_baselines(self, batch, history, same * worth, parameters)

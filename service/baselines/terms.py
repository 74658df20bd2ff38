"""TF-IDF vectors of task texts, by words and by spelling; frequencies fitted on earlier batches only.

Terms are hashed, so that a text's own vector needs no vocabulary and nothing of other texts enters
it but the document frequencies. Does not know which texts may inform which; the caller passes the
texts to fit on.

Invariants: rows have unit norm (a text without terms has a zero row); equal inputs, equal bits.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from threading import Lock

import numpy as np
from cachetools import LRUCache, cached
from numpy.typing import NDArray
from scipy import sparse

BUCKETS = 2**18
SKETCH = 1_024
GRAM_LENGTHS = (3, 4, 5)
Frequencies = tuple[NDArray[np.int64], NDArray[np.float64]]
CACHE_BYTES = 128 << 20
"""Of each of two caches; a text takes 16 bytes for each of its distinct terms, or runs of characters."""
DIGIT = re.compile(r"\d")
TERM = re.compile(r"\d+|[^\W\d_]+")
UNSPACED = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
"""Scripts written without spaces between words: Thai, Lao, Japanese and Chinese."""


def tfidf(
    texts: Sequence[str], fitted_on: Sequence[str], *, greatest_idf: float = math.inf
) -> sparse.csr_array:
    """[N, BUCKETS] rows (1 + ln tf) · min(idf, greatest_idf), normalised; idf = ln((1 + n) / (1 + df)).

    Source: "You Only Rollout Once", App. B, which leaves the variant open. Deviations from the
    textbook: hashed terms, numbers reduced to their digit count (`terms`), and n and df counted on
    earlier batches; with none, idf = 1. Terms that every earlier text has, such as the words of a
    shared system prompt, weigh nothing.
    """
    return _weighted(texts, fitted_on, term_frequencies, greatest_idf)


def spelling_sketch(texts: Sequence[str], fitted_on: Sequence[str]) -> NDArray[np.float32]:
    """[N, SKETCH] unit rows whose products approximate cosines of character n-gram TF-IDF vectors.

    Each bucket is added, with a sign of its own, to one of SKETCH coordinates (feature hashing,
    Weinberger et al. 2009); the error of a cosine is about SKETCH^-1/2 = 0.03.
    """
    vectors = _weighted(texts, fitted_on, gram_frequencies)
    signs = np.where(vectors.indices & SKETCH, 1.0, -1.0)
    rows = np.repeat(np.arange(len(texts)), np.diff(vectors.indptr))
    places = rows * SKETCH + vectors.indices % SKETCH
    folded = np.bincount(places, vectors.data * signs, minlength=len(texts) * SKETCH)
    sketch = folded.reshape(len(texts), SKETCH)
    norms = np.sqrt(np.einsum("ij,ij->i", sketch, sketch))
    return np.asarray(sketch / np.maximum(norms, 1e-12)[:, None], dtype=np.float32)


def _weighted(
    texts: Sequence[str],
    fitted_on: Sequence[str],
    count: Callable[[str], Frequencies],
    greatest_idf: float = math.inf,
) -> sparse.csr_array:
    rows = [count(text) for text in texts]
    columns = np.concatenate([row[0] for row in rows])
    inverse = inverse_document_frequencies(columns, [count(text)[0] for text in fitted_on])
    values = np.concatenate([row[1] for row in rows]) * np.minimum(inverse, greatest_idf)
    starts = np.cumsum([0, *(len(row[0]) for row in rows)])
    vectors = sparse.csr_array((values, columns, starts), shape=(len(texts), BUCKETS))
    vectors.eliminate_zeros()
    norms = np.sqrt(np.asarray(vectors.multiply(vectors).sum(axis=1)).ravel())
    vectors.data /= np.repeat(np.maximum(norms, 1e-12), np.diff(vectors.indptr))
    return vectors


def inverse_document_frequencies(
    columns: NDArray[np.int64], documents: Sequence[NDArray[np.int64]]
) -> NDArray[np.float64]:
    """Smoothed idf of each bucket in `columns`; all ones without documents.

    Looked up by document frequency: there are few frequencies, and 2^18 buckets.
    """
    if not documents:
        return np.ones(len(columns))
    frequencies = np.bincount(np.concatenate(documents), minlength=BUCKETS)
    by_frequency = np.log((1.0 + len(documents)) / (1.0 + np.arange(len(documents) + 1)))
    return np.asarray(by_frequency[frequencies[columns]])


def _remembered(function: Callable[[str], Frequencies]) -> Callable[[str], Frequencies]:
    """Keep results up to `CACHE_BYTES`: the same history is read batch after batch.

    By a digest, so that no text outlives its erasure here. The results must not be written to.
    """
    store: LRUCache[bytes, Frequencies] = LRUCache(
        CACHE_BYTES, getsizeof=lambda row: sum(a.nbytes for a in row)
    )
    return cached(store, key=_digest, lock=Lock())(function)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


@_remembered
def term_frequencies(text: str) -> Frequencies:
    """Sorted buckets of a text's terms, and 1 + ln(count) of each."""
    counts = Counter(zlib.crc32(term.encode()) % BUCKETS for term in terms(text))
    buckets = np.array(sorted(counts), dtype=np.int64)
    return buckets, 1.0 + np.log(np.array([counts[b] for b in buckets.tolist()], dtype=np.float64))


@_remembered
def gram_frequencies(text: str) -> Frequencies:
    """The same for runs of 3, 4 and 5 bytes of the lower-case text, its digits all written 0."""
    spelled = DIGIT.sub("0", " ".join(text.lower().split())).encode("utf-8", "replace")
    bytes_ = np.frombuffer(spelled, dtype=np.uint8).astype(np.uint64)
    hashes = [_rolling_hash(bytes_, length) for length in GRAM_LENGTHS if len(bytes_) >= length]
    found = np.concatenate([np.empty(0, dtype=np.int64), *hashes])
    buckets, counts = np.unique(found, return_counts=True)
    return buckets, 1.0 + np.log(counts)


def _rolling_hash(bytes_: NDArray[np.uint64], length: int) -> NDArray[np.int64]:
    """A bucket for every run of `length` bytes: a polynomial, multiplied out (Fibonacci hashing)."""
    runs = np.lib.stride_tricks.sliding_window_view(bytes_, length)
    value = np.full(len(runs), length, dtype=np.uint64)
    for k in range(length):
        value = value * np.uint64(257) + runs[:, k]
    return ((value * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - 18)).astype(np.int64)


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

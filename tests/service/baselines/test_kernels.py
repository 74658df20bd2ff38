"""What the lexical kernel takes two tasks to have in common."""

from __future__ import annotations

import numpy as np

from service.baselines.kernels import context_kernel, lexical_kernel
from service.baselines.terms import tfidf
from tests.service.baselines.synthetic_tasks import synthetic_task

EARLIER = [
    *(f"please add {word}" for word in ("ant", "bee", "cow")),
    *(f"please sing {word}" for word in ("dog", "elk", "fox", "gnu", "hen")),
]


def similarity(a: str, b: str) -> float:
    tasks, earlier = ([synthetic_task(text, text) for text in texts] for texts in ([a, b], EARLIER))
    return float(lexical_kernel(tasks, earlier)[0, 1])


def test_the_word_of_a_kind_counts_as_much_as_a_rare_one():
    assert np.isclose(similarity("please add owl", "please add pig"), 0.5)
    vectors = tfidf(["please add owl", "please add pig"], EARLIER)
    assert (vectors @ vectors.T).toarray()[0, 1] < 0.2  # the published weighting


def test_a_word_that_all_tasks_have_counts_nothing():
    assert similarity("please owl", "please pig") == 0.0


def test_a_number_is_compared_by_the_spread_of_those_that_have_it():
    """Earlier tasks without the field are no zeros: they say nothing of how far apart 2000 and 2025 are."""
    years = [synthetic_task("p", f"{year}", context={"year": year}) for year in (2000, 2010, 2025)]
    others = [synthetic_task("p", f"other {number}") for number in range(3)]
    dense, sparse = (context_kernel(years, earlier, "year") for earlier in (years, [*years, *others]))
    assert 0 < dense[0, 2] < 0.2
    np.testing.assert_array_equal(sparse, dense)

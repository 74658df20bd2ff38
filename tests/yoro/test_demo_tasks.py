"""The demo's tasks: never repeated, never held out, graded on their text alone."""

from itertools import islice

import pytest

from yoro.demo.tasks import FAMILIES, DemoTask, grade, held_out, is_exact, stream

SEEDS = (0, 1, 2, 77)


def task(expected: str, family: str = "capital", rivals: tuple[str, ...] = ()) -> DemoTask:
    """A task of which only what the grader reads matters."""
    return DemoTask("t", family, "What about France? Yes or no?", {}, expected, rivals)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_never_repeats_a_task(seed: int) -> None:
    drawn = list(islice(stream(seed), 5_000))
    assert len({t.prompt for t in drawn}) == len({t.task_id for t in drawn}) == 5_000


def test_the_same_seed_gives_the_same_stream_and_another_seed_another() -> None:
    first, again, other = (list(islice(stream(seed), 200)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_held_out_tasks_are_fixed_and_distinct() -> None:
    tasks = held_out(400)
    assert tasks == held_out(400)
    assert held_out(100) == tasks[:100]
    assert len({t.task_id for t in tasks}) == 400


@pytest.mark.parametrize("seed", SEEDS)
def test_no_stream_yields_a_held_out_task(seed: int) -> None:
    reserved = {t.prompt for t in held_out(1_000)}
    assert not reserved & {t.prompt for t in islice(stream(seed), 5_000)}


def test_every_family_is_in_the_stream_and_among_the_held_out() -> None:
    assert {t.family for t in islice(stream(3), 500)} == set(FAMILIES)
    assert {t.family for t in held_out(400)} == set(FAMILIES)


def test_the_expected_answer_earns_1_and_nothing_leaves_0_to_1() -> None:
    for drawn in islice(stream(9), 2_000):
        assert grade(drawn, drawn.expected) == 1.0
        for answer in ("", "   ", "yes", drawn.prompt, f"The answer is {drawn.expected}.", "7 " * 50):
            assert 0.0 <= grade(drawn, answer) <= 1.0


@pytest.mark.parametrize(
    ("wanted", "answer", "expected"),
    [
        (task("Paris"), "Paris", 1.0),
        (task("Paris"), " paris. ", 1.0),
        (task("Paris"), "The capital is Paris.", 0.55),
        (task("Paris"), "Paris is the capital of France, as everybody in the whole wide world knows", 0.2),
        (task("Paris"), "I know that Paris is nice", 0.0),
        (task("Paris"), "Lyon", 0.1),
        (task("Paris"), "Perhaps Lyon", 0.0),
        (task("Paris"), "France", 0.0),
        (task("Paris"), "", 0.0),
        (task("7"), "3 + 4 = 7", 0.6),
        (task("7"), "17", 0.1),
        (task("345678"), "345,678", 1.0),
        (task("OAK TREE", "upper"), "OAK TREE", 1.0),
        (task("OAK TREE", "upper"), "Oak tree", 0.1),
        (task("oak tree", "echo"), "oak", 0.0),
        (task("yes", "is_kind", ("no",)), "No", 0.0),
        (task("yes", "is_kind", ("no",)), "Yes or no", 0.0),
    ],
)
def test_partial_credit_is_graded(wanted: DemoTask, answer: str, expected: float) -> None:
    assert grade(wanted, answer) == pytest.approx(expected)
    assert is_exact(wanted, answer) is (expected == 1.0)


def test_every_further_word_costs() -> None:
    grades = [grade(task("Paris"), "so " * extra + "Paris") for extra in range(20)]
    assert grades == sorted(grades, reverse=True)
    assert grades[0] > grades[1]

"""The demo's tasks and their grader: short questions of very different difficulty.

Knows no model, adapter or network. Invariants: a stream never repeats a prompt and never yields a
held-out one (a hash of the prompt decides which it is, so that no list is shared); the same seed
gives the same stream on every machine; the grader reads the answer's text alone.

Difficulty is the point: a 135M model nearly always echoes two words, sometimes adds two numbers and
never multiplies three-digit ones, so that one reward means little before one knows the task.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from yoro.demo.vocabulary import (
    BLAME,
    BOUGHT,
    CAPITALS,
    IRREGULAR,
    KINDS,
    NOUNS,
    OPPOSITES,
    PEOPLE,
    PRAISE,
    REVIEWED,
)

SYSTEM_PROMPT = "Answer each question with one word."
HELD_OUT_SEED = 20_261_129
HELD_OUT_SHARE = 5
"""One prompt of this many is held out."""
LONGEST_ANSWER_TOKENS = 12
"""Ample for every expected answer; a rambling one is cut off."""
_TRIES = 40
"""Draws for a new prompt before a family counts as used up."""


@dataclass(frozen=True)
class DemoTask:
    """One question. Example: family "sum", prompt "What is 3 + 4? …", expected "7"."""

    task_id: str
    """Equal for equal prompts, and only for them."""
    family: str
    prompt: str
    context: Mapping[str, str]
    """What the agent's owner knows before the start; baselines may see it."""
    expected: str = field(repr=False)
    """For the grader alone; the agent never reads it."""
    rivals: tuple[str, ...] = field(default=(), repr=False)
    """Answers that contradict the expected one: a reply that names both earns nothing."""


Drawn = tuple[str, str, tuple[str, ...]]
"""Question, expected answer, rivals."""


def stream(seed: int) -> Iterator[DemoTask]:
    """Yield tasks for ever, mixed at random; a family that is used up drops out of the mix."""
    yield from _tasks(random.Random(f"yoro-{seed}"), held_out=False)  # noqa: S311 (not a secret)


def held_out(count: int = 400, seed: int = HELD_OUT_SEED) -> list[DemoTask]:
    """The tasks that measure progress; no stream of any seed yields one of them."""
    tasks = _tasks(random.Random(f"yoro-{seed}"), held_out=True)  # noqa: S311
    return [next(tasks) for _ in range(count)]


def grade(task: DemoTask, answer: str) -> float:
    """Score an answer in [0, 1]; the held-out table shows the mean of this.

    1 for the expected words and nothing else; where they open or close a longer reply, .7 less .05
    for each further word, at least .2; .1 for a wrong answer of the right length, unless it only
    repeats words of the question.
    """
    keep_case = task.family == "upper"
    said, expected = _words(answer, keep_case), _words(task.expected, keep_case)
    if said == expected:
        return 1.0
    if len(said) == len(expected):
        return 0.0 if set(said) <= set(_words(task.prompt, keep_case)) else 0.1
    rivals = {word for rival in task.rivals for word in _words(rival, keep_case)}
    if expected in (said[: len(expected)], said[-len(expected) :]) and not rivals & set(said):
        return max(0.2, 0.7 - 0.05 * (len(said) - len(expected)))
    return 0.0


def is_exact(task: DemoTask, answer: str) -> bool:
    """Whether the answer is the expected words and nothing else."""
    return grade(task, answer) == 1.0


def _words(text: str, keep_case: bool) -> list[str]:
    """Words and numbers without punctuation; thousands separators are not part of a number."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return re.findall(r"[^\W_]+", text if keep_case else text.casefold())


def _tasks(rng: random.Random, *, held_out: bool) -> Iterator[DemoTask]:
    seen: set[str] = set()
    while True:
        family = rng.choice(list(FAMILIES))
        for _ in range(_TRIES):
            question, expected, rivals = FAMILIES[family](rng)
            prompt = f"Question: {question}\nAnswer:"
            digest = hashlib.sha256(prompt.encode()).hexdigest()
            if digest in seen or (int(digest[-8:], 16) % HELD_OUT_SHARE == 0) is not held_out:
                continue
            seen.add(digest)
            context = MappingProxyType({"workflow": family})
            yield DemoTask(f"{family}-{digest[:16]}", family, prompt, context, expected, rivals)
            break


def _echo(rng: random.Random) -> Drawn:
    phrase = " ".join(rng.sample(NOUNS, 2))
    return f"Repeat after me: {phrase}", phrase, ()


def _upper(rng: random.Random) -> Drawn:
    noun = rng.choice(NOUNS)
    return f"Write in capital letters: {noun}", noun.upper(), ()


def _first_word(rng: random.Random) -> Drawn:
    words = rng.sample(NOUNS, 3)
    return f'What is the first word of "{" ".join(words)}"?', words[0], ()


def _last_word(rng: random.Random) -> Drawn:
    words = rng.sample(NOUNS, 3)
    return f'What is the last word of "{" ".join(words)}"?', words[-1], ()


def _plural(rng: random.Random) -> Drawn:
    noun = rng.choice(NOUNS)
    return f'What is the plural of "{noun}"?', _plural_of(noun), ()


def _plural_of(noun: str) -> str:
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


def _opposite(rng: random.Random) -> Drawn:
    pair = rng.choice(OPPOSITES)
    asked, expected = pair if rng.random() < 0.5 else pair[::-1]
    return f'What is the opposite of "{asked}"?', expected, ()


def _sentiment(rng: random.Random) -> Drawn:
    word, expected, rival = rng.choice(
        [(w, "positive", "negative") for w in PRAISE] + [(w, "negative", "positive") for w in BLAME]
    )
    thing, person = rng.choice(REVIEWED), rng.choice(PEOPLE)
    prompt = f'Is this review positive or negative? "{person} thought that the {thing} was {word}."'
    return prompt, expected, (rival,)


def _sum(rng: random.Random) -> Drawn:
    first, second = rng.randint(1, 20), rng.randint(1, 20)
    return f"What is {first} + {second}?", str(first + second), ()


def _next_number(rng: random.Random) -> Drawn:
    number = rng.randint(1, 400)
    return f"Which number comes right after {number}?", str(number + 1), ()


def _is_larger(rng: random.Random) -> Drawn:
    first, second = rng.sample(range(2, 100), 2)
    return f"Is {first} larger than {second}? Yes or no?", *_yes_or_no(first > second)


def _yes_or_no(answer: bool) -> tuple[str, tuple[str, ...]]:
    return ("yes", ("no",)) if answer else ("no", ("yes",))


def _is_kind(rng: random.Random) -> Drawn:
    kind, other = rng.sample(sorted(KINDS), 2)
    answer = rng.random() < 0.5
    thing = rng.choice(KINDS[kind if answer else other])
    return f'Is "{thing}" the name of {kind}? Yes or no?', *_yes_or_no(answer)


def _capital(rng: random.Random) -> Drawn:
    country, city = rng.choice(CAPITALS)
    return f"What is the capital of {country}?", city, ()


def _kind(rng: random.Random) -> Drawn:
    kind, other, another = rng.sample(sorted(KINDS), 3)
    options = [rng.choice(KINDS[k]) for k in (kind, other, another)]
    expected, *rivals = options
    rng.shuffle(options)
    return f"Which of these is {kind}: {', '.join(options)}?", expected, tuple(rivals)


def _who(rng: random.Random) -> Drawn:
    story, person, _, _ = _story(rng)
    return f"{story} Who was it?", person, ()


def _what(rng: random.Random) -> Drawn:
    story, person, thing, _ = _story(rng)
    return f"{story} What did {person} buy?", thing, ()


def _where(rng: random.Random) -> Drawn:
    story, _, _, city = _story(rng)
    return f"{story} In which city was that?", city, ()


def _story(rng: random.Random) -> tuple[str, str, str, str]:
    person, thing, (_, city) = rng.choice(PEOPLE), rng.choice(BOUGHT), rng.choice(CAPITALS)
    return f"{person} bought a {thing} in {city}.", person, thing, city


def _reverse(rng: random.Random) -> Drawn:
    word = rng.choice(NOUNS)
    return f'Spell the word "{word}" backwards.', word[::-1], ()


def _product(rng: random.Random) -> Drawn:
    first, second = rng.randint(101, 999), rng.randint(101, 999)
    return f"What is {first} * {second}?", str(first * second), ()


FAMILIES: Mapping[str, Callable[[random.Random], Drawn]] = {
    "echo": _echo,
    "upper": _upper,
    "first_word": _first_word,
    "last_word": _last_word,
    "plural": _plural,
    "opposite": _opposite,
    "sentiment": _sentiment,
    "sum": _sum,
    "next_number": _next_number,
    "is_larger": _is_larger,
    "is_kind": _is_kind,
    "capital": _capital,
    "kind": _kind,
    "who": _who,
    "what": _what,
    "where": _where,
    "reverse": _reverse,
    "product": _product,
}

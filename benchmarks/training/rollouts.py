"""The rollouts that every arm trains on, and what an arm's process says at its end.

Knows neither torch nor an arm. Same seed, same token ids: slices of this repository's documentation, so
that probabilities are those of text, and no two rollouts begin alike (nothing is saved by a shared prefix).
"""

import json
import random
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RANK, SEED, COUNT = 16, 2048, 32
PROMPT, COMPLETION = (40, 400), (8, 200)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What was read, what was sampled, and its advantage."""

    prompt: list[int]
    completion: list[int]
    advantage: float

    @property
    def tokens(self) -> int:
        """All of them."""
        return len(self.prompt) + len(self.completion)


def make(tokenizer: Any, count: int = COUNT, seed: int = SEED) -> list[Rollout]:
    """Draw the rollouts, their lengths uniform in the issue's ranges."""
    documents = sorted(Path(__file__).parents[2].glob("docs/*.md"))
    ids: list[int] = tokenizer("\n".join(path.read_text() for path in documents))["input_ids"]
    chance = random.Random(seed)  # noqa: S311
    made = []
    for _ in range(count):
        prompt, completion = chance.randint(*PROMPT), chance.randint(*COMPLETION)
        # random() draws once whatever the range, so that the lengths do not depend on the documentation's.
        start = int(chance.random() * (len(ids) - prompt - completion))
        end = start + prompt + completion
        made.append(
            Rollout(ids[start : start + prompt], ids[start + prompt : end], chance.uniform(-0.5, 0.5))
        )
    return made


def save(rollouts: list[Rollout], path: Path) -> None:
    """Write them for the arms."""
    path.write_text(json.dumps([asdict(rollout) for rollout in rollouts]))


def load(path: Path) -> list[Rollout]:
    """Read what `save` wrote."""
    return [Rollout(**each) for each in json.loads(path.read_text())]


class Watch:
    """Wall clock and processor seconds since it was made."""

    def __init__(self) -> None:
        """Start."""
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Return both."""
        return {
            "seconds": time.perf_counter() - self._wall,
            "processor_seconds": time.process_time() - self._processor,
        }


def say(**figures: Any) -> None:
    """Print an arm's figures, with the process's peak memory, as its last line."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"peak_gb": peak, **figures}), flush=True)

"""The demo's agent: answers tasks with the base model and the newest adapter it was given.

Knows no HTTP, grader or trainer. Invariants: tokens are drawn from the untruncated distribution at
temperature 1, and the logprobs recorded are that distribution's; token ids are those that were read
and sampled, never re-tokenised text. One thread at a time.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from service.policies import BaseModelSource
from yoro.demo.tasks import LONGEST_ANSWER_TOKENS, SYSTEM_PROMPT, DemoTask

Message = dict[str, str]
EVALUATION_BATCH = 80
"""Answers decoded together; more gains nothing on two cores."""


@dataclass(frozen=True)
class Attempt:
    """One sampled answer and its exact evidence."""

    task: DemoTask
    version: int
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    """With the end-of-turn token where it was sampled."""
    logprobs: list[float]
    """Of the completion's tokens, under the distribution that they were drawn from."""
    text: str
    finish_reason: Literal["stop", "length"]
    started_at: datetime
    ended_at: datetime
    trace_id: str = field(default_factory=lambda: uuid.uuid4().hex)


def messages_of(task: DemoTask) -> list[Message]:
    """What the agent sends for a task."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task.prompt}]


class Agent:
    """A loaded model; `version` says which adapter answers, 0 for the base alone."""

    def __init__(self, source: BaseModelSource, *, seed: int = 0, threads: int | None = None) -> None:
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging

        quietly: Any = logging
        quietly.disable_progress_bar()  # the demo's screen says what happens
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self.version = 0
        self._tokenizer: Any = AutoTokenizer.from_pretrained(source.path, **_weights_in(source))
        self._tokenizer.padding_side = "left"  # so that every row continues at the same place
        self._base = _load_base(source)
        self._model = self._base

    def load_adapter(self, folder: Path | None, version: int) -> None:
        """Answer with this adapter from now on; None: the base alone.

        Weights of a further adapter are copied into the first one's places, so all must have its
        shape. Raises what PEFT raises on files that it cannot read.
        """
        from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

        if folder is None:
            self._model = self._base if self._model is self._base else self._model.unload()
            self._base = self._model
        elif self._model is self._base:
            self._model = PeftModel.from_pretrained(self._base, str(folder)).eval()
        else:
            set_peft_model_state_dict(self._model, load_peft_weights(str(folder), device="cpu"))
        self.version = version

    def attempt(self, tasks: Sequence[DemoTask]) -> list[Attempt]:
        """Sample one answer to each task, all at once."""
        started_at = datetime.now(UTC)
        prompts = [self._prompt_ids(task) for task in tasks]
        completions, logprobs = self._generate(prompts, sample=True)
        return [
            Attempt(
                task,
                self.version,
                prompt,
                completion,
                values,
                self._text(completion),
                "stop" if completion[-1:] == [self._tokenizer.eos_token_id] else "length",
                started_at,
                datetime.now(UTC),
            )
            for task, prompt, completion, values in zip(tasks, prompts, completions, logprobs, strict=True)
        ]

    def answer_greedily(self, tasks: Sequence[DemoTask]) -> list[str]:
        """The most probable answers, in order."""
        return [text for batch in _batches(tasks) for text in self._answer_batch(batch)]

    def _answer_batch(self, tasks: Sequence[DemoTask]) -> list[str]:
        completions, _ = self._generate([self._prompt_ids(task) for task in tasks], sample=False)
        return [self._text(completion) for completion in completions]

    def _prompt_ids(self, task: DemoTask) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            messages_of(task), tokenize=True, add_generation_prompt=True, return_dict=True
        )
        return list(rendered["input_ids"])

    def _text(self, completion: list[int]) -> str:
        return str(self._tokenizer.decode(completion, skip_special_tokens=True))

    def _generate(
        self, prompts: Sequence[list[int]], *, sample: bool
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Completions up to their end of turn, and the logprobs of their tokens if sampled."""
        import torch

        padded = self._tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt")
        # top_k 0 and top_p 1 switch truncation off: transformers would keep the 50 most probable.
        options = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if sample else {}
        with torch.inference_mode():
            output = self._model.generate(
                **padded,
                do_sample=sample,
                max_new_tokens=LONGEST_ANSWER_TOKENS,
                pad_token_id=self._tokenizer.pad_token_id,
                output_logits=sample,
                return_dict_in_generate=True,
                **options,
            )
        sampled = output.sequences[:, padded["input_ids"].shape[1] :]
        completions = [_until_end(row, self._tokenizer.eos_token_id) for row in sampled.tolist()]
        if not sample:
            return completions, []
        steps = [
            logits.float().log_softmax(1).gather(1, sampled[:, t : t + 1])
            for t, logits in enumerate(output.logits)
        ]
        values = torch.cat(steps, 1).tolist()
        return completions, [row[: len(c)] for row, c in zip(values, completions, strict=True)]


def as_trace(attempt: Attempt, policy: str) -> dict[str, Any]:
    """The body of `POST /v1/traces` (design/api.md) for one attempt."""
    asked = messages_of(attempt.task)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    call = {
        "message_index": len(asked),
        "prompt_token_ids": attempt.prompt_token_ids,
        "completion_token_ids": attempt.completion_token_ids,
        "logprobs": attempt.logprobs,
        "logprobs_mode": "raw",
        "policy_version": attempt.version,
        "finish_reason": attempt.finish_reason,
        **sampling,
    }
    return {
        "policy": policy,
        "trace_id": attempt.trace_id,
        "policy_version": attempt.version,
        "task_id": attempt.task.task_id,
        "messages": [*asked, {"role": "assistant", "content": attempt.text}],
        "context": dict(attempt.task.context),
        "sampling": sampling,
        "calls": [call],
        "status": "completed" if attempt.finish_reason == "stop" else "truncated",
        "started_at": attempt.started_at.isoformat(),
        "ended_at": attempt.ended_at.isoformat(),
    }


def _weights_in(source: BaseModelSource) -> dict[str, Any]:
    """Where inside the source the weights are, in transformers' words."""
    if source.kind == "gguf":
        return {"gguf_file": source.gguf_file}
    return {"revision": source.revision} if source.kind == "hub" else {}


def _load_base(source: BaseModelSource) -> Any:
    """Load the weights as the trainer does, so that both compute the same probabilities."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    options = _weights_in(source)
    if source.kind == "gguf":
        options["quantization_config"] = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.bfloat16, **options)
    return model.eval()


def _until_end(row: list[int], end: int) -> list[int]:
    return row[: row.index(end) + 1] if end in row else row


def _batches(tasks: Sequence[DemoTask]) -> Iterator[Sequence[DemoTask]]:
    for start in range(0, len(tasks), EVALUATION_BATCH):
        yield tasks[start : start + EVALUATION_BATCH]

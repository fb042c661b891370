"""Answers by the serving engine of one rank: the model beside the one that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tutti.accelerator.accelerator import Accelerator
from tutti.batching import Finish
from tutti.errors import TuttiError
from tutti.huggingface.tokenizer import Tokenizer
from tutti.models.sampling import Sampling
from tutti.models.spec import ModelSpec
from tutti.nn import Model
from tutti.serve.engine import Engine as ServingEngine
from tutti.serve.loading import Sizes, end_tokens, prepare, settings_for
from tutti.serve.parameters import SamplingParameters
from tutti.serve.worker import Worker as ServingWorker
from tutti.train.data.prompt_rows import end_of_turn
from tutti.train.run.config import TrainConfig
from tutti.train.run.weights import model_folder

MOST_SLOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt that is to be answered, and where its random numbers come from."""

    prompt: int  # its number in the batch
    tokens: tuple[int, ...]
    seed: int


def ends_of(config: TrainConfig, spec: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end an answer: the folder's, the tokenizer's, the end of a turn."""
    folder = model_folder(config.model)
    ends = set(end_tokens(folder, spec)) if folder is not None else set()
    ends |= {t for t in (tokenizer.end, end_of_turn(tokenizer)) if t is not None}
    return tuple(sorted(token for token in ends if 0 <= token < spec.vocab))


class Generator:
    """A serving engine whose weights are handed over before each batch."""

    def __init__(
        self,
        model: Model,
        accelerator: Accelerator,
        sampling: Sampling,
        *,
        length: int,
        dtype: torch.dtype,
        ends: tuple[int, ...],
        slots: int,
    ) -> None:
        self.model, self.ends, self._sampling = model, ends, sampling
        slots = max(1, min(slots, MOST_SLOTS))
        page = 16
        sizes = Sizes(
            slots=slots, page_size=page, pages=slots * (-(-length // page)) + slots + 1,
            max_length=length, most_tokens=max(512, length),
        )  # fmt: skip
        settings = settings_for(model.spec, sizes, accelerator, dtype, model)
        self.worker = ServingWorker(model, accelerator, settings, dtype=dtype, end=ends)
        self.engine = ServingEngine(self.worker)

    def answers(
        self,
        asked: Sequence[Asked],
        *,
        batch: int,
        group: int,
        greedy: bool = False,
        logps: bool = False,
    ) -> list[tuple[int, list[list[int]], list[list[float]]]]:
        """Return the tokens of a group of answers to each prompt, with the prompt's number.

        With `logps` also the tokens' log-probabilities. Prefixes that were computed with the
        weights of an earlier batch are not taken.
        """
        given = self._sampling
        prepare(self.model)  # weights have changed: the host's own layout of them, too
        parameters = [
            SamplingParameters(
                max_tokens=given.max_tokens, n=group, seed=one.seed, salt=f"batch {batch}",
                temperature=0.0 if greedy else given.temperature,
                logprobs=0 if logps else None,
            )
            for one in asked
        ]  # fmt: skip
        requests = self.engine.generate([list(one.tokens) for one in asked], parameters)
        for done in requests:
            for answer in done.answers:
                if answer.finish is Finish.FAILED:
                    raise TuttiError(f"generation: {answer.reason}")
        return [
            (
                one.prompt,
                [[int(token) for token in answer.tokens] for answer in done.answers],
                [[entry.logprob for entry in answer.logprobs or ()] for answer in done.answers],
            )
            for one, done in zip(asked, requests, strict=True)
        ]

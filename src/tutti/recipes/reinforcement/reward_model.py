"""A reward model as a reward: FOLDER:score, in the process in which rewards run, on the host.

A prompt and its answer become tokens as they do when the model is trained: a chat through its
tokenizer's template, texts one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tutti.accelerator import open_accelerator
from tutti.accelerator.reference.preference_losses import Answers
from tutti.errors import InputError
from tutti.huggingface import open_checkpoint
from tutti.huggingface.tokenizer import Tokenizer, open_tokenizer
from tutti.nn import Batch, Model, load
from tutti.recipes.reinforcement.rewards import NoRewardError
from tutti.train.data.forms import answered

SCORE = "score"
_PROMPTS = ("prompt", "messages")


class RewardModel:
    """The scores of a folder's model."""

    def __init__(self, folder: Path, *, tokenizer: str = "") -> None:
        """Load it; raise NoRewardError where the folder holds no reward model.

        `tokenizer` is the folder's own unless it is named.
        """
        try:
            source = open_checkpoint(folder)
            if not source.spec.head.scores:
                raise NoRewardError(f"{folder}: is no reward model; train one with kind: reward")
            self.tokenizer = open_tokenizer(tokenizer or str(folder.resolve()))
            self._model = Model(source.spec, open_accelerator("cpu").operators)
            load(self._model, source)
        except InputError as error:
            raise NoRewardError(str(error)) from None

    def __call__(self, answers: Sequence[str], record: dict[str, Any]) -> list[float]:
        """Return the score of each answer to a record's prompt."""
        prompt = next((record[name] for name in _PROMPTS if name in record), None)
        if prompt is None:
            raise NoRewardError("the prompts have no field 'prompt' or 'messages' to score with")
        return self.scores([texts_of(self.tokenizer, prompt, answer) for answer in answers])

    @torch.no_grad()
    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each text."""
        lengths = [len(text) for text in texts]
        tokens = torch.tensor([token for text in texts for token in text])
        batch = Batch.of(
            self._model.spec, tokens, lengths, targets_t=torch.full_like(tokens, -100),
            answers=Answers.of(None, [1.0] * len(texts), [0.0] * len(texts), tokens.device),
        )  # fmt: skip
        stream, _ = self._model.stream(None, batch)
        assert self._model.head is not None
        scored = self._model.head(stream, batch)
        assert scored.logps_s is not None
        return [float(score) for score in scored.logps_s]


def texts_of(tokenizer: Tokenizer, prompt: object, answer: str) -> list[int]:
    """Return the tokens of a prompt with an answer, as a pair's chosen one is read."""
    said: object = answer
    if not isinstance(prompt, str):
        said = [{"role": "assistant", "content": answer}]
        while isinstance(prompt, list) and prompt and _role(prompt[-1]) == "assistant":
            prompt = prompt[:-1]
    try:
        tokens, _ = answered(tokenizer, prompt, said, lambda: "the prompt", end=True)
    except InputError as error:
        raise NoRewardError(str(error)) from None
    return [int(token) for token in tokens]


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None

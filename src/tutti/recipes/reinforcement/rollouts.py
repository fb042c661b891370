"""`Rollouts`: batches of sampled, judged answers for the ranks of a training job.

All ranks make a batch together and hold the same one; each trains on its own rows of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tutti.errors import InputError
from tutti.models.objective import Objective
from tutti.models.sampling import Sampling
from tutti.observe.folder import SAMPLES
from tutti.recipes.reinforcement.advantages import group_advantages, left_out_advantages
from tutti.recipes.reinforcement.alike import Alike, share_alike
from tutti.recipes.reinforcement.answering import Answering, Answers, Order
from tutti.recipes.reinforcement.apart import AnsweringAhead
from tutti.recipes.reinforcement.by_turns import ByTurns
from tutti.recipes.reinforcement.places import Load
from tutti.recipes.reinforcement.rewards import Judged
from tutti.recipes.reinforcement.row_room import answers_per_row
from tutti.recipes.reinforcement.sampled_rows import Answered, SampledBatch, pack, token_logps
from tutti.recipes.reinforcement.weights import HeldWeights
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.data.open_data import PackedData
from tutti.train.data.prompt_rows import PromptRows
from tutti.train.engine.engine import Batches, Engine
from tutti.train.run.build_rank import begin_reference
from tutti.train.run.rank_context import RankContext


class Rollouts:
    """What one rank does for batches of sampled answers."""

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        coordinator: Coordinator,
        data: PackedData,
        stack: ExitStack,
    ) -> None:
        objective = context.config.objective
        assert objective is not None
        assert objective.sampling is not None
        self._context, self._engine, self._coordinator = context, engine, coordinator
        self._objective: Objective = objective
        self._sampling: Sampling = objective.sampling
        self._data = data
        _check(engine, self._sampling)
        parts = [part.rows for part in data.train.parts]
        self._longest = max(rows.longest for rows in parts if isinstance(rows, PromptRows))
        self.prompts = self._prompts()
        self._reference: HeldWeights | None = None
        load = Load(
            prompts=self.prompts, group=self._sampling.group, prompt_tokens=self._longest,
            answer_tokens=self._sampling.max_tokens,
        )  # fmt: skip
        made = AnsweringAhead if self._sampling.answering else ByTurns
        self._answering: Answering = made(context, engine, coordinator, data, load, stack)
        self._number, self._batch = -1, None  # type: tuple[int, SampledBatch | None]
        self._alike = Alike()
        self.seconds = 0.0  # that the step at hand spent on its batch
        self.figures: dict[str, float] = {}

    # --- what a job asks for ---------------------------------------------------------------

    def begin(self) -> None:
        """Keep what answers are held against; before the run's own weights are loaded."""
        problem = self._answering.start()
        if problem:
            raise InputError(problem)
        if self._coordinator.rank == 0:
            for line in self._answering.explain():
                self._context.say(line)
        if self._objective.needs_reference:
            begin_reference(self._context, self._engine)
            self._reference = HeldWeights(self._engine)

    def step(self, step: int) -> Batches:
        """Return a step's micro-batches; every so many steps there is a new batch of answers."""
        number = step // self._sampling.updates
        began = time.perf_counter()
        if self._batch is None or self._number != number:
            self._number, self._batch = number, self._make(number)
        self.seconds = time.perf_counter() - began
        return self._batch.batches(self._engine, self._objective)

    def validate(self, steps: int) -> float:
        """Return minus the mean reward of the likeliest answers to prompts that are held out."""
        held = self._data.validation
        assert held is not None
        count = min(held.num_rows, steps * self.prompts)
        order = Order(number=self._number, prompts=count, group=1, held_out=True)
        judged = self._answering.answered(order, self._order(self._number + 1)).judged
        rewards = [one.rewards[0] for one in judged if not one.problem]
        return -float(np.mean(rewards)) if rewards else float("nan")

    def _order(self, number: int) -> Order | None:
        """Return a batch of the run; None behind its last."""
        given = self._sampling
        if number * given.updates >= self._context.config.steps:
            return None
        return Order(number=number, prompts=self.prompts, group=given.group)

    # --- a batch ---------------------------------------------------------------------------

    def _make(self, number: int) -> SampledBatch:
        given, order = self._sampling, self._order(number)
        assert order is not None
        answers = self._answering.answered(order, self._order(number + 1))
        judged = answers.judged
        answered = [
            Answered(prompt.tokens, tuple(tokens))
            for prompt, group in zip(answers.prompts, answers.answers, strict=True)
            for tokens in group
        ]
        counted = np.repeat([not one.problem for one in judged], given.group)
        plan = self._engine.plan
        pad = 0 if self._data.tokenizer is None else self._data.tokenizer.pad
        batch = SampledBatch(
            rows=pack(
                answered, rows=plan.job.global_batch, length=plan.job.sequence_length,
                pad=pad if pad < self._engine.spec.vocab else 0,
            ),
            advantages=np.zeros(len(answered), np.float32),
            counted=counted,
            temperature=given.temperature,
        )  # fmt: skip
        old = None
        if answers.logps is not None:
            old = batch.placed([values for group in answers.logps for values in group])
        made = self._weighed(batch, judged, old)
        self._note(answers)
        if self._coordinator.rank == 0:
            self._keep(answers, number)
        return made

    def _weighed(
        self, batch: SampledBatch, judged: Sequence[Judged], sampled: Tensor | None
    ) -> SampledBatch:
        """Return a batch with advantages; `sampled` are probabilities that the sampler told."""
        given, kind = self._sampling, self._objective.kind
        old, reference, ahead = sampled, None, sampled is not None
        if not ahead and (given.updates > 1 or (kind == "rloo" and self._reference is not None)):
            old = token_logps(self._engine, batch)
        if self._reference is not None:
            with self._reference.in_place():
                reference = token_logps(self._engine, batch)
        nothing = (0.0,) * given.group
        rewards = np.asarray([one.rewards if not one.problem else nothing for one in judged])
        if kind == "grpo":
            advantages = group_advantages(rewards, normalise=given.normalise)
            return batch.weighed(advantages.reshape(-1).astype(np.float32), old, reference)
        apart = np.zeros(rewards.shape)
        if old is not None and reference is not None:
            between = batch.sums(old) - batch.sums(reference)
            apart = between.astype(np.float64).reshape(rewards.shape)
        advantages = left_out_advantages(rewards, apart, self._objective.strength)
        return batch.weighed(
            advantages.reshape(-1).astype(np.float32),
            old if ahead or given.updates > 1 else None,
            None,
        )

    def _keep(self, answers: Answers, number: int) -> None:
        """Write the first prompt's answers where a person looks."""
        first = answers.judged[0]
        line = {
            "batch": number, "record": answers.prompts[0].record, "answers": answers.texts,
            "rewards": first.rewards, "problem": first.problem,
        }  # fmt: skip
        path = Path(self._context.config.folder) / SAMPLES
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been moved away
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _note(self, answers: Answers) -> None:
        groups = np.asarray([one.rewards for one in answers.judged if not one.problem])
        rewards, alike = groups.reshape(-1).tolist(), share_alike(groups)
        every = [tokens for group in answers.answers for tokens in group]
        cut = sum(tokens[-1] not in self._answering.ends for tokens in every if tokens)
        self.figures = {
            "reward": float(np.mean(rewards)) if rewards else float("nan"),
            "reward_deviation": float(np.std(rewards)) if rewards else float("nan"),
            "answer_tokens": float(np.mean([len(tokens) for tokens in every])),
            "cut_short": cut / max(1, len(every)),
            "left_out": float(sum(bool(one.problem) for one in answers.judged)),
            "alike": alike,
            **answers.seconds,
        }
        if self._coordinator.rank == 0:
            text = self._alike.noted(alike, rewards, str(self._context.config.folder / SAMPLES))
            if text:
                self._context.warn(text)

    # --- what a batch is made with ---------------------------------------------------------

    def _prompts(self) -> int:
        """Return the prompts of a batch: as many as asked for, or as surely fit its rows."""
        job, given = self._engine.plan.job, self._sampling
        longest = self._longest
        per_row = answers_per_row(job.sequence_length, longest, given.max_tokens)
        most = job.global_batch * per_row // given.group
        if most < 1 or (given.prompts or 0) > most:
            wanted = (given.prompts or 1) * given.group
            raise InputError(
                f"sampling: {wanted} answers of up to {longest + given.max_tokens} tokens do not "
                f"surely fit {job.global_batch} rows of {job.sequence_length} tokens, which have "
                f"room for {job.global_batch * per_row}; use a larger job.global_batch, or fewer "
                "prompts"
            )
        return given.prompts or most


def _check(engine: Engine, sampling: Sampling) -> None:
    """Refuse what sampled answers cannot have."""
    if engine.stub:
        raise InputError("emulate: stub computes nothing, and so answers nothing; leave it out")
    if sampling.temperature != 1.0 and engine.spec.head.soft_cap is not None:
        raise InputError(
            f"{engine.spec.name} caps its logits, and the loss has no form for a temperature "
            f"behind a cap; sample with temperature: 1 instead of {sampling.temperature:g}"
        )
    if engine.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError("sampled answers need job.precision bf16, fp16 or fp32")

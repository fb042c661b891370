"""`Rollouts`: batches of sampled, judged answers for the ranks of a training job.

All ranks make a batch together and hold the same one; each trains on its own rows of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti.errors import InputError, TuttiError
from tutti.models.objective import Objective
from tutti.models.sampling import Sampling
from tutti.nn import Model
from tutti.recipes.reinforcement.advantages import group_advantages, left_out_advantages
from tutti.recipes.reinforcement.generation import Asked, Generator, ends_of
from tutti.recipes.reinforcement.places import (
    Load,
    answer_seconds,
    bounds_of,
    explained,
    pools_of_ranks,
    share_out,
    turns_of,
)
from tutti.recipes.reinforcement.rewards import Judged, RewardProcess
from tutti.recipes.reinforcement.row_room import answers_per_row
from tutti.recipes.reinforcement.sampled_rows import (
    Answered,
    SampledBatch,
    pack,
    token_logps,
)
from tutti.recipes.reinforcement.weights import HeldWeights, answering_model, hand_over
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.data.opening import PackedData
from tutti.train.data.order import TrainingOrder, ValidationRows
from tutti.train.data.prompt_rows import PromptRecord, PromptRows
from tutti.train.engine.engine import Batches, Engine
from tutti.train.run.build_rank import begin_reference
from tutti.train.run.rank_context import RankContext

SAMPLES = "samples.jsonl"  # one group of every batch, in the run's folder
_HELD_OUT = 1 << 40  # numbers of batches that are only looked at


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
        _check(context, engine, self._sampling)
        parts = [part.rows for part in data.train.parts]
        self._longest = max(rows.longest for rows in parts if isinstance(rows, PromptRows))
        self.prompts = self._prompts()
        self._ranks = tuple(range(engine.seats.num_ranks))
        self._pools = pools_of_ranks(context.job)
        self._reference: HeldWeights | None = None
        self._rewards = RewardProcess(
            self._sampling.rewards, time_limit_s=self._sampling.time_limit_s
        )
        stack.callback(self._rewards.close)
        self._generator = self._make_generator()
        self._number, self._batch = -1, None  # type: tuple[int, SampledBatch | None]
        self.seconds = 0.0  # that the step at hand spent on its batch
        self.figures: dict[str, float] = {}
        self._bad = 0
        self._told: set[str] = set()

    # --- what a job asks for ---------------------------------------------------------------

    def begin(self) -> None:
        """Keep what answers are held against; before the run's own weights are loaded."""
        if self._coordinator.rank == 0:
            self._explain()
            problem = self._start_rewards()
        else:
            problem = ""
        problem = self._coordinator.broadcast((problem,))[0]
        if problem:
            raise InputError(problem)
        if self._objective.needs_reference:
            begin_reference(self._context, self._engine)
            self._reference = HeldWeights(self._engine)

    def _start_rewards(self) -> str:
        try:
            self._rewards.start()
        except InputError as error:
            return str(error)
        return ""

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
        prompts = [_prompt(held, i) for i in range(count)]
        number = _HELD_OUT + self._number
        _, judged, _ = self._answered(prompts, number, group=1, greedy=True)
        found = [one.rewards[0] for one in judged if not one.problem]
        return -float(np.mean(found)) if found else float("nan")

    # --- a batch ---------------------------------------------------------------------------

    def _make(self, number: int) -> SampledBatch:
        given, order = self._sampling, self._data.train
        prompts = [_prompt(order, number * self.prompts + i) for i in range(self.prompts)]
        answers, judged, seconds = self._answered(prompts, number, group=given.group)
        answered = [
            Answered(prompt.tokens, tuple(tokens))
            for prompt, group in zip(prompts, answers, strict=True)
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
        made = self._weighed(batch, judged)
        self._note(judged, answers, seconds)
        return made

    def _weighed(self, batch: SampledBatch, judged: Sequence[Judged]) -> SampledBatch:
        given, kind = self._sampling, self._objective.kind
        old = reference = None
        if given.updates > 1 or (kind == "rloo" and self._reference is not None):
            old = token_logps(self._engine, batch)
        if self._reference is not None:
            with self._reference.in_place():
                reference = token_logps(self._engine, batch)
        nothing = (0.0,) * given.group
        rewards = np.asarray([one.rewards if not one.problem else nothing for one in judged])
        if kind == "grpo":
            found = group_advantages(rewards, normalise=given.normalise)
            return batch.weighed(found.reshape(-1).astype(np.float32), old, reference)
        apart = np.zeros(rewards.shape)
        if old is not None and reference is not None:
            between = batch.sums(old) - batch.sums(reference)
            apart = between.astype(np.float64).reshape(rewards.shape)
        found = left_out_advantages(rewards, apart, self._objective.strength)
        return batch.weighed(
            found.reshape(-1).astype(np.float32), old if given.updates > 1 else None, None
        )

    def _answered(
        self, prompts: Sequence[PromptRecord], number: int, *, group: int, greedy: bool = False
    ) -> tuple[list[list[list[int]]], list[Judged], tuple[float, float, float]]:
        """Return the answers of all ranks and what rewards say, the same on every rank."""
        engine, began = self._engine, time.perf_counter()
        hand_over(
            engine, engine.spec, self._generator.model, engine.links, self._ranks,
            engine.dtype, engine.accelerator.device,
        )  # fmt: skip
        handed = time.perf_counter()
        bounds = self._bounds(len(prompts))
        own = [
            Asked(
                prompt=i, tokens=prompts[i].tokens, seed=_seed(self._context.config.seed, number, i)
            )
            for i in range(*bounds[self._coordinator.rank])
        ]
        found = self._generator.answers(own, batch=number, group=group, greedy=greedy)
        told = self._coordinator.gather(found)
        generated = time.perf_counter()
        said: dict[str, Any] | None = None
        if told is not None:
            said = self._judged(prompts, dict(pair for part in told for pair in part), number)
        said = self._coordinator.broadcast(said)
        if "error" in said:
            raise TuttiError(said["error"])
        judged = [Judged(rewards=tuple(r), problem=p) for r, p in said["judged"]]
        ended = time.perf_counter()
        return said["answers"], judged, (handed - began, generated - handed, ended - generated)

    def _judged(
        self, prompts: Sequence[PromptRecord], by_prompt: dict[int, list[list[int]]], number: int
    ) -> dict[str, Any]:
        """Let rewards judge all answers; on the first rank."""
        answers = [by_prompt[i] for i in range(len(prompts))]
        found: list[tuple[tuple[float, ...], str]] = []
        for prompt, group in zip(prompts, answers, strict=True):
            texts = [self._text(tokens) for tokens in group]
            judged = self._rewards.judge(texts, prompt.record)
            if judged.problem:
                self._bad += 1
                text = f"rewards: {judged.problem}"
                if self._sampling.bad_rewards == "error":
                    return {"error": f"{text}; mend it, or leave such groups out"}
                if self._bad > self._sampling.most_bad:
                    return {
                        "error": f"{text}; {self._bad} groups were left out, more than "
                        f"sampling.most_bad ({self._sampling.most_bad})"
                    }
                self._tell(f"{text}: the group is left out")
            found.append((judged.rewards, judged.problem))
        if number < _HELD_OUT and prompts:
            self._keep(prompts[0], [self._text(t) for t in answers[0]], found[0], number)
        return {"answers": answers, "judged": found}

    def _tell(self, text: str) -> None:
        """Say a line once."""
        if text not in self._told:
            self._told.add(text)
            self._context.warn(text)

    def _text(self, tokens: Sequence[int]) -> str:
        tokenizer = self._data.tokenizer
        assert tokenizer is not None
        ends = self._generator.ends
        said = tokens[:-1] if tokens and tokens[-1] in ends else tokens
        return tokenizer.decode([token for token in said if token not in tokenizer.special])

    def _keep(
        self, prompt: PromptRecord, texts: list[str], judged: tuple[Any, str], number: int
    ) -> None:
        line = {
            "batch": number, "record": prompt.record, "answers": texts, "rewards": judged[0],
            "problem": judged[1],
        }  # fmt: skip
        path = Path(self._context.config.folder) / SAMPLES
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _note(
        self, judged: Sequence[Judged], answers: list[list[list[int]]], seconds: Sequence[float]
    ) -> None:
        rewards = [value for one in judged if not one.problem for value in one.rewards]
        sizes = [len(tokens) for group in answers for tokens in group]
        ends = self._generator.ends
        cut = sum(tokens[-1] not in ends for group in answers for tokens in group if tokens)
        self.figures = {
            "reward": float(np.mean(rewards)) if rewards else float("nan"),
            "reward_deviation": float(np.std(rewards)) if rewards else float("nan"),
            "answer_tokens": float(np.mean(sizes)),
            "cut_short": cut / max(1, len(sizes)),
            "left_out": float(sum(bool(one.problem) for one in judged)),
            "hand_over_s": seconds[0],
            "generate_s": seconds[1],
            "judge_s": seconds[2],
        }

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

    def _load(self, prompts: int) -> Load:
        given = self._sampling
        return Load(
            prompts=prompts, group=given.group, prompt_tokens=self._longest,
            answer_tokens=given.max_tokens,
        )  # fmt: skip

    def _bounds(self, prompts: int) -> list[tuple[int, int]]:
        """Return which prompts each rank answers."""
        job = self._context.job
        seconds = functools.partial(answer_seconds, job.spec, job.cluster, self._load(prompts))
        return bounds_of(share_out(prompts, self._pools, seconds))

    def _explain(self) -> None:
        """Say who does what."""
        job = self._context.job
        turns = turns_of(job, self._load(self.prompts), job.predicted().step_seconds)
        for line in explained(turns):
            self._context.say(line)

    def _make_generator(self) -> Generator:
        engine, context, tokenizer = self._engine, self._context, self._data.tokenizer
        assert tokenizer is not None
        device = engine.accelerator.device
        model = Model(engine.spec, engine.accelerator.operators, dtype=engine.dtype, device=device)
        model = answering_model(engine.spec, context.config, model, device)
        bounds = self._bounds(self.prompts)[self._coordinator.rank]
        return Generator(
            model,
            engine.accelerator,
            self._sampling,
            length=engine.plan.job.sequence_length,
            dtype=engine.dtype,
            ends=ends_of(context.config, engine.spec, tokenizer),
            slots=(bounds[1] - bounds[0]) * self._sampling.group,
        )


def _prompt(order: TrainingOrder | ValidationRows, sample: int) -> PromptRecord:
    part, row = order.found(sample)
    assert isinstance(part.rows, PromptRows)
    return part.rows.prompts[row]


def _seed(seed: int, batch: int, prompt: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{batch}/{prompt}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _check(context: RankContext, engine: Engine, sampling: Sampling) -> None:
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
    del context

"""The process of a chip that only answers, beside a training job."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from tutti.comm import Communicator
from tutti.huggingface.tokenizer import Tokenizer
from tutti.nn import Model
from tutti.ranks.devices import open_chip
from tutti.ranks.standing_processes import die_with_parent
from tutti.recipes.reinforcement.answering import Order, bounds
from tutti.recipes.reinforcement.apart import meet
from tutti.recipes.reinforcement.generation import Asked, Generator, ends_of
from tutti.recipes.reinforcement.judging import Judge
from tutti.recipes.reinforcement.places import Load, answering_chips
from tutti.recipes.reinforcement.weights import answering_model, hand_over
from tutti.train.data.open_data import open_data
from tutti.train.data.prompt_rows import PromptRows
from tutti.train.run.planning import Job
from tutti.train.run.weights import model_folder
from tutti.train.state.state import compute_dtype


class AnsweringRank:
    """One of those that answer; the first of them judges."""

    def __init__(self, job: Job, number: int, port: int) -> None:
        objective = job.config.objective
        assert objective is not None
        assert objective.sampling is not None
        self.job, self.number, self.sampling = job, number, objective.sampling
        self.chips = answering_chips(job)
        position = self.chips[number]
        self.accelerator = open_chip(job.cluster.pool(position.pool).chip, position.slot)
        self.data = open_data(
            job.config.data, sequence_length=job.plan.job.sequence_length,
            vocabulary=job.spec.vocab, model_folder=model_folder(job.config.model),
            objective=objective,
        )  # fmt: skip
        self.dtype = compute_dtype(job.plan.job.precision)
        first = job.plan.num_ranks
        self.comm = meet(job, first + number, port, self.accelerator, position)
        self.talk = self.comm.control("talk", job.config.timeout_s)
        everybody = range(first, first + len(self.chips))
        group = self.comm.subgroup(tuple(everybody), "answering")
        assert group is not None
        self.others: Communicator = group.control("answers", job.config.timeout_s)
        self.warnings: list[str] = []

    def run(self) -> None:
        """Answer batches until somebody ends the process."""
        tokenizer = self.data.tokenizer
        assert tokenizer is not None
        ends = ends_of(self.job.config, self.job.spec, tokenizer)
        generator, judge = self._generator(ends), self._judge(tokenizer, ends)
        first = self.job.plan.num_ranks
        self.talk.broadcast_value(judge.start() if self.number == 0 else None, first)
        while True:
            order = Order(**self.talk.broadcast_value(None, 0))
            began = time.perf_counter()
            hand_over(None, self.job.spec, generator.model, self._add, self.dtype,
                      self.accelerator.device)  # fmt: skip
            handed = time.perf_counter()
            said = self._answered(order, generator, judge)
            if said is not None:
                said["seconds"] = {
                    "receive_s": handed - began,
                    "generate_s": time.perf_counter() - handed,
                }
                said["warnings"], self.warnings[:] = list(self.warnings), []
            self.talk.broadcast_value(said, first)

    def _answered(self, order: Order, generator: Generator, judge: Judge) -> dict[str, Any] | None:
        prompts = order.records(self.data.train, self.data.validation)
        pools = [chip.pool for chip in self.chips]
        load = self._load(len(prompts))
        own = bounds(self.job.spec, self.job.cluster, pools, load)[self.number]
        seed = self.job.config.seed
        asked = [
            Asked(prompt=i, tokens=prompts[i].tokens, seed=order.seed(seed, i)) for i in range(*own)
        ]
        answers = generator.answers(
            asked, batch=order.number, group=order.group, greedy=order.held_out, logps=True
        )
        told = self.others.gather_values(answers, root=self.job.plan.num_ranks)
        if told is None:
            return None
        every = {i: (group, logps) for part in told for i, group, logps in part}
        said = judge.judged(prompts, {i: group for i, (group, _) in every.items()})
        said["logps"] = [every[i][1] for i in range(len(prompts))]
        return said

    def _load(self, prompts: int) -> Load:
        parts = [p.rows for p in self.data.train.parts]
        longest = max(rows.longest for rows in parts if isinstance(rows, PromptRows))
        given = self.sampling
        return Load(
            prompts=prompts, group=given.group, prompt_tokens=longest,
            answer_tokens=given.max_tokens,
        )  # fmt: skip

    def _generator(self, ends: tuple[int, ...]) -> Generator:
        device = self.accelerator.device
        model = Model(self.job.spec, self.accelerator.operators, dtype=self.dtype, device=device)
        return Generator(
            answering_model(self.job.spec, self.job.config, model, device), self.accelerator,
            self.sampling, length=self.job.plan.job.sequence_length, dtype=self.dtype, ends=ends,
            slots=64,
        )  # fmt: skip

    def _judge(self, tokenizer: Tokenizer, ends: tuple[int, ...]) -> Judge:
        return Judge(self.sampling, tokenizer, ends, self.warnings.append)

    def _add(self, flat: torch.Tensor) -> None:
        self.comm.all_reduce(flat).wait()


def main(arguments: list[str]) -> int:
    """Be a chip that answers: the job's file, its number, the port where all meet."""
    die_with_parent()
    job = Job.load(Path(arguments[0]))
    AnsweringRank(job, int(arguments[1]), int(arguments[2])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

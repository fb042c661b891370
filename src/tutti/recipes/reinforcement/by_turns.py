"""All chips take turns: every training rank answers, with a serving engine beside its own."""

from __future__ import annotations

import time
from contextlib import ExitStack

from tutti.errors import InputError
from tutti.huggingface.tokenizer import Tokenizer
from tutti.models.sampling import Sampling
from tutti.nn import Model
from tutti.nn.cache import token_bytes
from tutti.ranks.rank_places import class_of
from tutti.recipes.reinforcement.answering import Answers, Order, bounds
from tutti.recipes.reinforcement.generation import MOST_SLOTS, Asked, Generator, ends_of
from tutti.recipes.reinforcement.judging import Judge
from tutti.recipes.reinforcement.places import Load, explained, pools_of_ranks, turns_of
from tutti.recipes.reinforcement.weights import answering_model, hand_over
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.data.open_data import PackedData
from tutti.train.engine.engine import Engine
from tutti.train.run.rank_context import RankContext
from tutti.units import bytes_text


def require_room(context: RankContext, engine: Engine, slots: int) -> None:
    """Refuse a chip that has no room for a model that answers beside what training takes."""
    estimate, spec = context.job.predicted(), engine.spec
    training = estimate.memory[class_of(estimate.schedule, context.seat)].total
    wide = engine.dtype.itemsize
    weights = sum(p.size * wide for u in range(spec.num_units) for p in spec.parameters(u))
    pages = slots * engine.plan.job.sequence_length * token_bytes(spec, engine.dtype)
    total = engine.accelerator.memory().total
    if training + weights + pages > total:
        raise InputError(
            f"{context.name}: training takes {bytes_text(training)} of {bytes_text(total)}, and "
            f"the model that answers {bytes_text(weights + pages)} beside it; name pools that "
            "only answer (sampling.answering), or fewer rows"
        )


class ByTurns:
    """A rank that answers between its steps."""

    def __init__(
        self,
        context: RankContext,
        engine: Engine,
        coordinator: Coordinator,
        data: PackedData,
        load: Load,
        stack: ExitStack,
    ) -> None:
        objective, tokenizer = context.config.objective, data.tokenizer
        assert objective is not None
        assert objective.sampling is not None
        assert tokenizer is not None
        self._context, self._engine, self._coordinator = context, engine, coordinator
        self._data, self._load = data, load
        self._pools = pools_of_ranks(context.job)
        self.ends = ends_of(context.config, engine.spec, tokenizer)
        self._judge = Judge(objective.sampling, tokenizer, self.ends, context.warn)
        stack.callback(self._judge.close)
        self._generator = self._made(objective.sampling, tokenizer)

    def _made(self, sampling: Sampling, tokenizer: Tokenizer) -> Generator:
        del tokenizer
        engine, device = self._engine, self._engine.accelerator.device
        own = self._bounds(self._load.prompts)[self._coordinator.rank]
        slots = min(MOST_SLOTS, (own[1] - own[0]) * sampling.group)
        require_room(self._context, engine, slots)
        model = Model(engine.spec, engine.accelerator.operators, dtype=engine.dtype, device=device)
        return Generator(
            answering_model(engine.spec, self._context.config, model, device),
            engine.accelerator,
            sampling,
            length=engine.plan.job.sequence_length,
            dtype=engine.dtype,
            ends=self.ends,
            slots=slots,
        )

    def _bounds(self, prompts: int) -> list[tuple[int, int]]:
        job = self._context.job
        return bounds(job.spec, job.cluster, self._pools, self._load.of(prompts))

    def start(self) -> str:
        """Start what judges, on the first rank."""
        first = self._coordinator.rank == 0
        return self._coordinator.broadcast((self._judge.start() if first else "",))[0]

    def explain(self) -> list[str]:
        """Return in words who answers."""
        job = self._context.job
        return explained(turns_of(job, self._load, job.predicted().step_seconds))

    def answered(self, order: Order, coming: Order | None) -> Answers:
        """Hand weights over, answer this rank's prompts, and hear the others' and the judge."""
        del coming
        engine, began = self._engine, time.perf_counter()
        hand_over(engine, engine.spec, self._generator.model, self._add, engine.dtype,
                  engine.accelerator.device)  # fmt: skip
        handed = time.perf_counter()
        prompts = order.records(self._data.train, self._data.validation)
        seed = self._context.config.seed
        own = [
            Asked(prompt=i, tokens=prompts[i].tokens, seed=order.seed(seed, i))
            for i in range(*self._bounds(len(prompts))[self._coordinator.rank])
        ]
        answers = self._generator.answers(own, batch=order.number, group=order.group,
                                          greedy=order.held_out)  # fmt: skip
        told = self._coordinator.gather(answers)
        generated = time.perf_counter()
        said = None
        if told is not None:
            said = self._judge.judged(prompts, {i: group for part in told for i, group, _ in part})
        said = self._coordinator.broadcast(said)
        seconds = {
            "hand_over_s": handed - began, "generate_s": generated - handed,
            "judge_s": time.perf_counter() - generated,
        }  # fmt: skip
        return Answers.of(prompts, said, seconds)

    def _add(self, flat: object) -> None:
        """Replace a tensor by its sum over the ranks."""
        engine = self._engine
        if engine.seats.num_ranks > 1:
            everybody = tuple(range(engine.seats.num_ranks))
            engine.links.all_reduce(everybody, flat, use="scalars").wait()  # type: ignore[arg-type]

"""The question of a training file: which chips answer, and which train. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tutti.errors import InputError
from tutti.recipes.reinforcement.places import Apart, Load, Turns, apart_of, explained, turns_of
from tutti.recipes.reinforcement.row_room import answers_per_row
from tutti.train.data.open_data import open_data
from tutti.train.data.prompt_rows import PromptRows
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import prepare
from tutti.train.run.weights import model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Both ways of a job, priced."""

    turns: Turns
    apart: tuple[Apart, ...]

    @property
    def lines(self) -> list[str]:
        """What a person reads."""
        return explained(self.turns, self.apart)

    def to_document(self) -> dict[str, object]:
        """Return plain values."""
        ways = [{**asdict(one), "batch_s": one.batch_s} for one in self.apart]
        return {
            "turns": {**asdict(self.turns), "batch_s": self.turns.batch_s},
            "apart": sorted(ways, key=lambda one: str(one["answering"])),
            "said": self.lines,
        }


def places_of(file: Path) -> Places:
    """Plan a training file both ways."""
    config = TrainConfig.load(file)
    objective = config.objective
    if objective is None or objective.sampling is None:
        raise InputError(f"{file}: has no objective grpo or rloo, so nobody answers")
    sampling = replace(objective.sampling, answering=())  # both ways are priced anew
    config = replace(config, objective=replace(objective, sampling=sampling))
    job = prepare(config)
    length = job.plan.job.sequence_length
    data = open_data(
        config.data, sequence_length=length, vocabulary=job.spec.vocab, objective=objective,
        model_folder=model_folder(config.model),
    )  # fmt: skip
    longest = max(p.rows.longest for p in data.train.parts if isinstance(p.rows, PromptRows))
    room = job.plan.job.global_batch * answers_per_row(length, longest, sampling.max_tokens)
    load = Load(
        prompts=sampling.prompts or max(1, room // sampling.group), group=sampling.group,
        prompt_tokens=longest, answer_tokens=sampling.max_tokens,
    )  # fmt: skip
    turns = turns_of(job, load, job.predicted().step_seconds)
    return Places(turns=turns, apart=tuple(apart_of(job, load)))

"""Jobs that are a model and tokens: the planner says how fast they train on each mix of pools.

Its answers are tabled once per model, batch, length and mix, in memory or in a file that later runs
go on with.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tutti.errors import InputError
from tutti.files import read_text, write_text
from tutti.fleet.mix_values import Mix, Worth, mixes
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelJob:
    """What is trained, and on how many nodes it may be."""

    model: str
    tokens: float
    global_batch: int | None = None  # None: what `tutti plan` takes on the most nodes
    sequence_length: int | None = None
    least_nodes: int = 1
    most_nodes: int = 8

    def __post_init__(self) -> None:
        for name in ("tokens", "least_nodes", "most_nodes", "global_batch", "sequence_length"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"'{name}' is {value:g}; give more than 0")
        if self.least_nodes > self.most_nodes:
            raise ValueError(
                f"from {self.least_nodes} to {self.most_nodes} nodes; give no fewer at most"
            )


Ask = Callable[[ModelJob, Cluster], float | None]  # tokens per second; None: nothing fits
Update = Callable[[str, int, int], None]  # what is asked, how many are answered, of how many


def ask_planner(job: ModelJob, part: Cluster) -> float | None:
    """Return the tokens per second of the best plan for a job on a part of a cluster.

    None: no plan fits; InputError: no plan could, such as of a model that is not known.
    """
    from tutti.search.ask_from_values import make_problem
    from tutti.search.planner import plan

    problem = make_problem(
        job.model, part, global_batch=job.global_batch, sequence_length=job.sequence_length
    )
    try:
        return plan(problem, compare=False).best.tokens_per_second
    except InputError:
        return None


@dataclass(slots=True)
class MixTable:
    """What mixes of one cluster are worth to models, as far as was asked."""

    cluster: Cluster
    file: Path | None = None
    ask: Ask | None = None  # None: the planner
    known: dict[str, float | None] = field(default_factory=dict)  # None: nothing fits

    @classmethod
    def load(cls, cluster: Cluster, file: Path | None = None, ask: Ask | None = None) -> MixTable:
        """Return the table of a file, empty if there is none yet; InputError: it is another's."""
        table = cls(cluster, file, ask)
        if file is None or not file.exists():
            return table
        try:
            document: dict[str, Any] = json.loads(read_text(file))
            of, values = document["cluster"], document["tokens_per_s"]
            table.known = {str(k): None if v is None else float(v) for k, v in values.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{file.name}: is no table of what mixes of pools are worth") from None
        if of != cluster.fingerprint():
            raise InputError(
                f"{file.name}: was made for another cluster than '{cluster.name}' as it is now; "
                "name a new file"
            )
        return table

    def fill(self, jobs: Iterable[ModelJob], update: Update | None = None) -> None:
        """Ask what is not yet known, and keep every answer as it comes."""
        ask = self.ask or ask_planner
        missing = {
            key: (job, mix)
            for job in map(self._whole, jobs)
            for mix in self._mixes(job)
            if (key := _key(job, mix)) not in self.known
        }
        for done, (key, (job, mix)) in enumerate(missing.items()):
            if update is not None:
                update(key, done, len(missing))
            self.known[key] = ask(job, self._part(mix))
            self._save()
        if missing and update is not None:
            update("", len(missing), len(missing))

    def worths(self, job: ModelJob) -> list[Worth]:
        """Return what each mix is worth to a job, fastest first, asked now where it was not.

        Mixes on which nothing fits are left out; InputError: nothing fits on any.
        """
        self.fill([job])
        job = self._whole(job)
        wanted = self._mixes(job)
        worths = [
            Worth(mix, speed, self._part(mix).price_per_hour)
            for mix in wanted
            if (speed := self.known[_key(job, mix)]) is not None
        ]
        if not worths:
            raise InputError(
                f"no plan for {job.model} fits any of {len(wanted)} mixes of "
                f"'{self.cluster.name}', {job.least_nodes} to {job.most_nodes} nodes"
            )
        return sorted(worths, key=lambda one: (-one.tokens_per_s, one.mix))

    def _whole(self, job: ModelJob) -> ModelJob:
        """Return a job with its batch."""
        from tutti.search.ask_from_values import default_batch

        if job.global_batch is not None:
            return job
        parts = map(self._part, self._mixes(job))
        largest = max(parts, key=lambda part: part.num_chips)
        return replace(job, global_batch=default_batch(largest))

    def _mixes(self, job: ModelJob) -> list[Mix]:
        all_mixes = list(mixes(self.cluster, job.least_nodes, job.most_nodes))
        if not all_mixes:
            raise InputError(
                f"{job.model} asks for {job.least_nodes} nodes at least, more than any pool of "
                f"'{self.cluster.name}' has"
            )
        return all_mixes

    def _part(self, mix: Mix) -> Cluster:
        return self.cluster.only({pool: range(count) for pool, count in mix})

    def _save(self) -> None:
        if self.file is not None:
            document = {"cluster": self.cluster.fingerprint(), "tokens_per_s": self.known}
            write_text(self.file, json.dumps(document, indent=1) + "\n")


def mix_text(mix: Mix) -> str:
    """Return "8 a800 + 8 h800"."""
    return " + ".join(f"{count} {pool}" for pool, count in mix)


@functools.cache
def shape_of(model: str) -> str:
    """Return what tells the shapes of two models of one name apart."""
    return load_model(model).fingerprint


def _key(job: ModelJob, mix: Mix) -> str:
    length = job.sequence_length or "usual"
    return f"{job.model} ({shape_of(job.model)}), {job.global_batch} × {length}, on {mix_text(mix)}"

"""`tutti train` of a file with `elastic:`: controller and agent in one, on this machine's chips."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tutti.comm.entry.store import StoreServer
from tutti.comm.entry.trust import Key
from tutti.elastic.agent import Agent, AgentSettings
from tutti.elastic.controller import Controller, ControllerSettings
from tutti.elastic.events import Fatal, Phase
from tutti.elastic.journal import Entry, Journal, last_generation, now
from tutti.errors import InputError, StoppedError, TuttiError
from tutti.launch.identity import used_chips
from tutti.launch.secret import SECRET, Secret, new_secret
from tutti.observe.folder import METRICS
from tutti.observe.record import PoolTimes, StepRecord
from tutti.observe.sinks import JsonLines
from tutti.ranks.local_processes import RankEvent
from tutti.train.elastic.settle import Settler
from tutti.train.elastic.watches import HangWatch, SlowWatch
from tutti.train.run.planning import Job
from tutti.train.run.starting import Resume

RANK_MODULE = "tutti.train.elastic.rank"
_SHARED_MEMORY = Path("/dev/shm")
Listener = Callable[[RankEvent], None]


class ElasticRun:
    """A job that goes on when ranks are lost."""

    def __init__(
        self,
        job: Job,
        *,
        resume: Resume,
        listener: Listener | None,
        environment: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        assert job.config.elastic is not None
        self.job, self.config = job, job.config.elastic
        self._listener = listener
        self._secret = new_secret()
        self._servers: list[StoreServer] = []
        self._figures = Figures(job)
        self.asked_by, self._asked = 0, 0
        self.summary: dict[str, Any] | None = None
        folder = job.config.folder
        self._journal = Journal(folder)
        self.name = uuid.uuid4().hex[:12]
        settings = ControllerSettings(
            job=self.name, death_after_s=self.config.death_after_s, wait_s=self.config.wait_s
        )
        self._settler = Settler(job, resume=resume)
        self.controller = Controller(
            settings, self._journal, self._settler, self._rendezvous, self._passed,
            generation=last_generation(folder),
        )  # fmt: skip
        self._memory = Path(tempfile.mkdtemp(prefix="tutti-elastic-", dir=_memory_folder()))
        self.agent = Agent(self._agent_settings(environment or {}), self._hear)
        self._slow = SlowWatch(job)
        self.controller.watch = HangWatch(job, self.agent, self.config.hang_after_s)

    def _agent_settings(self, environment: Mapping[int, Mapping[str, str]]) -> AgentSettings:
        chips = {str(chip): rank for chip, rank in used_chips(self.job.plan).items()}
        threads = str(max(1, (os.cpu_count() or 1) // len(chips)))
        common = {
            "LOCAL_WORLD_SIZE": str(len(chips)), "WORLD_SIZE": str(len(chips)),
            "MASTER_ADDR": "127.0.0.1", SECRET: self._secret,
        }  # fmt: skip
        given = {
            chip: {
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
                **common, "LOCAL_RANK": str(rank), **environment.get(rank, {}),
            }
            for chip, rank in chips.items()
        }  # fmt: skip
        return AgentSettings(
            job=self.name,
            host="here",
            chips=tuple(chips),
            controller=self.controller.address,
            module=RANK_MODULE,
            folder=self.job.config.folder.resolve(),
            memory=self._memory,
            environment=given,
            heartbeat_s=self.config.heartbeat_s,
        )

    def run(self) -> dict[str, Any]:
        """Run to the end; return what it came to."""
        self.agent.start()
        try:
            members = self.controller.run()
        finally:
            self.agent.close()
            self.controller.close()
            self._figures.close()
            for server in self._servers:
                server.close()
            self._journal.close()
            shutil.rmtree(self._memory, ignore_errors=True)
        if self._asked > 1:
            raise StoppedError(
                "ended at once, as asked; what was not saved is lost", by=self.asked_by
            )
        if members.phase is Phase.GIVEN_UP:
            raise TuttiError(f"given up: {members.why}; the logs are in {self._logs()}")
        if self.summary is None:
            raise StoppedError(
                "the run was stopped before it had begun", by=self.asked_by or signal.SIGTERM
            )
        return {**self.summary, **self._figures.summary(self.job)}

    def _hear(self, chip: str, process: int, values: dict[str, Any]) -> None:
        if values["kind"] == "died":
            self._settler.died(chip)
        self.controller.hear(chip, process, values)

    def _logs(self) -> Path:
        return self.job.config.folder / "logs"

    def ask_to_stop(self, by: int = signal.SIGTERM) -> None:
        """Let the ranks finish their step, save and end; asked twice, end now."""
        self._asked += 1
        self.asked_by = self.asked_by or by
        if self._asked == 1:
            self.agent.ask_to_stop(by)
        else:
            self.controller.tell(Fatal("asked to end at once"))

    # --- what the controller needs -------------------------------------------------------------

    def _rendezvous(self, generation: int, size: int) -> str:
        key = Key(Secret(self._secret.encode()), "store", f"generation-{generation}")
        server = StoreServer(key, size, "127.0.0.1")
        self._servers.append(server)
        for old in self._servers[:-2]:
            old.close()
        del self._servers[:-2]
        return f"127.0.0.1:{server.port}"

    def _took(self, values: dict[str, Any]) -> None:
        """Look at what every rank computed in a step; say which chip became slow, or well."""
        members = self.controller.members
        for verdict in self._slow.step(members, int(values["step"]), values["compute_s"]):
            chip = members.seats[verdict.rank].chip
            text = f"rank {verdict.rank} ({chip}) {verdict.why}"
            phase = "slow" if verdict.slow else "well again"
            self._journal.write(
                Entry(
                    at=now(),
                    generation=members.generation,
                    phase=phase,
                    why=text,
                    step=verdict.step,
                )
            )
            if self._listener is not None:
                self._listener(RankEvent(verdict.rank, "warning", {"text": text}))

    def _passed(self, rank: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "done":
            self.summary = values
        if kind == "times":
            self._took(values)
            return
        if kind == "step" and not self._figures.take(values):
            return
        if kind == "validation":
            self._figures.validation(int(values["step"]), float(values["loss"]))
        if self._listener is None:
            return
        if kind == "generation":
            number, phase = values["generation"], values["phase"]
            text = f"generation {number}: {phase}" + (
                f" ({values['text']})" if values["text"] else ""
            )
            self._listener(RankEvent(0, "notice", {"text": text}))
        elif kind == "died":
            self._listener(RankEvent(rank, "warning", {"text": f"rank {rank} {values['how']}"}))
        else:
            self._listener(RankEvent(rank, kind, values))


class Figures:
    """The figures of a run, by step; a step that is made again replaces what was said of it."""

    def __init__(self, job: Job) -> None:
        self._path = job.config.folder / METRICS
        self._lines: JsonLines | None = None
        self._records: dict[int, dict[str, Any]] = {}
        self._validation: dict[int, float] = {}
        self._last = 0

    def take(self, values: dict[str, Any]) -> bool:
        """Take a step; False if it was known."""
        late = bool(values.pop("late", False))
        step = int(values["step"])
        if late and step in self._records:
            return False
        self._records[step] = values
        again = [step]
        if self._lines is None or step <= self._last:
            if self._lines is not None:
                self._lines.close()
            self._lines = JsonLines(self._path, after=step - 1)
            if late:  # heard of after steps that came later; else the run went back to here
                again = [n for n in sorted(self._records) if n >= step]
        for number in again:
            self._lines.write(_record(self._records[number]))
        self._last = again[-1]
        return True

    def validation(self, step: int, loss: float) -> None:
        """Take a loss on held-out data."""
        self._validation[step] = loss
        if self._lines is not None:
            self._lines.validation(step, loss)

    def summary(self, job: Job) -> dict[str, Any]:
        """Return what all generations together came to."""
        steps = sorted(self._records)
        if not steps:
            return {}
        seconds = [float(self._records[step]["seconds"]) for step in steps]
        steady = statistics.median(seconds[1:] or seconds)
        return {
            "first_step": steps[0] - 1,
            "losses": [float(self._records[step]["loss"]) for step in steps],
            "validation": sorted(self._validation.items()),
            "seconds_per_step": steady,
            "tokens_per_s": job.plan.job.tokens / steady if steady else 0.0,
        }

    def close(self) -> None:
        """Write no more."""
        if self._lines is not None:
            self._lines.close()


def _record(values: dict[str, Any]) -> StepRecord:
    pools = values.get("pools")
    whole = {name: PoolTimes(**found) for name, found in pools.items()} if pools else None
    return StepRecord(**{**values, "pools": whole})


def _memory_folder() -> str | None:
    """Return where files lie in memory; None: wherever temporary files go."""
    return str(_SHARED_MEMORY) if os.access(_SHARED_MEMORY, os.W_OK) else None


def check_elastic(job: Job) -> None:
    """Refuse what cannot go on: more chips than the cluster has, figures that no rank writes."""
    elastic = job.config.elastic
    assert elastic is not None
    most = sum(pool.num_chips for pool in job.cluster.pools)
    if elastic.min_chips > most:
        raise InputError(
            f"elastic.min_chips is {elastic.min_chips}, but cluster '{job.cluster.name}' has "
            f"{most} chips"
        )
    measure = job.config.measure
    for name in ("tensorboard", "prometheus_port", "wandb", "mlflow", "tensors"):
        if getattr(measure, name):
            raise InputError(
                f"measure.{name}: not written by elastic runs yet, whose figures the controller "
                f"writes to {METRICS}; leave it out"
            )

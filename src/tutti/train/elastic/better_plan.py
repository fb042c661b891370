"""A plan for the chips that a running job has now, searched beside the training.

`Search` starts a process of low priority and is asked for its answer from time to time; `main` is
that process. Both talk by files in the run's folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tutti.elastic.journal import FOLDER
from tutti.errors import InputError
from tutti.files import write_text
from tutti.hardware.topology import Position
from tutti.observe.folder import RUN_FILE
from tutti.plan.check import check_plan
from tutti.plan.files import load_plan, save_plan
from tutti.plan.plan import Plan
from tutti.search.question.cluster_parts import ClusterParts, Wires, cluster_parts
from tutti.search.replan.replan import replan
from tutti.search.replan.state_movement import movement
from tutti.train.run.planning import Job, problem_of, search_question

_NICE = 5  # training comes first


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan for the chips that are there."""

    plan: Plan  # by real places
    step_s: float
    staying_s: float | None  # of the plan at hand, on the same chips; None: it has no price
    movement_s: float
    words: str


def position_of(chip: str) -> Position:
    """Return the place of "pool/node/slot"."""
    pool, node, slot = chip.split("/")
    return Position(pool, int(node), int(slot))


def find_better(
    job: Job,
    running: Plan,
    chips: Iterable[str],
    slow: Mapping[str, float],
    wires: Wires | None = None,
) -> Proposal:
    """Return the best plan for some chips of the job's cluster."""
    there = {position_of(chip) for chip in chips}
    parts = parts_of(job, there, {position_of(chip): f for chip, f in slow.items()}, wires)
    problem = problem_of(job.config, job.spec, parts.cluster)
    problem = replace(problem, job=replace(running.job, schedule=problem.job.schedule))
    before = parts.from_real(running)
    if before is not None and not check_plan(before, job.spec, parts.cluster):
        answer = replan(before, problem)
        step_s = answer.result.best.step_seconds
        staying_s = answer.staying.step_seconds if answer.staying is not None else None
        plan, words = answer.result.best.plan, answer.words
    else:
        best = search_question(problem)
        step_s, staying_s, plan, words = best.step_seconds, None, best.plan, ""
    real = parts.to_real(plan)
    problems = check_plan(real, job.spec, job.cluster)
    if problems:
        raise InputError(f"the plan that was found does not hold on the real chips: {problems[0]}")
    return Proposal(
        plan=real,
        step_s=step_s,
        staying_s=staying_s,
        movement_s=movement(running, real, job.spec, job.cluster).seconds,
        words=words,
    )


def parts_of(
    job: Job, there: set[Position], slow: Mapping[Position, float], wires: Wires | None = None
) -> ClusterParts:
    """Return the parts of the job's cluster that some chips are."""
    lost = [
        chip
        for pool in job.cluster.pools
        for node in range(pool.nodes)
        for slot in range(pool.node.num_chips)
        if (chip := Position(pool.name, node, slot)) not in there
    ]
    parts = cluster_parts(job.cluster, lost, slow, wires)
    if parts is None:
        raise InputError("no chip is left")
    return parts


class Search:
    """A search in a process of its own."""

    _count = 0

    def __init__(
        self,
        job: Job,
        running: Plan,
        chips: Iterable[str],
        slow: Mapping[str, float],
        wires: Wires,
    ) -> None:
        Search._count += 1
        folder = job.config.folder / FOLDER
        base = folder / f"search-{os.getpid()}-{Search._count}"
        self._asked, self._told = base.with_suffix(".asked.json"), base.with_suffix(".told.json")
        self._running, self._found = base.with_suffix(".running.json"), base.with_suffix(".json")
        save_plan(running, self._running)
        asked = {"chips": sorted(chips), "slow": dict(slow), "wires": list(wires.items()),
                 "running": str(self._running), "told": str(self._told),
                 "found": str(self._found)}  # fmt: skip
        write_text(self._asked, json.dumps(asked))
        log = (job.config.folder / "logs" / "search.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(job.config.folder), str(self._asked)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        log.close()

    def answer(self) -> Proposal | str | None:
        """Return what was found, or why nothing was; None while it is still sought."""
        if self._process.poll() is None:
            return None
        if not self._told.is_file():
            return f"the search failed (status {self._process.returncode}; see logs/search.log)"
        told = json.loads(self._told.read_text(encoding="utf-8"))
        if "error" in told:
            return str(told["error"])
        return Proposal(plan=load_plan(self._found), **told)

    def close(self) -> None:
        """End it, and remove its files."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for path in (self._asked, self._told, self._running, self._found):
            path.unlink(missing_ok=True)


def main(folder: Path, asked: Path) -> None:
    """Search as a file asks for."""
    os.nice(_NICE)
    words = json.loads(asked.read_text(encoding="utf-8"))
    job = Job.load(folder / RUN_FILE)
    told: dict[str, object]
    try:
        wires = {tuple(ends): factor for ends, factor in words["wires"]}
        running = load_plan(Path(words["running"]))
        better = find_better(job, running, words["chips"], words["slow"], wires)
        save_plan(better.plan, Path(words["found"]))
        told = {"step_s": better.step_s, "staying_s": better.staying_s,
                "movement_s": better.movement_s, "words": better.words}  # fmt: skip
    except InputError as error:
        told = {"error": str(error)}
    write_text(Path(words["told"]), json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

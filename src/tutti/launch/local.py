"""`--to local`: the command that runs all ranks of a plan on this machine."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from tutti.launch.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCommand:
    """Words to execute and the variables that they need."""

    words: tuple[str, ...]
    environment: dict[str, str]
    num_hosts: int  # that the plan has; all their ranks run here

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, *map(shlex.quote, self.words)])

    def execute(self) -> None:
        """Become this command."""
        os.execvpe(self.words[0], self.words, {**os.environ, **self.environment})


def local_command(job: Job, plan: Path, config: Path | None) -> LocalCommand:
    """Return the command; plan and configuration are read where they are.

    It starts the ranks itself, numbered as in the plan. torchrun is not needed for it, whose own
    rendezvous would listen to every network that this machine is in.
    """
    part, _ = next(job.hosts())
    if job.num_hosts == 1:
        environment = dict(part.launch.environment)
    else:
        threads = max(1, (os.cpu_count() or 1) // job.plan.num_ranks)
        common = {name: str(value) for name, value in job.facts.environment.items()}
        environment = {"OMP_NUM_THREADS": str(threads), **common}
    return LocalCommand(
        words=(
            *job.words,
            *([str(config)] if config is not None else []),
            *([job.model_folder] if job.serves else []),
            "--plan",
            str(plan),
            *job.arguments,
        ),
        environment=environment,
        num_hosts=job.num_hosts,
    )

"""Generations that fail though nobody is lost: why is told, and that it comes again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tutti.elastic.events import Decided, Heard, Instruction, Phase, Settle, Settled, Silent
from tutti.elastic.hosts import named
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Report, Source, Standing, Status

CHIPS = ("p/0/0", "p/1/0")
WRONG = "rank 1: all_reduce gradients #2: 16 bytes came where 30 are due"


@dataclass
class Job:
    """Two hosts that do as they are told."""

    members: Membership = field(default_factory=lambda: Membership(job="job"))
    number: int = 0
    said: list[str] = field(default_factory=list)

    def hear(self, standing: Standing, step: int, whys: tuple[str, str] = ("", "")) -> None:
        for host, chip in enumerate(CHIPS):
            self.number += 1
            generation = self.members.generation
            report = Report(chip=chip, process=1, standing=standing, step=step, why=whys[host],
                            generation=generation)  # fmt: skip
            self.after(Heard(Status(
                job="job", host=f"p/{host}", incarnation=1, number=self.number,
                order=self.members.order, reports=(report,),
            )))  # fmt: skip

    def after(self, event: Any) -> None:
        self.members, instructions = self.members.after(event)
        for instruction in instructions:
            self.obey(instruction)

    def obey(self, instruction: Instruction) -> None:
        if isinstance(instruction, Decided):
            self.said.append(instruction.why)
        if isinstance(instruction, Settle) and len(instruction.chips) == len(CHIPS):
            source = Source(kind="memory", holders=CHIPS)
            self.after(Settled(instruction.request, CHIPS, "plan", source))

    def fail(self, step: int, *whys: str) -> None:
        self.hear(Standing.RUNNING, step)
        assert self.members.phase is Phase.RUNNING
        self.hear(Standing.IDLE, step, (whys[0], whys[1]))


def test_why_a_generation_failed_is_told_by_who_noticed() -> None:
    job = Job()
    job.hear(Standing.IDLE, -1)
    job.fail(4, f"rank 0: {WRONG} (told by rank 1)", WRONG)
    assert f"nobody is lost, but {WRONG}" in job.said
    assert job.members.phase is Phase.ENTERING


def test_what_fails_three_times_at_one_step_is_given_up() -> None:
    job = Job()
    job.hear(Standing.IDLE, -1)
    for step in (4, 4, 7, 7):
        job.fail(step, "", WRONG)
        assert job.members.phase is Phase.ENTERING
    job.fail(4, "", WRONG)
    assert job.members.phase is Phase.GIVEN_UP
    words = f"3 times at step 5: nobody is lost, but {WRONG}; going on would repeat it"
    assert job.members.why == words


def test_what_ranks_say_of_an_earlier_generation_does_not_count() -> None:
    job = Job()
    job.hear(Standing.IDLE, -1)
    for step in range(4, 12):  # the switch to another plan is no failure
        job.fail(step, "", "")
    assert job.members.phase is Phase.ENTERING
    assert not job.members.faults


def test_all_who_were_lost_are_named() -> None:
    job = Job()
    job.hear(Standing.IDLE, -1)
    job.hear(Standing.RUNNING, 3)
    for host in ("p/0", "p/1"):
        job.after(Silent(host))
    assert job.said[-1] == "rank 0 (p/0/0): host p/0 is silent; rank 1 (p/1/0): host p/1 is silent"


def test_of_many_that_were_lost_the_first_are_named() -> None:
    assert named([f"rank {n} is gone" for n in range(6)]).endswith("rank 3 is gone; and 2 more")

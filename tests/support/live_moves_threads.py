"""Live moves with ranks as threads: the same calls as between processes, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.support.checkpointing import SYNCHRONOUS, Run, kept
from tests.support.live_moves import Moved, chips_of
from tests.support.threads import ThreadLinks, World
from tutti.launch.identity import used_chips
from tutti.plan.plan import Plan
from tutti.train.checkpoint import Progress
from tutti.train.elastic.held_state import HeldState, fill, offer


class ThreadControl:
    """What `fill` and `offer` need of a communicator; counts the bytes that it sends."""

    def __init__(self, links: ThreadLinks) -> None:
        self._links, self.rank, self.size = links, links.rank, links.world.size
        self.sent_bytes = 0

    def gather_values(self, value: Any) -> list[Any]:
        return self._links._meet(range(self.size), value)()

    def exchange(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], channel: str
    ) -> Any:
        self.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor, _ in sends)
        return self._links.exchange(
            [(peer, tensor) for tensor, peer in sends],
            [(peer, tensor) for tensor, peer in receives], channel,
        )  # fmt: skip


def move_all(before: Plan, after: Plan, folder: Path, *, steps: int = 1) -> list[Moved]:
    """Train under one plan, save, and go on under another by both ways; a rank per chip."""
    progress = Progress(step=steps, samples=before.job.global_batch * steps)

    def first(links: ThreadLinks) -> HeldState:
        one = Run(links, before, folder)
        one.begin()
        one.train(steps)
        one.checkpointer.save(one.engine, progress)
        one.checkpointer.close()
        return HeldState.taken(one.engine, progress)

    states = World(before.num_ranks).run(first)
    chips, worlds = chips_of(before, after), (World(after.num_ranks), World(after.num_ranks))

    def second(links: ThreadLinks) -> Moved:
        control, chip = ThreadControl(links), chips[links.rank]
        given, seat = used_chips(before).get(chip), used_chips(after).get(chip)
        held = [] if given is None else [states[given]]
        live, disk = [], []
        if seat is None:
            offer(control, held, steps)  # type: ignore[arg-type]
        else:
            one = Run(ThreadLinks(worlds[0], seat), after, folder)
            fill(one.engine, control, held, steps)  # type: ignore[arg-type]
            live = kept(one.engine)
            other = Run(ThreadLinks(worlds[1], seat), after, folder, settings=SYNCHRONOUS)
            other.checkpointer.load(other.engine)
            disk = kept(other.engine)
        return Moved(live=live, disk=disk, numbers={"bytes": control.sent_bytes})

    return World(len(chips)).run(second)

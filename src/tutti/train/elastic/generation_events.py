"""What ranks tell, with the generation that it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutti.ranks.events import PipeEvents

if TYPE_CHECKING:
    from tutti.train.run.worker import Worker


class GenerationEvents:
    """Events with the generation that they are of."""

    def __init__(self, events: PipeEvents, generation: int) -> None:
        self._events, self.generation = events, generation

    def send(self, kind: str, **values: object) -> None:
        """Tell one."""
        self._events.send(kind, **values, generation=self.generation)


def live_generation(worker: Worker) -> int:
    """Return the generation of a worker."""
    events = worker.context.events
    assert isinstance(events, GenerationEvents)
    return events.generation

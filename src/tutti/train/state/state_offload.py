"""Runs the Fetch and Offload instructions of a rank's parameters, gradients and optimizer state.

What is offloaded lies on the host between its uses. Optimizer state comes for the step of its
bucket. Parameters come for a pass (at level 3 this rank's shard, to be gathered) and leave with its
end. Gradients add up on the host, one micro-batch after the other; they come back to be reduced,
and for the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from tutti.accelerator.accelerator import Accelerator, Event
from tutti.ranks.links import Handle, Then
from tutti.schedule.instruction import Instruction, What
from tutti.train.state.host_vectors import COPY_IN
from tutti.train.state.optimizer_state import OptimizerState
from tutti.train.state.state import SpanState
from tutti.train.sync.synchronise import Exchange, Synchronised, allocate


class Departure:
    """Something on its way to the host, whose memory on the device will be free."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def wait(self) -> None:
        """Let the host wait: memory is given anew when the host knows that it is free."""
        for event in self._events:
            event.synchronize()


class Arrival:
    """An event that the lane of whoever waits is to wait for."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the current lane wait."""
        self._event.wait()


class Visit:
    """Optimizer state on its way."""

    def __init__(self, state: OptimizerState) -> None:
        self._state = state

    def wait(self) -> None:
        """Let the state be what is on the device."""
        self._state.arrive()


class HostMoves:
    """What one rank brings from its host and back."""

    def __init__(self, accelerator: Accelerator, parameters: Synchronised) -> None:
        self._accelerator, self._parameters = accelerator, parameters

    def fetch(self, entry: Instruction) -> Handle:
        """Bring something to the device."""
        exchanges = self._parameters.of_units(range(entry.start, entry.stop))
        if entry.what is What.PARAMETERS:
            return Then([self._fetch_parameters(exchange) for exchange in exchanges])
        states = [state for exchange in exchanges for state in exchange.states]
        if entry.what is What.OPTIMIZER:
            for state in states:
                state.optimizer.fetch()
            return Then([Visit(state.optimizer) for state in states])
        assert entry.what is What.GRADIENTS
        return Then([_fetch_gradients(state) for state in states])

    def offload(self, entry: Instruction) -> Handle:
        """Move something to the host."""
        exchanges = self._parameters.of_units(range(entry.start, entry.stop))
        events: list[Event | None] = []
        for state in (state for exchange in exchanges for state in exchange.states):
            if entry.what is What.OPTIMIZER:
                events += state.optimizer.store()
            elif entry.what is What.PARAMETERS:
                events.append(None if state.home is None else state.home.store())
            else:
                assert entry.what is What.GRADIENTS
                events.append(state.offload_gradients())
        return Departure([event for event in events if event is not None])

    def begin(self) -> None:
        """Let go of parameters that are at home on the host by now."""
        self._accelerator.synchronize()
        for exchange in self._parameters.exchanges.values():
            if any(state.home is not None for state in exchange.states):
                self._parameters.release(exchange)

    def _fetch_parameters(self, exchange: Exchange) -> Handle:
        if exchange.level == 3:
            for state in exchange.states:
                assert state.home is not None
                state.home.fetch()  # whoever gathers waits for it
            return Then(())
        exchange.uses += 1
        if exchange.uses > 1:
            return Then(())
        with self._accelerator.lane(COPY_IN):
            for owner in exchange.owners():
                allocate(owner, self._accelerator)
            for state in exchange.states:
                state.bring_parameters()
            arrived = self._accelerator.event()
            arrived.record()
        for owner in exchange.owners():
            self._accelerator.keep_for_lane(owner.data, "compute")
        return Arrival(arrived)


def _fetch_gradients(state: SpanState) -> Handle:
    assert state.host_sum is not None
    fetched = state.host_sum.take()
    if fetched is None:
        return Then(())
    tensor, arrived = fetched
    return Then([Arrival(arrived)], lambda: state.join_gradients(tensor))

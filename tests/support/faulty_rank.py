"""A rank of a job on which one instruction goes wrong: `python -m tests.support.faulty_rank FILE`.

The variable FAULT says what: {"rank", "op", "how", "step", "mark"}. An exception is raised and a
process stopped once; numbers are spoilt from then on, as by a chip that computes wrongly.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.ranks.links import Handle, Then
from tutti.schedule.instruction import Instruction, Op, What
from tutti.train.engine.engine import Engine
from tutti.train.state.state import SpanState

NAN = float("nan")


class InjectedError(Exception):
    """What the fault raises."""


def spoil(tensor: Tensor) -> None:
    tensor.detach().reshape(-1)[:1].fill_(NAN)


def spoil_gradients(states: list[SpanState]) -> bool:
    """Spoil the first gradient there is."""
    for state in states:
        on_host = None if state.host_sum is None else state.host_sum.total
        for tensor in (state.gradient, state.total, on_host, *(state.loose or {}).values()):
            if tensor is not None:
                spoil(tensor)
                return True
    return False


class Fault:
    """Goes wrong at the first instruction of a kind in a step that can."""

    def __init__(self, *, rank: int, op: str, how: str, step: int, mark: str) -> None:
        self.rank, self.op, self.how, self.step = rank, Op(op), how, step
        self.mark, self.steps, self.done_in = Path(mark), -1, -2

    def install(self) -> None:
        start, step = Engine.start, Engine.step

        def counted(engine: Engine, *arguments: Any) -> Any:
            self.steps += 1
            return step(engine, *arguments)

        def faulty(
            engine: Engine, entry: Instruction, handler: Callable[[Instruction], Handle]
        ) -> Handle:
            if entry.op is not self.op or self.steps < self.step or self.done_in == self.steps:
                return start(engine, entry, handler)
            if self.how == "nan" and entry.what is What.BATCH:  # tokens are whole numbers
                return start(engine, entry, handler)
            if self.how == "nan":
                return self.spoilt(engine, entry, lambda: start(engine, entry, handler))
            self.note()
            if self.how == "exception":
                raise InjectedError(f"at {entry}")
            os.kill(os.getpid(), signal.SIGSTOP)
            return start(engine, entry, handler)

        Engine.start, Engine.step = faulty, counted  # type: ignore[method-assign]

    def note(self) -> None:
        self.done_in = self.steps
        if not self.mark.exists():
            self.mark.write_text(str(time.time()), encoding="ascii")

    def spoilt(self, engine: Engine, entry: Instruction, run: Callable[[], Handle]) -> Handle:
        """Run an instruction and spoil a number that it reads or writes."""
        states = [
            state
            for exchange in engine.parameters.of_units(
                u for u in range(entry.start, max(entry.stop, 1)) if u in engine.seat.units
            )
            for state in exchange.states
        ]
        if self.before(engine, entry, states):
            self.note()
            return run()
        handle = run()

        def after() -> None:
            if self.after(engine, entry, states):
                self.note()

        if entry.op in (Op.RECEIVE, Op.GATHER_PARAMETERS):
            return Then([handle], after)
        after()
        return handle

    def before(self, engine: Engine, entry: Instruction, states: list[SpanState]) -> bool:
        passes, key = engine.passes, (entry.start, entry.micro_batch)
        if entry.op is Op.SEND:
            spoil((passes.streams if entry.what is What.ACTIVATIONS else passes.gradients)[key])
            return True
        if entry.op is Op.RECOMPUTE:
            for unit in range(entry.start, entry.stop):
                for again in passes.live[unit, entry.micro_batch].again:  # type: ignore[union-attr]
                    spoil(again._inputs[0])
                    return True
        if entry.op in (Op.REDUCE_GRADIENTS, Op.FETCH, Op.OFFLOAD):
            return spoil_gradients(states)
        if entry.op in (Op.SYNC_TIED, Op.CLIP_NORM):
            return spoil_gradients(engine.parameters.all_states())
        return False

    def after(self, engine: Engine, entry: Instruction, states: list[SpanState]) -> bool:
        passes = engine.passes
        held = passes.streams if entry.what is What.ACTIVATIONS else passes.gradients
        if entry.op is Op.FORWARD:
            made = passes.streams.get((entry.stop, entry.micro_batch))
            made = passes.totals["loss"] if made is None else made
        elif entry.op is Op.BACKWARD_INPUT and not entry.start:
            return spoil_gradients(engine.parameters.all_states())
        elif entry.op is Op.BACKWARD_INPUT:
            made = passes.gradients[entry.start, entry.micro_batch]
        elif entry.op is Op.RECEIVE:
            made = held[entry.start, entry.micro_batch]
        elif entry.op is Op.BACKWARD_WEIGHT:
            return spoil_gradients(states)
        else:
            assert entry.op in (Op.GATHER_PARAMETERS, Op.STEP), entry
            with (
                torch.no_grad(),
                torch.autograd._unsafe_preserve_version_counter(  # type: ignore[attr-defined]
                    tuple(states[0].owners)
                ),
            ):
                if states[0].views[0].untyped_storage().size():
                    spoil(states[0].views[0])
                master = states[0].optimizer.master
                if entry.op is Op.STEP and master is not None:
                    spoil(master)
            return True
        spoil(made.data)
        return True


if __name__ == "__main__":
    from tutti.train.run.rank import main

    given = json.loads(os.environ["FAULT"])
    if int(os.environ["RANK"]) == given["rank"]:
        Fault(**given).install()
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

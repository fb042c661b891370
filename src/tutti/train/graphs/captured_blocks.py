"""Which blocks run as graphs, from when on, and what that costs in memory.

`capture: auto` runs the first step as it is (kernels are made, libraries choose), watches the
second, and then captures blocks only where the chip waits for the host's issuing (`launches`); `on`
captures from the second step on wherever it can be done; `off` never. A graph is captured once per
block and slot (`schedule.slots`) and replayed for every micro-batch that has the slot; batches of
another shape than the first run as they are. What goes wrong in a capture is said in one line, and
everything goes on without graphs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.nn.batch import Batch
from tutti.nn.block import Block
from tutti.nn.build import Unit
from tutti.plan.plan import covers
from tutti.ranks.rank_places import Seat
from tutti.schedule.instruction import Instruction, Op
from tutti.schedule.slots import Units, all_slots
from tutti.train.graphs.block_graphs import BlockGraphs, Slot
from tutti.train.graphs.launch_gaps import ChipWaits, LaunchWatch
from tutti.train.sync.synchronise import Synchronised
from tutti.units import bytes_text

log = logging.getLogger(__name__)

CaptureMode = Literal["auto", "on", "off"]
NO_ROOM = "the plan leaves {room} of memory free, graphs hold {extra} more"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """What a job says about graphs."""

    mode: CaptureMode = "off"
    room_bytes: int | None = None  # beyond what the plan promises to use; None: unknown
    say: Callable[[str], None] = log.info


def reason_against(unit: int, module: Unit, seat: Seat, parameters: Synchronised) -> str | None:
    """Return why a unit cannot be captured; "" for one that nobody expects to be: no block."""
    if not isinstance(module, Block):
        return ""
    replica = seat.replica
    if seat.tensor.size > 1 or seat.context.size > 1:
        return "ranks talk to each other inside of the block"
    if covers(replica.recompute.full, unit) or covers(replica.recompute.selective, unit):
        return "activations are recomputed"
    if covers(replica.offload.activations, unit):
        return "activations wait on the host"
    if any(exchange.comes_and_goes for exchange in parameters.of_units([unit])):
        return "parameters are brought for each pass, to other addresses"
    if module.moe is not None and module.moe.asks_host:
        return "the host reads how many rows each expert gets"
    return None


class Graphs:
    """The graphs of one rank's blocks."""

    def __init__(
        self,
        units: Mapping[int, Unit],
        seat: Seat,
        parameters: Synchronised,
        instructions: Sequence[Instruction],
        accelerator: Accelerator,
        settings: CaptureSettings,
        *,
        token_bytes: int,  # of the stream between blocks
    ) -> None:
        self._accelerator, self._settings, self._token_bytes = accelerator, settings, token_bytes
        reasons = {u: reason_against(u, module, seat, parameters) for u, module in units.items()}
        self._blocks: dict[int, Block] = {
            u: module for u, module in units.items()
            if isinstance(module, Block) and reasons[u] is None
        }  # fmt: skip
        self._refused = {u: reason for u, reason in reasons.items() if reason}
        chunks = seat.stage.units
        self._parameters: dict[int, tuple[torch.nn.Parameter, ...]] = {}
        self._chunk_of: dict[int, Units] = {u: c for c in chunks for u in range(*c)}
        self._slot_of = all_slots(instructions, chunks)
        weighed = {e.micro_batch for e in instructions if e.op is Op.BACKWARD_WEIGHT}
        self.several = len(weighed) > 1  # micro-batches, which share the gradients' memory
        self._wanted = settings.mode != "off" and bool(self._blocks or self._refused)
        self._active = self._suspended = self._failed = False
        self._steps = 0
        self.watch: LaunchWatch | None = None  # while a step is watched
        self._shape: tuple[object, ...] | None = None
        self._tokens = 0
        self._told: set[str] = set()
        self._taken_before, self._said_memory = 0, False
        self.held_bytes = 0  # by graphs, known after their first step
        self._forget()
        self._announce()

    def _forget(self) -> None:
        """Let go of every graph and its memory."""
        self._made: dict[tuple[int, int], BlockGraphs] = {}
        self._slots: dict[tuple[Units, int], Slot] = {}
        self._gradients: dict[int, dict[str, Tensor]] = {}
        self._weights_pool: object | None = None
        self._addresses: dict[int, tuple[int, ...]] = {}

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._settings.say(text)

    def _announce(self) -> None:
        """Say at once what can never be captured."""
        if not self._wanted:
            return
        if self._accelerator.graph_pool() is None:
            self._wanted = False
            if self._settings.mode == "on":
                self._say(
                    f"capture: {self._accelerator.chip} has no graphs; blocks run as they are"
                )
            return
        for reason, group in itertools.groupby(sorted(self._refused.items(), key=_why), key=_why):
            units = [unit for unit, _ in group]
            self._say(f"capture: {len(units)} blocks run as they are: {reason}")
        self._wanted = bool(self._blocks)

    # --- from step to step -----------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether blocks run as graphs by now."""
        return self._active

    def begin_step(self) -> None:
        """A step begins: decide, if this is the moment."""
        if not self._wanted or self._suspended:
            return
        self._steps += 1
        if self._failed:
            self._forget()
            self._wanted = self._active = False
        elif self._active:
            self._check()
        elif self._settings.mode == "on":
            if self._shape is not None:
                self._activate("")
        elif self._steps == 2:
            self.watch = LaunchWatch(self._accelerator)
        elif self._steps == 3:
            watch, self.watch = self.watch, None
            assert watch is not None
            self._decide(watch.waits())

    def _decide(self, waits: ChipWaits | None) -> None:
        """Choose by what the chip waited for in the step before, and say why."""
        self._wanted = False
        if waits is None or self._shape is None:
            return  # no batch that could be captured; that was said
        why = f"the chip waited for the host in {waits.waited} of {waits.passes} passes"
        extra, room = self.extra_bytes, self._settings.room_bytes
        if not waits.graphs_pay:
            self._say(f"capture: blocks run as they are: {why}")
        elif room is not None and extra > room:
            text = NO_ROOM.format(room=bytes_text(max(0, room)), extra=bytes_text(extra))
            self._say(f"capture: blocks run as they are: {text}")
        else:
            self._wanted = True
            self._activate(f": {why}")

    def _activate(self, why: str) -> None:
        self._active = True
        self._weights_pool = self._accelerator.graph_pool()
        self._accelerator.empty_cache()
        self._taken_before = self._accelerator.taken_bytes()
        self._say(f"capture: {len(self._blocks)} blocks run as graphs{why}")

    def _check(self) -> None:
        """See that parameters lie where graphs read them; after the first step say what is held."""
        moved = [u for u, known in self._addresses.items() if known != self._addresses_of(u)]
        if moved:
            self._say(f"capture: parameters of unit {moved[0]} moved; graphs are made anew")
            self._forget()
            self._weights_pool = self._accelerator.graph_pool()
        elif self._made and not self._said_memory:
            self._say_memory()

    def _say_memory(self) -> None:
        self._said_memory = True
        self._accelerator.empty_cache()  # what is left is in use, or the graphs'
        self.held_bytes = max(0, self._accelerator.taken_bytes() - self._taken_before)
        text = (
            f"capture: graphs in {len(self._slots)} slots hold {bytes_text(self.held_bytes)}, at "
            f"most {bytes_text(self.extra_bytes)} of it beyond what the plan promises"
        )
        room = self._settings.room_bytes
        if room is not None:
            text += f", which leaves {bytes_text(max(0, room))} free"
        self._say(text)

    def _addresses_of(self, unit: int) -> tuple[int, ...]:
        if unit not in self._parameters:  # walking a module takes longer than asking its tensors
            self._parameters[unit] = tuple(self._blocks[unit].parameters())
        return tuple(parameter.data_ptr() for parameter in self._parameters[unit])

    @property
    def extra_bytes(self) -> int:
        """What graphs hold at most beyond a step that runs as it is.

        That is the gradients of the captured blocks in the dtype that is computed with, which
        otherwise come and go with each pass; and, per slot, what stays where it would have made
        room for something else: the streams between blocks, and the gradients of their products,
        which weight passes read. Each slot also has room for what one block has at work.
        """
        weights = 0
        streams: dict[Units, list[int]] = {}  # bytes per token of each block
        for unit, block in self._blocks.items():
            trained = [p for p in block.parameters() if p.requires_grad]
            # experts' gradients, which are made beside the graphs, come and go as before
            weights += sum(p.numel() * p.element_size() for p in trained if p.dim() < 3)
            products = sum(p.shape[0] * p.element_size() for p in trained if p.dim() == 2)
            if block.moe is not None:
                per_expert = sum(p.shape[1] * p.element_size() for p in trained if p.dim() == 3)
                products += block.moe.spec.experts_per_token * per_expert
            streams.setdefault(self._chunk_of[unit], []).append(products + 2 * self._token_bytes)
        per_token = 0
        for chunk, each in streams.items():
            slots = 1 + max(slot for (own, _), slot in self._slot_of.items() if own == chunk)
            per_token += slots * (sum(each) + max(each))
        return weights + per_token * self._tokens

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run what is inside without graphs: modules are watched, say."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    # --- passes ----------------------------------------------------------------------------

    def watched(self, unit: int) -> contextlib.AbstractContextManager[None]:
        """Issue a pass that could be a graph, watched while that is wanted."""
        if self.watch is None or unit not in self._blocks:
            return contextlib.nullcontext()
        return self.watch.seen()

    def of(self, unit: int, micro_batch: int, batch: Batch) -> BlockGraphs | None:
        """Return the graphs of a block for a micro-batch; None where it runs as it is."""
        if not self._wanted or self._suspended or self._failed or unit not in self._blocks:
            return None
        if not torch.is_grad_enabled() or not self._fits(batch) or not self._active:
            return None
        chunk = self._chunk_of[unit]
        slot = self._slot_of[chunk, micro_batch]
        if (unit, slot) not in self._made:
            self._made[unit, slot] = self._new(unit, chunk, slot, batch)
            self._addresses[unit] = self._addresses_of(unit)
        return self._made[unit, slot]

    def _fits(self, batch: Batch) -> bool:
        """Tell whether a batch has the shape that graphs are for; the first rectangle's is it."""
        shape = (batch.segments, batch.lengths, batch.tokens_t.shape)
        if self._shape is None:
            if not batch.segments.is_batch:
                self._say("capture: batches of packed documents run as they are")
                return False
            self._shape, self._tokens = shape, batch.num_tokens
        return shape == self._shape

    def _new(self, unit: int, chunk: Units, slot: int, batch: Batch) -> BlockGraphs:
        if (chunk, slot) not in self._slots:
            self._slots[chunk, slot] = Slot(self._accelerator.graph_pool())
        return BlockGraphs(
            self._blocks[unit],
            batch,
            self._slots[chunk, slot],
            self._capture,
            self._gradients.setdefault(unit, {}),
            self._weights_pool,
            is_lowest=unit == chunk[0],
            is_highest=unit == chunk[1] - 1,
        )

    def _capture(self, work: Callable[[], Any], pool: object) -> Callable[[], Any] | None:
        if self._failed:
            return None
        try:
            return self._accelerator.capture(work, pool=pool, warm_ups=0)
        except Exception as error:  # an error of the block itself goes on from running it as it is
            first = (str(error).strip().splitlines() or [""])[0]
            self._say(f"capture: blocks run as they are: {type(error).__name__}: {first}")
            self._failed = True
            return None


def _why(item: tuple[int, str]) -> str:
    return item[1]


class NoGraphs(Graphs):
    """Nothing is captured."""

    def __init__(self) -> None:
        self.several = False
        self.watch = None

    def of(self, unit: int, micro_batch: int, batch: Batch) -> BlockGraphs | None:
        """Every block runs as it is."""
        del unit, micro_batch, batch
        return None

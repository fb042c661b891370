"""Launcher: from an operation as it was asked for to a run of it.

Finds the program and this rank's script (both are kept), lays tensors out flat, makes the scratch
buffer, and says what happens at the end: results are put where the caller wants them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.collective import Group, Layout, Operation
from tutti.comm.choice import Chooser, Named
from tutti.comm.compression import Codec, Residuals
from tutti.comm.exchange import Channels, exchange_script
from tutti.comm.executor import Executor
from tutti.comm.reductions import find_reduction
from tutti.comm.run import Run
from tutti.comm.script import Script, compile_script
from tutti.comm.work import Work
from tutti.errors import InputError

Counts = int | Sequence[int]
Messages = Sequence[tuple[Tensor, int]]
_POINT_TO_POINT = 1 << 63


@dataclass(slots=True, kw_only=True)
class Shared:
    """What the communicators of a job have in common."""

    executor: Executor
    accelerator: Accelerator | None  # None: tensors lie on the host
    emulated: bool  # the chip is emulated on the host, but its tensors count as its own
    timeout_s: float
    close: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation as the caller asked for it."""

    operation: Operation
    counts: Counts
    given: Tensor | None  # what this rank brings
    wanted: Tensor | None  # where its result goes
    root: int | None = None
    reduction: str = "sum"
    accumulate: torch.dtype | None = None
    compress: str | None = None
    keep_given: bool = False  # the input must survive, though the program writes there
    local_only: bool = False  # the counts are only right for this rank's own messages


class Launcher:
    """Starts the operations of one group."""

    def __init__(
        self,
        shared: Shared,
        number: int,
        group: Group,
        chooser: Chooser,
        native_ranks: frozenset[int],
        label: str = "",
    ) -> None:
        self._shared = shared
        self._number = number
        self._label = f" {label}" if label else ""
        self.rank = shared.executor.rank
        self.group = group
        self.size = group.size
        self.chooser = chooser
        self._seat = group.seat(self.rank)
        self._native = self.rank in native_ranks
        self._sequence = itertools.count()
        self._messages = itertools.count()
        self._channels = Channels()
        self._programs: dict[Any, Any] = {}
        self._scripts: dict[Any, Script] = {}
        self._residuals = Residuals()
        self.ran = Counter[tuple[Operation, int, Named]]()  # how often, by operation and bytes

    def program(self, call: Call, element_bytes: int) -> tuple[Any, Script]:
        """Return the program of a call and this rank's script of it."""
        counts = call.counts if isinstance(call.counts, int) else tuple(call.counts)
        total = counts if isinstance(counts, int) else sum(counts)
        named = self._named(call, total * element_bytes)
        self.ran[call.operation, total * element_bytes, named] += 1
        key = (call.operation, named, call.root)
        if key not in self._programs:
            self._programs[key] = named.build(call.operation, self.group, call.root)
        program = self._programs[key]
        script_key = (key, counts)
        if script_key not in self._scripts:
            layout = Layout.of(program, counts)
            self._scripts[script_key] = compile_script(
                program, self._seat, layout, native=self._native
            )
        return program, self._scripts[script_key]

    def _named(self, call: Call, num_bytes: int) -> Named:
        if call.local_only:
            return Named(algorithm="direct", connections=self.chooser.connections, by="caller")
        return self.chooser.choose(call.operation, num_bytes, lossy=call.compress is not None)

    def launch(self, call: Call) -> Work:
        """Start an operation."""
        some = call.given if call.given is not None else call.wanted
        assert some is not None
        dtype = call.accumulate or some.dtype
        combine = find_reduction(call.reduction, dtype) if call.operation.reduces else None
        program, script = self.program(call, dtype.itemsize)
        given = None if call.given is None else _flat(call.given, dtype)
        in_place = call.wanted is call.given
        if given is not None and call.given is not None and call.keep_given and self.size > 1:
            given = given.clone() if _same(given, call.given) else given
        wanted = given if in_place else None
        if not in_place and call.wanted is not None:
            wanted = _flat(call.wanted, dtype)
        self._check(call, script, given, wanted)
        for (_, a, b), (_, c, d) in script.copies:
            if given is not None and wanted is not None and not _same(given, wanted):
                wanted[c:d].copy_(given[a:b])
        scratch = some.new_empty(script.scratch_elements, dtype=dtype)
        buffers = (given, wanted, scratch)

        def finish() -> None:
            if wanted is not None and call.wanted is not None:
                _copy_back(wanted, call.wanted)

        number = next(self._sequence)
        codec = self._codec(call, dtype, script)
        return self._submit(
            Run(
                links=self._shared.executor,
                script=script,
                buffers=buffers,
                work=Work(self.rank, f"{call.operation}{self._label} #{number}", call.wanted),
                group=self._number,
                sequence=number,
                combine=combine or _replace,
                reduction=call.reduction,
                codec=codec,
                connections=program.connections,
                finish=self._finish(finish, buffers),
                timeout_s=self._shared.timeout_s,
            ),
            buffers,
        )

    def _codec(self, call: Call, dtype: torch.dtype, script: Script) -> Codec | None:
        if call.compress is None:
            return None
        if not dtype.is_floating_point:
            raise InputError(f"compress: {dtype} numbers cannot be rounded")
        stream = (call.operation, script.input_elements, script.output_elements, dtype)
        return Codec(call.compress, self._residuals, stream)

    def _check(
        self, call: Call, script: Script, given: Tensor | None, wanted: Tensor | None
    ) -> None:
        for what, tensor, due in (
            ("brings", given, script.input_elements),
            ("takes", wanted, script.output_elements),
        ):
            elements = 0 if tensor is None else tensor.numel()
            if elements != due:
                raise InputError(
                    f"{call.operation}: rank {self.rank} {what} {elements} elements; {due} are due"
                )

    def _finish(
        self, finish: Callable[[], None], buffers: tuple[Tensor | None, ...]
    ) -> Callable[[], None]:
        """Return `finish` as it runs where the tensors lie."""
        accelerator = self._shared.accelerator
        if accelerator is None or self._on_host(buffers):
            return finish

        def on_device() -> None:
            with accelerator.lane("comm_in"):
                finish()
                event = accelerator.event()
                event.record()
            event.synchronize()

        return on_device

    def _on_host(self, buffers: tuple[Tensor | None, ...]) -> bool:
        """Tell whether tensors lie on the host; those of an emulated chip only seem to."""
        if self._shared.emulated:
            return all(t is None or t.numel() * t.element_size() < 64 for t in buffers)
        return all(tensor is None or tensor.device.type == "cpu" for tensor in buffers)

    def _submit(self, run: Run, buffers: tuple[Tensor | None, ...]) -> Work:
        accelerator = self._shared.accelerator
        if accelerator is not None and not self._on_host(buffers):
            run.on_host = False if self._shared.emulated else None
            run.begins = accelerator.event()
            run.begins.record()
        self._shared.executor.submit(run)
        return run.work

    def exchange(self, sends: Messages, receives: Messages, channel: str = "") -> Work:
        """Start point-to-point messages."""
        pairs: dict[tuple[int, bool], list[int]] = {}
        for receiving, moves in ((False, sends), (True, receives)):
            for _, peer in moves:
                self.group.seat(peer)
                number = self._channels.next_number(channel, peer, receiving)
                pairs.setdefault((peer, receiving), []).append(number)
        outgoing = [(_flat(tensor), peer) for tensor, peer in sends]
        incoming = [(_flat(tensor), peer) for tensor, peer in receives]
        script, buffers = exchange_script(self.rank, outgoing, incoming)

        def finish() -> None:
            for (tensor, _), (flat, _) in zip(receives, incoming, strict=True):
                _copy_back(flat, tensor)

        number = next(self._messages)
        name = f"exchange {channel} #{number}" if channel else f"exchange #{number}"
        work = Work(self.rank, name, [tensor for tensor, _ in receives])
        return self._submit(
            Run(
                links=self._shared.executor,
                script=script,
                buffers=buffers,
                work=work,
                group=self._number | _POINT_TO_POINT,
                sequence=number,
                combine=lambda there, arrived: there.copy_(arrived),
                connections=self.chooser.connections,
                finish=self._finish(finish, buffers),
                timeout_s=self._shared.timeout_s,
                pair_sequences=pairs,
            ),
            buffers,
        )


def _replace(there: Tensor, arrived: Tensor) -> Tensor:
    return there.copy_(arrived)


def _flat(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor in one dimension, without a copy where it can be."""
    packed = tensor.detach().contiguous()
    # not view(-1): that of one element keeps any stride, and then has no bytes
    flat = packed.as_strided((packed.numel(),), (1,))
    return flat.to(dtype or tensor.dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype


def _copy_back(flat: Tensor, tensor: Tensor) -> None:
    """Put a result where the caller wants it, unless it is there."""
    if not _same(flat, tensor) or not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))

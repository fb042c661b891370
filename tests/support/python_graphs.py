"""Graphs of the Python device, as strict about memory as a chip's.

A capture records operators with the addresses of what they read and write, and computes nothing:
whatever memory it touched is as before when it ends, and what it allocated is poison until a
replay. A replay writes to the same addresses. Memory comes from a pool; what is let go during or
after a capture is used by later captures of the same pool, so that replaying in another order than
that of capture gives wrong numbers here as it does there. Reading on the host inside of a capture
is refused, and so is a replay that reads memory which was freed or has moved.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

ALIGNED = 64
POISON = 0xFF  # NaN in every floating dtype, -1 in integers
HOST_READS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal",
              "is_nonzero", "repeat_interleave.Tensor")  # fmt: skip


class CaptureError(RuntimeError):
    """Something that a chip does not do while it captures."""


class FreedMemoryError(RuntimeError):
    """A replay would read memory that is no longer what was captured."""


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return what operators take or give, with a function's value for each leaf of it.

    It is torch's `tree_map` for the few types that they have, at a tenth of its cost.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(function, each) for each in value])
    if kind is dict:
        return {name: mapped(function, each) for name, each in value.items()}
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of what operators take or give."""
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    else:
        yield value


@dataclass(eq=False)
class Block:
    """A piece of a pool."""

    arena: np.ndarray[Any, Any]
    start: int
    size: int
    is_new: bool = False  # nobody had this memory before

    @property
    def memory(self) -> np.ndarray[Any, Any]:
        return self.arena[self.start : self.start + self.size]

    def tensor(self, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """A tensor in this memory; it does not keep the memory from being used anew."""
        base = torch.from_numpy(self.memory).view(like.dtype)
        return base.as_strided(like.shape, like.stride(), offset)

    def common(self, other: Block) -> np.ndarray[Any, Any]:
        """What two pieces share."""
        if self.arena is not other.arena:
            return self.arena[:0]
        low = max(self.start, other.start)
        return self.arena[low : max(low, min(self.start + self.size, other.start + other.size))]


class Pool:
    """Memory that graphs share: blocks are cut to size, and joined again when both are free."""

    def __init__(self) -> None:
        self.free: list[Block] = []
        self.blocks: dict[int, Block] = {}  # by address

    def take(self, size: int) -> Block:
        """The front of the smallest free block that is large enough, else a new one."""
        size = -(-max(size, 1) // ALIGNED) * ALIGNED
        fitting = [b for b in self.free if b.size >= size]
        if fitting:
            whole = min(fitting, key=lambda b: b.size)
            self.free.remove(whole)
            if whole.size > size:
                self.free.append(Block(whole.arena, whole.start + size, whole.size - size))
            block = Block(whole.arena, whole.start, size)
        else:
            wide = np.empty(size + ALIGNED, np.uint8)
            start = -wide.ctypes.data % ALIGNED
            block = Block(wide[start : start + size], 0, size, is_new=True)
        self.blocks[block.memory.ctypes.data] = block
        return block

    def give_back(self, block: Block) -> None:
        """Free a block, joined with free neighbours."""
        for other in [b for b in self.free if b.arena is block.arena]:
            if other.start + other.size == block.start:
                self.free.remove(other)
                block = Block(block.arena, other.start, other.size + block.size)
            elif block.start + block.size == other.start:
                self.free.remove(other)
                block = Block(block.arena, block.start, block.size + other.size)
        self.free.append(block)

    def owned(self, block: Block, like: torch.Tensor) -> torch.Tensor:
        """A tensor whose end gives the block back."""
        made = block.tensor(like)
        weakref.finalize(made.untyped_storage(), self.give_back, block).atexit = False
        return made


pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def block_of(raw: torch.Tensor) -> Block | None:
    """The block that a tensor lies in, if it came from a pool."""
    address = raw.untyped_storage().data_ptr()
    return next((p.blocks[address] for p in pools if address in p.blocks), None)


class Plain:
    """A tensor in ordinary memory, by its address."""

    def __init__(self, raw: torch.Tensor) -> None:
        storage = raw.untyped_storage()
        self._storage, self._address = weakref.ref(storage), storage.data_ptr()
        self._layout = (raw.storage_offset(), raw.shape, raw.stride())
        self._dtype = raw.dtype

    def tensor(self) -> torch.Tensor:
        storage = self._storage()
        if storage is None or storage.data_ptr() != self._address:
            raise FreedMemoryError("a graph reads memory that was freed or has moved")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


@dataclass
class Entry:
    """One operator, its arguments by address, and where its results go."""

    op: Any
    args: Any
    kwargs: Any
    outputs: list[torch.Tensor | None]  # None: a view, or the target of an operator in place


@dataclass(eq=False)
class Graph:
    """What a capture recorded."""

    pool: Pool = field(default_factory=Pool)
    entries: list[Entry] = field(default_factory=list)
    allocated: list[Block] = field(default_factory=list)
    saved: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    new: list[Any] = field(default_factory=list)
    temporary: list[Any] = field(default_factory=list)
    ready: bool = False
    thread: int = field(default_factory=threading.get_ident)

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, so that the program goes on, and note it."""
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for raw in _written(op, args, kwargs):
            self._save(raw)
        inputs = {raw.untyped_storage().data_ptr() for raw in given if raw.numel()}
        held = mapped(_address, (args, kwargs))
        outputs: list[torch.Tensor | None] = []

        def placed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            passed_on = any(value is raw for raw in given)
            if passed_on or value.untyped_storage().data_ptr() in inputs:
                outputs.append(None)
                return value
            owned, shadow = self._allocate(value)
            outputs.append(shadow)
            return owned

        results = mapped(placed, op(*args, **kwargs))
        self.entries.append(Entry(op, *held, outputs))
        return results

    def _allocate(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        like = value if _is_dense(value) else value.contiguous()
        block = self.pool.take(value.numel() * value.element_size())
        if not block.is_new:
            self._save(torch.from_numpy(block.memory))
        self.allocated.append(block)
        owned = self.pool.owned(block, like)
        owned.copy_(value)
        return owned, block.tensor(like)

    def _save(self, raw: torch.Tensor) -> None:
        """Keep what memory holds, to be there again when the capture ends."""
        block = block_of(raw)
        whole = raw if block is None else torch.from_numpy(block.memory)
        self.saved.append((whole, whole.clone()))

    def end(self) -> None:
        """A capture has computed nothing."""
        for block in self.allocated:
            if block.is_new:
                block.memory.fill(POISON)
        for whole, before in reversed(self.saved):
            whole.copy_(before)
        self.saved.clear()
        self.new = [b.memory for b in self.allocated if b.is_new]
        self.temporary = [b.common(f) for b in self.allocated for f in self.pool.free]
        self.ready = True

    def replay(self) -> None:
        if not self.ready:
            raise CaptureError("a graph whose capture failed is replayed")
        if current() is not None:
            raise CaptureError("a replay inside of a capture")
        for memory in self.new:
            memory.fill(POISON)
        for entry in self.entries:
            args, kwargs = mapped(_tensor, (entry.args, entry.kwargs))
            results = [r for r in leaves(entry.op(*args, **kwargs)) if _is_tensor(r)]
            for place, result in zip(entry.outputs, results, strict=True):
                if place is not None:
                    place.copy_(result)
        for memory in self.temporary:
            memory.fill(POISON)


capturing: Graph | None = None


def begin(graph: Graph, pool: Pool | None) -> None:
    global capturing
    if capturing is not None:
        raise CaptureError("a capture inside of a capture")
    graph.pool = pool or graph.pool
    pools.add(graph.pool)
    capturing = graph


def finish(*, failed: bool) -> None:
    global capturing
    assert capturing is not None
    capturing.end()
    capturing.ready = not failed
    capturing = None


def current() -> Graph | None:
    """The capture that this thread's work belongs to: its own, or in backward's threads any."""
    graph = capturing
    if graph is None or graph.thread == threading.get_ident():
        return graph
    return graph if isinstance(threading.current_thread(), threading._DummyThread) else None


def refuse_host_reads(op: Any) -> None:
    """Raise where a chip would have to wait for the numbers."""
    if current() is not None and any(name in str(op) for name in HOST_READS):
        raise CaptureError(f"{op}: not permitted while a graph is captured")


def refuse_crossing(what: str) -> None:
    """Raise at a copy between host and device."""
    if current() is not None:
        raise CaptureError(f"{what}: not permitted while a graph is captured")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_dense(value: torch.Tensor) -> bool:
    order = sorted(range(value.dim()), key=lambda d: -value.stride(d))
    return value.permute(order).is_contiguous()


def _written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[Any] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def _address(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    block = block_of(value)
    if block is not None:
        return block.tensor(value, int(value.storage_offset()))
    return Plain(value) if value.untyped_storage().nbytes() else value


def _tensor(value: Any) -> Any:
    return value.tensor() if isinstance(value, Plain) else value

"""Native steps: calls of an island's own library through a torch.distributed sub-group.

Libraries demand that all ranks of a group issue calls in one order. Steps become ready in any
order, so they queue: a call is issued when every call that comes before it in the order of
operations and steps has been. Parts of unequal size are padded; parts in several pieces are packed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.collective.program import Action
from tutti.comm.reactor import Reactor
from tutti.comm.script import NativeCall

if TYPE_CHECKING:
    from tutti.comm.run import Run

Then = Callable[[], None]
# torch 2.13 gave these two new names, and warns of the old ones.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPERATORS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def make_group(ranks: tuple[int, ...], rank: int, backend: str, name: str) -> Any:
    """Return a torch group that its members make alone, by a name they all know.

    torch's public call names a group by how many groups the process has made, which is not the same
    on all members unless every rank of the job makes every group; so the call inside it is used.
    """
    torch_groups = dist.distributed_c10d
    chosen = torch_groups.Backend(backend)
    group, _ = torch_groups._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        chosen,
        torch_groups._get_default_store(),
        torch_groups.GroupName(name),
        timeout=torch_groups._get_default_timeout(chosen),
    )
    torch_groups._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group


class NativeQueue:
    """The native calls of this rank, in the order in which all ranks make them."""

    def __init__(
        self,
        reactor: Reactor,
        failed: Callable[[Run, BaseException], None],
        accelerator: Accelerator | None,
    ) -> None:
        self._reactor = reactor
        self._failed = failed
        self._accelerator = accelerator
        self._order: deque[tuple[Run, NativeCall]] = deque()
        self._ready: dict[tuple[int, int], tuple[Run, NativeCall, Then]] = {}
        self._groups: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wakes = threading.Condition()
        self._thread: threading.Thread | None = None
        self._over = False

    def add_group(self, group: int, ranks: tuple[int, ...], process_group: Any) -> None:
        """Make the sub-group of an island's ranks known."""
        self._groups[group, ranks] = process_group

    def expect(self, run: Run) -> None:
        """Queue the calls of an operation before it starts."""
        for step in run.script.steps:
            for team in step.teams:
                if team.native is not None:
                    self._order.append((run, team.native))

    def ready(self, run: Run, call: NativeCall, done: Then) -> None:
        """Note that a call may be made; make it when its turn has come."""
        self._ready[id(run), id(call)] = (run, call, done)
        while self._order:
            first_run, first = self._order[0]
            key = (id(first_run), id(first))
            if key not in self._ready:
                return
            self._order.popleft()
            self._issue(*self._ready.pop(key))

    def _issue(self, run: Run, call: NativeCall, done: Then) -> None:
        def make() -> None:
            try:
                group = self._groups[run.group, tuple(sorted(call.ranks))]
                self._perform(group, run, call)
            except Exception as error:
                failed = error  # the name `error` ends with the block
                self._reactor.call(lambda: self._failed(run, failed))
            else:
                self._reactor.call(done)

        with self._wakes:
            self._calls.append(make)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tutti-native", daemon=True)
                self._thread.start()
            self._wakes.notify()

    def _perform(self, group: Any, run: Run, call: NativeCall) -> None:
        if self._accelerator is None:
            perform(group, run, call)
            return
        with self._accelerator.lane("comm_native"):
            if run.begins is not None:
                run.begins.wait()
            perform(group, run, call)
            event = self._accelerator.event()
            event.record()
        event.synchronize()

    def _work(self) -> None:
        while True:
            with self._wakes:
                while not self._calls and not self._over:
                    self._wakes.wait()
                if self._over:
                    return
                make = self._calls.popleft()
            make()

    def abort(self) -> None:
        """Give up all calls; those that are being made end by their library's own means."""
        self._order.clear()
        self._ready.clear()
        with self._wakes:
            self._calls.clear()
        for group in self._groups.values():
            stop = getattr(group, "abort", None)
            if stop is not None:
                # gloo and plug-ins may not know how; their calls run into their own time-outs
                threading.Thread(target=_quietly, args=(stop,), daemon=True).start()

    def close(self) -> None:
        """End the calling thread."""
        with self._wakes:
            self._over = True
            self._wakes.notify()


def _quietly(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        return


def perform(group: Any, run: Run, call: NativeCall) -> None:
    """Make one call and wait for it; a torch group has its ranks in ascending order."""
    order = sorted(range(len(call.ranks)), key=lambda k: call.ranks[k])
    me, root = order.index(call.ranks.index(run.rank)), call.ranks[0]
    if call.action is Action.ALL_TO_ALL:
        _all_to_all(group, run, call, order, me)
        return
    parts = [run.tensors(call.parts[k]) for k in order]
    lengths = [call.lengths[k] for k in order]
    if not sum(lengths):
        return
    operator = _OPERATORS[run.reduction]
    match call.action:
        case Action.ALL_REDUCE | Action.BROADCAST | Action.REDUCE:
            whole = [tensor for k in range(len(order)) for tensor in run.tensors(call.parts[k])]
            buffer = _packed(whole)
            if call.action is Action.ALL_REDUCE:
                dist.all_reduce(buffer, operator, group=group)
            elif call.action is Action.BROADCAST:
                dist.broadcast(buffer, root, group=group)
            else:
                dist.reduce(buffer, root, operator, group=group)
            _unpack(buffer, whole)
        case Action.ALL_GATHER:
            _all_gather(group, parts, lengths, me, run.any_tensor())
        case Action.REDUCE_SCATTER:
            _reduce_scatter(group, parts, lengths, me, operator)
        case Action.GATHER:
            _gather(group, parts, lengths, me, (run.rank, root), run.any_tensor())
        case Action.SCATTER:
            _scatter(group, parts, lengths, me, (run.rank, root), run.any_tensor())


def _packed(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _unpack(buffer: Tensor, tensors: list[Tensor]) -> None:
    at = 0
    for tensor in tensors:
        piece = buffer[at : at + tensor.numel()]
        if piece.data_ptr() != tensor.data_ptr():
            tensor.copy_(piece)
        at += tensor.numel()


def _padded(part: list[Tensor], length: int, like: Tensor) -> Tensor:
    buffer = like.new_zeros(length)
    at = 0
    for tensor in part:
        buffer[at : at + tensor.numel()].copy_(tensor)
        at += tensor.numel()
    return buffer


def _all_gather(
    group: Any, parts: list[list[Tensor]], lengths: list[int], me: int, like: Tensor
) -> None:
    longest = max(lengths)
    rows = like.new_empty(longest * len(parts))
    ALL_GATHER(rows, _padded(parts[me], longest, like), group=group)
    for k, part in enumerate(parts):
        if k != me:
            _unpack(rows[k * longest : k * longest + lengths[k]], part)


def _reduce_scatter(
    group: Any, parts: list[list[Tensor]], lengths: list[int], me: int, operator: Any
) -> None:
    longest = max(lengths)
    like = next(tensor for part in parts for tensor in part)
    rows = torch.cat([_padded(part, longest, like) for part in parts])
    out = rows.new_empty(longest)
    REDUCE_SCATTER(out, rows, operator, group=group)
    _unpack(out[: lengths[me]], parts[me])


def _gather(
    group: Any,
    parts: list[list[Tensor]],
    lengths: list[int],
    me: int,
    ranks: tuple[int, int],
    like: Tensor,
) -> None:
    rank, root = ranks
    longest = max(lengths)
    mine = _padded(parts[me], longest, like)
    rows = [like.new_empty(longest) for _ in parts] if rank == root else None
    dist.gather(mine, rows, root, group=group)
    for k, row in enumerate(rows or []):
        if k != me:
            _unpack(row[: lengths[k]], parts[k])


def _scatter(
    group: Any,
    parts: list[list[Tensor]],
    lengths: list[int],
    me: int,
    ranks: tuple[int, int],
    like: Tensor,
) -> None:
    rank, root = ranks
    longest = max(lengths)
    rows = [_padded(part, longest, like) for part in parts] if rank == root else None
    out = like.new_empty(longest)
    dist.scatter(out, rows, root, group=group)
    if rank != root:
        _unpack(out[: lengths[me]], parts[me])


def _all_to_all(group: Any, run: Run, call: NativeCall, order: list[int], me: int) -> None:
    leaving = [[] if k == order[me] else run.tensors(call.parts[k]) for k in order]
    arriving = [[] if k == order[me] else run.tensors(call.arriving[k]) for k in order]
    like = run.any_tensor()
    sent = torch.cat([like.new_empty(0), *(tensor for part in leaving for tensor in part)])
    sizes_out = [sum(t.numel() for t in part) for part in leaving]
    sizes_in = [sum(t.numel() for t in part) for part in arriving]
    received = like.new_empty(sum(sizes_in))
    dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=group)
    _unpack(received, [tensor for part in arriving for tensor in part])

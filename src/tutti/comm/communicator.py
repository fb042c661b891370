"""Communicator: the operations of a group of ranks, on any tensors, in the background.

Every method returns at once with a `Work`; `wait()` gives the result. Ranks are ranks of the whole
job everywhere. All ranks of a group call the same operations in the same order, with the same
sizes; what runs is chosen by the cost model. Tensors must not be touched until the work is done.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.collective import Group, Operation
from tutti.comm.choice import Chooser, Named
from tutti.comm.executor import OpenRun
from tutti.comm.launch import Call, Launcher, Shared
from tutti.comm.places import Topology
from tutti.comm.transport.lane import Carried
from tutti.comm.work import Work
from tutti.errors import InputError

# of some ranks, by a name, for control with a time-out of its own
MakeGroup = Callable[[Sequence[int], str, float | None], "Communicator | None"]


class Communicator:
    """A group of ranks that communicate."""

    def __init__(
        self,
        shared: Shared,
        make_group: MakeGroup,
        number: int,
        group: Group,
        chooser: Chooser,
        native_ranks: frozenset[int],
        label: str = "",
    ) -> None:
        """Be a group; `label` is what its operations are called in words."""
        self._shared, self._make_group = shared, make_group
        self._launcher = Launcher(shared, number, group, chooser, native_ranks, label)
        self.rank = shared.executor.rank
        self.group = group
        self.ranks = tuple(sorted(group.ranks))
        self.chooser = chooser

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """The place of this rank among the ranks in ascending order: the order of buffers."""
        return self.ranks.index(self.rank)

    @property
    def ran(self) -> Counter[tuple[Operation, int, Named]]:
        """How often which program ran, by operation and bytes; whoever wants it anew clears it."""
        return self._launcher.ran

    @property
    def topology(self) -> Topology:
        """The places of all ranks of the job."""
        return self._shared.executor.topology

    def subgroup(self, ranks: Sequence[int], name: str = "") -> Communicator | None:
        """Return a communicator of some ranks; None on a rank that is not among them.

        Only its members call this; those who share several groups make them in the same order.
        Groups of the same ranks with different names have nothing to do with each other.
        """
        return self._make_group(ranks, name, None)

    def control(self, name: str, timeout_s: float | None = None) -> Communicator:
        """Return a communicator of the same ranks for what hosts tell each other.

        Its tensors are the host's, also where an emulated chip's lie there. It has a time-out of
        its own, for those who wait while one rank writes for all.
        """
        limit = self._shared.timeout_s if timeout_s is None else timeout_s
        made = self._make_group(self.ranks, name, limit)
        assert made is not None
        return made

    def close(self) -> None:
        """Leave: others are told, connections closed, threads ended."""
        self._shared.close()

    def abort(self, why: str) -> None:
        """End every operation, here and on all ranks that hear of it; called by any thread."""
        self._shared.executor.abort(why)

    def watch(self, every_s: float, tell: Callable[[list[OpenRun]], None]) -> None:
        """Let the thread that owns the connections tell, again and again, what is open."""
        self._shared.executor.watch(every_s, tell)

    def carried(self) -> dict[int, Carried]:
        """Return what the wires to other hosts have carried so far, by rank: of the whole job."""
        return self._shared.executor.carried()

    # --- everybody gets everything ---------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor,
        reduction: str = "sum",
        *,
        accumulate: torch.dtype | None = None,
        compress: str | None = None,
    ) -> Work:
        """Reduce over all ranks, in place; the same bits everywhere.

        `accumulate` adds up in a wider dtype and rounds once; `compress` ("bf16", "fp8") rounds
        what passes between islands and feeds the error back at the next call of the same size.
        """
        return self._launcher.launch(
            Call(
                operation=Operation.ALL_REDUCE,
                counts=tensor.numel(),
                given=tensor,
                wanted=tensor,
                reduction=reduction,
                accumulate=accumulate,
                compress=compress,
            )
        )

    def all_gather(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        counts: Sequence[int] | None = None,
        *,
        compress: str | None = None,
    ) -> Work:
        """Gather every rank's tensor, by ascending rank; `counts`: elements of each rank."""
        each = self._counts(counts, tensor.numel())
        output = self._output(output, sum(each), tensor)
        return self._launcher.launch(
            Call(
                operation=Operation.ALL_GATHER,
                counts=each,
                given=tensor,
                wanted=output,
                compress=compress,
            )
        )

    def reduce_scatter(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        counts: Sequence[int] | None = None,
        reduction: str = "sum",
        *,
        accumulate: torch.dtype | None = None,
        compress: str | None = None,
        overwrite: bool = False,
    ) -> Work:
        """Reduce over all ranks and keep this rank's part; `counts`: elements of each part.

        With `overwrite` the input may hold partial sums afterwards, which saves a copy of it.
        """
        if counts is None and tensor.numel() % self.size:
            raise InputError(
                f"reduce_scatter: {tensor.numel()} elements do not divide by {self.size} ranks; "
                "give counts"
            )
        each = self._counts(counts, tensor.numel() // self.size)
        output = self._output(output, each[self.index], tensor)
        return self._launcher.launch(
            Call(
                operation=Operation.REDUCE_SCATTER,
                counts=each,
                given=tensor,
                wanted=output,
                reduction=reduction,
                accumulate=accumulate,
                compress=compress,
                keep_given=not overwrite,
            )
        )

    # --- one rank gives or gets ------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Give everybody the root's tensor, in place."""
        return self._launcher.launch(
            Call(
                operation=Operation.BROADCAST,
                counts=tensor.numel(),
                given=tensor if self.rank == root else None,
                wanted=tensor,
                root=root,
            )
        )

    def reduce(
        self,
        tensor: Tensor,
        root: int,
        reduction: str = "sum",
        *,
        accumulate: torch.dtype | None = None,
    ) -> Work:
        """Reduce to the root, in place; elsewhere the tensor holds partial sums afterwards."""
        return self._launcher.launch(
            Call(
                operation=Operation.REDUCE,
                counts=tensor.numel(),
                given=tensor,
                wanted=tensor if self.rank == root else None,
                root=root,
                reduction=reduction,
                accumulate=accumulate,
            )
        )

    def gather(
        self,
        tensor: Tensor,
        root: int,
        output: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """Gather every rank's tensor at the root, by ascending rank."""
        each = self._counts(counts, tensor.numel())
        here = self.rank == root
        return self._launcher.launch(
            Call(
                operation=Operation.GATHER,
                counts=each,
                given=tensor,
                wanted=self._output(output, sum(each), tensor) if here else None,
                root=root,
            )
        )

    def scatter(
        self,
        output: Tensor,
        root: int,
        tensor: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """Give each rank its part of the root's tensor."""
        each = self._counts(counts, output.numel())
        if self.rank == root and tensor is None:
            raise InputError("scatter: the root gave no tensor")
        return self._launcher.launch(
            Call(
                operation=Operation.SCATTER,
                counts=each,
                given=tensor if self.rank == root else None,
                wanted=output,
                root=root,
            )
        )

    # --- everybody to everybody ------------------------------------------------------------

    def all_to_all(
        self,
        tensor: Tensor,
        output: Tensor | None = None,
        *,
        counts: Sequence[Sequence[int]] | None = None,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        compress: str | None = None,
    ) -> Work:
        """Send each rank its part of the tensor, by ascending rank.

        Equal parts unless told otherwise: `counts[source][target]` where every rank knows all, or
        this rank's `send_counts` and `receive_counts`. Only with equal parts or all counts known
        can ranks agree on a program other than the direct one.
        """
        size, me = self.size, self.index
        if counts is not None:
            matrix = [[int(count) for count in row] for row in counts]
        elif send_counts is not None and receive_counts is not None:
            matrix = [[0] * size for _ in range(size)]
            matrix[me] = [int(count) for count in send_counts]
            for source in range(size):
                if source != me:
                    matrix[source][me] = int(receive_counts[source])
        elif tensor.numel() % size:
            raise InputError(
                f"all_to_all: {tensor.numel()} elements do not divide by {size} ranks; give counts"
            )
        else:
            matrix = [[tensor.numel() // size] * size for _ in range(size)]
        if len(matrix) != size or any(len(row) != size for row in matrix):
            raise InputError(f"all_to_all: counts must be {size} for each of {size} ranks")
        output = self._output(output, sum(row[me] for row in matrix), tensor)
        return self._launcher.launch(
            Call(
                operation=Operation.ALL_TO_ALL,
                counts=[count for row in matrix for count in row],
                given=tensor,
                wanted=output,
                compress=compress,
                local_only=counts is None and send_counts is not None,
            )
        )

    # --- between some ranks ----------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]] = (),
        receives: Sequence[tuple[Tensor, int]] = (),
        *,
        channel: str = "",
    ) -> Work:
        """Send tensors to ranks and receive into tensors from ranks, all at once.

        The n-th send of one rank to another meets the n-th receive there, over all calls with the
        same `channel`; only the ranks named take part, in any order. Channels know nothing of each
        other: two ranks may use them in different order, and neither waits for the other's turn.
        """
        return self._launcher.exchange(sends, receives, channel)

    def send(self, tensor: Tensor, target: int, *, channel: str = "") -> Work:
        """Send one tensor."""
        return self.exchange(sends=[(tensor, target)], channel=channel)

    def receive(self, tensor: Tensor, source: int, *, channel: str = "") -> Work:
        """Receive into one tensor."""
        return self.exchange(receives=[(tensor, source)], channel=channel)

    def barrier(self) -> Work:
        """Let nobody go on before all are here."""
        token = torch.zeros(1, dtype=torch.uint8)
        return self._launcher.launch(
            Call(operation=Operation.BARRIER, counts=1, given=token, wanted=token, reduction="max")
        )

    # --- plain values ----------------------------------------------------------------------

    def gather_values(self, value: Any, root: int | None = None) -> list[Any] | None:
        """Return every rank's value, by ascending rank; with a root there only, None elsewhere.

        A value is what JSON can say: nothing that a rank sends can be more than that.
        """
        data = _json_bytes(value)
        lengths = self.all_gather(torch.tensor([data.numel()])).wait().tolist()
        if root is None:
            gathered = self.all_gather(data, counts=lengths).wait()
        else:
            gathered = self.gather(data, root, counts=lengths).wait()
        if root not in (None, self.rank):
            return None
        pieces = itertools.pairwise([0, *itertools.accumulate(lengths)])
        return [_json_value(gathered[a:b]) for a, b in pieces]

    def broadcast_value(self, value: Any, root: int) -> Any:
        """Return the root's value on every rank."""
        data = _json_bytes(value) if self.rank == root else None
        length = torch.tensor([0 if data is None else data.numel()])
        size = int(self.broadcast(length, root).wait())
        if data is None:
            data = torch.empty(size, dtype=torch.uint8)
        return _json_value(self.broadcast(data, root).wait())

    # --- how -------------------------------------------------------------------------------

    def _counts(self, counts: Sequence[int] | None, mine: int) -> list[int]:
        if counts is None:
            return [mine] * self.size
        if len(counts) != self.size:
            raise InputError(f"{len(counts)} counts for {self.size} ranks")
        return [int(count) for count in counts]

    def _output(self, output: Tensor | None, elements: int, like: Tensor) -> Tensor:
        if output is None:
            return like.new_empty(elements)
        if output.numel() != elements or output.dtype != like.dtype:
            raise InputError(
                f"output has {output.numel()} elements of {output.dtype}; "
                f"due are {elements} of {like.dtype}"
            )
        return output


def _json_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _json_value(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())

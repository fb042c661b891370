"""The engine's links over the real network: `comm`, with the programs that the Plan names.

Every group of ranks and use has a communicator of its own, so that collectives of different groups
may be under way at once, in whatever order ranks come to them. Sums are added up in the order that
the program says, gradients of 16 bits in float32: the same Plan gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.collective import Group as CommRanks
from tutti.collective import Operation
from tutti.comm import Communicator
from tutti.comm.choice import Named, Rule
from tutti.cost.network.group_links import num_islands
from tutti.cost.network.recorded_programs import GroupKind, Recorded, require_runnable
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.nn.parallel.groups import Group
from tutti.plan.check import embedded_cluster
from tutti.plan.plan import CollectiveUse, Plan
from tutti.ranks.comm_group import CommGroup
from tutti.ranks.links import Done, Handle, Use
from tutti.ranks.rank_places import Seats
from tutti.simulate.measured import CollectiveRun
from tutti.train.sync.groups import RankGroup, groups_of, pools_of, require_meetings

_NARROW = frozenset({torch.bfloat16, torch.float16})


class CommLinks:
    """One rank's links; all ranks of the communicator make theirs from the same plan."""

    def __init__(
        self, comm: Communicator, plan: Plan, spec: ModelSpec, cluster: Cluster | None = None
    ) -> None:
        """Make the groups of this rank; a recorded program that one cannot run is refused.

        `cluster` is needed where the plan records programs and does not embed its cluster.
        """
        if comm.size != plan.num_ranks:
            raise InputError(
                f"the plan is for {plan.num_ranks} ranks, the job has {comm.size}; start one "
                "process for each chip of the plan"
            )
        self.comm, self.rank = comm, comm.rank
        self._seats = Seats(plan, spec)
        require_meetings(self._seats, self.rank)
        self._programs = PlannedPrograms(self._seats, cluster)
        self._made: dict[RankGroup, Communicator] = {}
        self.foreseen = groups_of(self._seats, self.rank)
        for group in self.foreseen:
            self._communicator(group.ranks, group.use)

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """The groups that were made so far."""
        return tuple(self._made)

    def forget_programs(self) -> None:
        """Count what runs anew from now on."""
        for made in self._made.values():
            made.ran.clear()

    def programs(self) -> tuple[CollectiveRun, ...]:
        """Return what ran in the groups of which this rank is the first; bytes as a plan counts."""
        return tuple(
            CollectiveRun(
                use=_recorded_use(key.use, operation) or key.use,
                ranks=key.ranks,
                operation=operation.value,
                bytes=self._programs.planned_bytes(key.use, num_bytes),
                algorithm=named.algorithm,
                chunks=named.chunks,
                by=named.by,
                calls=calls,
            )
            for key, made in sorted(self._made.items())
            if key.ranks[0] == self.rank
            for (operation, num_bytes, named), calls in made.ran.items()
        )

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        channel: str,
    ) -> Handle:
        """Send tensors to ranks and fill tensors from ranks; in order within a channel."""
        if not sends and not receives:
            return Done()
        return self.comm.exchange(
            [(tensor, rank) for rank, tensor in sends],
            [(tensor, rank) for rank, tensor in receives],
            channel=channel,
        )

    def all_reduce(self, ranks: Sequence[int], x: Tensor, *, use: Use = "gradients") -> Handle:
        """Replace x by its sum over the ranks."""
        return self._communicator(ranks, use).all_reduce(x, accumulate=_wide(x))

    def reduce_scatter(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> Handle:
        """Fill `out` with this rank's part of the gradients x, summed over the ranks."""
        return self._communicator(ranks, "gradients").reduce_scatter(
            x, out, counts, accumulate=_wide(x), overwrite=True
        )

    def all_gather(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> Handle:
        """Fill `out` with the elements of each rank."""
        return self._communicator(ranks, "parameters").all_gather(x, out, counts)

    def group(self, ranks: Sequence[int], *, use: Use = "block") -> Group:
        """Return collectives as a model uses them inside a block."""
        told = self._programs.tells("experts", Operation.ALL_TO_ALL, ranks)
        return CommGroup(self._communicator(ranks, use), tells_counts=told)

    def _communicator(self, ranks: Sequence[int], use: Use) -> Communicator:
        key = RankGroup(tuple(ranks), use)
        if key not in self._made:
            made = self.comm.subgroup(key.ranks, use)
            if made is None or made.ranks != key.ranks:
                raise ValueError(
                    f"rank {self.rank} asks for ranks {key.ranks}: not in rising order"
                )
            self._programs.require_runnable(use, key.ranks, made.group)
            made.chooser.follow(self._programs.rule(use, key.ranks, made.chooser.connections))
            self._made[key] = made
        return self._made[key]


class PlannedPrograms:
    """The collective programs of a plan, as rules that a communicator's chooser follows."""

    def __init__(self, seats: Seats, cluster: Cluster | None = None) -> None:
        plan = seats.plan
        self._seats, self._recorded = seats, Recorded(plan)
        self._cluster = cluster
        if plan.collectives and cluster is None:
            self._cluster = embedded_cluster(plan)
        # the plan counts bytes of gradients as they are kept, `comm` as they are added up
        narrow = Dtype.FP32.num_bytes / plan.job.precision.gradients.num_bytes
        self._widened = max(1.0, narrow)

    def planned_bytes(self, use: Use, num_bytes: int) -> float:
        """Return what a plan says for so many bytes that `comm` adds up or moves."""
        return num_bytes / (self._widened if use == "gradients" else 1.0)

    def _kind(self, ranks: Sequence[int]) -> GroupKind | None:
        """Return the kind of group as the cluster has it; None where the plan records nothing."""
        if self._cluster is None:
            return None
        chips = [self._seats.map.place(rank).chip for rank in ranks]
        islands = num_islands(self._cluster, chips)
        return GroupKind(pools_of(self._seats, ranks), len(ranks), islands)

    def tells(self, use: CollectiveUse, operation: Operation, ranks: Sequence[int]) -> bool:
        """Tell whether the plan names a program for any size."""
        kind = self._kind(ranks)
        return kind is not None and any(self._recorded.entries(use, operation, kind))

    def require_runnable(self, use: Use, ranks: Sequence[int], group: CommRanks) -> None:
        """Raise where the plan records a program for these ranks that cannot run among them."""
        kind = self._kind(ranks)
        if use == "block" and tuple(ranks) != self._seats[ranks[0]].experts.ranks:
            return  # of what blocks do, only what experts exchange is recorded
        for operation in Operation if kind is not None else ():
            meant = _recorded_use(use, operation)
            if meant is not None and kind is not None:
                for choice in self._recorded.entries(meant, operation, kind):
                    require_runnable(choice, group, kind)

    def rule(self, use: Use, ranks: Sequence[int], connections: int) -> Rule:
        """Return what the plan says for a group of ranks."""
        kind = self._kind(ranks)

        def rule(operation: Operation, num_bytes: int) -> Named | None:
            meant = _recorded_use(use, operation)
            if meant is None or kind is None:
                return None
            size = self.planned_bytes(use, num_bytes)
            choice = self._recorded.find(meant, operation, kind, size)
            if choice is None:
                return None
            several = choice.channels if choice.channels > 1 else connections
            return Named(
                algorithm=choice.algorithm, chunks=choice.chunks, connections=several, by="plan"
            )

        return rule


def _recorded_use(use: Use, operation: Operation) -> CollectiveUse | None:
    """Return under which use a plan records a collective; None: it does not."""
    if use == "block":
        return "experts" if operation is Operation.ALL_TO_ALL else None
    return use


def _wide(x: Tensor) -> torch.dtype | None:
    return torch.float32 if x.dtype in _NARROW else None

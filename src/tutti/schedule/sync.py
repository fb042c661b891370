"""Parameters in, gradients out, the optimizer's step: what the holders of a unit do together.

Every rank issues its reductions by falling unit (those that may not overlap after all others) and
its gathers by rising unit; with one common order no set of groups can wait in a circle.
"""

from __future__ import annotations

from typing import NamedTuple

from tutti.models.parameters import ParameterClass
from tutti.ownership.buckets import Bucket
from tutti.plan.plan import Replica, Stage, Synchronisation, covers
from tutti.schedule.emitter import Emitter, waits
from tutti.schedule.instruction import NO_MICRO_BATCH, Op, Scope, What
from tutti.schedule.segments import Segment

_CLASS = {ParameterClass.DENSE: What.DENSE, ParameterClass.EXPERT: What.EXPERT}


class _Whole(NamedTuple):
    """A bucket whose gradients are whole: what is done about it closes the step for it."""

    bucket: Bucket
    micro_batch: int
    after: list[int]
    offload: bool


class Synchroniser:
    """Writes the gathers, reductions and optimizer steps of one class of ranks."""

    def __init__(
        self,
        emitter: Emitter,
        stage: Stage,
        replica: Replica,
        buckets: list[Bucket],
        *,
        micro_batches: int,
        tied: bool,
    ) -> None:
        self._to = emitter
        self._offload = replica.offload
        self._own = [b for b in buckets if covers(stage.units, b.start)]
        self._several = micro_batches > 1
        self._tied = tied
        self._gathered: dict[int, list[int]] = {}  # bucket start → gathers of the step
        self._reduced: list[int] = []
        self._on_host: dict[int, int] = {}  # bucket start → the last offload of its gradients
        self._deferred: list[tuple[Bucket, ParameterClass, list[int]]] = []
        self._at_once: dict[Bucket, list[int]] = {}  # of closed buckets, what was reduced then
        self._held: list[_Whole] = []

    def gather_once(self) -> None:
        """Levels 1 and 2: fetch the others' updated parameters, once per step."""
        latest: dict[ParameterClass, int] = {}
        for bucket in self._own:
            for kind, rule in bucket.rules():
                if rule.shard_level not in (1, 2):
                    continue
                if bucket.is_first(kind):
                    latest[kind] = self._gather(bucket, kind, rule, NO_MICRO_BATCH, ())
                self._gathered.setdefault(bucket.start, []).append(latest[kind])

    def _gather(
        self,
        bucket: Bucket,
        kind: ParameterClass,
        rule: Synchronisation,
        micro_batch: int,
        after: tuple[int, ...],
    ) -> int:
        start, stop = bucket.span(kind)
        return self._to.emit(
            Op.GATHER_PARAMETERS,
            micro_batch=micro_batch,
            start=start,
            stop=stop,
            what=_CLASS[kind],
            scope=Scope.ALL if rule.shard_level == 1 else Scope.PIPELINE,
            after=after,
        )

    def bring_parameters(
        self, segment: Segment, micro_batch: int, *, entering_from_below: bool
    ) -> list[int]:
        """Bring what is not on the chip before a pass: from the host, then from the others."""
        needed: list[int] = []
        for atom in segment.atoms:
            if not (atom.is_lowest if entering_from_below else atom.is_highest):
                continue
            bucket = atom.bucket
            fetched: tuple[int, ...] = ()
            if atom.offload_parameters:
                span = (bucket.start, bucket.stop)
                fetched = (self._to.fetch(What.PARAMETERS, micro_batch, *span),)
                needed += fetched
            needed += [
                self._gather(bucket, kind, rule, micro_batch, waits(self._to.ahead, fetched))
                for kind, rule in bucket.rules()
                if rule.shard_level == 3
                and (bucket.is_first(kind) if entering_from_below else bucket.is_last(kind))
            ]
        return needed

    def gathered_for(self, segment: Segment) -> list[int]:
        """Return the step's gathers that the first forward of a segment waits for."""
        return [i for atom in segment.atoms for i in self._gathered.get(atom.bucket.start, ())]

    def hand_gradients(
        self, segment: Segment, micro_batch: int, source: int, *, final: bool, hold: bool = False
    ) -> None:
        """Reduce and offload what a weight pass left, where this is its moment.

        With `hold`, what closes the step is written only when `release` says so: behind the
        gradient that the stage before waits for. All classes of a stage then have one order,
        however finely they cut their passes; on lanes nothing starts later for it.
        """
        for atom in reversed(segment.atoms):
            if atom.is_lowest:
                self._hand_bucket(
                    atom.bucket,
                    micro_batch,
                    source,
                    final=final,
                    offload=atom.offload_gradients,
                    hold=hold,
                )

    @property
    def is_plain(self) -> bool:
        """Tell whether what follows depends on nothing that was done here before."""
        return not self._held and not self._offload.gradients

    @property
    def reduced(self) -> list[int]:
        """The reductions so far, which the norm waits for."""
        return self._reduced

    def release(self) -> None:
        """Write what was held."""
        for whole in self._held:
            self._close_bucket(whole)
        self._held.clear()

    def _hand_bucket(
        self,
        bucket: Bucket,
        micro_batch: int,
        source: int,
        *,
        final: bool,
        offload: bool,
        hold: bool,
    ) -> None:
        shared = [
            self._reduce(bucket, kind, micro_batch, Scope.PIPELINE, (source,))
            for kind, rule in bucket.rules()
            if rule.shard_level >= 2 and bucket.is_first(kind)
        ]
        self._reduced += shared
        last = shared or [source]
        if final:
            self._held.append(_Whole(bucket, micro_batch, last, offload))
            if not hold:
                self.release()
            return
        if offload:
            last = [self._to_host(bucket, micro_batch, last)]
        if last != [source]:  # the chip's copy is gone when this ends
            self._to.leaves(What.GRADIENTS, last[-1])

    def _close_bucket(self, whole: _Whole) -> None:
        bucket, micro_batch, last, offload = whole
        span = (bucket.start, bucket.stop)
        closing = [
            (kind, rule)
            for kind, rule in bucket.rules()
            if bucket.is_first(kind) and (rule.shard_level < 2 or bucket.several_pipelines)
        ]
        if offload and closing and self._several:  # the sum so far lies on the host
            last = [*last, self._to.fetch(What.GRADIENTS, micro_batch, *span, self._host(bucket))]
        at_once = [kind for kind, rule in closing if rule.overlap]
        self._deferred += [(bucket, kind, last) for kind, rule in closing if not rule.overlap]
        reduced = [
            self._reduce(bucket, kind, NO_MICRO_BATCH, Scope.ALL, waits(last)) for kind in at_once
        ]
        self._reduced += reduced
        self._at_once[bucket] = reduced
        if offload and len(at_once) == len(closing):
            self._to_host(bucket, micro_batch, reduced or last)

    def _to_host(self, bucket: Bucket, micro_batch: int, after: list[int]) -> int:
        span = (bucket.start, bucket.stop)
        index = self._to.offload(What.GRADIENTS, micro_batch, *span, waits(after))
        self._on_host[bucket.start] = index
        return index

    def _host(self, bucket: Bucket) -> tuple[int, ...]:
        """What brought a bucket's gradients to the host last."""
        index = self._on_host.get(bucket.start)
        return () if index is None else (index,)

    def _reduce(
        self,
        bucket: Bucket,
        kind: ParameterClass,
        micro_batch: int,
        scope: Scope,
        after: tuple[int, ...],
    ) -> int:
        start, stop = bucket.span(kind)
        return self._to.emit(
            Op.REDUCE_GRADIENTS,
            micro_batch=micro_batch,
            start=start,
            stop=stop,
            what=_CLASS[kind],
            scope=scope,
            after=after,
        )

    def finish(self) -> None:
        """Close the step: late reductions, tied weights, the norm, the optimizer."""
        late: dict[Bucket, list[int]] = {}  # the reductions of each bucket that has late ones
        for bucket, kind, last in sorted(self._deferred, key=lambda item: -item[0].start):
            after = waits(last, [self._to.last_weights])  # beside nothing
            index = self._reduce(bucket, kind, NO_MICRO_BATCH, Scope.ALL, after)
            self._reduced.append(index)
            late.setdefault(bucket, [*self._at_once[bucket]]).append(index)
        for bucket, reduced in late.items():
            if covers(self._offload.gradients, bucket.start):
                self._to_host(bucket, NO_MICRO_BATCH, reduced)
        last_pass = self._to.next_index - 1
        if self._tied:
            after = waits(self._reduced) or (last_pass,)
            self._reduced.append(self._to.emit(Op.SYNC_TIED, what=What.GRADIENTS, after=after))
        norm = self._to.emit(Op.CLIP_NORM, after=waits(self._reduced, [self._to.last_weights]))
        steps = [self._step(bucket, norm) for bucket in self._own]
        if self._tied:
            self._to.emit(Op.SYNC_TIED, what=What.PARAMETERS, after=waits(steps))

    def _step(self, bucket: Bucket, norm: int) -> int:
        """Update one bucket, its state brought from the host and back where it lives there."""
        span = (bucket.start, bucket.stop)
        needed = [norm]
        if covers(self._offload.gradients, bucket.start):
            after = waits((norm,), self._host(bucket))
            needed.append(self._to.fetch(What.GRADIENTS, NO_MICRO_BATCH, *span, after=after))
        on_host = covers(self._offload.optimizer, bucket.start)
        if on_host:  # one bucket comes while another leaves, never more
            room = self._to.room(What.OPTIMIZER)
            needed.append(self._to.fetch(What.OPTIMIZER, NO_MICRO_BATCH, *span, after=room))
        index = self._to.compute(Op.STEP, NO_MICRO_BATCH, *span, waits(needed))
        if on_host:
            gone = self._to.offload(What.OPTIMIZER, NO_MICRO_BATCH, *span, (index,))
            self._to.leaves(What.OPTIMIZER, gone)
        if covers(self._offload.parameters, bucket.start):
            self._to.offload(What.PARAMETERS, NO_MICRO_BATCH, *span, (index,))
        return index

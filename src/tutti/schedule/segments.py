"""How finely one class of ranks must cut a chunk: as coarsely as its duties allow.

A chunk (a unit range of a stage) is first cut into atoms: units of one bucket with equal duties.
A forward or backward pass then joins neighbouring atoms unless something has to happen between
them: a gather, a fetch, an offload, a recomputation, a reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from tutti.ownership.buckets import Bucket
from tutti.plan.plan import Replica, Stage, UnitRanges, covers


@dataclass(frozen=True, slots=True)
class Atom:
    """Units of one bucket that a class of ranks treats alike."""

    start: int
    stop: int
    bucket: Bucket
    recompute: bool
    offload_activations: bool
    offload_parameters: bool
    offload_gradients: bool

    @property
    def is_lowest(self) -> bool:
        """Tell whether forward enters the bucket, and backward leaves it, here."""
        return self.start == self.bucket.start

    @property
    def is_highest(self) -> bool:
        """Tell whether backward enters the bucket here."""
        return self.stop == self.bucket.stop

    def until(self, stop: int) -> Atom:
        """Return the atom with another end."""
        return dataclasses.replace(self, stop=stop)

    def split_forward(self, *, first: bool) -> bool:
        """Tell whether something happens around this atom's forward."""
        gathers = any(
            rule.shard_level == 3 or (first and rule.shard_level > 0 and rule.overlap)
            for _, rule in self.bucket.rules()
        )
        return gathers or self.offload_parameters or self.offload_activations

    def split_backward(self, *, final: bool) -> bool:
        """Tell whether something happens around this atom's backward."""
        duties = self.recompute or self.offload_activations or self.offload_parameters
        reduces = any(
            rule.shard_level >= 2 or (final and rule.overlap) for _, rule in self.bucket.rules()
        )
        return duties or self.offload_gradients or reduces


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive atoms that one instruction computes.

    The flags say which duties a pass over them has, so that the many plain passes of a long
    schedule are written without looking at the atoms again.
    """

    atoms: tuple[Atom, ...]
    start: int
    stop: int
    recompute: bool
    brings_parameters: bool  # before every pass
    offloads_activations: bool
    hands_gradients: bool  # after every weight pass, not only after the last

    @classmethod
    def of(cls, atoms: list[Atom]) -> Segment:
        """Join neighbouring atoms."""
        levels = [rule.shard_level for atom in atoms for _, rule in atom.bucket.rules()]
        return cls(
            atoms=tuple(atoms),
            start=atoms[0].start,
            stop=atoms[-1].stop,
            recompute=atoms[0].recompute,
            brings_parameters=3 in levels or any(atom.offload_parameters for atom in atoms),
            offloads_activations=any(atom.offload_activations for atom in atoms),
            hands_gradients=max(levels, default=0) >= 2
            or any(atom.offload_gradients for atom in atoms),
        )


Groups = tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True, slots=True)
class ChunkSegments:
    """The segments of one chunk for all four cases, by rising unit.

    Those of backward come in groups: all input passes of a group run before its weight passes.
    """

    first_forward: tuple[Segment, ...]
    forward: tuple[Segment, ...]
    backward: Groups
    final_backward: Groups


def make_segments(
    start: int, stop: int, replica: Replica, buckets: list[Bucket], apart: UnitRanges = ()
) -> ChunkSegments:
    """Cut one chunk for one class of ranks.

    `apart` are units whose backward some replica of the stage finishes before it goes on; all
    replicas do alike there, for they reduce and gather in one common order.
    """
    atoms = _atoms(start, stop, replica, buckets)
    backward = _join(atoms, lambda atom: atom.split_backward(final=False))
    final = _join(atoms, lambda atom: atom.split_backward(final=True))
    return ChunkSegments(
        first_forward=_join(atoms, lambda atom: atom.split_forward(first=True)),
        forward=_join(atoms, lambda atom: atom.split_forward(first=False)),
        backward=_together(backward, apart),
        final_backward=_grouped(final, backward if start else final),
    )


def apart_units(stage: Stage) -> UnitRanges:
    """Return the units whose activations come back to some replica for their backward only."""
    return tuple(
        span
        for replica in stage.replicas
        for ranges in (
            replica.recompute.full,
            replica.recompute.selective,
            replica.offload.activations,
        )
        for span in ranges
    )


def _together(segments: tuple[Segment, ...], apart: UnitRanges) -> Groups:
    """Put neighbours into one group unless one of their buckets has units that stay apart.

    The stage before waits for the gradient: it is handed on before weight passes and reductions.
    """
    groups: list[list[Segment]] = []
    previous_alone = True
    for segment in segments:
        alone = any(
            a < atom.bucket.stop and atom.bucket.start < b
            for atom in segment.atoms
            for a, b in apart
        )
        if alone or previous_alone:
            groups.append([segment])
        else:
            groups[-1].append(segment)
        previous_alone = alone
    return tuple(map(tuple, groups))


def _grouped(fine: tuple[Segment, ...], coarse: tuple[Segment, ...]) -> Groups:
    """Put what is one segment in every other pass into one group.

    The last pass is cut more finely, so that reductions may begin early; the stage before waits
    for its gradient all the same and must not wait for weight passes, too.
    """
    return tuple(tuple(s for s in fine if whole.start <= s.start < whole.stop) for whole in coarse)


def _atoms(start: int, stop: int, replica: Replica, buckets: list[Bucket]) -> list[Atom]:
    atoms: list[Atom] = []
    for bucket in buckets:
        for unit in range(max(start, bucket.start), min(stop, bucket.stop)):
            atom = _unit_atom(unit, replica, bucket)
            joined = dataclasses.replace(atom, start=atoms[-1].start) if atoms else atom
            # A recomputed unit stays alone: its activations live only for its own backward.
            if atoms and not atom.recompute and joined == atoms[-1].until(unit + 1):
                atoms[-1] = joined
            else:
                atoms.append(atom)
    return atoms


def _unit_atom(unit: int, replica: Replica, bucket: Bucket) -> Atom:
    recompute, offload = replica.recompute, replica.offload
    return Atom(
        start=unit,
        stop=unit + 1,
        bucket=bucket,
        recompute=covers(recompute.full, unit) or covers(recompute.selective, unit),
        offload_activations=covers(offload.activations, unit),
        offload_parameters=covers(offload.parameters, unit),
        offload_gradients=covers(offload.gradients, unit),
    )


def _join(atoms: list[Atom], alone: Callable[[Atom], bool]) -> tuple[Segment, ...]:
    segments: list[list[Atom]] = []
    previous_alone = True
    for atom in atoms:
        is_alone = alone(atom)
        if is_alone or previous_alone:
            segments.append([atom])
        else:
            segments[-1].append(atom)
        previous_alone = is_alone
    return tuple(map(Segment.of, segments))

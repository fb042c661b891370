"""Which chips and wires of a plan are slow now, step by step, and by how much. Pure.

`slow` says it of a job's ranks and `slow_wires` of its edges; here are their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tutti.diagnose.slow import SlowRanks
from tutti.diagnose.slow_wires import Edge, Ends, SlowWires, Traffic

Wire = tuple[int, int, float, float]  # from a rank to a rank: bytes, busy seconds


def traffic_of(names: Sequence[str], wires: Iterable[Wire]) -> dict[Edge, Traffic]:
    """Return what every edge carried; `names` are those of the ranks' wires."""
    traffic = dict[Edge, Traffic]()
    for home, away, size, busy_s in wires:
        edge = (names[home], names[away])
        if edge[0] != edge[1]:
            before = traffic.get(edge, Traffic(0.0, 0.0))
            traffic[edge] = Traffic(before.bytes + size, before.busy_s + busy_s)
    return traffic


class SlowParts:
    """The slow chips and wires of a run whose ranks stay the same."""

    def __init__(
        self, expected_s: Sequence[float], chips: Sequence[str], wires: Sequence[str]
    ) -> None:
        """Take what each rank should compute in a step, its chip, and the wire it sends through."""
        self._ranks, self._edges = SlowRanks(expected_s), SlowWires()
        self._chips, self._names = tuple(chips), tuple(wires)
        self.chips: dict[str, float] = {}  # times as long as they should take
        self.wires: dict[Ends, float] = {}

    def step(
        self, number: int, step_s: float, compute_s: Sequence[float], wires: Iterable[Wire]
    ) -> list[str]:
        """Take a step; return what became slow, or well again, in words."""
        said = []
        for verdict in self._ranks.step(number, compute_s):
            chip = self._chips[verdict.rank]
            said.append(f"rank {verdict.rank} ({chip}) {verdict.why}")
            self.chips.pop(chip, None)
            if verdict.slow:
                self.chips[chip] = verdict.factor
        for told in self._edges.step(number, step_s, traffic_of(self._names, wires)):
            said.append(f"{' – '.join(told.ends)} {told.why}")
            self.wires.pop(told.ends, None)
            if told.slow:
                self.wires[told.ends] = told.factor
        return said

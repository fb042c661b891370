"""How many engines of which kind and role: a mixed-integer program over flows of requests.

Engines of both roles serve requests themselves; what prefill engines begin flows over the links
between pools to decode engines. Its relaxation bounds every deployment of these engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tutti.cost.serving.engine_prices import request_bytes
from tutti.cost.serving.stage_prices import Formats
from tutti.cost.serving.transfers import wire_between
from tutti.errors import InputError
from tutti.hardware.topology import Position
from tutti.plan.serving import Role
from tutti.search.serving.options import EngineOption
from tutti.search.serving.question import Objective, ServeProblem

F64 = NDArray[np.float64]
TIME_LIMIT_S = 5.0
GAP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """How many of which engines, and how requests flow from pool to pool."""

    engines: tuple[tuple[EngineOption, int], ...]
    flows: dict[tuple[str, str], float]  # requests per second, by prefill and decode pool
    rate: float  # requests per second of all, never waiting
    bound: float  # of any mixture of these engines, by the relaxation
    relaxed: tuple[EngineOption, ...] = ()  # the engines of the relaxation

    @property
    def num_chips(self) -> int:
        """Chips of all engines."""
        return sum(option.num_chips * count for option, count in self.engines)

    @property
    def price(self) -> float:
        """Per hour."""
        return sum(option.price * count for option, count in self.engines)


class _Program:
    """The rows of the program; columns are engines, then flows between pools."""

    def __init__(self, problem: ServeProblem, options: Sequence[EngineOption]) -> None:
        self.options = options
        pools = sorted({option.home for option in options if option.role is not Role.BOTH})
        self.pairs = [(a, b) for a in pools for b in pools]
        self.num = len(options) + len(self.pairs)
        self._rows: list[F64] = []
        self._tops: list[float] = []
        self._chips(problem)
        self._flows(problem, pools)

    def _add(self, row: F64, top: float) -> None:
        size = float(np.abs(row).max()) or 1.0  # bytes beside counts of chips: solvers fail
        self._rows.append(row / size)
        self._tops.append(top / size)

    def _chips(self, problem: ServeProblem) -> None:
        for name in problem.pools:
            row = np.zeros(self.num)
            for place, option in enumerate(self.options):
                row[place] = option.chips.get(name, 0)
            self._add(row, float(problem.cluster.pool(name).num_chips))

    def _flows(self, problem: ServeProblem, pools: Sequence[str]) -> None:
        moved = problem.service.traffic.prompt.expected * request_bytes(problem.model, Formats())
        for pool in pools:
            for role, end in ((Role.PREFILL, 0), (Role.DECODE, 1)):
                row = self._made(pool, role, 1.0)
                for place, pair in enumerate(self.pairs):
                    row[len(self.options) + place] += float(pair[end] == pool)
                self._add(row, 0.0)
        for place, pair in enumerate(self.pairs):
            a, b = Position(pair[0], 0, 0), Position(pair[1], 0, 0)
            if pair[0] == pair[1]:
                own = problem.cluster.pool(pair[0])
                b = Position(pair[1], min(1, own.nodes - 1), own.node.num_chips - 1)
            byte_s = wire_between(problem.cluster, a, b, lanes=2).byte_s * 2.0
            for role, pool in ((Role.PREFILL, pair[0]), (Role.DECODE, pair[1])):
                row = np.zeros(self.num)
                for column, option in enumerate(self.options):
                    if option.role is role and option.home == pool:
                        row[column] = -option.num_chips / byte_s
                row[len(self.options) + place] = moved
                self._add(row, 0.0)

    def _made(self, pool: str, role: Role, share: float) -> F64:
        row = np.zeros(self.num)
        for place, option in enumerate(self.options):
            if option.role is role and option.home == pool:
                row[place] = -share * option.rate
        return row

    def served(self) -> F64:
        """Return the requests per second of each column."""
        row = np.zeros(self.num)
        for place, option in enumerate(self.options):
            row[place] = option.rate if option.role is Role.BOTH else 0.0
        row[len(self.options) :] = 1.0
        return row

    def solve(self, cost: F64, least: float | None, *, whole: bool) -> NDArray[np.float64] | None:
        """Return the columns of least cost, serving at least so much."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        constraints = [LinearConstraint(np.array(self._rows), -np.inf, np.array(self._tops))]
        if least is not None:
            constraints.append(LinearConstraint(self.served()[None, :], least, np.inf))
        integral = np.zeros(self.num)
        integral[: len(self.options)] = float(whole)
        solution = milp(
            cost,
            constraints=constraints,
            integrality=integral,
            bounds=Bounds(0.0, np.inf),
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": GAP},
        )
        return None if solution.x is None else np.asarray(solution.x, np.float64)


def solve_flows(
    problem: ServeProblem,
    options: Sequence[EngineOption],
    *,
    objective: Objective = "rate",
    demand: float | None = None,
) -> Mixture | None:
    """Return the best mixture; None if no engine fits, or none serves the demand."""
    if not options:
        return None
    program = _Program(problem, options)
    # of equally good ones, the one with fewest chips
    chips = np.zeros(program.num)
    chips[: len(options)] = [option.num_chips for option in options]
    served = program.served()
    tie = 1e-6 * served.max() / chips.max()
    cost, least = -served + tie * chips, None
    if objective != "rate":
        if demand is None:
            raise InputError(f"objective '{objective}': the workload must say requests_per_s")
        least = demand
        cost = chips.copy()
        if objective == "cost":
            cost[: len(options)] = [option.price for option in options]
            cost = cost + 1e-9 * chips
    ideal = _Program(problem, [replace(option, rate=option.ideal) for option in options])
    relaxed = ideal.solve(-ideal.served(), None, whole=False)
    columns = program.solve(cost, least, whole=True)
    if columns is None or relaxed is None:
        return None
    counts = np.round(columns[: len(options)]).astype(int).tolist()
    flows = {
        pair: float(value)
        for pair, value in zip(program.pairs, columns[len(options) :], strict=True)
        if value > 1e-9
    }
    return Mixture(
        engines=tuple((o, n) for o, n in zip(options, counts, strict=True) if n > 0),
        flows=flows,
        rate=float(served @ columns),
        bound=float(ideal.served() @ relaxed),
        relaxed=tuple(o for o, n in zip(options, relaxed, strict=False) if n > 1e-6),
    )

"""Engines whose rates are simulated where they matter: those of mixtures, and of their bounds.

Closed forms rate all engines. Whoever comes into a mixture or into its relaxation is simulated
alone, once, and the program is solved again, until all of both are. The others are taken to be as
far from their closed form as those of their role were on average, and for the bound as far above
it as any of them was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tutti.plan.serving import Role
from tutti.search.serving.flows import Mixture, solve_flows
from tutti.search.serving.options import EngineOption
from tutti.search.serving.question import Objective, ServeProblem
from tutti.search.serving.steady import is_quick, steady_rate

MOST_ROUNDS = 12
TIGHT = 1.02  # a bound this close to the mixture is not looked at any closer


class RatedEngines:
    """The engines that fit, and what is known of their rates."""

    def __init__(self, problem: ServeProblem, options: Sequence[EngineOption]) -> None:
        self._problem = problem
        self._options = list(options)
        self._steady: dict[EngineOption, float] = {}  # of those that were simulated
        self._quick = is_quick(problem)

    @property
    def num_simulated(self) -> int:
        """How many engines were simulated."""
        return len(self._steady)

    def solve(
        self,
        wanted: Callable[[EngineOption], bool] = lambda _: True,
        *,
        objective: Objective = "rate",
        demand: float | None = None,
    ) -> Mixture | None:
        """Return the best mixture of those that are wanted, with rates that are simulated."""
        own = [option for option in self._options if wanted(option)]
        for _ in range(MOST_ROUNDS):
            rated = self._rated(own)
            mixture = solve_flows(self._problem, list(rated), objective=objective, demand=demand)
            if mixture is None or not self._quick:
                return mixture
            met = [option for option, _ in mixture.engines]
            if objective == "rate" and mixture.bound > TIGHT * mixture.rate:
                met += mixture.relaxed
            new = dict.fromkeys(rated[option] for option in met)
            unknown = [option for option in new if option not in self._steady]
            if not self._simulate(unknown, mixture.rate):
                return mixture
        known = [option for option in own if option in self._steady]
        return solve_flows(
            self._problem, list(self._rated(known)), objective=objective, demand=demand
        )

    def rate(self, option: EngineOption) -> EngineOption:
        """Return an engine with the rate that it has by simulation."""
        if not self._quick:
            return option
        if option not in self._steady:
            self._simulate([option], option.rate)
        steady = self._steady[option]
        return replace(option, rate=steady, ideal=steady)

    def _simulate(self, options: Sequence[EngineOption], total: float) -> bool:
        """Simulate engines of a deployment that serves so much; tell whether there were any."""
        for option in options:
            guess = option.rate * self._factors(option.role)[0]
            copies = max(1, round(total / guess))
            self._steady[option] = steady_rate(self._problem, option, copies=copies, guess=guess)
        return bool(options)

    def _rated(self, options: Sequence[EngineOption]) -> dict[EngineOption, EngineOption]:
        """Return engines with what is known of their rates, and which they are."""
        factors = {role: self._factors(role) for role in Role}
        rated = {}
        for option in options:
            steady = self._steady.get(option)
            mean, most = factors[option.role]
            rate = steady if steady is not None else mean * option.rate
            ideal = steady if steady is not None else max(most * option.ideal, rate)
            if rate > 0.0:
                rated[replace(option, rate=rate, ideal=ideal)] = option
        return rated

    def _factors(self, role: Role) -> tuple[float, float]:
        """Return how far simulations are from closed forms: on average, and at most above ideal."""
        known = [(o, rate) for o, rate in self._steady.items() if o.role is role and rate > 0.0]
        if not known:
            return 1.0, 1.0
        mean = sum(rate / option.rate for option, rate in known) / len(known)
        return mean, max(1.0, *(rate / option.ideal for option, rate in known))

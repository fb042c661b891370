"""`Router`: which engine of a deployment takes a request. Pure: it is told what happens.

An engine's share says how many of all requests it can take. By `queues`, a request goes where it
is done first: to the engine whose work, divided by its share, is least after it came; a prompt
whose beginning an engine has computed costs it less. By `shares`, requests are dealt as the shares
say, whatever the queues. Prefill engines hand on to the decode engines that their routes name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tutti.batching.prefix_index import PrefixIndex
from tutti.plan.plan import Plan
from tutti.plan.serving import Role

PROMPT_WEIGHT = 0.1  # of a prompt's token against one that is decoded
Routing = Literal["queues", "shares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedEngine:
    """An engine as the router knows it."""

    number: int
    pipeline: int
    role: Role
    share: float  # of all requests: those that come to it, or that routes lead to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The engines of a deployment, who feeds whom, and what a request is like."""

    engines: tuple[RoutedEngine, ...]
    onward: Mapping[int, Mapping[int, float]] = field(default_factory=dict)  # by pipelines: shares
    prompt: float = 256.0  # tokens of a usual one
    output: float = 256.0

    @classmethod
    def alone(cls) -> Routes:
        """Return the routes of a server that has one engine."""
        return cls(engines=(RoutedEngine(number=0, pipeline=0, role=Role.BOTH, share=1.0),))

    @classmethod
    def of(cls, plan: Plan) -> Routes:
        """Return what a plan says; equal engines share their pipeline's requests."""
        assert plan.job.serving is not None
        traffic = plan.job.serving.traffic
        shares = [0.0 if p.engine is None else p.engine.share for p in plan.pipelines]
        onward: dict[int, dict[int, float]] = {}
        for route in plan.routes:
            onward.setdefault(route.prefill, {})[route.decode] = route.share
            shares[route.decode] += shares[route.prefill] * route.share
        engines: list[RoutedEngine] = []
        for number, pipeline in enumerate(plan.pipelines):
            assert pipeline.engine is not None
            for _ in range(pipeline.copies):
                engines.append(
                    RoutedEngine(
                        number=len(engines),
                        pipeline=number,
                        role=pipeline.engine.role,
                        share=shares[number] / pipeline.copies,
                    )
                )
        return cls(
            engines=tuple(engines),
            onward=onward,
            prompt=traffic.prompt.expected,
            output=traffic.output.expected,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes; `onward`: the engine that decodes what this one begins."""

    engine: int
    onward: int | None = None


@dataclass(slots=True)
class _Underway:
    engine: int
    work: float  # that is left of it


class Router:
    """Knows what each engine has to do and what it has computed."""

    def __init__(self, routes: Routes, routing: Routing = "queues") -> None:
        self.routes, self.routing = routes, routing
        self._by_number = {engine.number: engine for engine in routes.engines}
        self.ready: set[int] = set()
        self._requests: dict[int, _Underway] = {}
        self._work = dict.fromkeys(self._by_number, 0.0)
        self._counts = dict.fromkeys(self._by_number, 0)
        self._elsewhere = dict.fromkeys(self._by_number, 0)  # requests of other routers
        self._prefixes = PrefixIndex()
        self._dealt = dict.fromkeys(self._by_number, 0)
        self._passed: dict[tuple[int, int], int] = {}

    # --- what happens ----------------------------------------------------------------------

    def came(self, engine: int) -> None:
        """Take note of an engine that takes requests."""
        self.ready.add(engine)

    def left(self, engine: int) -> None:
        """Take note of an engine that is gone, and with it what it had computed."""
        self.ready.discard(engine)
        self._prefixes.forget(engine)
        self._elsewhere[engine] = 0

    def heard(self, engine: int, requests: int) -> None:
        """Take note of how many requests an engine says that it has, whoever sent them."""
        self._elsewhere[engine] = max(0, requests - self._counts[engine])

    def noted(self, request: int, tokens: int) -> None:
        """Take note of tokens that came."""
        own = self._requests.get(request)
        if own is not None:
            done = min(own.work, float(tokens))
            own.work -= done
            self._work[own.engine] -= done

    def ended(self, request: int) -> None:
        """Take note that a request is no longer where it was."""
        own = self._requests.pop(request, None)
        if own is not None:
            self._work[own.engine] -= own.work
            self._counts[own.engine] -= 1

    # --- choices ---------------------------------------------------------------------------

    def choose(
        self, request: int, tokens: Sequence[int], most_new: int, *, root: str = ""
    ) -> Choice | None:
        """Send a request on its way; None: no engine is there."""
        names = self._prefixes.names(tokens, root)
        entries = [e for e in self._present() if e.role is not Role.DECODE]
        whole = not entries or most_new <= 1  # nobody needs to go on, or nobody else is there
        chosen = self._best(entries or self._present(), names, len(tokens), most_new)
        if chosen is None:
            return None
        self._dealt[chosen.number] += 1
        onward = None
        if chosen.role is Role.PREFILL and not whole:
            onward = self._next(chosen.pipeline, most_new)
        left = 1 if onward is not None else most_new
        self._put(request, chosen, self._work_of(chosen, names, len(tokens), left))
        self._prefixes.add(names, chosen.number)
        return Choice(chosen.number, onward)

    def go_on(
        self,
        request: int,
        tokens: Sequence[int],
        most_new: int,
        *,
        wanted: int | None = None,
        root: str = "",
    ) -> int | None:
        """Send what began elsewhere to an engine: the wanted one if it is there."""
        names = self._prefixes.names(tokens, root)
        present = self._present()
        chosen = next((e for e in present if e.number == wanted), None)
        if chosen is None:
            able = [e for e in present if e.role is not Role.PREFILL] or present
            chosen = self._best(able, names, len(tokens), most_new)
        if chosen is None:
            return None
        prompt = 0 if chosen.number == wanted else len(tokens)  # it is sent keys and values
        self._put(request, chosen, self._work_of(chosen, names, prompt, most_new))
        self._prefixes.add(names, chosen.number)
        return chosen.number

    def work(self, engine: int) -> float:
        """Return what an engine has to do, in tokens to decode."""
        return self._work[engine] + self._elsewhere[engine] * self._usual(self._by_number[engine])

    # --- how -------------------------------------------------------------------------------

    def _present(self) -> list[RoutedEngine]:
        return [engine for engine in self.routes.engines if engine.number in self.ready]

    def _put(self, request: int, engine: RoutedEngine, work: float) -> None:
        self.ended(request)
        self._requests[request] = _Underway(engine.number, work)
        self._work[engine.number] += work
        self._counts[engine.number] += 1

    def _usual(self, engine: RoutedEngine) -> float:
        """Return what a usual request is for an engine of its role."""
        prompt = 0.0 if engine.role is Role.DECODE else self.routes.prompt * PROMPT_WEIGHT
        return max(1.0, prompt + (0.0 if engine.role is Role.PREFILL else self.routes.output))

    def _work_of(
        self, engine: RoutedEngine, names: Sequence[int], prompt: int, most_new: int
    ) -> float:
        known = min(self._prefixes.known(names, engine.number), prompt)
        return (prompt - known) * PROMPT_WEIGHT + min(most_new, self.routes.output)

    def _best(
        self, engines: Sequence[RoutedEngine], names: Sequence[int], prompt: int, most_new: int
    ) -> RoutedEngine | None:
        """Return who is done first, or who is furthest behind its share."""
        if not engines:
            return None
        whole = sum(engine.share for engine in engines)
        if self.routing == "shares" and whole > 0:
            total = 1 + sum(self._dealt[engine.number] for engine in engines)
            return max(engines, key=lambda e: e.share / whole * total - self._dealt[e.number])

        def until(engine: RoutedEngine) -> tuple[float, int]:
            left = 1 if engine.role is Role.PREFILL else most_new
            work = self.work(engine.number) + self._work_of(engine, names, prompt, left)
            # in usual requests of its role: prompts alone are less work, at the same share
            return work / self._usual(engine) / max(engine.share, 1e-9), engine.number

        return min(engines, key=until)

    def _next(self, pipeline: int, most_new: int) -> int | None:
        """Return the decode engine that goes on with what a prefill engine begins."""
        shares = self.routes.onward.get(pipeline, {})
        able = [e for e in self._present() if shares.get(e.pipeline, 0.0) > 0]
        if not able:
            return None
        if self.routing == "shares":
            passed = self._passed
            total = 1 + sum(passed.get((pipeline, e.number), 0) for e in able)
            copies = {e.pipeline: sum(o.pipeline == e.pipeline for o in able) for e in able}
            chosen = max(
                able,
                key=lambda e: (
                    shares[e.pipeline] / copies[e.pipeline] * total
                    - passed.get((pipeline, e.number), 0)
                ),
            )
        else:
            chosen = min(
                able,
                key=lambda e: (
                    (self.work(e.number) + min(most_new, self.routes.output)) / max(e.share, 1e-9)
                ),
            )
        key = (pipeline, chosen.number)
        self._passed[key] = self._passed.get(key, 0) + 1
        return chosen.number

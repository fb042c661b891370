"""Requests go where they are done first, and where their beginning is known."""

from __future__ import annotations

from collections import Counter

from tests.support.deployments import mixed_plan, separated_plan
from tutti.batching.prefix_index import BLOCK, PrefixIndex
from tutti.batching.router import PROMPT_WEIGHT, Choice, RoutedEngine, Router, Routes, Routing
from tutti.plan.serving import Role


def routed(routing: Routing = "queues", *, shares: tuple[float, ...] = (0.75, 0.25)) -> Router:
    engines = tuple(
        RoutedEngine(number=n, pipeline=n, role=Role.BOTH, share=share)
        for n, share in enumerate(shares)
    )
    router = Router(Routes(engines=engines, prompt=100.0, output=100.0), routing)
    for engine in engines:
        router.came(engine.number)
    return router


def prompt(name: int, count: int = 100) -> list[int]:
    return [name * 1000 + place for place in range(count)]


def test_shares_hold_while_queues_are_alike() -> None:
    router = routed()
    given = Counter(router.choose(n, prompt(n), 100).engine for n in range(400))  # type: ignore[union-attr]
    assert given == {0: 300, 1: 100}


def test_an_engine_that_is_behind_gets_fewer() -> None:
    router = routed(shares=(0.5, 0.5))
    for n in range(40):
        choice = router.choose(n, prompt(n), 100)
        assert choice is not None
        if choice.engine == 1:  # it is done at once; the other never is
            router.ended(n)
    given = Counter(router._requests[n].engine if n in router._requests else 1 for n in range(40))
    assert given[1] > 35


def test_by_shares_queues_do_not_count() -> None:
    router = routed("shares", shares=(0.5, 0.5))
    for n in range(40):
        choice = router.choose(n, prompt(n), 100)
        assert choice is not None
        assert choice.engine == n % 2
        if choice.engine == 1:
            router.ended(n)


def test_tokens_that_came_are_work_that_is_done() -> None:
    router = routed()
    router.choose(1, prompt(1), 80)
    assert router.work(0) == 100 * PROMPT_WEIGHT + 80
    router.noted(1, 30)
    assert router.work(0) == 100 * PROMPT_WEIGHT + 50
    router.ended(1)
    router.ended(1)
    router.noted(1, 5)
    assert router.work(0) == 0.0


def test_other_routers_requests_count() -> None:
    router = routed(shares=(0.5, 0.5))
    router.heard(0, 10)
    assert router.choose(1, prompt(1), 100) == Choice(1)
    router.heard(0, 0)
    assert router.choose(2, prompt(2), 100) == Choice(0)


def test_a_known_beginning_draws_requests_until_the_queue_is_longer() -> None:
    router = routed(shares=(0.5, 0.5))
    shared = prompt(9, 20 * BLOCK)
    assert router.choose(0, shared, 10) == Choice(0)
    assert router.choose(1, prompt(1), 100) == Choice(1)
    assert router.choose(2, [*shared, 1, 2, 3], 10) == Choice(0), "computed there already"
    assert router.choose(3, prompt(3), 10) == Choice(0)
    for n in range(4, 30):
        router.choose(n, [*shared, n], 100)
    engines = {own.engine for own in router._requests.values()}
    assert engines == {0, 1}, "a queue is not worth any prefix"


def test_salts_share_nothing() -> None:
    router = routed(shares=(0.5, 0.5))
    shared = prompt(9, 20 * BLOCK)
    router.choose(0, shared, 10, root="a")
    router.choose(1, prompt(1, 640), 10)
    index = router._prefixes
    assert index.known(index.names(shared, "a"), 0) == 640
    assert index.known(index.names(shared, "b"), 0) == 0


def test_an_engine_that_is_gone_gets_nothing_and_knows_nothing() -> None:
    router = routed()
    shared = prompt(9, 4 * BLOCK)
    assert router.choose(0, shared, 10) == Choice(0)
    router.left(0)
    assert router.choose(1, shared, 10) == Choice(1)
    router.came(0)
    assert router._prefixes.known(router._prefixes.names(shared), 0) == 0
    router.left(0)
    router.left(1)
    assert router.choose(2, shared, 10) is None
    assert router.go_on(2, shared, 10) is None


def test_equal_engines_share_what_their_pipeline_gets() -> None:
    routes = Routes.of(mixed_plan())
    assert [engine.share for engine in routes.engines] == [0.35, 0.35, 0.3]
    assert [engine.pipeline for engine in routes.engines] == [0, 0, 1]


def test_prefill_hands_on_to_who_has_least_to_do() -> None:
    router = Router(Routes.of(separated_plan()))
    for engine in router.routes.engines:
        router.came(engine.number)
    assert [e.role for e in router.routes.engines] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert router.choose(0, prompt(0), 100) == Choice(0, 1)
    assert router.go_on(0, [*prompt(0), 1], 99, wanted=1) == 1
    assert router.choose(1, prompt(1), 100) == Choice(0, 2)
    assert router.choose(2, prompt(2), 1) == Choice(0), "one token: nobody needs to go on"
    router.left(1)
    router.ended(0)
    assert router.go_on(0, [*prompt(0), 1], 99, wanted=1) == 2, "another one, from the tokens"
    router.left(0)
    assert router.choose(3, prompt(3), 100) == Choice(2), "no prefill engine: it does both"
    router.left(2)
    router.came(0)
    assert router.choose(4, prompt(4), 100) == Choice(0), "no decode engine: it does both"


def test_routes_are_dealt_by_shares() -> None:
    router = Router(Routes.of(separated_plan()), "shares")
    for engine in router.routes.engines:
        router.came(engine.number)
    found = [router.choose(n, prompt(n), 100) for n in range(6)]
    assert Counter(choice.onward for choice in found if choice) == {1: 3, 2: 3}


def test_an_index_forgets_what_was_not_used() -> None:
    index = PrefixIndex(most=3)
    first, second = index.names(prompt(1, 2 * BLOCK)), index.names(prompt(2, 2 * BLOCK))
    index.add(first, 0)
    index.add(second, 0)
    assert index.known(second, 0) == 2 * BLOCK
    assert index.known(first, 0) == 0, "its first block went, and with it what follows"

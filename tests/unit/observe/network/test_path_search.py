"""Path search against pretended switches: some silent, some slow to answer."""

from __future__ import annotations

from tutti.observe.network.path_search import Hops, PathSearch


def _run(search: PathSearch, routes: dict[tuple[int, int], Hops], seconds: float = 8.0) -> None:
    now = 0.0
    while now < seconds:
        for peer, port, hops in search.due(now, most=5):
            path = routes[peer, port]
            if hops <= len(path) and path[hops - 1] != "silent":
                search.answer(peer, port, hops, path[hops - 1])
        now += 0.1


def test_one_port_per_path_is_kept() -> None:
    search = PathSearch([1, 2], [10, 11, 12], 0.0)
    routes = {
        (1, 10): ("l0", "s0", "l1"), (1, 11): ("l0", "s1", "l1"), (1, 12): ("l0", "s0", "l1"),
        (2, 10): ("l0",), (2, 11): ("l0",), (2, 12): ("l0",),
    }  # fmt: skip
    search.length(1, 3)
    search.length(2, 1)
    _run(search, routes)
    assert search.paths == {1: {10: routes[1, 10], 11: routes[1, 11]}, 2: {10: ("l0",)}}
    assert search.is_done(1)
    assert len(search.news) == 3


def test_silent_switches_and_unknown_lengths() -> None:
    search = PathSearch([1, 2], [10], 0.0)
    search.length(1, 3)
    routes: dict[tuple[int, int], Hops] = {(1, 10): ("l0", "silent", "l1"), (2, 10): ("l0", "s1")}
    _run(search, routes, seconds=12.0)
    assert search.paths == {1: {10: ("l0", "?", "l1")}, 2: {10: ("l0", "s1")}}


def test_a_changed_route_is_news_an_unanswered_trace_is_not() -> None:
    search = PathSearch([1], [10], 0.0)
    search.length(1, 2)
    routes: dict[tuple[int, int], Hops] = {(1, 10): ("l0", "s0")}
    _run(search, routes)
    search.news.clear()
    for path, news in ((("l0", "silent"), []), (("l0", "s1"), [(1, 10, ("l0", "s1"))])):
        routes[1, 10] = path
        search.trace_again()
        _run(search, routes)
        assert search.news == news

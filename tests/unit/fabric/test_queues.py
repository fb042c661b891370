"""The queue model: rates, marks, pauses, losses; and what must not happen."""

from __future__ import annotations

import pytest

from tutti.errors import InputError
from tutti.fabric.queues import QueueFlow, QueueNetwork, QueueRules

LINE = 12.5e9


def _star(hosts: int) -> dict[tuple[str, str], float]:
    names = [f"h{n}" for n in range(hosts)]
    return {link: LINE for name in names for link in ((name, "s"), ("s", name))}


def _incast(rules: QueueRules, senders: int = 4) -> QueueNetwork:
    flows = [QueueFlow(path=(f"h{n}", "s", "h0")) for n in range(1, senders + 1)]
    return QueueNetwork(_star(senders + 1), flows, rules)


def test_one_flow_gets_its_line_and_is_never_marked_or_paused() -> None:
    network = QueueNetwork(_star(2), [QueueFlow(path=("h0", "s", "h1"))])
    counters = network.run(2e-3)
    assert network.delivered_bytes[0] == pytest.approx(2e-3 * LINE, rel=0.01)
    assert counters["s", "h1"].marks == counters["h0", "s"].paused_s == 0
    assert network.now_s == pytest.approx(2e-3)


def test_incast_without_marks_is_held_back_by_pauses_and_nothing_is_lost() -> None:
    network = _incast(QueueRules(dcqcn=False))
    counters = network.run(4e-3)
    assert sum(network.delivered_bytes) == pytest.approx(4e-3 * LINE, rel=0.02)
    for sender in range(1, 5):  # each may send a quarter
        assert counters[f"h{sender}", "s"].paused_s == pytest.approx(3e-3, rel=0.1)
        assert network.delivered_bytes[sender - 1] == pytest.approx(1e-3 * LINE, rel=0.05)
    assert not any(one.discards for one in counters.values())


def test_senders_that_heed_marks_need_few_pauses() -> None:
    network = _incast(QueueRules())
    network.run(3e-3)
    before = network.run(0.0)
    after = network.run(4e-3)
    paused = after["h1", "s"].paused_s - before["h1", "s"].paused_s
    assert paused < 0.1 * 4e-3
    assert after["s", "h0"].marks > before["s", "h0"].marks
    sent = after["s", "h0"].sent_bytes - before["s", "h0"].sent_bytes
    assert sent > 0.8 * 4e-3 * LINE


def test_without_pauses_what_does_not_fit_is_lost() -> None:
    network = _incast(QueueRules(pfc=False, dcqcn=False))
    counters = network.run(2e-3)
    assert counters["h1", "s"].paused_s == 0
    sent = sum(counters[f"h{n}", "s"].sent_bytes for n in range(1, 5))
    lost = counters["s", "h0"].discards * 1024
    assert lost == pytest.approx(sent - 2e-3 * LINE, rel=0.25)


def test_a_slow_host_stops_its_switch_and_whoever_shares_a_way_with_it() -> None:
    links = _star(3) | {("h3", "t"): LINE, ("t", "s"): LINE, ("h4", "t"): LINE}
    flows = [QueueFlow(path=("h3", "t", "s", "h0")), QueueFlow(path=("h4", "t", "s", "h1"))]
    network = QueueNetwork(links, flows, QueueRules(dcqcn=False))
    network.run(1e-3)
    old = network.delivered_bytes[1]
    network.storm("s", "h0")
    counters = network.run(2e-3)
    assert counters["t", "s"].paused_s > 1e-3
    assert network.delivered_bytes[1] - old < 0.3 * 1e-3 * LINE  # it sends to another host


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="1,024 at most"):
        QueueNetwork(_star(600), [])
    with pytest.raises(InputError, match="there is no such link"):
        QueueNetwork(_star(2), [QueueFlow(path=("h0", "h1"))])
    with pytest.raises(InputError, match="xon ≤ xoff"):
        QueueRules(xon=300e3)
    with pytest.raises(InputError, match="no link"):
        _incast(QueueRules()).take("h9", 1.0)

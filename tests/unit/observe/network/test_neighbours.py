"""Probes between neighbours: on this machine's loopback, and over wires between namespaces."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable

import pytest

from tutti.bench.beds.namespaces import Namespaces, visiting, why_not
from tutti.errors import InputError
from tutti.observe.figures import key
from tutti.observe.network.neighbours import Neighbour, NeighbourProbes
from tutti.observe.network.probe_packets import Probe, ProbeKind, answer, pack, unpack
from tutti.observe.samplers.sampler import Values

EVERY_S, PATIENT_S = 0.02, 60.0


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def until(probes: NeighbourProbes, holds: Callable[[Values], bool]) -> Values:
    """Wait until a sample is as it should be."""
    end = time.monotonic() + PATIENT_S
    while not holds(values := probes.sample()):
        assert time.monotonic() < end, values
        time.sleep(EVERY_S)
    return values


LOSS, TRIP = (key(f"neighbour_{what}", "b/0") for what in ("loss_ratio", "round_trip_seconds"))


def test_an_answer_is_an_echo_without_the_time_it_lay() -> None:
    echo = unpack(pack(ProbeKind.ECHO, 0, 3, 17))
    assert echo is not None
    back = unpack(answer(echo, 250))
    assert back == Probe(ProbeKind.ANSWER, 0, 3, 17, echo.sent_ns + 250)
    assert unpack(answer(echo, -9)) == Probe(ProbeKind.ANSWER, 0, 3, 17, echo.sent_ns)


def test_two_hosts_tell_round_trips_and_one_that_goes_is_lost() -> None:
    port = free_port()
    a = NeighbourProbes(
        ["127.0.0.1"], port, [Neighbour("b/0", ("127.0.0.2",), port)], every_s=EVERY_S
    )
    try:
        b = NeighbourProbes(
            ["127.0.0.2"], port, [Neighbour("a/0", ("127.0.0.1",), port)], every_s=EVERY_S
        )
        values = until(a, lambda v: v.get(LOSS, math.nan) == 0.0)
        assert 0.0 <= values[TRIP] < PATIENT_S
        until(b, lambda v: v.get(key("neighbour_loss_ratio", "a/0")) == 0.0)
        b.close()
        until(a, lambda v: v[LOSS] > 0.9)
    finally:
        a.close()


def test_who_never_answers_is_said_once_and_strangers_get_no_answer() -> None:
    port, said = free_port(), list[str]()
    probes = NeighbourProbes(
        ["127.0.0.1"], port, [Neighbour("b/0", ("127.0.0.3",), port)], said.append, every_s=0.002
    )
    try:
        end = time.monotonic() + PATIENT_S
        while not said:
            assert time.monotonic() < end
            time.sleep(EVERY_S)
        assert probes.sample() == {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.bind(("127.0.0.9", 0))
            stranger.settimeout(0.3)
            stranger.sendto(pack(ProbeKind.ECHO, 0, 0, 0), ("127.0.0.1", port))
            with pytest.raises(TimeoutError):
                stranger.recv(64)
        assert said == [f"b/0: no answer to probes at port {port} (UDP)"]
    finally:
        probes.close()


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match="neighbours are not probed"):
            NeighbourProbes(["127.0.0.1"], one.getsockname()[1], [])


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_every_nic_is_probed_and_a_cut_wire_loses_on_its_own() -> None:
    beds = Namespaces()
    made: list[NeighbourProbes] = []
    try:
        hosts = [beds.hold(), beds.hold()]
        for nic in range(2):
            beds.inside(hosts[0], ["ip", "-batch", "-"], [
                f"link add wire{nic} type veth peer name wire{nic} netns {hosts[1]}",
                f"addr add 10.9.{nic}.1/24 dev wire{nic}", f"link set wire{nic} up",
            ])  # fmt: skip
            beds.inside(hosts[1], ["ip", "-batch", "-"], [
                f"addr add 10.9.{nic}.2/24 dev wire{nic}", f"link set wire{nic} up",
            ])  # fmt: skip
        for own, holder in enumerate(hosts):
            addresses = [tuple(f"10.9.{nic}.{one + 1}" for nic in range(2)) for one in range(2)]
            with visiting(holder):
                made.append(NeighbourProbes(
                    addresses[own], 7777, [Neighbour("b/0", addresses[1 - own], 7777)],
                    every_s=EVERY_S,
                ))  # fmt: skip
        losses = [key("neighbour_loss_ratio", f"b/0 nic {nic}") for nic in range(2)]
        until(made[0], lambda v: all(v.get(one) == 0.0 for one in losses))
        beds.inside(hosts[1], ["ip", "-batch", "-"], ["link set wire1 down"])
        values = until(made[0], lambda v: v[losses[1]] > 0.9)
        assert values[losses[0]] == 0.0
    finally:
        for one in made:
            one.close()
        beds.close()

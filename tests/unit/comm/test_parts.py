"""The small parts: spans, frames, rounding, the reactor."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.comm.compression import Bf16, Codec, Fp8, Residuals
from tutti.comm.exchange import Channels
from tutti.comm.frames import Frame, Kind, Tag, message, read, unpack
from tutti.comm.reactor import Reactor
from tutti.comm.spans import Spans
from tutti.comm.transport.shared import RingPlaces
from tutti.comm.transport.tcp import tune
from tutti.errors import InputError


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    cuts=st.tuples(st.integers(0, 240), st.integers(0, 240)),
)
def test_a_message_is_cut_anywhere(sizes: list[int], cuts: tuple[int, int]) -> None:
    whole = torch.arange(sum(sizes), dtype=torch.int32)
    pieces = list(torch.split(whole.clone(), sizes))
    spans = Spans(pieces)
    start, stop = sorted(min(cut, sum(sizes)) * 4 for cut in cuts)
    into = torch.empty(stop - start, dtype=torch.uint8)
    spans.gather(start, stop, into)
    assert torch.equal(into, whole.view(torch.uint8)[start:stop])
    joined = b"".join(bytes(view) for view in spans.views(start, stop))
    assert joined == into.numpy().tobytes()
    spans.scatter(start, stop, torch.zeros_like(into))
    whole.view(torch.uint8)[start:stop] = 0
    assert torch.equal(torch.cat(pieces), whole)


def test_a_frame_survives_the_wire() -> None:
    frame = Frame(Kind.DATA, Tag(3, 1 << 40, 2, 1, 5, 6, 7), 100, 10, 20, 1 << 50)
    assert unpack(frame.pack()) == frame
    (view,) = message(Kind.ABORT, {"peer": 3})
    head = unpack(view[: len(Frame(Kind.BYE).pack())])
    assert head.kind is Kind.ABORT
    assert read(view[-head.length :]) == {"peer": 3}


@pytest.mark.parametrize("rounding", [Bf16(), Fp8()])
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=2100))
def test_rounding_twice_changes_nothing(rounding: Bf16 | Fp8, numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    encoded = rounding.encode(values)
    assert encoded.numel() == rounding.num_bytes(len(numbers))
    once = rounding.decode(encoded, len(numbers))
    assert torch.equal(rounding.decode(rounding.encode(once), len(numbers)), once)
    largest = values.abs().max()
    assert (once - values).abs().max() <= 0.07 * largest


def test_what_rounding_lost_is_added_next_time() -> None:
    residuals = Residuals()
    total = torch.zeros(50)
    value = torch.full((50,), 1.0 + 1 / 300)
    for _ in range(300):
        codec = Codec("bf16", residuals, "stream")
        sent = codec.encode(1, Tag(0, 0), Spans([value.clone()]), keep=False)
        total += codec.decoder(Spans([value]))(sent.tensors[0]).view(torch.float32)
    assert (total / 300 - value).abs().max() < 1e-4


def test_an_unknown_rounding_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'bf16'"):
        Codec("bf61", Residuals(), "stream")


def test_the_reactor_misses_no_call() -> None:
    reactor = Reactor("test")
    done = threading.Event()
    seen = []
    try:
        for number in range(5000):
            reactor.call(lambda number=number: seen.append(number))  # type: ignore[misc]
        reactor.call(done.set)
        assert done.wait(10)
        assert seen == list(range(5000))
    finally:
        reactor.stop()


def test_channels_whose_hashes_meet_are_refused() -> None:
    channels = Channels()
    assert channels.next_number("", 1, True) == 0  # no channel: plain numbers
    assert channels.next_number("", 1, True) == 1
    assert channels.next_number("plumless", 1, True) & 0xFFFFFFFF == 0
    with pytest.raises(InputError, match="'buckeroo' has the hash of channel 'plumless'"):
        channels.next_number("buckeroo", 1, True)


def test_a_place_in_the_ring_is_kept_while_an_earlier_one_is_in_use() -> None:
    places = RingPlaces(1024)
    first, second, third = places.take(256), places.take(300), places.take(256)
    assert (first, second, third) == (0, 256, 768)
    places.free(256)
    places.free(768)
    assert places.take(100) is None, "the first piece is still being read"
    places.free(0)
    assert places.take(1024) == 1024


@given(data=st.data())
def test_pieces_in_a_ring_never_overlap(data: st.DataObject) -> None:
    places, used = RingPlaces(4096), {}
    for _ in range(data.draw(st.integers(1, 40))):
        if used and data.draw(st.booleans()):
            place = data.draw(st.sampled_from(sorted(used)))
            del used[place]
            places.free(place)
            continue
        length = data.draw(st.integers(1, 2048))
        place = places.take(length)
        if place is None:
            assert used
            continue
        at = place % 4096
        assert at + length <= 4096
        for other, size in used.items():
            assert at + length <= other % 4096 or other % 4096 + size <= at
        used[place] = length


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system has no such choice")
def test_sockets_leave_bbr_unless_told_otherwise() -> None:
    def control(name: str) -> str:
        with socket.socket() as sock:
            tune(sock, name)
            found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            return found.partition(b"\0")[0].decode()

    with socket.socket() as sock:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    kernel = found.partition(b"\0")[0].decode()
    assert control("kernel") == kernel
    assert control("reno") == "reno"
    assert control("") == kernel if kernel != "bbr" else control("") in ("cubic", "reno")
    with pytest.raises(InputError, match="congestion 'no-such'"):
        control("no-such")


def test_a_socket_that_is_closed_while_it_is_read_is_not_written() -> None:
    reactor, failures, over = Reactor("test"), [], threading.Event()
    reactor.on_failure = failures.append
    here, there = socket.socketpair()

    def read() -> None:
        reactor.watch(here, None, None)
        here.close()
        reactor.after(0.05, over.set)

    there.send(b"!")  # readable and writable in the same turn
    reactor.call(lambda: reactor.watch(here, read, lambda: failures.append(OSError("written"))))
    assert over.wait(10)
    reactor.stop()
    there.close()
    assert not failures

"""The way out of a rank after an error: told first, ended soon, signals as they are by default."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tutti.ranks.shutdown import Leaving, asking


@pytest.fixture(autouse=True)
def handlers():  # type: ignore[no-untyped-def]
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_asks() -> None:
    asked: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    with asking(asked.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait([], 0)  # let Python run the handlers
    assert asked == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_is_told_before_anything_is_closed() -> None:
    told: list[BaseException] = []
    ended: list[int] = []
    error = ValueError("one\ntwo")
    with asking(lambda _number: None), Leaving(3, told.append, end=ended.append) as leaving:
        leaving.tell(error)
        assert told == [error]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "no step is left to finish"
        assert [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    assert ended == [], "it came out in time"


def test_what_hangs_on_its_way_out_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()
    ended: list[int] = []

    def end(status: int) -> None:
        ended.append(status)
        over.set()

    with Leaving(3, lambda _error: None, end=end, after_s=0.01) as leaving:
        leaving.tell(ValueError("one\ntwo"))
        assert over.wait(30.0)  # hangs until it is ended
    assert ended == [1]
    assert capsys.readouterr().err == "rank 3: one; it hung on its way out and was ended\n"

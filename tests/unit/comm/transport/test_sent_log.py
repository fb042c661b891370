"""What is kept of a connection until it is confirmed, and what goes out again when it is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.comm.transport.sent_log import Sent, SentLog


class Told:
    """Frames of a log, and what their senders were told."""

    def __init__(self, resent: list[bool]) -> None:
        self.log = SentLog()
        self.taken: list[int] = []
        self.released: list[int] = []
        self.frames = [self._frame(number, again) for number, again in enumerate(resent)]
        for frame in self.frames:
            self.log.add(frame)

    def _frame(self, number: int, again: bool) -> Sent:
        return Sent(
            (memoryview(b"x" * number),),
            number,
            lambda: self.released.append(number),
            lambda: self.taken.append(number),
            again,
        )


@given(resent=st.lists(st.booleans(), max_size=30), data=st.data())
def test_every_frame_is_confirmed_or_sent_again_once(resent, data) -> None:  # type: ignore[no-untyped-def]
    told = Told(resent)
    counts = sorted(data.draw(st.lists(st.integers(0, len(resent)), max_size=5)))
    for count in counts:
        told.log.confirm(count)
    confirmed = max(counts, default=0)
    assert told.log.num_bytes == sum(range(confirmed, len(resent)))
    came = data.draw(st.integers(confirmed, len(resent)))
    told.log.settle()
    rest = told.log.rest(came)
    assert rest == [frame for frame in told.frames[came:] if frame.again]
    assert told.released == list(range(came))
    assert sorted(told.taken) == list(range(len(resent)))  # each was told once
    assert (len(told.log), told.log.num_bytes) == (0, 0)


def test_more_frames_than_were_sent_are_not_confirmed() -> None:
    told = Told([True, True])
    with pytest.raises(ValueError, match="3 frames are confirmed, 2 were sent"):
        told.log.confirm(3)

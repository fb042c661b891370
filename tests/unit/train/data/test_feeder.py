"""The thread that brings micro-batches: the right ones, no more than wanted, with their errors."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.support.tiny import MODEL
from tutti.accelerator import open_accelerator
from tutti.errors import InputError, TuttiError
from tutti.models import read_config
from tutti.nn.batch import Batch
from tutti.train.data.feeder import Feeder
from tutti.train.data.row import Row
from tutti.train.data.synthetic import SyntheticRows

SPEC = read_config(MODEL, "tiny")
ROWS = SyntheticRows(vocabulary=64, length=16, document_length=10, surprise=0.1, seed=0)


def indices(step: int, micro_batch: int) -> range:
    first = 12 * step + 3 * micro_batch
    return range(first, first + 3)


def feeder(samples=ROWS, **options: object) -> Feeder:
    given = {"micro_batches": 4, **options}
    return Feeder(samples, SPEC, open_accelerator("cpu"), indices, **given)  # type: ignore[arg-type]


def check(batch: Batch, step: int, micro_batch: int) -> None:
    rows = [ROWS.row(sample) for sample in indices(step, micro_batch)]
    assert batch.tokens_t.tolist() == np.concatenate([row.tokens for row in rows]).tolist()
    assert batch.targets_t is not None
    assert batch.targets_t.tolist() == np.concatenate([row.targets for row in rows]).tolist()
    assert batch.lengths == (10, 6) * 3
    assert batch.positions_t.tolist() == [*range(10), *range(6)] * 3


def test_batches_in_order_and_as_the_engine_asks() -> None:
    with feeder() as feed:
        for step in range(2):
            batches = feed.step(step)
            for micro_batch in range(4):
                check(batches(micro_batch), step, micro_batch)
        for micro_batch in (2, 0, 3, 1):  # any order within a step
            check(feed.batch(2, micro_batch), 2, micro_batch)
        assert feed.wait_s > 0
        with pytest.raises(ValueError, match="step 1: micro-batch 0 was given before"):
            feed.batch(1, 0)
        check(feed.batch(3, 0), 3, 0)


def test_resuming_and_ending() -> None:
    with feeder(first_step=5, last_step=6) as feed:
        for micro_batch in range(4):
            check(feed.batch(5, micro_batch), 5, micro_batch)
        for _ in range(2):
            with pytest.raises(InputError, match="no micro-batch behind step 5"):
                feed.batch(6, 0)


class Counted:
    """Counts the rows that were asked for."""

    def __init__(self) -> None:
        self.count = 0

    def row(self, sample: int) -> Row:
        self.count += 1
        return ROWS.row(sample)


def test_no_more_is_prepared_than_wanted() -> None:
    samples = Counted()
    with feeder(samples, depth=2) as feed:
        feed.batch(0, 0)
        before = -1
        while before != samples.count:  # until the thread waits for room
            before = samples.count
            time.sleep(0.3)
        assert samples.count <= 3 * (1 + 2 + 1)  # given, queued, in the thread's hand
    assert not any(thread.name == "tutti-feeder" for thread in threading.enumerate())


class Broken:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def row(self, sample: int) -> Row:
        if sample == 7:
            raise self.error
        return ROWS.row(sample)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InputError("a.jsonl: row 3: wrong"), InputError, "data: sample 7: a.jsonl: row 3: wrong"),
        (KeyError("x"), TuttiError, "data: sample 7: KeyError: 'x'"),
    ],
)
def test_errors_come_where_the_batch_is_asked_for(error, kind: type, message: str) -> None:
    with feeder(Broken(error)) as feed:
        check(feed.batch(0, 0), 0, 0)
        check(feed.batch(0, 1), 0, 1)
        for _ in range(2):
            with pytest.raises(kind) as raised:
                feed.batch(0, 2)
            assert str(raised.value) == message


def test_closing_while_the_queue_is_full() -> None:
    feed = feeder(depth=1)
    feed.batch(0, 0)
    feed.close()
    feed.close()
    with pytest.raises(ValueError, match="the feeder is closed"):
        feed.batch(9, 0)

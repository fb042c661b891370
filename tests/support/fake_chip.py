"""A chip that computes nothing and checks everything: what `Step`s do to pages, token by token.

A page's place holds a hash of all tokens up to its own. A row that looks at its keys must find the
hashes of its own tokens there: any page given away, shared or copied wrongly shows. The next token
is a function of the tokens before and of the sample, so that what must come out is known.
"""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import numpy as np

from tutti.batching import Received, Request, Scheduler, Sequence, Settings, Step, Tokens
from tutti.batching.events import GOES_ON, STOPS
from tutti.batching.step import LAST

VOCABULARY = 31
STOP = 0


def prints(tokens: list[int], salt: str) -> list[int]:
    found, own = [], crc32(salt.encode())  # the hash of a text is another in every process
    for token in tokens:
        own = hash((own, token))
        found.append(own)
    return found


def next_token(tokens: list[int], sample: int) -> int:
    return hash((tuple(tokens), sample)) % VOCABULARY


def expected(request: Request, sample: int) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.most_new:
        tokens.append(next_token(tokens, sample))
        if tokens[-1] == STOP:
            break
    return tokens[len(request.prompt) :]


def _first_seen(settings: Settings, query: int) -> int:
    """The first key that a query looks at."""
    window = settings.window
    if window is None:
        return 0
    kind = settings.window_kind
    return next(
        key
        for key in range(query + 1)
        if (query - key < window if kind == "sliding" else query // window == key // window)
    )


class FakeChip:
    """Runs steps in the order in which they are made; hands their tokens out later."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pages: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}  # pages of the host
        self.slots: dict[int, tuple[Sequence, list[int]]] = {}  # who has it, its tokens
        self.waiting: list[Tokens] = []
        self.done: dict[int, list[int]] = {}
        self.stopped: set[int] = set()

    def run(self, step: Step) -> None:
        settings = self.settings
        assert 0 < step.num_tokens <= settings.most_tokens, "more than the budget"
        assert len(set(step.slots.tolist())) == len(step.slots), "a slot twice"
        self._move(step)
        for begin in step.begins:
            if begin.fork_of is None:
                self.slots[begin.slot] = (begin.sequence, list(begin.sequence.tokens))
        self._compute(step)
        for begin in step.begins:
            if begin.fork_of is not None:
                self.slots[begin.slot] = (begin.sequence, list(self.slots[begin.fork_of][1]))
        tokens, ends = [], []
        assert len(step.sample_rows) == len(step.sample_slots) == len(step.sample_offsets)
        ended: set[int] = set()
        for row, offset, slot in zip(
            step.sample_rows.tolist(), step.sample_offsets.tolist(), step.sample_slots.tolist(),
            strict=True,
        ):  # fmt: skip
            sequence, own = self.slots[slot]
            before = self.rows[row][: int(step.starts[row] + step.queries[row]) - offset]
            token = next_token(before, sequence.sample)
            if before == own and slot not in ended:  # else a guess before was wrong
                own.append(token)
                if token == STOP:
                    ended.add(slot)
            tokens.append(token)
            ends.append(STOPS if token == STOP else GOES_ON)
        self.waiting.append(
            Tokens(step.number, np.array(tokens, np.int32), np.array(ends, np.int8))
        )

    def _move(self, step: Step) -> None:
        """Move pages to the host, copy pages, and move pages back, in this order."""
        moves = (
            (step.stows, self.pages, self.host),
            (step.copies, self.pages, self.pages),
            (step.fetches, self.host, self.pages),
        )
        for pairs, source, target in moves:
            written = pairs[:, 1].tolist()
            assert 0 not in written, "page 0 belongs to nobody"
            assert len(written) == len(set(written)), "a page is written twice"
            for old, new in pairs.tolist():
                for offset in range(self.settings.page_size):
                    target.pop((new, offset), None)
                    if (old, offset) in source:
                        target[new, offset] = source[old, offset]

    def _compute(self, step: Step) -> None:
        settings, size = self.settings, self.settings.page_size
        writers: Counter[tuple[int, int]] = Counter()
        owners: dict[int, int] = {}
        used = iter(step.tokens.tolist())
        self.rows: list[list[int]] = []
        rows = list(
            zip(step.slots.tolist(), step.queries.tolist(), step.starts.tolist(), strict=True)
        )
        marks = []
        for row, (slot, count, start) in enumerate(rows):
            sequence, own = self.slots[slot]
            assert sequence.id == step.sequences[row]
            base = int(step.bases[row])
            assert base == sequence.base
            given = [next(used) for _ in range(count)]
            real = own[start : start + count]
            assert all(a in (LAST, b) for a, b in zip(given, real, strict=False)), "other tokens"
            assert len(real) == count or len(real) == 1, "only guesses may be new"
            whole = own + given[len(real) :]
            self.rows.append(whole)
            marks.append(self._prints(whole, sequence.request, base))
            for position in range(start, start + count):
                page = int(step.tables[row, position // size])
                assert page > 0, "page 0 belongs to nobody"
                writers[page, position % size] += 1
                assert owners.setdefault(page, slot) == slot, "two writers of a page"
                self.pages[page, position % size] = marks[-1][position]
        assert not writers or max(writers.values()) == 1
        for row, (_, count, start) in enumerate(rows):
            first = _first_seen(settings, start)
            switched = settings.stretch is not None and settings.stretch_kind == "switch"
            if switched and start + count > (settings.stretch or 0):
                assert step.bases[row] > (settings.stretch or 0), "short and long keys together"
            for position in range(first, start + count):
                page = int(step.tables[row, position // size])
                assert page > 0, "a page that is looked at was given away"
                assert self.pages.get((page, position % size)) == marks[row][position], "wrong keys"

    def _prints(self, tokens: list[int], request: Request, base: int) -> list[int]:
        """What the keys of tokens are made of: all tokens before, and the sequence's length."""
        salt, stretch = f"{request.adapter}/{request.salt}", self.settings.stretch
        made = prints(tokens, salt)
        if stretch is None:
            return made
        lengths = [max(base, position + 1) for position in range(len(tokens))]
        if self.settings.stretch_kind == "switch":
            return [hash((p, length > stretch)) for p, length in zip(made, lengths, strict=True)]
        return [hash((p, max(length, stretch))) for p, length in zip(made, lengths, strict=True)]

    def received(self, found: Received) -> None:
        for name, token in zip(found.sequences.tolist(), found.tokens.tolist(), strict=True):
            assert name not in self.stopped, "a token after the end"
            if token == STOP:
                self.stopped.add(name)
        for sequence in found.finished:
            assert sequence.id not in self.done, "ended twice"
            self.done[sequence.id] = sequence.new_tokens


def check_pages(scheduler: Scheduler) -> None:
    """Every page is free, idle or used, and counted as often as slots have it."""
    pool, slots = scheduler.pool, scheduler.slots
    count = Counter(
        page
        for slot in range(scheduler.settings.slots)
        if slots.sequence[slot] >= 0
        for page in slots.pages(slot).tolist()
    )
    for page in range(1, scheduler.settings.pages):
        assert pool.users[page] == count[page], f"page {page}: users"
    free, idle, used = set(pool.free_pages()), set(pool.idle), set(count)
    assert len(free) == len(pool.free_pages()), "a page is free twice"
    assert 0 not in free | idle | used
    assert not free & idle
    assert not free & used
    assert not idle & used
    assert len(free) + len(idle) + len(used) == scheduler.settings.usable_pages, "pages are lost"
    assert idle <= pool.kept
    assert not free & pool.kept
    assert len(scheduler.tree) == len(pool.kept)
    check_host_pages(scheduler)
    held = [s for s in slots.sequence.tolist() if s >= 0]
    assert len(held) == len(set(held)), "a sequence has two slots"
    assert slots.num_free == scheduler.settings.slots - len(held)


def check_host_pages(scheduler: Scheduler) -> None:
    """Every page of the host is free, or one sequence's that waits."""
    pool, owners = scheduler.on_host.pool, scheduler.on_host.owners()
    used = [page for pages in owners.values() for page in pages]
    free = pool.free_pages()
    assert len(used) == len(set(used)), "a page of the host has two owners"
    assert len(free) == len(set(free)), "a page of the host is free twice"
    assert not set(free) & set(used), "a page of the host is free and used"
    left = scheduler.settings.host_pages - len(free) - len(used)
    assert left == 0 or scheduler.on_host.is_due, "pages of the host are lost"
    waiting = {s.id for s in scheduler.waiting if s.finish is None}
    assert set(owners) <= waiting, "the host keeps pages of one that does not wait"

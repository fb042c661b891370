"""Sequences that lost their slots, and whose keys and values wait in pages on the host.

Who loses its slot is computed anew later, or its pages are moved out and back: whichever is priced
cheaper. Page numbers of the host have a pool of their own, and each page one owner. Pages go out
with the next step and come back with the step that goes on with them; a worker does both in the
order of its steps, so that a page may be used again in the very step that moves it out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tutti.batching.pages import PagePool, Pages
from tutti.batching.prices import Prices, StepSize
from tutti.batching.request import Sequence
from tutti.batching.settings import Settings
from tutti.batching.slots import Slots
from tutti.batching.step import I32


@dataclass(frozen=True, slots=True, eq=False)
class SequenceOnHost:
    """What the host keeps of a sequence."""

    stored: int  # its first tokens: those whose keys and values are there
    first: int  # page of the sequence: those before lie behind its window
    pages: Pages  # of the host, one after the other


class SequencesOnHost:
    """Chooses who is kept on the host, and says which pages move."""

    def __init__(self, settings: Settings, prices: Prices | None, slots: Slots) -> None:
        self._settings, self._prices, self._slots = settings, prices, slots
        self.pool = PagePool(settings.host_pages + 1)  # here too page 0 belongs to nobody
        self._stowed: dict[int, SequenceOnHost] = {}  # by sequence
        self._stows: dict[int, int] = {}  # page of the host: page of the device
        self._fetches: list[tuple[int, int]] = []  # page of the host, page of the device
        self._left: list[int] = []  # the host's, free when the step is made that reads them

    @property
    def is_due(self) -> bool:
        """Whether pages are to be moved with the next step."""
        return bool(self._stows or self._fetches)

    def of(self, sequence: Sequence) -> SequenceOnHost | None:
        """Return what the host keeps of a sequence."""
        return self._stowed.get(sequence.id)

    def owners(self) -> dict[int, list[int]]:
        """Return the host's pages by the sequences that have them."""
        return {name: stowed.pages.tolist() for name, stowed in self._stowed.items()}

    def stow(self, slot: int) -> None:
        """Keep what a slot has that is about to be cleared, if its sequence goes on and it pays."""
        columns, settings = self._slots, self._settings
        sequence, stored = columns.held[slot], int(columns.stored[slot])
        assert sequence is not None
        if not settings.host_pages or sequence.finish is not None or not stored:
            return
        if sequence.base != columns.base[slot]:  # its keys are to be made in another way
            return
        first, last = settings.first_seen(stored) // settings.page_size, settings.pages_for(stored)
        count = max(0, last - first)
        if count > self.pool.available or not self._pays(stored, count):
            return
        pages = self.pool.take(count)
        self._stowed[sequence.id] = SequenceOnHost(stored, first, pages)
        sources = columns.table[slot, first:last].tolist()
        self._stows.update(zip(pages.tolist(), sources, strict=True))

    def _pays(self, stored: int, pages: int) -> bool:
        """Tell whether moving pages out and back takes less than computing their tokens again.

        Both are what they add to steps that others need anyway. What the prefix tree may still
        have later is not counted on: pages are short.
        """
        if self._settings.keep_on_host == "always":
            return True
        if self._prices is None:
            return False
        seconds, beside = self._prices.seconds, StepSize(1, 0, 1)
        without = seconds(beside)
        moved = seconds(beside._replace(stows=pages)) + seconds(beside._replace(fetches=pages))
        chunk = max(1, self._settings.most_tokens - 1)
        again = sum(
            seconds(beside.with_chunk(start, min(chunk, stored - start))) - without
            for start in range(0, stored, chunk)
        )
        return moved - 2.0 * without < again

    def fetch(self, sequence: Sequence, first: int, pages: Pages) -> None:
        """Let pages of a sequence come back to some of the device, from its page `first` on."""
        if not len(pages):
            return
        stowed = self._stowed[sequence.id]
        own = stowed.pages[first - stowed.first :]
        self._fetches += zip(own.tolist(), pages.tolist(), strict=True)

    def back(self, sequence: Sequence) -> None:
        """Forget a sequence that has a slot again: its host pages are free after the next step."""
        stowed = self._stowed.pop(sequence.id, None)
        if stowed is not None:
            self._left += stowed.pages.tolist()

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that needs nothing of it any more."""
        stowed = self._stowed.pop(sequence.id, None)
        if stowed is None:
            return
        for page in stowed.pages.tolist():
            self._stows.pop(page, None)  # else it might be written twice in one step
        self.pool.release(stowed.pages)

    def take_stows(self) -> I32:
        """Return what moves out before anything else is written: device page, host page."""
        stows, self._stows = self._stows, {}
        return _pairs([(device, host) for host, device in stows.items()])

    def take(self) -> tuple[I32, I32]:
        """Return what moves with a step: device page to host page, host page to device page."""
        stows, fetches = self.take_stows(), _pairs(self._fetches)
        self._fetches = []
        self.pool.release(np.array(self._left, np.int32))
        self._left = []
        return stows, fetches


def _pairs(pairs: list[tuple[int, int]]) -> I32:
    return np.array(pairs, np.int32).reshape(-1, 2)

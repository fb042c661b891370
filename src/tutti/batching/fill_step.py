"""Fills a step: decodes, chunks of prompts, new sequences, and the pages they need."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import numpy as np

from tutti.batching.pages import PagePool
from tutti.batching.prefix import PrefixTree
from tutti.batching.prices import Prices, StepSize
from tutti.batching.request import Sequence
from tutti.batching.sequences_on_host import SequencesOnHost
from tutti.batching.settings import Settings
from tutti.batching.slots import PREEMPTED, STAYS, Slots
from tutti.batching.step import Beginning
from tutti.batching.step_builder import Draft


class Filling:
    """Chooses rows and gives them pages."""

    def __init__(
        self,
        settings: Settings,
        prices: Prices | None,
        pool: PagePool,
        tree: PrefixTree,
        slots: Slots,
        on_host: SequencesOnHost,
        free_leaving: Callable[[], None],
    ) -> None:
        self._settings, self._prices = settings, prices
        self._pool, self._tree, self._slots = pool, tree, slots
        self._on_host, self._free_leaving = on_host, free_leaving
        self._switches = settings.stretch is not None and settings.stretch_kind == "switch"

    def draft(self, waiting: list[Sequence], guesses: Mapping[int, tuple[int, ...]]) -> Draft:
        """Return the rows of the next step; their pages are theirs already."""
        self._displace(waiting)
        self._start_anew()
        draft = Draft(self._settings.most_tokens)
        columns = self._slots
        to_do = np.minimum(columns.length, columns.goal) - columns.computed
        ready = (
            (to_do > 0) & (columns.leaving == STAYS) & (columns.in_flight < columns.most_flights)
        )
        if self._switches:
            ready &= ~self._stretched()
        self._decode(draft, (ready & (to_do == 1)).nonzero()[0])
        # a decode may have taken the pages of one that goes last
        stays = (columns.leaving == STAYS) & (columns.sequence >= 0)
        more = (ready & (to_do > 1) & stays).nonzero()[0]
        for slot in columns.by_order(more).tolist():
            if not self._chunk(draft, slot):
                break
        else:
            self._admit(draft, waiting)
        if guesses:
            self._guess(draft, guesses)
        return draft

    def _stretched(self) -> np.ndarray:
        """Tell whose keys are no longer those of a sequence of its length."""
        columns, settings = self._slots, self._settings
        assert settings.stretch is not None
        stretched: np.ndarray = (columns.base <= settings.stretch) & (
            np.minimum(columns.length, columns.goal) > settings.stretch
        )
        return stretched

    def _start_anew(self) -> None:
        """Let sequences that outgrew their keys be computed from their beginning."""
        if not self._switches:
            return
        columns = self._slots
        ripe = self._stretched() & (columns.in_flight == 0) & (columns.leaving == STAYS)
        for slot in np.flatnonzero(ripe & (columns.sequence >= 0)).tolist():
            sequence = columns.held[slot]
            assert sequence is not None
            sequence.base = int(columns.known[slot])
            self._preempt(slot)

    def make_way(self) -> bool:
        """Let the last in order give up its slot for the others; False if there is no other."""
        used = self._slots.in_use()
        if len(used) < 2:
            return False
        self._preempt(used[-1])
        return True

    # --- decodes ---------------------------------------------------------------------------

    def _decode(self, draft: Draft, slots: np.ndarray) -> None:
        columns, size = self._slots, self._settings.page_size
        if len(slots) > draft.budget:
            slots = columns.by_order(slots)[: draft.budget]
        needs = self._needs_page(slots)
        if np.count_nonzero(needs) > self._pool.available:
            slots = self._squeezed(slots)
            needs = self._needs_page(slots)
        at = columns.computed[slots] // size
        fresh = at >= columns.num_pages[slots]
        if needs.any():
            new = slots[fresh]
            columns.table[new, at[fresh]] = self._pool.take(len(new))
            columns.num_pages[new] += 1
            shared = needs & ~fresh
            for slot, index in zip(slots[shared].tolist(), at[shared].tolist(), strict=True):
                self._own_page(draft, slot, index)
        draft.singles = slots.astype(np.int32)
        draft.budget -= len(slots)
        keys = int(columns.computed[slots].sum()) + len(slots)
        draft.size = StepSize(len(slots), 0, keys)

    def _needs_page(self, slots: np.ndarray) -> np.ndarray:
        """Tell whose next token has no page, or one that others use too."""
        columns = self._slots
        at = columns.computed[slots] // self._settings.page_size
        fresh = at >= columns.num_pages[slots]
        shared = self._pool.users[columns.table[slots, np.where(fresh, 0, at)]] > 1
        needs_page: np.ndarray = fresh | shared
        return needs_page

    def _own_page(self, draft: Draft, slot: int, index: int) -> None:
        """Copy a page that others use too; the last of them keeps it."""
        page = self._slots.table[slot, index : index + 1].copy()
        if self._pool.users[page[0]] == 1:
            return
        copy = self._pool.take(1)
        self._pool.release(page)
        self._slots.table[slot, index] = copy[0]
        draft.copies.append((int(page[0]), int(copy[0])))

    def _squeezed(self, slots: np.ndarray) -> np.ndarray:
        """Return those that can go on; the last in order give their pages to the first."""
        columns = self._slots
        for victim in columns.in_use()[:0:-1]:
            need = int(self._needs_page(slots).sum())
            if need <= self._pool.available + self._coming():
                break
            self._preempt(victim)
            slots = slots[slots != victim]
        slots = columns.by_order(slots)
        needs = self._needs_page(slots)
        going = ~needs | (np.cumsum(needs) <= self._pool.available)
        going_slots: np.ndarray = slots[going]
        return going_slots

    def _coming(self) -> int:
        """Return how many pages come back with the steps under way."""
        columns = self._slots
        leaving = np.flatnonzero((columns.leaving != STAYS) & (columns.sequence >= 0)).tolist()
        return sum(int((self._pool.users[columns.pages(slot)] == 1).sum()) for slot in leaving)

    def _preempt(self, slot: int) -> None:
        self._slots.leaving[slot] = PREEMPTED
        self._free_leaving()

    def _guess(self, draft: Draft, guesses: Mapping[int, tuple[int, ...]]) -> None:
        """Let decodes try what may come next, as far as tokens and pages are left."""
        columns, settings = self._slots, self._settings
        for slot in columns.by_order(draft.singles).tolist():
            tokens = guesses.get(int(columns.sequence[slot]), ())
            known = columns.in_flight[slot] == 0 and columns.known[slot] == columns.length[slot]
            start, held = int(columns.computed[slot]), int(columns.num_pages[slot])
            spare = self._pool.available - columns.settled
            room = (held + max(0, spare)) * settings.page_size - start - 1
            left = int(columns.limit[slot]) - int(columns.length[slot]) - 1
            stretch = settings.stretch if settings.stretch_kind == "switch" else None
            if stretch is not None and columns.base[slot] <= stretch:
                left = min(left, stretch - start - 1)
            count = min(len(tokens), draft.budget, room, left)
            # samples fork off where the prompt ends: nothing is tried beyond before they have
            if count <= 0 or not known or columns.known[slot] <= start or columns.forks[slot]:
                continue
            new = settings.pages_for(start + 1 + count) - held
            if new > 0:
                columns.table[slot, held : held + new] = self._pool.take(new)
                columns.num_pages[slot] += new
            draft.singles = draft.singles[draft.singles != slot]
            draft.budget += 1  # of the single token, which is part of the longer row
            draft.size = draft.size._replace(
                decodes=draft.size.decodes - 1, keys=draft.size.keys - start - 1
            )
            draft.add_chunk(slot, start, 1 + count)
            draft.guesses[slot] = tokens[:count]

    # --- prompts ---------------------------------------------------------------------------

    def _chunk(self, draft: Draft, slot: int) -> bool:
        """Compute more of a prompt; False if not even one token of it finds room."""
        columns, settings, pool = self._slots, self._settings, self._pool
        start = int(columns.computed[slot])
        to_do = min(int(columns.length[slot]), int(columns.goal[slot])) - start
        held = int(columns.num_pages[slot])
        room = (held + pool.available) * settings.page_size - start
        count = min(to_do, draft.budget, room, self._affordable(draft, start))
        if count <= 0:
            return False
        new = settings.pages_for(start + count) - held
        if new > 0:
            columns.table[slot, held : held + new] = pool.take(new)
            columns.num_pages[slot] += new
        draft.add_chunk(slot, start, count)
        return True

    def _affordable(self, draft: Draft, start: int) -> int:
        """Return how long a chunk may be for the step to keep its target; a page at least."""
        target, prices = self._settings.target_s, self._prices
        if target is None or prices is None or not len(draft.singles):
            return draft.budget
        low, high = min(self._settings.page_size, draft.budget), draft.budget
        while low < high:
            count = (low + high + 1) // 2
            if prices.seconds(draft.size.with_chunk(start, count)) <= target:
                low = count
            else:
                high = count - 1
        return low

    # --- admission -------------------------------------------------------------------------

    def _admit(self, draft: Draft, waiting: list[Sequence]) -> None:
        """Give slots to the next in line as far as pages reach."""
        while waiting and draft.budget > 0:
            sequence = waiting[0]
            if sequence.finish is not None:  # it ended while it waited
                heapq.heappop(waiting)
                continue
            slot = self._placed(sequence) if self._slots.num_free else None
            if slot is None:
                return
            heapq.heappop(waiting)
            draft.begins.append(Beginning(slot, sequence))
            if not self._chunk(draft, slot):
                return

    def _placed(self, sequence: Sequence) -> int | None:
        """Return a sequence's new slot; None if pages do not reach for its prompt."""
        settings, pool, size = self._settings, self._pool, self._settings.page_size
        request, count = sequence.request, len(sequence.tokens)
        long = self._switches and min(count, sequence.goal) > (settings.stretch or 0)
        if long and sequence.base <= (settings.stretch or 0):  # it outgrew its keys and lost them
            sequence.base = count
            self._on_host.drop(sequence)
        key = (request.adapter, request.salt, settings.stretch_class(sequence.base))
        root = self._tree.root(key)
        nodes = []
        if settings.prefix and request.shares_prefix:
            tokens = np.array(sequence.tokens, np.int32)
            nodes = self._tree.match(key, tokens, (count - 1) // size)
        stowed = self._on_host.of(sequence)
        known, stored = len(nodes), len(nodes) * size
        if stowed is not None:
            stored = max(stored, stowed.stored)
        behind = settings.first_seen(stored) // size
        pages = np.array([node.page for node in nodes], np.int32)
        pages[:behind] = 0
        pool.share(pages[behind:])
        need = settings.most_pages(count) - max(0, known - behind)
        if not self.has_room(need):
            pool.release(pages[behind:])
            return None
        if not sequence.preemptions:
            sequence.cached = known * size
        # what the tree does not have, or no longer, comes back from the host
        first = max(known, behind)
        back = pool.take(max(0, settings.pages_for(stored) - first))
        self._on_host.fetch(sequence, first, back)
        self._on_host.back(sequence)
        table = [*pages.tolist(), *[0] * (first - known), *back.tolist()]
        node = nodes[-1] if nodes else root
        slot = self._slots.place(sequence, table, stored, node if first == known else None)
        self._slots.behind[slot] = behind
        if first == known:
            self._slots.inserted[slot] = known
        return slot

    def has_room(self, need: int) -> bool:
        """Tell whether so many pages are left: those that run will each want one before long."""
        used = int((self._slots.sequence >= 0).sum())
        return not used or need + self._promised() + used <= self._pool.available

    def _promised(self) -> int:
        """Return how many pages the prompts that are being computed still need."""
        columns, settings = self._slots, self._settings
        used = (columns.sequence >= 0) & (columns.leaving == STAYS)
        more = -(-columns.length // settings.page_size) - columns.num_pages
        if settings.window is not None:
            most = settings.most_pages(settings.max_length)
            more = np.minimum(more, most - (columns.num_pages - columns.behind))
        return int(np.maximum(more, 0)[used].sum())

    def _displace(self, waiting: list[Sequence]) -> None:
        """Let the last in order go if one with a higher priority waits and finds no room."""
        if not waiting or not (used := self._slots.in_use()):
            return
        sequence, last = waiting[0], self._slots.held[used[-1]]
        if last is None or last.order <= sequence.order or sequence.finish is not None:
            return
        need = self._settings.most_pages(len(sequence.tokens)) + self._promised() + len(used)
        if not self._slots.num_free or need > self._pool.available:
            self._preempt(used[-1])

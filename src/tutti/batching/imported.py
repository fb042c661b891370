"""Keys and values that another engine computed: pages for them, in the prefix tree.

A request whose prompt was computed elsewhere then finds its beginning as if it had been cached, and
computes what is left of it: less than a page. If pages have gone again before it gets a slot, it
computes more, and nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tutti.batching.pages import Pages
from tutti.batching.scheduler import Scheduler
from tutti.batching.step import I32


class Imported(NamedTuple):
    """Pages to be written: those of a sequence's tokens from `first` on, page by page."""

    first: int  # token
    pages: Pages
    stows: I32  # what moves to the host before they are written: device page, host page


def import_prefix(
    scheduler: Scheduler, tokens: Sequence[int], *, salt: str = "", base: int | None = None
) -> Imported:
    """Return pages for the whole pages of some tokens that the tree lacks, as far as there is room.

    `base`: the length that length-dependent keys were made for; the tokens'.
    """
    settings, pool, tree = scheduler.settings, scheduler.pool, scheduler.tree
    size = settings.page_size
    key = ("", salt, settings.stretch_class(len(tokens) if base is None else base))
    row = np.asarray(tokens, np.int32)
    whole = len(row) // size
    nodes = tree.match(key, row, whole)
    known = np.array([node.page for node in nodes], np.int32)
    pool.share(known)  # what is there already is not given away for what follows it
    spare = max(0, pool.available - scheduler.slots.settled)  # those that run will want a page each
    new = pool.take(min(whole - len(nodes), spare))
    node = nodes[-1] if nodes else tree.root(key)
    for index, page in enumerate(new.tolist(), len(nodes)):
        node = tree.insert(node, row[index * size : (index + 1) * size].tobytes(), page)
    pool.release(np.concatenate((known, new)))
    return Imported(len(nodes) * size, new, scheduler.on_host.take_stows())

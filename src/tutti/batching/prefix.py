"""`PrefixTree`: which pages hold the beginning of which tokens.

A node is one full page; its key is the page's tokens, its place in the tree the tokens before.
Trees of different adapters, salts and
rotary stretches share nothing. The pool says which page goes when room is
needed; a node that goes takes those below it along, for nobody could find them any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tutti.batching.pages import PagePool

Key = tuple[str, str, int]  # adapter, salt, how keys were made


@dataclass(slots=True, eq=False)
class Node:
    """A page in the tree; a root has none."""

    page: int
    parent: Node | None
    key: bytes = b""
    children: dict[bytes, Node] = field(default_factory=dict)
    known: bool = True  # False: no longer in the tree


class PrefixTree:
    """Full pages by the tokens they hold."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._roots: dict[Key, Node] = {}
        self._nodes: dict[int, Node] = {}
        pool.forget = self.forget

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, key: Key) -> Node:
        """Return where sequences of an adapter and a salt begin."""
        return self._roots.setdefault(key, Node(0, None))

    def match(self, key: Key, tokens: NDArray[np.int32], most: int) -> list[Node]:
        """Return the nodes of the longest known beginning, at most so many."""
        nodes: list[Node] = []
        node, size = self.root(key), self._page_size
        for index in range(most):
            below = node.children.get(tokens[index * size : (index + 1) * size].tobytes())
            if below is None:
                break
            nodes.append(below)
            node = below
        return nodes

    def insert(self, parent: Node, key: bytes, page: int) -> Node:
        """Return the node of a page's tokens below a node; the page becomes it if there is none.

        The key is the page's tokens as bytes.
        """
        node = parent.children.get(key)
        if node is None:
            node = Node(page, parent, key)
            parent.children[key] = node
            self._nodes[page] = node
            self._pool.keep(page)
        return node

    def forget(self, page: int) -> None:
        """Take a page and all below it out of the tree."""
        top = self._nodes[page]
        assert top.parent is not None
        del top.parent.children[top.key]
        line = [top]
        while line:
            node = line.pop()
            line += node.children.values()
            node.children = {}
            node.known = False
            del self._nodes[node.page]
            self._pool.drop(node.page)

    def clear(self) -> None:
        """Forget everything."""
        for root in self._roots.values():
            for node in list(root.children.values()):
                self.forget(node.page)
        self._roots.clear()

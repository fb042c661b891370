"""What a scheduler is given to work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tutti.errors import InputError

PAGES_SHARE = 0.9  # of the memory that weights leave; the rest is for activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes and limits of one engine.

    Aging: a request with a priority higher by one goes before those that arrived up to `aging`
    steps earlier, and after those that have waited longer. Nobody's order changes while it waits,
    so that the order on arrival is final.
    """

    slots: int  # sequences at a time
    pages: int  # page 0 belongs to nobody: rows that are padding write there
    page_size: int  # tokens
    max_length: int  # of a sequence
    most_tokens: int  # of a step
    window: int | None = None  # of keys that any layer looks back at; None: some see all
    window_kind: Literal["sliding", "chunked"] = "sliding"
    # keys depend on how long their sequence is, beyond a length: all of them change when it is
    # reached, or those of a prompt hang on the prompt's length
    stretch: int | None = None
    stretch_kind: Literal["switch", "grow"] = "switch"
    prefix: bool = True  # keep the pages of ended sequences for others with the same beginning
    aging: float = 100.0
    ahead: int = 1  # steps of one sequence that may be under way; more than 1: tokens come late
    # pages on the host, for sequences that lose their slots; and who is kept there: whose pages
    # move in less time than its tokens are computed again, or everybody for whom there is room
    host_pages: int = 0
    keep_on_host: Literal["priced", "always"] = "priced"
    target_s: float | None = None  # prefill is cut such that a priced step beside decodes keeps it

    def __post_init__(self) -> None:
        for name in ("slots", "page_size", "max_length", "most_tokens", "ahead"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"serving: '{name}' is {getattr(self, name)}; it must be at least 1"
                )
        if self.host_pages < 0:
            raise InputError(f"serving: 'host_pages' is {self.host_pages}; it must be at least 0")
        if self.keep_on_host not in ("priced", "always"):
            raise InputError(
                f"serving: 'keep_on_host' is '{self.keep_on_host}'; it may be priced or always"
            )
        if self.pages < 2:
            raise InputError(
                f"serving: {self.pages} pages leave none for requests; give at least 2"
            )

    @property
    def usable_pages(self) -> int:
        """Pages that sequences can have."""
        return self.pages - 1

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_length // self.page_size)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold so many tokens of a sequence."""
        return -(-tokens // self.page_size)

    def most_pages(self, tokens: int) -> int:
        """Return the most pages that a sequence of so many tokens has at a time."""
        whole = self.pages_for(tokens)
        if self.window is None:
            return whole
        # pages behind the window go when a step's tokens have come; `ahead` steps may be under way
        reach = self.window + self.ahead * min(self.most_tokens, tokens)
        return min(whole, self.pages_for(reach) + 1)

    def stretch_class(self, base: int) -> int:
        """Return a number that sequences share whose keys were made in the same way."""
        if self.stretch is None or base <= self.stretch:
            return 0
        return 1 if self.stretch_kind == "switch" else base

    def first_seen(self, stored: int) -> int:
        """Return the first key that a query at position `stored` or later looks at."""
        if self.window is None:
            return 0
        if self.window_kind == "sliding":
            return max(0, stored - self.window + 1)
        return stored // self.window * self.window

"""Which known architecture a config.json of an unknown type is nearest to, by what it says.

Every adapter is asked to read it. The nearest is the one that the file's `architectures` name, or
else the one that uses most of its fields and misses fewest of those it asks for; only between
equals does the likest name decide, and Llama where no name is like.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tutti.document import Place
from tutti.errors import InputError

FEWEST = 5  # fields in common; with fewer there is nothing to compare
ALIKE = 0.6  # as `errors.nearest` has it
# Options that most configs leave out: to miss them says nothing.
_OPTIONS = frozenset(("head_dim", "attention_bias", "mlp_bias", "attention_dropout"))


class _Asked(Mapping[str, object]):
    """A config that remembers which of its fields were asked for."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self.used: set[str] = set()
        self.missed: set[str] = set()

    def __getitem__(self, key: str) -> object:
        (self.used if key in self._values else self.missed).add(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        if key not in self._values:
            self.missed.add(str(key))
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def nearest_family(
    values: Mapping[str, object],
    families: Iterable[Any],
    read: Callable[[Any, Mapping[str, object], str, Place], object],
) -> str | None:
    """Return what to say of the nearest architecture; None where nothing is near."""
    names = _architectures(values)
    if names and not any(re.search("CausalLM|LMHead", name) for name in names):
        return f"'{names[0]}' is no decoder that predicts the next token"
    likeness = [_plain(re.sub("(ForCausalLM|LMHeadModel).*", "", name)) for name in names]
    likeness.append(_plain(str(values.get("model_type"))))
    best: tuple[tuple[float, ...], str] | None = None
    why = ""
    for family in families:
        asked = _Asked(values)
        try:
            read(family, asked, "nearest", Place("nearest"))
        except (InputError, TypeError, ValueError):
            continue  # a field that it needs is missing, or says what it does not do
        own = _plain(family.model_type)
        named = own in likeness[:-1]
        like = max(difflib.SequenceMatcher(None, own, name).ratio() for name in likeness)
        used, missed = len(asked.used), len(asked.missed - asked.used - _OPTIONS)
        rank = (named, used - missed / 3, like if like >= ALIKE else 0.0, own == "llama")
        if (named or used >= FEWEST) and (best is None or rank > best[0]):
            best, why = (rank, family.model_type), f"{used} of its fields are read there"
    if best is None:
        return None
    why = f"'architectures' says {names[0]}" if best[0][0] else why
    return f"the nearest architecture is '{best[1]}' ({why})"


def _architectures(values: Mapping[str, object]) -> list[str]:
    names = values.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())

"""Signatures: lines that are known, what they mean, and how surely. Data in `signatures/*.yaml`.

A signature is a family of lines of one layer, with the component that it speaks of. It is a cause,
a symptom (something else made it happen), or noise (harmless, whatever it says). Where a code
tells more than the words, its table in `codes/*.yaml` does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from tutti.diagnose.finding import Component
from tutti.diagnose.logs.literals import required_literals
from tutti.diagnose.logs.wording import of_words
from tutti.document import AtLeast, AtMost, Place, build
from tutti.errors import InputError
from tutti.files import parse_yaml, read_text

Kind = Literal["cause", "symptom", "noise"]
Layer = Literal[
    "chip", "link", "kernel", "storage", "scheduler", "runtime", "collective", "framework", "script"
]
Share = Annotated[float, AtLeast(0), AtMost(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What one code of a table means; what it leaves out, the signature says."""

    says: str
    component: Component | None = None
    kind: Kind = "cause"
    specificity: Share | None = None
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A family of lines, and what they mean."""

    name: str
    layer: Layer
    says: str
    any: tuple[str, ...]  # patterns; named groups are fields: rank, host, device, peer, code
    examples: tuple[str, ...]  # lines that it must match
    kind: Kind = "cause"
    component: Component = Component.UNDETERMINED
    specificity: Share = 0.5  # how often the component is right where this line is all there is
    remedy: str = ""
    source: str = ""
    explains: tuple[str, ...] = ()  # families of symptoms that follow from it
    family: str = ""  # of a symptom
    table: str = ""
    ignore_case: bool = False
    compiled: tuple[re.Pattern[str], ...] = field(default=(), init=False, compare=False)
    texts: tuple[frozenset[str] | None, ...] = field(default=(), init=False, compare=False)

    def __post_init__(self) -> None:
        flags = re.IGNORECASE if self.ignore_case else 0
        try:
            compiled = tuple(re.compile(of_words(pattern), flags) for pattern in self.any)
        except re.error as error:
            raise ValueError(f"signature '{self.name}': pattern {error}") from None
        object.__setattr__(self, "compiled", compiled)
        object.__setattr__(self, "texts", tuple(required_literals(one) for one in self.any))
        for line in self.examples:
            if not self.match(line):
                raise ValueError(f"signature '{self.name}': does not match its example {line!r}")

    def match(self, text: str, lower: str | None = None) -> re.Match[str] | None:
        """Return where a line is of this family; `lower` is the line in lower case."""
        lower = text.lower() if lower is None else lower
        for pattern, needed in zip(self.compiled, self.texts, strict=True):
            if needed is not None and not any(one in lower for one in needed):
                continue
            if match := pattern.search(text):
                return match
        return None


@dataclass(frozen=True, slots=True)
class Catalog:
    """All signatures, the tables of their codes, and the words that a line of theirs has."""

    signatures: tuple[Signature, ...]
    tables: Mapping[str, Mapping[str, Code]]
    words: tuple[str, ...]

    def needed_texts(self) -> tuple[str, ...] | None:
        """Return texts of which every known line has one; None if a line may have none."""
        needed = [texts for one in self.signatures for texts in one.texts]
        if any(texts is None for texts in needed):
            return None
        return tuple(sorted(frozenset().union(*(texts for texts in needed if texts))))

    def resolved(self, signature: Signature, match: re.Match[str]) -> Signature:
        """Return a signature as its table says it of the code in a line."""
        if not signature.table:
            return signature
        key = match.groupdict().get("code") or ""
        table = self.tables[signature.table]
        code = table.get(key.lstrip("-0") or key, table.get(_ANY_OTHER))
        if code is None:
            return signature
        return _with_code(signature, key, code)


_ANY_OTHER = "other"  # of a table: what a code means that it does not have


@functools.lru_cache(maxsize=512)
def _with_code(signature: Signature, key: str, code: Code) -> Signature:
    return replace(
        signature,
        name=f"{signature.name} {key}",
        says=code.says,
        kind=code.kind,
        component=code.component or signature.component,
        specificity=signature.specificity if code.specificity is None else code.specificity,
        remedy=code.remedy or signature.remedy,
        table="",
    )


@functools.cache
def own_catalog() -> Catalog:
    """Return what the package knows."""
    here = resources.files("tutti.diagnose")
    files = sorted(
        (f for f in (here / "signatures").iterdir() if f.name.endswith(".yaml")),
        key=lambda f: f.name,
    )
    signatures: list[Signature] = []
    words: list[str] = []
    for file in files:
        document = parse_yaml(file.read_text(encoding="utf-8"), file.name)
        if file.name == "words.yaml":
            words = list(build(tuple[str, ...], document, Place(file.name)))
        else:
            signatures += _signatures(document, file.name)
    tables = {
        file.name.removesuffix(".yaml"): _table(file.read_text(encoding="utf-8"), file.name)
        for file in (here / "codes").iterdir() if file.name.endswith(".yaml")
    }  # fmt: skip
    return _checked(Catalog(tuple(signatures), tables, tuple(words)))


def with_own_signatures(catalog: Catalog, path: Path) -> Catalog:
    """Return a catalog with a user's signatures before its own."""
    added = _signatures(parse_yaml(read_text(path), str(path)), str(path))
    return _checked(Catalog((*added, *catalog.signatures), catalog.tables, catalog.words))


def _signatures(document: object, name: str) -> list[Signature]:
    return list(build(tuple[Signature, ...], document, Place(name)))


def _table(text: str, name: str) -> dict[str, Code]:
    document = parse_yaml(text, name)
    if not isinstance(document, dict):
        raise InputError(f"{name}: expected codes and what they mean")
    return {str(k): build(Code, v, Place(name, (str(k),))) for k, v in document.items()}


def _checked(catalog: Catalog) -> Catalog:
    words = [word.lower() for word in catalog.words]
    names: set[str] = set()
    for one in catalog.signatures:
        if one.name in names:
            raise InputError(f"signature '{one.name}' stands twice")
        names.add(one.name)
        if one.table and one.table not in catalog.tables:
            raise InputError(f"signature '{one.name}': no table of codes is called '{one.table}'")
        for line in one.examples:
            if not any(word in line.lower() for word in words):
                raise InputError(
                    f"signature '{one.name}': its example {line!r} has none of the words "
                    "by which lines are chosen; add one to words.yaml"
                )
    return catalog

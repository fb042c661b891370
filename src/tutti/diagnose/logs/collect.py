"""From files to hits: the known lines of some logs, who said them and in which attempt.

Lines are recognised once per kind: a line that differs from an earlier one only in its numbers is
of the same signature. A signature keeps the first hits of each rank and attempt.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tutti.diagnose.logs.gate import Gate
from tutti.diagnose.logs.identity import Identity, of_file, of_line, with_fields
from tutti.diagnose.logs.reading import Line, LogFile, log_files, loud_lines, loud_lines_of
from tutti.diagnose.logs.signatures import Catalog, Signature
from tutti.diagnose.logs.templates import TemplateTree

_MOST_HITS = 24  # kept per signature and rank
_MOST_TOTAL = 20_000
_MOST_KINDS = 40_000  # of lines that are remembered one by one
_MOST_UNKNOWN = 20_000
_SYMPTOM = 0.6  # a symptom goes before what any exception of its type would mean
_MOST_OF_A_KIND = 50  # unknown lines of one kind and file whose host is looked for
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_DIGITS = bytes.maketrans(b"0123456789", b"#" * 10)
_SHAPE = 400  # characters of a line by which it is known again
# of torchrun, of Ray, of Open MPI, of MPICH
_BLOCK_HEADS = re.compile(
    r"^\s*(?:host|rank)\s+: |^\s+ip: \d|^\s*Process name: \[\[|^=\s+.{0,20}PID \d+ RUNNING AT"
)
_OF_BLOCK = re.compile(
    r"^\s*(?:exitcode|Exit code:)|^=\s+(?:EXIT CODE|KILLED BY)|^The actor (?:is dead|died) because"
)
_RANK_HEAD = re.compile(r"^\s*(?:rank\s|Process name)|^=\s+RANK")
_RESTART = re.compile(
    r"restart_count=(?P<count>[1-9]\d*)|[Rr]estart(?:ing)? worker group|DUE TO JOB REQUEUE|"
    r"Starting elastic_operator with launch configs|Rendezvous'?ing worker group|"
    r"(?i:\b(?:restart|retry) attempt\W+[1-9])"
)
# each of its alternatives has one of these
_RESTARTING = ("estart", "RESTART", "REQUEUE", "launch configs", "endezvous", "etry", "RETRY")
_HEADS = (  # of blocks and of attempts
    "host  ", "rank  ", " ip: ", "process name", "running at", "exitcode", "exit code",
    "killed by", "the actor", "restart", "retry attempt",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hit:
    """A known line."""

    signature: Signature
    line: Line
    who: Identity
    attempt: int
    order: int  # among all hits, as they were read
    peer: str = ""


@dataclass(slots=True)
class Collected:
    """All that the reasoning needs of some logs."""

    hits: list[Hit] = field(default_factory=list)
    files: list[LogFile] = field(default_factory=list)
    attempts: int = 1
    ranks: set[int] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    unknown: TemplateTree = field(default_factory=TemplateTree)

    @property
    def lines(self) -> int:
        """All lines that were read."""
        return sum(file.lines for file in self.files)


class _Reader:
    """Recognises lines; state of one collection."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.into = Collected()
        self.kinds: dict[str, tuple[Signature, ...] | None] = {}
        # lines of one shape, and their kind: a shape is found faster
        self.alike: dict[bytes, str] = {}
        self.said_enough: set[bytes] = set()  # shapes of which a file says nothing more
        self.of_a_kind: dict[tuple[str, str], int] = {}
        self.num_unknown = 0
        self.kept: dict[tuple[str, int | None, int], int] = {}
        self.block = Identity()

    def begin(self, name: str, file: Identity) -> LogFile:
        """Note a file, and who its name says that it is of."""
        seen = LogFile(name)
        self.into.files.append(seen)
        self.said_enough.clear()
        if file.rank is not None:
            self.into.ranks.add(file.rank)
        if file.host is not None:
            self.into.hosts.add(file.host)
        return seen

    def take_all(self, lines: Iterable[Line], file: Identity) -> None:
        """Look at the lines of one file."""
        for line in lines:
            if line.text:
                self.take(line, file)

    def take(self, line: Line, file: Identity) -> None:
        """Look at one line."""
        text = line.text
        shape = text[:_SHAPE].encode().translate(_DIGITS)
        if shape in self.said_enough and len(text) <= _SHAPE:
            return
        restarting = any(word in text for word in _RESTARTING)
        if restarting and _RESTART.search(text):
            self._restarted(text)
        head = _BLOCK_HEADS.match(text) is not None
        if head:
            self._who(text, file)
        kind = self._kind_of(text, shape)
        candidates = self._kind(text, kind)
        if candidates:
            self._hit(candidates, line, file)
        elif candidates is not None and self._is_new(kind, line.file):
            who = self._who(text, file)
            self.into.unknown.add(
                text[:300], file=line.file, line=line.number,
                host=who.host or ("" if who.rank is None else f"rank {who.rank}"),
            )  # fmt: skip
        elif not restarting and not head and len(self.said_enough) < _MOST_KINDS:
            self.said_enough.add(shape)

    def _who(self, text: str, file: Identity) -> Identity:
        who = of_line(text, file)
        if _BLOCK_HEADS.match(text):
            self.block = Identity(
                rank=who.rank if _RANK_HEAD.match(text) else None, host=who.host or self.block.host
            )
        elif _OF_BLOCK.match(text) and self.block != Identity():
            rank = who.rank if self.block.rank is None else self.block.rank
            who = Identity(rank, self.block.host or who.host, who.device, who.time)
        if who.rank is not None:
            self.into.ranks.add(who.rank)
        if who.host is not None and len(self.into.hosts) < 100_000:
            self.into.hosts.add(who.host)
        return who

    def _restarted(self, text: str) -> None:
        if "launch configs" in text and not self.into.hits:
            return  # the first start
        if any(hit.attempt == self.into.attempts for hit in self.into.hits[-50:]):
            self.into.attempts += 1

    def _is_new(self, kind: str, file: str) -> bool:
        """Tell whether an unknown line is still worth a look."""
        seen = self.of_a_kind.get((kind, file), 0)
        if seen >= _MOST_OF_A_KIND or self.num_unknown >= _MOST_UNKNOWN:
            return False
        self.of_a_kind[kind, file] = seen + 1
        self.num_unknown += 1
        return True

    def _kind_of(self, text: str, shape: bytes) -> str:
        """Return a line without its numbers."""
        kind = self.alike.get(shape)
        if kind is None:
            kind = _NUMBERS.sub("#", text[:_SHAPE])
            if len(self.alike) < _MOST_KINDS:
                self.alike[shape] = kind
        return kind

    def _kind(self, text: str, key: str) -> tuple[Signature, ...] | None:
        """Return the signatures that a line may be of; None of noise."""
        if len(self.kinds) >= _MOST_KINDS and key not in self.kinds:
            words = key.split()
            key = " ".join([*words[:4], "…", *words[-2:]])
        if key not in self.kinds:
            lower = text.lower()
            signatures = tuple(one for one in self.catalog.signatures if one.match(text, lower))
            noise = any(one.kind == "noise" for one in signatures)
            self.kinds[key] = None if noise else signatures
        return self.kinds[key]

    def _hit(self, candidates: tuple[Signature, ...], line: Line, file: Identity) -> None:
        matches = [(one, match) for one in candidates if (match := one.match(line.text))]
        resolved = [(self.catalog.resolved(one, match), match) for one, match in matches]
        if not resolved or any(one.kind == "noise" for one, _ in resolved):
            return
        exact, match = max(resolved, key=lambda pair: _precedence(pair[0]))
        who = with_fields(self._who(line.text, file), match.groupdict())
        key = (exact.name, who.rank, self.into.attempts)
        if self.kept.get(key, 0) >= _MOST_HITS or len(self.into.hits) >= _MOST_TOTAL:
            return
        self.kept[key] = self.kept.get(key, 0) + 1
        peer = match.groupdict().get("peer") or ""
        self.into.hits.append(
            Hit(exact, line, who, self.into.attempts, len(self.into.hits), peer=peer)
        )


def _precedence(signature: Signature) -> float:
    """Which signature a line is of, where several match: what says most of the cause."""
    if signature.kind == "symptom":
        return max(_SYMPTOM, signature.specificity)
    return signature.specificity


def _gate(catalog: Catalog) -> Gate:
    needed = catalog.needed_texts()
    if needed is None:
        return Gate(catalog.words)
    return Gate(catalog.words, (*needed, *_RESTARTING, *_HEADS))


def collect(
    paths: Iterable[Path], catalog: Catalog, *, texts: Mapping[str, bytes] | None = None,
    update: Callable[[str, float, float], None] = lambda *_: None,
) -> Collected:  # fmt: skip
    """Read logs, and return what is known of their lines; `texts` are in no file, by name.

    `update` hears which file is read, and how many bytes of how many were.
    """
    files, texts = log_files(list(paths)), texts or {}
    reader, gate = _Reader(catalog), _gate(catalog)
    sizes = [path.stat().st_size for path in files]
    whole, before = sum(sizes) + sum(map(len, texts.values())), 0
    for path, size in zip(files, sizes, strict=True):
        seen = reader.begin(str(path), file := of_file(path))
        reached = functools.partial(_reached, update, path.name, before, whole)
        lines = loud_lines(path, gate, seen, whole_bytes=whole, reached=reached)
        reader.take_all(lines, file)
        before += size
    for name, text in texts.items():
        seen = reader.begin(name, Identity())
        reader.take_all(loud_lines_of(text, gate, seen, whole_bytes=whole), Identity())
    if gate.thinned:
        seen.notes.append(
            f"{gate.thinned:,} lines like tens of thousands before them were not looked at"
        )
    return reader.into


def _reached(
    update: Callable[[str, float, float], None], name: str, before: int, whole: int, here: int
) -> None:
    update(name, before + here, max(whole, before + here))

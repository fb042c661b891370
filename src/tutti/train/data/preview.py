"""What a source becomes: its first examples with their mask, and the lengths of all that was read.

The same code encodes them as for training; nothing is cached. Needs no torch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.huggingface.tokenizer import Ids, Tokenizer
from tutti.train.data.cache import default_folder, silent
from tutti.train.data.config import Form, SourceConfig, SourceKind
from tutti.train.data.encode import Encoded, encode, holds_prompts, shape_of
from tutti.train.data.prompt_rows import PromptRows
from tutti.train.data.sources.find import find, reader_of
from tutti.train.data.sources.piece import unreadable
from tutti.train.data.sources.remote import brought_here


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One document or conversation as it is trained on."""

    tokens: Ids
    trained: NDArray[np.bool_]  # which tokens are targets

    def runs(self, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
        """Return the text in parts that are trained on, or not."""
        runs: list[tuple[str, bool]] = []
        at = 0
        for trained, group in itertools.groupby(self.trained.tolist()):
            size = len(list(group))
            runs.append((tokenizer.decode(self.tokens[at : at + size].tolist()), trained))
            at += size
        return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of a source."""

    name: str
    kind: SourceKind
    form: Form
    examples: tuple[Example, ...]  # the first ones
    lengths: NDArray[np.int64]  # of everything read, in tokens
    num_trained: int
    skipped: int
    whole: bool  # whether everything was read


def look(
    source: SourceConfig,
    tokenizer: Tokenizer,
    *,
    base: Path = Path(),
    end: bool = True,
    most: int = 3,
    whole: bool = False,
) -> Look:
    """Encode the first piece of a source, or all of it."""
    if source.kind is SourceKind.SYNTHETIC:
        raise InputError("a synthetic source has no text to show")
    source = brought_here(source, default_folder(), silent)
    kind, files = find(source, base)
    if kind is SourceKind.MEGATRON:
        raise InputError(f"{source.name}: is tokenised already; there is no text to show")
    if holds_prompts(source, kind, files):
        return _prompts(source, kind, files, tokenizer, most)
    try:
        shape = shape_of(source, kind, files)
        reader = reader_of(kind, blocks=source.in_blocks)
        pieces = [piece for file in files for piece in reader.pieces(file)]
        read = pieces if whole else pieces[:1]
        parts = [
            encode(piece, kind, shape, tokenizer, blocks=source.in_blocks, end=end)
            for piece in read
        ]
    except OSError as error:
        raise unreadable(error.filename or source.name, error) from None
    examples = (example for part in parts for example in _examples(part))
    return Look(
        name=source.name,
        kind=kind,
        form=shape.form,
        examples=tuple(itertools.islice(examples, most)),
        lengths=np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)]),
        num_trained=sum(_num_trained(part) for part in parts),
        skipped=sum(part.skipped for part in parts),
        whole=len(read) == len(pieces),
    )


def _prompts(
    source: SourceConfig, kind: SourceKind, files: list[Path], tokenizer: Tokenizer, most: int
) -> Look:
    """Look at prompts: nothing of them is trained on."""
    rows = PromptRows(
        source, kind, files, tokenizer, length=sys.maxsize, answer=0, vocabulary=sys.maxsize
    )
    tokens = [np.asarray(one.tokens, np.int64) for one in rows.prompts]
    return Look(
        name=source.name,
        kind=kind,
        form=Form.PROMPTS,
        examples=tuple(
            Example(tokens=t, trained=np.zeros(len(t), np.bool_)) for t in tokens[:most]
        ),
        lengths=np.asarray([len(own) for own in tokens], np.int64),
        num_trained=0,
        skipped=rows.skipped,
        whole=True,
    )


def _examples(part: Encoded) -> Iterator[Example]:
    for stop, length in zip(np.cumsum(part.lengths).tolist(), part.lengths.tolist(), strict=True):
        where = slice(stop - length, stop)
        mask = np.ones(length, np.bool_) if part.supervised is None else part.supervised[where]
        trained = mask.copy()
        trained[:1] = False  # nothing stands before the first token to predict it
        yield Example(tokens=part.tokens[where], trained=trained)


def _num_trained(part: Encoded) -> int:
    return sum(int(example.trained.sum()) for example in _examples(part))


def histogram(lengths: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return (lowest, highest, count) of lengths, in ranges that double."""
    lengths_n = np.asarray(list(lengths), np.int64)
    if not len(lengths_n):
        return []
    first, last = (int(v).bit_length() for v in (lengths_n.min(), lengths_n.max()))
    edges = [(1 << n >> 1, (1 << n) - 1) for n in range(first, last + 1)]
    return [
        (low, high, int(((lengths_n >= low) & (lengths_n <= high)).sum())) for low, high in edges
    ]

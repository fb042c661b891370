"""`TokenStore`: all tokens of a source in one memory-mapped file, and where documents begin.

A store is a folder: `tokens.bin` (uint16 or uint32), `offsets.npy`, `supervised.bin` (a bit per
token, of supervised sources), `weights.bin` and `margins.bin` (of documents, where they have some)
and `store.json`.
It is written part by part, whole documents each, and joined in order, so that the result does not
depend on how many processes wrote.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.document import Place, build
from tutti.errors import InputError
from tutti.train.data.encode import Encoded

FORMAT = 2  # 2: no loss behind the end of a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What `store.json` says."""

    format: int
    dtype: str
    tokens: int
    documents: int
    largest: int  # token
    supervised: bool
    skipped: int  # records without text, or without a token that has a loss
    digest: str  # of the tokens, their documents and masks
    weighted: bool = False
    margins: bool = False
    group: int = 1  # documents of an example


class TokenStore:
    """Tokens in documents, read as they are needed."""

    def __init__(
        self,
        tokens: NDArray[Any],
        offsets: NDArray[np.int64],
        supervised: NDArray[np.uint8] | None,
        *,
        name: str,
        digest: str,
        largest: int | None,
        skipped: int = 0,
        weights: NDArray[np.float32] | None = None,
        margins: NDArray[np.float32] | None = None,
        group: int = 1,
    ) -> None:
        self.weights, self.margins, self.group = weights, margins, group
        self.tokens, self.offsets, self._supervised = tokens, offsets, supervised
        self.name, self.digest, self.largest, self.skipped = name, digest, largest, skipped

    @classmethod
    def open(cls, folder: Path, name: str) -> TokenStore:
        """Open a folder that `join` wrote."""
        try:
            facts = build(
                StoreFacts, json.loads((folder / "store.json").read_text()), Place("store.json")
            )
            tokens = np.memmap(folder / "tokens.bin", facts.dtype, "r", shape=(facts.tokens,))
            offsets = np.load(folder / "offsets.npy", mmap_mode="r")
            supervised = (
                np.memmap(folder / "supervised.bin", np.uint8, "r") if facts.supervised else None
            )
            weights = np.fromfile(folder / "weights.bin", np.float32) if facts.weighted else None
            margins = np.fromfile(folder / "margins.bin", np.float32) if facts.margins else None
        except (OSError, ValueError, InputError) as error:
            raise InputError(
                f"{folder}: the cached tokens are damaged ({error}); remove the folder"
            ) from None
        return cls(
            tokens, offsets, supervised, name=name, digest=facts.digest,
            largest=facts.largest, skipped=facts.skipped, weights=weights, margins=margins,
            group=facts.group,
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.offsets[-1])

    @property
    def num_documents(self) -> int:
        """Documents, or examples."""
        return len(self.offsets) - 1

    @property
    def is_supervised(self) -> bool:
        """Whether only some tokens have a loss."""
        return self._supervised is not None

    def supervised(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the tokens may be targets."""
        if self._supervised is None:
            return np.ones(stop - start, np.bool_)
        bits = np.unpackbits(self._supervised[start // 8 : -(-stop // 8)])
        return bits[start % 8 : start % 8 + stop - start].astype(np.bool_)


def write_part(folder: Path, number: int, encoded: Encoded, dtype: str) -> None:
    """Write the documents of one piece."""
    stem = folder / f"part-{number:06d}"
    # written as bytes: numpy's own `tofile` does not say why it failed
    Path(f"{stem}.tokens").write_bytes(encoded.tokens.astype(dtype).data)
    Path(f"{stem}.lengths").write_bytes(encoded.lengths.data)
    if encoded.supervised is not None:
        Path(f"{stem}.supervised").write_bytes(encoded.supervised.data)
    if encoded.weights is not None:
        Path(f"{stem}.weights").write_bytes(encoded.weights.data)
    if encoded.margins is not None:
        Path(f"{stem}.margins").write_bytes(encoded.margins.data)
    facts = {"largest": int(encoded.tokens.max(initial=-1)), "skipped": encoded.skipped}
    Path(f"{stem}.json").write_text(json.dumps(facts), encoding="utf-8")


def join(
    folder: Path,
    num_parts: int,
    dtype: str,
    *,
    supervised: bool,
    weighted: bool = False,
    margins: bool = False,
    group: int = 1,
) -> StoreFacts:
    """Make the store out of its parts, which are removed on the way."""
    digest = hashlib.blake2b(digest_size=16)
    lengths: list[NDArray[np.int64]] = []
    numbers = [name for name, has in (("weights", weighted), ("margins", margins)) if has]
    of_documents = {name: [np.zeros(0, np.float32)] for name in numbers}
    largest, skipped = -1, 0
    bits = _BitWriter(folder / "supervised.bin") if supervised else None
    with (folder / "tokens.bin").open("wb") as tokens:
        for number in range(num_parts):
            stem = f"{folder}/part-{number:06d}"
            lengths.append(np.fromfile(f"{stem}.lengths", np.int64))
            with open(f"{stem}.tokens", "rb") as part:
                while block := part.read(1 << 22):
                    digest.update(block)
                    tokens.write(block)
            if bits is not None:
                bits.append(np.fromfile(f"{stem}.supervised", np.bool_))
            for name, parts in of_documents.items():
                parts.append(np.fromfile(f"{stem}.{name}", np.float32))
            facts = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
            largest, skipped = max(largest, facts["largest"]), skipped + facts["skipped"]
            for ending in ("tokens", "lengths", "supervised", *numbers, "json"):
                Path(f"{stem}.{ending}").unlink(missing_ok=True)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([*lengths, np.zeros(0, np.int64)]))])
    offsets = offsets.astype(np.int64)
    np.save(folder / "offsets.npy", offsets)
    digest.update(offsets.tobytes())
    if bits is not None:
        digest.update(bits.close())
    for name, parts in of_documents.items():
        (folder / f"{name}.bin").write_bytes(np.concatenate(parts).data)
        digest.update(np.concatenate(parts).tobytes())
    made = StoreFacts(
        format=FORMAT, dtype=dtype, tokens=int(offsets[-1]), documents=len(offsets) - 1,
        largest=largest, supervised=supervised, skipped=skipped, digest=digest.hexdigest(),
        weighted=weighted, margins=margins, group=group,
    )  # fmt: skip
    (folder / "store.json").write_text(json.dumps(asdict(made)))
    return made


class _BitWriter:
    """Packs truth values of any number into a file of bits."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("wb")
        self._rest = np.zeros(0, np.bool_)
        self._digest = hashlib.blake2b(digest_size=16)

    def append(self, values: NDArray[np.bool_]) -> None:
        values = np.concatenate([self._rest, values])
        whole = len(values) // 8 * 8
        self._write(values[:whole])
        self._rest = values[whole:]

    def close(self) -> bytes:
        self._write(self._rest)
        self._stream.close()
        return self._digest.digest()

    def _write(self, values: NDArray[np.bool_]) -> None:
        packed = np.packbits(values).tobytes()
        self._digest.update(packed)
        self._stream.write(packed)


def remove_folder(folder: Path) -> None:
    """Remove a half-written store."""
    shutil.rmtree(folder, ignore_errors=True)

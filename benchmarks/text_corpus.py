"""Documentation out of Debian packages as tokens to train on: `.bin` and `.idx` of Megatron's form.

python benchmarks/text_corpus.py out/corpus

Downloads packages with `apt-get download` into the folder, unpacks them, takes plain sources of
manuals (and HTML without its tags where there is nothing else), trains a byte-level tokenizer on
them and writes `train`, `heldout`, the tokenizer and `corpus.json` with what they hold. Every
twentieth document, by the hash of its text, is held out; equal documents count once.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tutti.train.data.megatron import MAGIC

PACKAGES = (
    "linux-doc-6.1", "perl-doc", "git-doc", "manpages", "manpages-dev", "postgresql-doc-15",
    "python3.11-doc", "sqlite3-doc",
)  # fmt: skip
PLAIN = re.compile(r"\.(rst|txt|pod|[1-9])(\.gz)?$")
PAGES = {"postgresql-doc-15", "sqlite3-doc"}  # have nothing but HTML
# the same again: other languages, sources of pages, manual pages made of pods
SKIPPED = {
    "linux-doc-6.1": ("/translations/", "/html/_sources/"),
    "perl-doc": ("/man/",),
}
HELD_OUT = 20
SHORTEST = 400  # characters of a document
END = "<end>"


def unpacked(folder: Path) -> list[Path]:
    """Download and unpack what is not there yet; return a folder per package."""
    found = []
    for package in PACKAGES:
        target = folder / "packages" / package
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["apt-get", "download", package], cwd=target.parent, check=True)
            (archive,) = target.parent.glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "-x", archive, target], check=True)
        found.append(target)
    return found


def documents(packages: Sequence[Path]) -> Iterator[str]:
    """Return the texts of packages, in the order of their paths, each once."""
    seen: set[str] = set()
    for package in packages:
        for path in sorted(path for path in package.rglob("*") if path.is_file()):
            if any(part in str(path) for part in SKIPPED.get(package.name, ())):
                continue
            page = path.suffix == ".html" and package.name in PAGES
            if not page and not PLAIN.search(path.name):
                continue
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = raw.decode("utf-8", errors="replace")
            text = _without_tags(text) if page else text
            mark = _mark(text)
            if len(text) >= SHORTEST and mark not in seen:
                seen.add(mark)
                yield text


def _without_tags(text: str) -> str:
    text = re.sub(r"<(script|style|head)\b.*?</\1>", " ", text, flags=re.DOTALL | re.IGNORECASE)
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    return re.sub(r"\n\s*\n+", "\n\n", text)


def _mark(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write(stem: Path, encoded: Sequence[Sequence[int]]) -> int:
    """Write documents of tokens below 2¹⁶; return how many tokens they have."""
    lengths = np.array([len(each) for each in encoded], "<i4")
    starts = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * 2
    with Path(f"{stem}.bin").open("wb") as stream:
        for each in encoded:
            stream.write(np.array(each, "<u2").tobytes())
    head = (1).to_bytes(8, "little") + bytes([8]) + len(lengths).to_bytes(8, "little")
    head += (len(lengths) + 1).to_bytes(8, "little")
    body = lengths.tobytes() + starts.astype("<i8").tobytes()
    boundaries = np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    Path(f"{stem}.idx").write_bytes(MAGIC + head + body + boundaries)
    return int(lengths.sum())


def main() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--most-bytes", type=float, default=40e6)
    asked = parser.parse_args()
    texts: dict[str, list[str]] = {"train": [], "heldout": []}
    taken = 0
    # in the order of their hashes, so that a smaller corpus has a part of everything
    for text in sorted(documents(unpacked(asked.folder)), key=_mark):
        if taken + len(text.encode()) > asked.most_bytes:
            break
        taken += len(text.encode())
        held = int(_mark(text), 16) % HELD_OUT == 0
        texts["heldout" if held else "train"].append(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=asked.vocabulary, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts["train"], trainer)
    tokenizer.save(str(asked.folder / "tokenizer.json"))
    told: dict[str, object] = {"packages": PACKAGES, "vocabulary": tokenizer.get_vocab_size()}
    end = tokenizer.token_to_id(END)
    for part, own in texts.items():
        encoded = [[*found.ids, end] for found in tokenizer.encode_batch(own)]
        told[part] = {
            "documents": len(own),
            "bytes": sum(len(text.encode()) for text in own),
            "tokens": write(asked.folder / part, encoded),
        }
    (asked.folder / "corpus.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()

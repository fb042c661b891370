"""The scan of large logs: by forms of lines, thinned, with somebody who waits."""

from __future__ import annotations

import random
from pathlib import Path

from tutti.diagnose.logs import gate as gates
from tutti.diagnose.logs.collect import collect
from tutti.diagnose.logs.gate import Gate
from tutti.diagnose.logs.signatures import own_catalog


def test_lines_known_by_their_form_are_those_that_have_a_word() -> None:
    draw = random.Random(25)
    words = ["error", "e19999", "xid 79", "lost", "2: down", "fail"]
    gate = Gate(words)  # that every line may be known: none is thinned
    pieces = [
        "Error ", "xid 7", "9", "8", "was ", "LOST", "2: DOWN", "link ", "E1", "9999", " ok ",
        "\x00", "\r", "fai", "l", "0x7f", "\xe9", " " * 7, "12345678", "e1e19999",
    ]  # fmt: skip
    for _ in range(40):
        lines = ["".join(draw.choices(pieces, k=draw.randrange(9))) for _ in range(400)]
        block = "\n".join(lines).encode() + b"\n" * draw.randrange(3)
        expected = [
            number for number, line in enumerate(lines)
            if any(word.encode() in line.encode().lower() for word in words)
        ]  # fmt: skip
        at = gate.positions(block, whole_bytes=gates.SMALL_BYTES)
        assert [block.count(b"\n", 0, i) for i in at] == expected


def test_every_own_signature_has_texts_by_which_a_flood_is_thinned() -> None:
    assert own_catalog().needed_texts() is not None


def test_who_waits_hears_how_much_was_read(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("a line of progress\n" * 300_000)
    heard: list[tuple[str, float, float]] = []
    collect([tmp_path], own_catalog(), update=lambda *said: heard.append(said))
    done, whole = [part for _, part, _ in heard], 2 * 19 * 300_000
    assert {name for name, _, _ in heard} == {"a.log", "b.log"}
    assert done == sorted(done)
    assert done[-1] == whole
    assert {of for _, _, of in heard} == {whole}

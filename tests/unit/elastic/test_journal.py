"""The log of an elastic run: written, read, cut off; and the fence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.elastic.journal import (
    FOLDER,
    LOG,
    Entry,
    FencedError,
    Journal,
    last_generation,
    read_journal,
    require_current,
)
from tutti.errors import InputError


def entry(generation: int) -> Entry:
    return Entry(at=1.0, generation=generation, phase="running", why="", ranks=("p/0/0",))


def test_what_was_decided_is_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(entry(1))
    journal.write(entry(2))
    journal.close()
    assert read_journal(tmp_path) == [entry(1), entry(2)]


def test_a_last_line_that_was_cut_off_is_left_out_and_others_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(entry(1))
    journal.close()
    path = tmp_path / FOLDER / LOG
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + whole[:20], encoding="utf-8")
    assert read_journal(tmp_path) == [entry(1)]
    path.write_text(whole[:20] + "\n" + whole, encoding="utf-8")
    with pytest.raises(InputError, match="line 1: is no decision"):
        read_journal(tmp_path)
    with pytest.raises(InputError, match="no elastic run"):
        read_journal(tmp_path / "elsewhere")


def test_an_older_generation_publishes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert last_generation(tmp_path) == 0
    journal.fence(3)
    require_current(tmp_path, 3)
    with pytest.raises(FencedError, match="3 has begun; this process is of generation 2"):
        require_current(tmp_path, 2)
    journal.close()

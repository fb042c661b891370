"""`tutti --help` lists every verb once, in one line that is not cut off."""

from __future__ import annotations

from typer.main import get_command
from typer.testing import CliRunner

from tutti.cli.main import app
from tutti.cli.verbs import SECTIONS


def test_every_verb_stands_in_one_section():
    listed = [name for verbs in SECTIONS.values() for name in verbs]
    assert sorted(listed) == sorted(get_command(app).commands)


def test_each_verb_is_one_whole_line():
    output = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    lines = [line for line in output.splitlines() if line.startswith("  ")]
    for verbs in SECTIONS.values():
        for name, words in verbs.items():
            assert sum(line.split(maxsplit=1) == [name, words] for line in lines) == 1
    assert max(len(line) for line in output.splitlines()) <= 80

"""Every command that the README and docs/ show is run, in order, in one folder per page.

A `console` block holds commands (`$ tutti …`, `$ python FILE …`, `$ cat FILE`) and what they print;
a shown line must be a line of the real output, `…` stands for anything. Blocks with a `title` are
files that are written first. `<!-- fails -->` above a block: its command must exit with 2 and the
one line that the block shows; `<!-- finds -->`: with 1. `<!-- figures vary -->`: what is shown must
be printed, but numbers, bars and line breaks may differ. `<!-- varies -->`: the output is not
compared.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet

from tests.support.pages import DOCS, FENCE, PAGES, ROOT, blocks, called, words
from tests.support.warm_scripts import run_script
from tutti.cli.main import run

# searches, runs and tables like those of the README and of the verbs' own tests
LONG = {
    "docs/how-to/plan-a-mixed-cluster.md",
    "docs/how-to/design-a-network.md",
    "docs/how-to/storage.md",
    "docs/how-to/train.md",
    "docs/reference/command-line.md",
}
SKIPPED = (".", "make", "pip", "pre-commit")


class Command(NamedTuple):
    arguments: list[str]
    shown: list[str]
    mark: str | None


def commands(page: Path) -> Iterator[Command]:
    for block in blocks(page):
        if block["language"] != "console":
            continue
        found: Command | None = None
        for line in block["body"].replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                if found is not None:
                    yield found
                found = Command(shlex.split(line[2:], comments=True), [], block["mark"])
            elif found is not None:
                found.shown.append(line)
        if found is not None:
            yield found


def pages_with_commands() -> list[ParameterSet]:
    return [
        pytest.param(
            page, marks=[pytest.mark.slow] if called(page) in LONG else [], id=called(page)
        )
        for page in PAGES
        if any(commands(page))
    ]


# --- commands --------------------------------------------------------------------------------


def execute(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    if arguments[0] == "python":
        done = run_script(arguments[1:], timeout=60)
        return done.returncode, done.stdout, done.stderr
    if arguments[0] == "cat":
        return 0, Path(arguments[1]).read_text(encoding="utf-8"), ""
    with pytest.raises(SystemExit) as stopped:
        run(arguments[1:])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def is_printed(shown: str, output: list[str]) -> bool:
    pattern = ".*".join(map(re.escape, words(shown).split("…")))
    return not shown.strip("… ") or any(re.fullmatch(pattern, line) for line in output)


FIGURE = re.compile(r"(?<![A-Za-z])[-+−]?\d[\d,.]*( [KMGT](?= ))?|[█▉▊▋▌▍▎▏]+")


def without_figures(text: str) -> str:
    """Return a text with one sign for every number and bar, however its lines are broken."""
    return words(re.sub(r"\b([mµn]?s)\b", "s", FIGURE.sub("#", text)))


def not_printed(shown: str, output: str) -> str:
    """Return the first part between two `…` that the output does not have after those before."""
    found = without_figures(output)
    for part in map(str.strip, without_figures(shown).split("…")):
        at = found.find(part)
        if at < 0:
            return part
        found = found[at + len(part) :]
    return ""


@pytest.mark.parametrize("page", pages_with_commands())
def test_commands_of_a_page(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_search_per_question: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUTTI_DEBUG", raising=False)
    for block in blocks(page):
        if block["title"]:
            file = tmp_path / block["title"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["body"], encoding="utf-8")
    for arguments, shown, mark in commands(page):
        if arguments[0] in SKIPPED:
            continue
        text = shlex.join(arguments)
        assert arguments[0] in ("tutti", "python", "cat"), (
            f"{called(page)}: '$ {text}' is not tested"
        )
        code, out, err = execute(arguments, capsys)
        if mark == "fails":
            assert code == 2, f"$ {text}"
            assert len(err.splitlines()) == 1, err
            assert words(err) in map(words, shown), err
            continue
        assert code == (1 if mark == "finds" else 0), f"$ {text}\n{err}"
        if mark == "figures vary":
            missing = not_printed("\n".join(shown), out)
            assert not missing, f"'$ {text}' does not print, whatever the figures: {missing}"
        elif mark != "varies":
            printed = [words(line) for line in out.splitlines()]
            for line in shown:
                assert is_printed(line, printed), f"'$ {text}' does not print: {line}"


def test_bad_blocks_are_found() -> None:
    output = ["a b", "… 266 more (--most)"]
    assert is_printed("  a   b", output)
    assert is_printed("…", output)
    assert is_printed("… 266 more", output) is False
    assert is_printed("a …", output)
    assert is_printed("a c", output) is False


def test_figures_may_vary_and_words_may_not() -> None:
    output = "this plan  ████  370.1 ms\nrunner-up  █████▌ 1.2 s  +2.1 %\nheld by 3 pools"
    assert not_printed("this plan █ 12 ms\nrunner-up ██ 99 ms -7 %\n…\nby 12\npools", output) == ""
    assert not_printed("runner-up …\nthis plan …", output) == "this plan"
    assert not_printed("this plan █ 12 ms\nbest uniform ██ 99 s\n…", output).startswith("this plan")
    assert not_printed("…\nheld by two pools", output) == "held by two pools"


# --- links -----------------------------------------------------------------------------------

LINK = re.compile(r"\]\((?!\w+:)(?P<file>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles
    }


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.finditer(text):
        target = (page.parent / link["file"]).resolve() if link["file"] else page
        assert target.exists(), f"{called(page)}: {link[0]}"
        if link["anchor"]:
            assert link["anchor"] in anchors(target), f"{called(page)}: {link[0]}"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.md", text))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize("contents", [ROOT / "README.md", DOCS / "index.md"], ids=called)
def test_every_page_is_in_the_contents(contents: Path) -> None:
    text = FENCE.sub("", contents.read_text(encoding="utf-8"))
    linked = {(contents.parent / link["file"]).resolve() for link in LINK.finditer(text)}
    missing = {called(page) for page in DOCS.rglob("*.md") if page not in {*linked, contents}}
    assert not missing


def test_pictures_are_shown_and_small() -> None:
    pictures = set((DOCS / "images").glob("*.png"))
    shown = {
        (page.parent / link["file"]).resolve()
        for page in PAGES
        for link in LINK.finditer(page.read_text(encoding="utf-8"))
        if link["file"].endswith(".png")
    }
    assert pictures == shown
    assert max(picture.stat().st_size for picture in pictures) < 200_000

"""The house stays easy to find one's way in: small files and functions, no circles, plain rooms."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections import Counter, defaultdict
from fnmatch import fnmatch
from pathlib import Path

import pytest

import tutti

SOURCE = Path(tutti.__file__).parent
MOST_FILES, MOST_LINES, MOST_FUNCTION_LINES = 25, 400, 60
# Loops that numba or Triton compile as one function. Signatures do not count: a verb's options.
LONG_FUNCTIONS = {
    "simulate/kernel.py:execute",
    "search/cutting/relief_mixture.py:fill",
    "accelerator/cuda/flash_kernels.py:backward_keys",
    "search/exact/comparison_search.py:_all_stages",
    "fabric/path_loops.py:route",
}


def module_name(path: Path) -> str:
    parts = ("tutti", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def trees() -> dict[str, ast.Module]:
    gc.disable()  # a million small objects, none of them garbage
    try:
        return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
    finally:
        gc.freeze()
        gc.enable()


def imports() -> dict[str, set[str]]:
    """What each file imports of ours: at its top, in functions, for types."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tutti"):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found[name].add(whole if whole in FILES else str(node.module))
    return found


def test_no_room_has_too_many_files_at_one_level():
    counts = Counter(path.parent.relative_to(SOURCE).as_posix() for path in FILES.values())
    assert {room: n for room, n in counts.items() if n > MOST_FILES} == {}


def test_no_file_is_too_long():
    lines = {name: path.read_bytes().count(b"\n") for name, path in FILES.items()}
    assert {name: n for name, n in lines.items() if n > MOST_LINES} == {}


def test_no_file_of_tests_is_too_long():
    tests = Path(__file__).parents[2]
    lines = {p.name: p.read_bytes().count(b"\n") for p in tests.rglob("*.py")}
    assert len(lines) > 100
    assert {name: n for name, n in lines.items() if n > MOST_LINES} == {}


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config):
    """By itself pytest goes past folders with names like `dist` and `build`, and says nothing."""
    folders = {path.parent.name for path in Path(__file__).parents[2].rglob("test_*.py")}
    patterns = pytestconfig.getini("norecursedirs")
    assert "dist" in folders
    assert [name for name in folders if any(fnmatch(name, each) for each in patterns)] == []


def test_no_function_is_too_long():
    long = {
        f"{FILES[name].relative_to(SOURCE).as_posix()}:{node.name}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.body[0].lineno + 1 > MOST_FUNCTION_LINES
    }
    assert long == LONG_FUNCTIONS


def test_no_public_class_name_stands_twice_in_a_room():
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for name, tree in trees().items():
        room = name.split(".")[1] if "." in name else ""
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms[room][node.name] += 1
    twice = {room: [n for n, count in names.items() if count > 1] for room, names in rooms.items()}
    assert {room: names for room, names in twice.items() if names} == {}


def test_no_circle_among_files():
    graph, done, path = imports(), set(), []

    def visit(name: str) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in sorted(graph.get(name, ())):
            visit(other)
        path.pop()
        done.add(name)

    for start in FILES:
        visit(start)


def test_the_page_about_rooms_names_every_room_and_files_that_exist():
    page = (SOURCE.parents[1] / "docs/concepts/rooms.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    rooms |= {path.parent.name for path in (SOURCE / "search").glob("*/__init__.py")}
    assert {room for room in rooms if f"`{room}`" not in page} == set()
    files = re.findall(r"`([a-z_/]+\.py)`", page)
    assert len(files) > 10
    inside = [name for name in files if not name.startswith("tests/")]
    missing = [name for name in inside if not (SOURCE / name).exists()]
    assert missing == []

"""Scripts in `benchmarks/` name only what there is, and say how they are started.

Most of them need a chip or minutes, so that no test runs them: what they import is looked up.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")
FOLDERS = {"tutti": ROOT / "src", "benchmarks": ROOT, "tests": ROOT}


def file_of(module: str) -> Path | None:
    """Return the file of a module of this repository."""
    base = FOLDERS[module.split(".", maxsplit=1)[0]].joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return path
    return None


def names_in(path: Path) -> set[str]:
    """Return the names that a file defines or imports, in `if` and `try` too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def imports(script: Path) -> list[tuple[str, str]]:
    """Return what a script imports of this repository: module and name."""
    return [
        (node.module or "", alias.name)
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".", maxsplit=1)[0] in FOLDERS
        for alias in node.names
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_imports_only_what_exists(script):
    missing = []
    for module, name in imports(script):
        path = file_of(module)
        is_module = file_of(f"{module}.{name}") is not None
        if not is_module and (path is None or name not in names_in(path)):
            missing.append(f"{module}.{name}")
    assert missing == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_says_the_command_that_starts_it(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    words = ast.get_docstring(tree) or ""
    by_name = any(module.split(".")[0] != "tutti" for module, _ in imports(script))
    command = (
        f"python -m benchmarks.{script.stem}" if by_name else f"python benchmarks/{script.name}"
    )
    assert command in words, "a script beside it, or tests, are found from the repository's folder"

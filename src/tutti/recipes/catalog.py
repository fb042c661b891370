"""The recipes that ship: listed, read, and copied beside what they need to run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tutti import files
from tutti.errors import InputError, hint
from tutti.recipes.examples import EXAMPLES, TINY_MODEL

_FIRST = re.compile(r"^# ([^:]+): (.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training file."""

    name: str
    about: str  # its first line
    text: str

    @property
    def needs(self) -> tuple[str, ...]:
        """What it names of the examples, and what these name."""
        named = [name for name in EXAMPLES if name in self.text]
        text = self.text + "".join(EXAMPLES[name]() for name in named)
        return tuple(name for name in EXAMPLES if name.split("/")[0] in text)

    @property
    def command(self) -> str:
        """What runs it, from the folder that it is in."""
        return self.text.splitlines()[1].removeprefix("# run: ")


def names() -> list[str]:
    """Return what there is."""
    entries = (entry.name for entry in resources.files(__package__).iterdir())
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


def find(name: str) -> Recipe:
    """Return a recipe."""
    if name not in names():
        raise InputError(f"recipe '{name}': there is none; {hint(name, names())}")
    text = (resources.files(__package__) / f"{name}.yaml").read_text(encoding="utf-8")
    first = _FIRST.match(text.splitlines()[0])
    assert first is not None, f"{name}.yaml begins with '# title: what it does'"
    return Recipe(name=name, about=f"{first[1]}: {first[2]}", text=text)


def copy(recipe: Recipe, folder: Path) -> list[Path]:
    """Write a recipe with a tiny model and its data into a folder; nothing is overwritten."""
    config = json.dumps(TINY_MODEL.get(recipe.name, TINY_MODEL[""]), indent=2)
    written = {
        folder / f"{recipe.name}.yaml": recipe.text,
        folder / "tiny-model" / "config.json": config + "\n",
        **{folder / name: EXAMPLES[name]() for name in recipe.needs},
    }
    for path in written:
        if path.exists():
            raise InputError(f"{path}: is there already; name another folder")
    try:
        for path, text in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(path, text)
    except OSError as error:
        raise files.unwritable(folder, error) from None
    return list(written)

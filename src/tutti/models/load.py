"""Finds the model that a person names: a folder, a config.json, or a name from the catalog."""

from __future__ import annotations

import functools
import re
from importlib import resources
from pathlib import Path

from tutti import files
from tutti.errors import InputError, hint, nearest
from tutti.models.families import read_config
from tutti.models.spec import ModelSpec


@functools.cache
def catalog_names() -> tuple[str, ...]:
    """Return the names of the models that ship with tutti."""
    folder = resources.files("tutti.models") / "catalog"
    files = (item.name for item in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def catalog_config(name: str) -> dict[str, object]:
    """Return the config.json of a model in the catalog."""
    names = catalog_names()
    if name not in names:
        raise InputError(f"no model '{name}' in the catalog; {hint(name, names)}")
    file = resources.files("tutti.models") / "catalog" / f"{name}.json"
    return _mapping(files.parse_json(file.read_text(encoding="utf-8"), name), name)


def load_model(text: str) -> ModelSpec:
    """Return the model of a Hugging Face folder, a config.json file, or a catalog name."""
    path = Path(text)
    if is_hub_id(text):
        raise hub_error(text.rstrip("/"))
    if _is_path(text, path):
        file = path / "config.json" if path.is_dir() else path
        if path.is_dir() and not file.is_file():
            raise InputError(f"{text}: the folder holds no config.json; is it a model's?")
        config = _mapping(files.parse_json(files.read_text(file), str(file)), str(file))
        return read_config(config, _name(file), str(file))
    if text not in catalog_names():
        known = hint(text, catalog_names())
        raise InputError(
            f"{text}: neither a folder, a config.json nor a name in the catalog; {known}"
        )
    return read_config(catalog_config(text), text)


def is_hub_id(text: str) -> bool:
    """Tell whether a text is what Hugging Face's hub calls a model, and no path of this machine."""
    text = text.rstrip("/")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is None:
        return False
    owner, _, name = text.partition("/")
    try:
        here = Path(text).exists() or Path(owner).exists()
    except OSError:  # a name no file can have
        return False
    return not here and not name.endswith((".json", ".yaml", ".yml"))


def hub_error(text: str) -> InputError:
    """Return the answer to a name of the hub: nothing is downloaded."""
    shape = nearest(text.partition("/")[2].casefold(), catalog_names())
    known = f"; to plan for its shape alone: '{shape}' of tutti model list" if shape else ""
    return InputError(
        f"{text}: no such folder; give a local folder, nothing is downloaded from the Hugging Face "
        f"hub (hf download {text} --local-dir FOLDER){known}"
    )


def _is_path(text: str, path: Path) -> bool:
    if "/" in text or text.endswith(".json") or text in ("", ".", ".."):
        return True
    try:
        return text not in catalog_names() and path.exists()
    except (OSError, ValueError):  # a name no file can have
        return False


def _name(file: Path) -> str:
    """Return what to call a file's model: a config.json by its folder, another by itself."""
    return (file.resolve().parent.name or "model") if file.name == "config.json" else file.stem


def _mapping(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InputError(f"{name}: not a model's config.json: expected a mapping at the top")
    return value

"""Files as plain values: strict YAML and JSON, whole-file writes, fingerprints.

Every way in which a file can be unreadable is one line that names it. What the values mean is
`document`'s and the nouns' business.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tutti.errors import InputError, hint, nearest


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, which plain YAML silently lets the last one win."""


def _unique_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (dict, list)):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be plain text", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key '{key}' stands twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


_MOST_SIBLINGS = 200  # a folder of more is no place where a person looks for a name


def meant_instead(path: Path, *, folders: bool = False) -> str:
    """Return what to add to "no such file": the nearest name beside it, or others of its kind.

    A name of another kind (a folder where a file is wanted, another ending) is said only if it is
    spelt nearly alike.
    """
    siblings = list(path.parent.iterdir()) if path.parent.is_dir() else []
    if not 0 < len(siblings) < _MOST_SIBLINGS:
        return ""
    guess = nearest(path.name, [each.name for each in siblings if folders or each.is_file()])
    if guess is not None:
        return f"; did you mean '{guess}'?"
    alike = [each.name for each in siblings if each.is_file() and each.suffix == path.suffix]
    return f"; {hint(path.name, alike)}" if alike else ""


def read_text(path: Path) -> str:
    """Read a text file; every way in which that fails is one line."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file{meant_instead(path)}") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; name a file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file ({error.reason})") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be read ({reason})") from None


def parse_yaml(text: str, name: str) -> object:
    """Parse YAML text called `name` in messages."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise InputError(f"{name}: {where}{error.problem or 'not valid YAML'}") from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{name}: not valid YAML ({first})") from None


def parse_json(text: str, name: str) -> object:
    """Parse JSON text called `name` in messages; NaN, Infinity and duplicate keys are refused."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise InputError(f"{name}: the key '{key}' stands twice")
            found[key] = value
        return found

    def constant(text: str) -> float:
        raise InputError(f"{name}: {text} is not a number that can be used here")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}: line {error.lineno}: not valid JSON ({error.msg})") from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"{name}: not valid JSON ({error})") from None


def read_file(path: Path) -> object:
    """Read a YAML or JSON file, by its ending."""
    text = read_text(path)
    return (parse_json if path.suffix == ".json" else parse_yaml)(text, path.name)


def unwritable(path: Path, error: OSError) -> InputError:
    """Return the error of a file or folder that could not be written."""
    if isinstance(error, PermissionError):
        return InputError(f"cannot write {path}: permission denied")
    return InputError(f"{path}: cannot be written ({error.strerror})")


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all: temporary file, then rename.

    A link is followed; a device or a pipe is written to as it is, never replaced.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file() and not path.is_dir():
        try:
            with path.open("w", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise unwritable(path, error) from None
        return
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise unwritable(path, error) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise unwritable(path, error) from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def require_folder(path: Path) -> None:
    """Refuse what is no folder, and say what it is."""
    try:
        if path.is_dir():
            return
        if path.exists():
            raise InputError(f"{path}: is a file; name a folder")
    except (OSError, ValueError) as error:  # a name too long, a folder that nobody may enter
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{str(path)[:200]}: cannot be looked at ({reason})") from None
    near = path.parent if path.parent.is_dir() else Path()
    known = [p.name for p in near.iterdir() if p.is_dir() and not p.name.startswith(".")]
    guess = nearest(path.name, known) if len(known) < 200 else None
    remedy = f"; did you mean '{guess}'?" if guess is not None else ""
    raise InputError(f"{path}: no such folder{remedy}")


def require_apart(source: Path, *targets: Path | None) -> None:
    """Refuse to write over what was read, or two results into one file."""
    taken = {source.resolve()}
    for target in (target for target in targets if target is not None):
        if target.resolve() in taken:
            raise InputError(f"{target}: is read or written already; choose another name")
        taken.add(target.resolve())


def fingerprint(value: object) -> str:
    """Return a short, stable hash of a plain value (12 hex digits of SHA-256)."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def pretty_json(value: Any, *, width: int = 100) -> str:
    """Return JSON that a person can read: what fits on a line stays on one."""

    def write(item: Any, depth: int) -> str:
        flat = json.dumps(item, ensure_ascii=False)
        if not isinstance(item, (dict, list)) or len(flat) + 2 * depth <= width:
            return flat
        inner = "  " * (depth + 1)
        if isinstance(item, dict):
            rows = [
                f"{inner}{json.dumps(key, ensure_ascii=False)}: {write(sub, depth + 1)}"
                for key, sub in item.items()
            ]
            return "{\n" + ",\n".join(rows) + "\n" + "  " * depth + "}"
        rows = [inner + write(sub, depth + 1) for sub in item]
        return "[\n" + ",\n".join(rows) + "\n" + "  " * depth + "]"

    return write(value, 0)

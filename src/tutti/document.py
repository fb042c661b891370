"""Plain values and the frozen dataclasses they describe, strictly, both ways.

`build` turns plain YAML/JSON values into a dataclass by its type hints and refuses everything it
does not understand, naming the place, the value and the nearest remedy. `plain` is its inverse
and leaves defaults out. Field metadata come as `Annotated[...]`: a `Quantity` lets a person write
"80 GiB", `AtLeast` and `Above` bound a number. A class with a shorter written form than its
fields implements `from_document` and `to_document`.

It knows no noun of tutti's; the nouns use it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from tutti import units
from tutti.errors import InputError, hint

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """Marks a number that may be written with a unit."""

    dimension: units.Dimension


@dataclasses.dataclass(frozen=True, slots=True)
class AtLeast:
    """Marks a number that must be at least `minimum`."""

    minimum: float


@dataclasses.dataclass(frozen=True, slots=True)
class Above:
    """Marks a number that must be greater than `minimum`."""

    minimum: float


@dataclasses.dataclass(frozen=True, slots=True)
class AtMost:
    """Marks a number that must be at most `maximum`."""

    maximum: float


Bytes = Annotated[float, Quantity("bytes"), AtLeast(0)]
BytesPerSecond = Annotated[float, Quantity("bytes/s"), Above(0)]
FlopPerSecond = Annotated[float, Quantity("flop/s"), Above(0)]
Seconds = Annotated[float, Quantity("s"), AtLeast(0)]
Watts = Annotated[float, Quantity("W"), AtLeast(0)]
Count = Annotated[int, AtLeast(1)]
Natural = Annotated[int, AtLeast(0)]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in which document we are, for error messages."""

    file: str
    trail: tuple[str, ...] = ()

    def key(self, name: str) -> Place:
        """Return the place one mapping key deeper."""
        return Place(self.file, (*self.trail, str(name)))

    def item(self, index: int, value: object) -> Place:
        """Return the place of a list item, called by its name where it has one."""
        if not self.trail:
            return Place(self.file, (f"item {index}",))
        *outer, last = self.trail
        name = value.get("name") if isinstance(value, dict) else None
        called = f"{_singular(last)} '{name}'" if isinstance(name, str) else f"{last}[{index}]"
        return Place(self.file, (*outer, called))

    def error(self, message: str) -> InputError:
        """Return the error "file: outer: inner: message"."""
        return InputError(": ".join((self.file, *self.trail, message)))

    def value_error(self, message: str) -> InputError:
        """Return the error of a value: "file: outer: 'key' is …"."""
        if not self.trail:
            return self.error(message)
        *outer, last = self.trail
        quoted = last if last.endswith(("'", "]")) or " " in last else f"'{last}'"
        return InputError(": ".join((self.file, *outer, f"{quoted} {message}")))


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") else word


def shown(value: object, *, limit: int = 60) -> str:
    """Return a value as an error message quotes it."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- plain values to dataclasses -------------------------------------------------------------


def build(kind: type[T], value: object, place: Place) -> T:
    """Return `value` as a `kind`, or raise an InputError that names the place."""
    return cast(T, _build(kind, value, place))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _build(kind: Any, value: object, place: Place) -> object:
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *marks = get_args(kind)
        return _build_marked(inner, marks, value, place)
    if origin is Union or origin is types.UnionType:
        return _build_union(get_args(kind), value, place)
    if origin is Literal:
        return _build_choice(get_args(kind), value, place)
    if origin is tuple:
        return _build_tuple(get_args(kind), value, place)
    if origin is not None and issubclass(origin, Mapping):
        key_kind, item_kind = get_args(kind)
        mapping = _mapping(value, place)
        return {
            _build(key_kind, key, place): _build(item_kind, item, place.key(key))
            for key, item in mapping.items()
        }
    if kind in (Any, object):
        return value
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            return kind(_build_choice(tuple(m.value for m in kind), value, place))
        custom: Callable[[object, Place], object] | None = getattr(kind, "from_document", None)
        if custom is not None:
            return custom(value, place)
        if dataclasses.is_dataclass(kind):
            return build_fields(kind, value, place)
        return _build_scalar(kind, value, place)
    raise TypeError(f"documents cannot hold a {kind}")


def build_fields(kind: type[T], value: object, place: Place) -> T:
    """Build a dataclass from a mapping of its fields (ignores a custom `from_document`)."""
    mapping = _mapping(value, place)
    fields = {field.name: field for field in dataclasses.fields(cast(Any, kind)) if field.init}
    for key in mapping:
        if key not in fields:
            raise place.error(f"unknown key {shown(key)}; {hint(str(key), fields)}")
    hints = _hints(cast(Any, kind))
    given: dict[str, object] = {}
    for name, field in fields.items():
        if name in mapping:
            given[name] = _build(hints[name], mapping[name], place.key(name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise place.error(f"'{name}' is missing")
    try:
        return kind(**given)
    except ValueError as error:
        raise place.error(str(error)) from None


def _mapping(value: object, place: Place) -> dict[str, object]:
    if not isinstance(value, dict):
        raise place.error(f"expected a mapping of keys to values, found {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise place.error(f"the key {shown(key)} must be text; quote it")
    return value


def _build_marked(inner: Any, marks: list[object], value: object, place: Place) -> object:
    for mark in marks:
        if isinstance(mark, Quantity) and isinstance(value, str):
            try:
                value = units.parse(value, mark.dimension)
            except ValueError as error:
                raise place.value_error(str(error)) from None
    built = _build(inner, value, place)
    if isinstance(built, (int, float)):
        for mark in marks:
            if isinstance(mark, AtLeast) and built < mark.minimum:
                raise place.value_error(f"is {shown(value)}; must be at least {mark.minimum:g}")
            if isinstance(mark, Above) and built <= mark.minimum:
                raise place.value_error(f"is {shown(value)}; must be more than {mark.minimum:g}")
            if isinstance(mark, AtMost) and built > mark.maximum:
                raise place.value_error(f"is {shown(value)}; must be at most {mark.maximum:g}")
    return built


def _build_union(options: tuple[Any, ...], value: object, place: Place) -> object:
    if value is None and type(None) in options:
        return None
    kinds = [kind for kind in options if kind is not type(None)]
    for kind in kinds:
        if len(kinds) == 1 or _has_shape(kind, value):
            return _build(kind, value, place)
    expected = " or ".join(_called(kind) for kind in kinds)
    raise place.value_error(f"is {shown(value)}; expected {expected}")


def _has_shape(kind: Any, value: object) -> bool:
    """Tell whether `value` is written the way a `kind` is, without looking deeper."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *marks = get_args(kind)
        quantity = any(isinstance(mark, Quantity) for mark in marks)
        return _has_shape(inner, value) or (quantity and isinstance(value, str))
    if origin is Literal:
        return isinstance(value, type(get_args(kind)[0]))
    if origin is tuple:
        return isinstance(value, list)
    if origin is not None:
        return isinstance(value, dict)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return isinstance(value, str)
    if dataclasses.is_dataclass(kind):
        return isinstance(value, getattr(kind, "document_shape", dict))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _build_choice(choices: tuple[Any, ...], value: object, place: Place) -> object:
    if isinstance(value, bool) and {"on", "off"} <= set(choices):
        value = "on" if value else "off"  # YAML reads these words as true and false
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    raise place.value_error(f"is {shown(value)}; {hint(str(value), map(str, choices))}")


def _build_tuple(kinds: tuple[Any, ...], value: object, place: Place) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise place.value_error(f"is {shown(value)}; expected a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_build(kinds[0], item, place.item(i, item)) for i, item in enumerate(value))
    if len(value) != len(kinds):
        raise place.value_error(f"is {shown(value)}; expected a list of {len(kinds)}")
    return tuple(
        _build(kind, item, place.item(i, item))
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


_NAMES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a mapping",
}


def _called(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return _NAMES.get(kind, "a mapping" if dataclasses.is_dataclass(kind) else str(kind))


def _build_scalar(kind: type, value: object, place: Place) -> object:
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
        raise _unlike(kind, value, place)
    if kind is float and isinstance(value, (int, float)):
        try:
            number = float(value)
        except OverflowError:
            raise place.value_error("is too large a number") from None
        if not math.isfinite(number):
            raise place.value_error(f"is {value}, which is not a finite number")
        return number
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, kind):
        return value
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e9 as text
        try:
            number = float(value)
        except ValueError:
            raise _unlike(kind, value, place) from None
        if math.isfinite(number):
            return number
    raise _unlike(kind, value, place)


def _unlike(kind: type, value: object, place: Place) -> InputError:
    """Return the error of a value of another kind; its text takes longer than most values."""
    return place.value_error(f"is {shown(value)}; expected {_called(kind)}")


# --- dataclasses to plain values -------------------------------------------------------------


def plain(value: object) -> Any:
    """Return `value` as JSON-able plain values; fields equal to their default are left out."""
    custom = getattr(value, "to_document", None)
    if custom is not None:
        return custom()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_fields(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def plain_fields(value: object) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cast(Any, value)):
        item = getattr(value, field.name)
        if field.default is not dataclasses.MISSING and item == field.default:
            continue
        if field.default_factory is not dataclasses.MISSING and item == field.default_factory():
            continue
        if field.init:
            found[field.name] = plain(item)
    return found

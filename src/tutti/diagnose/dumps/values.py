"""Plain values from a pickle, without executing it.

A pickle is a program. This reads the few of its instructions that make numbers, texts, lists and
mappings, and refuses all others, so that a dump can hold nothing but data.
"""

from __future__ import annotations

import pickletools
from typing import Any

from tutti.errors import InputError

_MOST_VALUES = 20_000_000
_MARK = object()
_CONSTANTS = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False,
}  # fmt: skip
_LITERALS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip


def plain_values(data: bytes, name: str) -> Any:
    """Return what a pickle of plain values holds; anything else is an error in one line."""
    machine = _Machine(name)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count > _MOST_VALUES:
                raise InputError(f"{name}: too large for a flight recorder's dump")
            if machine.step(opcode.name, argument):
                return machine.stack[-1]
    except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
        raise InputError(f"{name}: the dump is cut off or damaged") from None
    raise InputError(f"{name}: the dump is cut off or damaged")


class _Machine:
    """The stack and the memory of a pickle's instructions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def step(self, code: str, argument: Any) -> bool:
        """Do one instruction; tell whether it was the last."""
        if code in _LITERALS:
            self.stack.append(argument)
        elif code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
        elif code in {"PROTO", "FRAME"}:
            pass
        elif code == "STOP":
            return True
        elif not (self._make(code) or self._fill(code) or self._remember(code, argument)):
            raise InputError(
                f"{self.name}: the pickle holds code ({code}), which is not executed; "
                "a flight recorder's dump is plain data"
            )
        return False

    def _make(self, code: str) -> bool:
        stack = self.stack
        if code == "MARK":
            stack.append(_MARK)
        elif code == "EMPTY_LIST":
            stack.append([])
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code == "EMPTY_TUPLE":
            stack.append(())
        elif code in {"TUPLE1", "TUPLE2", "TUPLE3"}:
            size = int(code[-1])
            stack[-size:] = [tuple(stack[-size:])]
        elif code == "TUPLE":
            items = self._marked()
            stack.append(tuple(items))
        elif code == "LIST":
            stack.append(self._marked())
        elif code == "DICT":
            items = self._marked()
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        else:
            return False
        return True

    def _fill(self, code: str) -> bool:
        stack = self.stack
        if code == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif code == "APPENDS":
            items = self._marked()
            stack[-1].extend(items)
        elif code == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif code == "SETITEMS":
            items = self._marked()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif code == "POP":
            stack.pop()
        elif code == "DUP":
            stack.append(stack[-1])
        else:
            return False
        return True

    def _remember(self, code: str, argument: Any) -> bool:
        if code == "MEMOIZE":
            self.memory[len(self.memory)] = self.stack[-1]
        elif code in {"PUT", "BINPUT", "LONG_BINPUT"}:
            self.memory[argument] = self.stack[-1]
        elif code in {"GET", "BINGET", "LONG_BINGET"}:
            self.stack.append(self.memory[argument])
        else:
            return False
        return True

    def _marked(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

"""Hooks: code of others on a request's way through the server.

A package names a module in the entry points `tutti.serving`, or TUTTI_SERVING names modules; each
calls `register`. What a hook raises fails the request that it was called for and no other: an
`InputError` is the client's mistake (400), all else the server's (500). Needs no torch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tutti import plug_ins
from tutti.errors import InputError, TuttiError, hint

if TYPE_CHECKING:
    from tutti.serve.parameters import LogitsChange, NamedChange

ENTRY_POINTS = "tutti.serving"
MODULES = "TUTTI_SERVING"
log = logging.getLogger("tutti.server")
Settings = Mapping[str, Any]
Shown = Callable[[str, bool], str]


class HookError(TuttiError):
    """A hook that failed."""


class Hook:
    """What a hook may do; each of these does nothing.

    `settings` are what the request says under the hook's name in `hooks`; None: it does not say.
    """

    name = ""

    def before(self, request: dict[str, Any], settings: Settings | None) -> dict[str, Any]:
        """Return a request, as JSON has it, before it is looked at."""
        del settings
        return request

    def tokenised(self, tokens: list[int], settings: Settings | None) -> list[int]:
        """Return a prompt's tokens."""
        del settings
        return tokens

    def after(self, settings: Settings | None) -> Shown | None:
        """Return what a sample's texts go through; None: nothing.

        It is called with each new piece of text and whether it is the last, and returns what is
        shown instead: it may hold text back.
        """
        del settings
        return None

    def logits(self, settings: Settings) -> LogitsChange | None:
        """Return what changes a sample's logits; None: nothing. Only where a request names it.

        It is called before each token with those that were generated, and the vocabulary's logits.
        """
        del settings
        return None


_registered: dict[str, Hook] = {}


def register(hook: Hook) -> None:
    """Add a hook; one of the same name is replaced."""
    if not hook.name or "/" in hook.name:
        raise InputError(f"hook '{hook.name}': a name has letters and no '/'")
    _registered[hook.name] = hook


@functools.cache
def load_hooks() -> None:
    """Find what is installed."""
    plug_ins.load(ENTRY_POINTS, MODULES)


class Hooks:
    """The hooks of this process, in the order of their names."""

    def __init__(self, hooks: Mapping[str, Hook] | None = None) -> None:
        if hooks is None:
            load_hooks()
        registered = _registered if hooks is None else hooks
        self._hooks = [registered[name] for name in sorted(registered)]

    @property
    def names(self) -> list[str]:
        """What they are called."""
        return [hook.name for hook in self._hooks]

    def check(self, named: Mapping[str, Settings]) -> None:
        """Refuse names that no hook has."""
        for name in named:
            if name not in self.names:
                known = hint(name, self.names) if self.names else "there are none"
                raise InputError(f"hooks: '{name}' is not installed; {known}")

    def before(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a request as all hooks leave it."""
        for hook in self._hooks:
            named = request.get("hooks")
            own = named.get(hook.name) if isinstance(named, dict) else None
            with _failing(hook, "before"):
                request = hook.before(request, own)
                if not isinstance(request, dict):
                    raise TypeError("it returned no dict")
        return request

    def tokenised(self, tokens: list[int], named: Mapping[str, Settings]) -> list[int]:
        """Return a prompt's tokens as all hooks leave them."""
        for hook in self._hooks:
            with _failing(hook, "tokenised"):
                tokens = [int(token) for token in hook.tokenised(tokens, named.get(hook.name))]
        return tokens

    def after(self, named: Mapping[str, Settings]) -> Shown | None:
        """Return what a sample's texts go through; None: nothing."""
        shown: list[tuple[Hook, Shown]] = []
        for hook in self._hooks:
            with _failing(hook, "after"):
                own = hook.after(named.get(hook.name))
            if own is not None:
                shown.append((hook, own))
        if not shown:
            return None

        def through(text: str, last: bool) -> str:
            for hook, own in shown:
                with _failing(hook, "after"):
                    text = str(own(text, last))
            return text

        return through

    def changes(self, named: Mapping[str, Settings]) -> tuple[NamedChange, ...]:
        """Return what changes the logits of a request that names hooks."""
        from tutti.serve.parameters import NamedChange

        self.check(named)
        chosen = [hook for hook in self._hooks if hook.name in named]
        chosen = [hook for hook in chosen if type(hook).logits is not Hook.logits]
        return tuple(
            NamedChange(hook.name, functools.partial(_change, hook, named[hook.name]))
            for hook in chosen
        )


def _change(hook: Hook, settings: Settings) -> LogitsChange:
    return hook.logits(settings) or _unchanged


def _unchanged(_tokens: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return logits


@contextmanager
def _failing(hook: Hook, where: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # it may fail in any way
        log.warning("hook '%s' failed in '%s'", hook.name, where, exc_info=error)
        raise HookError(
            f"hook '{hook.name}' failed in '{where}': {type(error).__name__}: "
            f"{plug_ins.reason(error)}"
        ) from error

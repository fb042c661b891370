"""Hooks as a package of somebody else's would have them; named requests alone are touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.server.hooks import Hook, register

Settings = Mapping[str, Any]


class Shout(Hook):
    """Every place of the way, each where its settings ask for it."""

    name = "shout"

    def before(self, request: dict[str, Any], settings: Settings | None) -> dict[str, Any]:
        if settings and "prompt" in settings:
            return {**request, "prompt": settings["prompt"]}
        if settings and settings.get("refuse"):
            raise InputError("shout: not today")
        return request

    def tokenised(self, tokens: list[int], settings: Settings | None) -> list[int]:
        return tokens[: settings["first"]] if settings and "first" in settings else tokens

    def after(self, settings: Settings | None) -> Callable[[str, bool], str] | None:
        if not settings or "held" not in settings:
            return None
        held: list[str] = []

        def shown(text: str, last: bool) -> str:
            held.append(text)
            return "".join(held).upper() if last else ""

        return shown

    def logits(
        self, settings: Settings
    ) -> Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]] | None:
        if "only" not in settings:
            return None

        def change(tokens: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
            wanted = settings["only"]
            changed = np.full_like(logits, -np.inf)
            changed[wanted[len(tokens) % len(wanted)]] = 0.0
            return changed

        return change


class Broken(Hook):
    """Fails where it is told to."""

    name = "broken"

    def before(self, request: dict[str, Any], settings: Settings | None) -> dict[str, Any]:
        if settings and settings.get("at") == "before":
            raise RuntimeError("on purpose")
        return request

    def tokenised(self, tokens: list[int], settings: Settings | None) -> list[int]:
        if settings and settings.get("at") == "tokenised":
            return [10**9]
        return tokens

    def after(self, settings: Settings | None) -> Callable[[str, bool], str] | None:
        if not settings or settings.get("at") != "after":
            return None

        def shown(text: str, last: bool) -> str:
            if last:
                raise KeyError("on purpose")
            return text

        return shown

    def logits(
        self, settings: Settings
    ) -> Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]] | None:
        def change(tokens: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
            if settings.get("at") == "logits" and len(tokens) == 3:
                raise ZeroDivisionError("on purpose")
            return logits[:-1] if settings.get("at") == "shape" else logits

        return change


register(Shout())
register(Broken())

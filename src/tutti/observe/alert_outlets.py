"""Where alerts go while a run lives: the terminal, a file of events, a web hook, a command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tutti.errors import InputError
from tutti.observe.alerts import Alert

Say = Callable[[str], None]
HOOK_S, COMMAND_S = 5.0, 30.0  # after which nobody waits for them any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An alert that began or ended."""

    what: Literal["began", "ended"]
    at: int  # the second
    alert: Alert

    def line(self) -> str:
        """Return it for a person."""
        if self.what == "ended":
            return f"alert over: {self.alert.rule.name} ({self.alert.place})"
        return f"alert {self.alert.rule.name}: {self.alert.words()}; {self.alert.rule.remedy}"

    def to_document(self) -> dict[str, Any]:
        """Return plain values, for a program."""
        alert, rule = self.alert, self.alert.rule
        return {
            "what": self.what, "at": self.at, "name": rule.name, "component": rule.component,
            "host": alert.host, "figure": alert.figure, "begin": alert.begin, "end": alert.end,
            "worst": alert.worst, "words": alert.words(), "remedy": rule.remedy,
        }  # fmt: skip


class Outlets:
    """Tells notices everywhere; what cannot be reached is said once and keeps nobody waiting."""

    def __init__(self, *, events: Path, say: Say, hook: str = "", command: str = "") -> None:
        if hook and not hook.startswith(("http://", "https://")):
            raise InputError(
                f"measure.alerts.hook: '{hook}' is no address; write http://… or https://…"
            )
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise InputError(f"measure.alerts.command: {error}") from None
        self._events, self._say, self._hook = events, say, hook
        self._failed: set[str] = set()

    def tell(self, notices: Sequence[Notice]) -> None:
        """Tell each notice everywhere, in order."""
        for notice in notices:
            self._say(notice.line())
            document = notice.to_document()
            self._try("events are not written", self._write, document)
            if self._hook:
                self._try("the web hook was not reached", self._post, document)
            if self._command:
                self._try("the command failed", self._run, document)

    def _try(
        self, trouble: str, act: Callable[[dict[str, Any]], None], document: dict[str, Any]
    ) -> None:
        try:
            act(document)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            if trouble not in self._failed:
                self._say(f"alerts: {trouble} ({error})")
            self._failed.add(trouble)

    def _write(self, document: dict[str, Any]) -> None:
        with self._events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(document) + "\n")

    def _post(self, document: dict[str, Any]) -> None:
        request = urllib.request.Request(
            self._hook, json.dumps(document).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HOOK_S):
            return

    def _run(self, document: dict[str, Any]) -> None:
        """Run the command: the notice on its standard input, the rule's name in TUTTI_ALERT."""
        subprocess.run(
            self._command,
            input=json.dumps(document).encode() + b"\n",
            env=os.environ | {"TUTTI_ALERT": str(document["name"])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=COMMAND_S,
            check=True,
        )

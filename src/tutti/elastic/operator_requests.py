"""What people ask of a running job: files in its folder, which its controller reads and removes."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from tutti.elastic.journal import FOLDER, read_journal
from tutti.elastic.restore import is_over
from tutti.errors import InputError
from tutti.files import write_text

_WISH = "wish-"
LOOK_S = 0.5  # between two looks of the controller


class OperatorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """To leave a place, to use it again, or to look for a plan."""

    kind: Literal["drain", "add", "replan"]
    place: str = ""  # "pool/node" or "pool/node/slot"


def wish(run: Path, asked: OperatorRequest) -> None:
    """Ask something of a run that goes on."""
    entries = read_journal(run)
    if is_over(entries):
        last = entries[-1]
        raise InputError(f"{run}: the run is over ({last.phase}: {last.why})")
    if asked.place:
        known = {place for entry in entries for chip in entry.ranks for place in _places(chip)}
        parts = asked.place.split("/")
        whole = len(parts) in (2, 3) and all(part.isdecimal() for part in parts[1:])
        if not whole:
            raise InputError(f"'{asked.place}': write POOL/NODE or POOL/NODE/SLOT")
        if asked.kind == "drain" and asked.place not in known:
            raise InputError(
                f"'{asked.place}': no generation of this run has had a seat there; it had "
                f"{', '.join(sorted(place for place in known if place.count('/') == 1))}"
            )
    name = f"{_WISH}{time.time_ns()}-{uuid.uuid4().hex[:6]}.json"
    write_text(run / FOLDER / name, json.dumps(msgspec.to_builtins(asked)))


def _places(chip: str) -> tuple[str, str]:
    return chip, chip.rpartition("/")[0]


class OperatorRequests:
    """The wishes of a run, as its controller takes them."""

    def __init__(self, run: Path) -> None:
        self._folder, self._next = run / FOLDER, 0.0

    def take(self) -> Iterator[OperatorRequest]:
        """Yield what was asked for since the last look."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        for path in sorted(self._folder.glob(f"{_WISH}*.json")):
            try:
                asked = msgspec.json.decode(path.read_bytes(), type=OperatorRequest)
            except (OSError, msgspec.DecodeError):
                asked = None
            path.unlink(missing_ok=True)
            if asked is not None:
                yield asked

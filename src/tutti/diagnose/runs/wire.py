"""A run at HOST:PORT as evidence: fetched from the port that tells its figures."""

from __future__ import annotations

import re
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from tutti.diagnose.finding import Component, Finding, Where
from tutti.diagnose.runs.folder import diagnose_run
from tutti.errors import InputError
from tutti.observe.evidence import MOST_BYTES, NOW, PATH, unpack_evidence

_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:]+)\]|([A-Za-z0-9.-]+)):(\d{1,5})")
_TIMEOUT_S = 10.0
_ELSE = "give the run's folder, or the address of its measure.prometheus_port"


def address_of(text: str) -> tuple[str, int] | None:
    """Return host and port where a text is HOST:PORT."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
    port = int(match[3])
    if not 0 < port < 65536:
        raise InputError(f"{text}: ports are 1 to 65535")
    return match[1] or match[2], port


def diagnose_address(host: str, port: int, *, timeout_s: float = _TIMEOUT_S) -> Finding:
    """Return what is wrong with a run that is told over the wire."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        with urllib.request.urlopen(f"http://{shown}{PATH}", timeout=timeout_s) as answer:
            data, now = answer.read(MOST_BYTES + 1), answer.headers.get(NOW, "")
    except urllib.error.HTTPError as error:
        raise InputError(f"{shown}: answers, but tells no run ({error.code}); {_ELSE}") from None
    except (TimeoutError, urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return _silent(shown, timeout_s)
        raise InputError(f"{shown}: does not answer ({reason}); {_ELSE}") from None
    if len(data) > MOST_BYTES or not now.isdigit():
        raise InputError(f"{shown}: answers, but tells no run; {_ELSE}")
    with tempfile.TemporaryDirectory(prefix="tutti-doctor-") as folder:
        try:
            unpack_evidence(data, Path(folder))
            return diagnose_run(Path(folder), now_ns=int(now), name=shown)
        except InputError as error:
            raise InputError(f"{shown}: {str(error).removeprefix(folder + ': ')}") from None


def _silent(shown: str, waited_s: float) -> Finding:
    """Return what it means that somebody listens and does not answer."""
    return Finding(
        component=Component.UNDETERMINED,
        cause=f"{shown} took the connection and said nothing for {waited_s:.0f} s: the process of "
        "rank 0 is stopped, or native code holds the interpreter",
        confidence=0.0,
        where=Where(ranks=(0,)),
        next_steps=(
            "look at rank 0: its state in ps (T: stopped, D: waits for a device or a file system)",
            "`tutti doctor run FOLDER` reads the rings, which need no answer from anybody",
        ),
    )

"""What the driver of a NIC counts (`ethtool -S`), asked of the kernel itself; no tool is needed."""

from __future__ import annotations

import array
import fcntl
import functools
import re
import socket
import struct
from collections.abc import Mapping
from importlib import resources

import yaml

_SIOCETHTOOL = 0x8946
_STRINGS, _STATS, _COUNTS = 0x1B, 0x1D, 0x37
_STATISTICS = 1  # the set of strings that names them
_NAME_BYTES = 32


@functools.cache
def counter_names(kind: str) -> dict[str, re.Pattern[str]]:
    """Return the patterns of names, by what they count; `kind` is `driver` or `switch`."""
    text = (
        resources.files("tutti.observe.network").joinpath("counter_names.yaml").read_text("utf-8")
    )
    return {
        figure: re.compile("|".join(f"(?:{name})" for name in names))
        for figure, names in yaml.safe_load(text)[kind].items()
    }


def _ask(sock: socket.socket, nic: str, request: array.array[int]) -> None:
    address, _ = request.buffer_info()
    fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP", nic.encode()[:15], address))


def driver_counters(nic: str) -> dict[str, int]:
    """Return a driver's counters by its own names; none where it has none or is no NIC."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            asked = array.array("B", struct.pack("=IIQI", _COUNTS, 0, 1 << _STATISTICS, 0))
            _ask(sock, nic, asked)
            _, _, mask, count = struct.unpack("=IIQI", asked)
            if not mask or not count:
                return {}
            head = struct.pack("=III", _STRINGS, _STATISTICS, count)
            names = array.array("B", head + bytes(count * _NAME_BYTES))
            _ask(sock, nic, names)
            values = array.array("B", struct.pack("=II", _STATS, count) + bytes(count * 8))
            _ask(sock, nic, values)
    except OSError:
        return {}
    text = names.tobytes()[12:]
    numbers = struct.unpack(f"={count}Q", values.tobytes()[8:])
    return {
        text[i * _NAME_BYTES : (i + 1) * _NAME_BYTES].split(b"\0")[0].decode("ascii", "replace"): n
        for i, n in enumerate(numbers)
    }


def driver_figures(counters: Mapping[str, int]) -> dict[str, float]:
    """Return what is known of a driver's counters, by the figures' names."""
    figures: dict[str, float] = {}
    for figure, pattern in counter_names("driver").items():
        own = [value for name, value in counters.items() if pattern.fullmatch(name)]
        if own and figure == "nic_paused_microseconds":
            figures["nic_paused_seconds_total"] = sum(own) / 1e6
        elif own:
            figures[figure] = float(sum(own))
    return figures

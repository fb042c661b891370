"""What is known of all chips, from what their hosts said last."""

from __future__ import annotations

from tutti.elastic.membership import Membership
from tutti.elastic.messages import Report


def all_reports(members: Membership) -> dict[str, Report]:
    """Return what is known of every chip of hosts that are there."""
    return {
        report.chip: report
        for _, host in members.hosts
        if not host.silent
        for report in host.status.reports
    }


def all_kept(members: Membership) -> dict[str, list[tuple[str, int, int]]]:
    """Return the copies of each chip that other hosts keep: host, generation, step."""
    copies: dict[str, list[tuple[str, int, int]]] = {}
    for name, host in members.hosts:
        for chip, generation, step in () if host.silent else host.status.kept:
            copies.setdefault(chip, []).append((name, generation, step))
    return copies

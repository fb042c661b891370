"""A process that leads an elastic job whose leader was lost; its host's agent starts it.

python -m tutti.train.elastic.lead_process FOLDER STORE NODE ADDRESS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tutti.elastic.events import Phase
from tutti.elastic.fork_server import die_with_parent
from tutti.elastic.join import SECRET_IN_RUN, signals_to
from tutti.elastic.journal import Entry, last_generation
from tutti.elastic.membership import OVER, Membership
from tutti.elastic.restore import is_over
from tutti.elastic.store import LostLeadError
from tutti.errors import TuttiError
from tutti.observe.folder import RUN_FILE
from tutti.ranks.local_processes import RankEvent, free_port
from tutti.train.elastic.job import known_identity
from tutti.train.elastic.leader import Door, Leader
from tutti.train.elastic.shared_store import SharedStore
from tutti.train.run.planning import Job

_FAREWELL_S = 10.0  # for agents to hear that all is over


def main(arguments: Sequence[str]) -> int:
    """Lead until the job is over, or another host leads."""
    die_with_parent()
    folder, url, node, host = Path(arguments[0]), *arguments[1:4]
    job = Job.load(folder / RUN_FILE)
    try:
        own = known_identity(folder)
    except TuttiError as error:
        _print(str(error))
        return 1
    port = free_port(host)
    shared = SharedStore(url, node, f"{host}:{port}")
    try:
        entries = shared.begin(own.name, again=True, log=[])
        shared.store.stand_down()
        leader = Leader(
            job, shared.journal(folder), own, Door(host=host, port=str(port)),
            resume=False, earlier=entries, listener=_say,
            generation=max(last_generation(folder), shared.store.generation()),
        )  # fmt: skip
        leader.controller.hold = shared.hold
        try:
            leader.decided("leads", f"{node}, for nobody did any more")
            if is_over(entries):
                _farewell(leader, entries)
            with signals_to(leader.controller.finish):  # all save and end
                members = leader.controller.run()
        finally:
            leader.close()
        if members.phase in OVER:
            (folder / SECRET_IN_RUN).unlink(missing_ok=True)
    except LostLeadError as error:
        _print(str(error))
    except TuttiError as error:
        _print(str(error))
        return 1
    finally:
        shared.close()
    return 0


def _farewell(leader: Leader, entries: Sequence[Entry]) -> None:
    """Tell all that a job is over whose leader was lost before it could."""
    last = [entry for entry in entries if entry.phase in set(Phase)][-1]
    order = max(entry.order for entry in entries) + 1
    members = Membership(job=leader.controller.settings.job, generation=last.generation)
    leader.controller.members = replace(members, phase=Phase(last.phase), order=order, why=last.why)
    until = time.monotonic() + _FAREWELL_S
    while time.monotonic() < until:
        leader.controller.turn()


def _say(event: RankEvent) -> None:
    if event.kind in ("notice", "warning", "error"):
        _print(str(event.values.get("text", "")))


def _print(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Processes of this machine: who is blamed, how they end. Ranks are a few lines without torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import InputError, StoppedError, TuttiError
from tutti.ranks import local_processes
from tutti.ranks.local_processes import LocalRanks, RankEvent, free_port, require_free

OPENING = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
pipe = os.fdopen(int(os.environ["TUTTI_EVENTS"]), "w", buffering=1)
def say(kind, **values):
    pipe.write(json.dumps({"kind": kind, **values}) + "\\n")
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make ranks that run a few lines instead of tutti's rank."""
    made: list[LocalRanks] = []

    def make(lines: str, num_ranks: int = 2, **words: Any) -> LocalRanks:
        script = tmp_path / "rank.py"
        script.write_text(OPENING + textwrap.dedent(lines), encoding="utf-8")
        popen = subprocess.Popen

        def start(command: list[str], **options: Any) -> Any:
            assert command[1:3] == ["-m", "tutti.train.run.rank"]
            return popen([sys.executable, "-S", str(script), *command[3:]], **options)

        monkeypatch.setattr(local_processes.subprocess, "Popen", start)
        found = LocalRanks(tmp_path / "run.json", num_ranks, **words)
        made.append(found)
        found.start()
        return found

    yield make
    for one in made:
        one.end(grace_s=0.0)


def heard(found: LocalRanks) -> list[RankEvent]:
    return list(found.events())


def test_what_ranks_say_arrives_with_their_number(ranks: Any) -> None:
    found = ranks(
        """
        say("say", text=os.environ["LOCAL_RANK"] + os.environ["WORLD_SIZE"])
        say("done", resumed="--resume" in sys.argv, own=os.environ.get("OWN"))
        """,
        environment={1: {"OWN": "mine"}},
        resume=True,
    )
    events = sorted(heard(found), key=lambda event: (event.rank, event.kind))
    assert [(e.rank, e.kind, dict(e.values)) for e in events] == [
        (0, "done", {"resumed": True, "own": None}),
        (0, "say", {"text": "02"}),
        (1, "done", {"resumed": True, "own": "mine"}),
        (1, "say", {"text": "12"}),
    ]


def test_the_cause_is_blamed_and_not_the_victim(ranks: Any) -> None:
    found = ranks(
        """
        if rank == 0:
            say("error", text="rank 1 is lost", cause=False)
        else:
            time.sleep(0.3)
            say("error", text="no memory", cause=True, where="fast/0/1")
        sys.exit(1)
        """
    )
    with pytest.raises(TuttiError, match=r"^rank 1 \(fast/0/1\): no memory; its log: .*rank-1.log"):
        heard(found)


def test_where_all_are_victims_the_first_is_shown(ranks: Any) -> None:
    found = ranks(
        """
        if rank == 1:
            say("error", text="rank 0 is lost", cause=False)
            sys.exit(1)
        """
    )
    with pytest.raises(TuttiError, match="rank 1: rank 0 is lost"):
        heard(found)


@pytest.mark.parametrize("code", [1, 2])
def test_what_a_rank_was_given_wrongly_is_bad_input_of_the_job(ranks: Any, code: int) -> None:
    found = ranks(f"say('error', text='no such file', cause=True, code={code})", num_ranks=1)
    with pytest.raises(TuttiError, match="rank 0: no such file") as failed:
        heard(found)
    assert failed.value.exit_code == code
    assert isinstance(failed.value, InputError) is (code == 2)


def test_a_step_to_resume_from_reaches_the_ranks(ranks: Any) -> None:
    (event,) = heard(ranks("say('done', words=sys.argv[2:])", num_ranks=1, resume=12))
    assert event.values["words"] == ["--resume=12"]


def test_a_rank_that_is_killed_is_named_by_the_signal(ranks: Any) -> None:
    found = ranks(
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        say("error", text="rank 1 is lost", cause=False)
        sys.exit(1)
        """
    )
    with pytest.raises(TuttiError, match="rank 1: was killed by SIGKILL"):
        heard(found)


def test_a_silent_end_is_a_failure(ranks: Any) -> None:
    with pytest.raises(TuttiError, match="rank 0: ended with status 3"):
        heard(ranks("sys.exit(3)", num_ranks=1))


def test_ranks_that_hang_after_a_failure_are_ended(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_processes, "LAST_WORDS_S", 0.2)
    found = ranks(
        """
        if rank == 1:
            say("error", text="broken", cause=True)
            sys.exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("say", text="waiting")
        time.sleep(600)
        """
    )
    with pytest.raises(TuttiError, match="rank 1: broken"):
        heard(found)
    assert all(rank.process.poll() is not None for rank in found._ranks)


LISTENING = """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
say("say", text="ready")
while not asked:
    time.sleep(0.02)
say("done", steps=4)
"""


def test_asked_to_stop_they_finish(ranks: Any) -> None:
    found = ranks(LISTENING)
    events, ready, done = found.events(), 0, []
    for event in events:
        ready += event.kind == "say"
        if ready == 2 and event.kind == "say":
            found.ask_to_stop()
        if event.kind == "done":
            done.append(event.rank)
    assert sorted(done) == [0, 1]


def test_asked_twice_they_are_ended(ranks: Any) -> None:
    found = ranks("signal.signal(15, signal.SIG_IGN)\nsay('say', text='ready')\ntime.sleep(600)\n")
    heard_all = found.events()
    assert [next(heard_all).kind, next(heard_all).kind] == ["say", "say"]
    found.ask_to_stop(signal.SIGINT)
    assert all(rank.process.poll() is None for rank in found._ranks)
    found.ask_to_stop()
    with pytest.raises(StoppedError, match="ended at once, as asked") as stopped:
        list(heard_all)
    assert stopped.value.exit_code == 130
    assert all(rank.process.poll() is not None for rank in found._ranks)


def test_asked_before_they_listen(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_processes, "LAST_WORDS_S", 0.2)
    found = ranks("say('say', text='importing')\ntime.sleep(600)\n")
    heard_all = found.events()
    assert [next(heard_all).kind, next(heard_all).kind] == ["say", "say"]
    found.ask_to_stop()
    with pytest.raises(StoppedError, match="was stopped before it began") as stopped:
        list(heard_all)
    assert stopped.value.exit_code == 143


def test_ctrl_c_of_the_terminal_does_not_reach_them(ranks: Any) -> None:
    """They have process groups of their own, so that the one who started them decides."""
    found = ranks("say('done', group=os.getpgid(0))", num_ranks=1)
    (event,) = heard(found)
    assert event.values["group"] != os.getpgid(0)


def test_what_they_print_goes_to_their_logs(ranks: Any, tmp_path: Path) -> None:
    heard(ranks("print('out', rank); print('err', rank, file=sys.stderr)"))
    texts = [(tmp_path / "logs" / f"rank-{r}.log").read_text().split() for r in (0, 1)]
    assert [sorted(text) for text in texts] == [["0", "0", "err", "out"], ["1", "1", "err", "out"]]


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: .*in use; leave it out"):
            require_free(port)
    require_free(free_port())
    with pytest.raises(InputError, match=r"--port 70000: .*0-65535"):
        require_free(70000)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_free_port_of_an_address_of_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        port = free_port("::1")
        taken.bind(("::1", port))
        assert taken.getsockname()[1] == port


def test_signals_without_a_name() -> None:
    assert local_processes._signal_name(signal.SIGSEGV) == "SIGSEGV"
    assert local_processes._signal_name(250) == "signal 250"

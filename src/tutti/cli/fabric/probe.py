"""`tutti fabric probe`: agents probe every path; the collector says what is broken."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.diagnose.fabric.likelihood import Blame
    from tutti.diagnose.fabric.probe_ledger import ProbeVerdict
    from tutti.observe.network.probe_file import ProbeFile

_EVERY_S = 0.5
_MOST_STRANGE = 5


def probe(
    hosts: Annotated[Path, typer.Argument(help="File with hosts, their addresses, the collector.")],
    host: Annotated[
        str | None, typer.Option(help="Be the agent of this host; none: be the collector.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after so long; none: when interrupted.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="An agent's own figures, as a store of series (.db).")
    ] = None,
    json: Json = False,
) -> None:
    """Probe every path. The collector exits with 0 where nothing was broken at the end, else 1."""
    from tutti.observe.network.probe_file import ProbeFile

    file = ProbeFile.load(hosts)
    if seconds is not None and seconds <= 0:
        raise InputError(f"--seconds: {seconds:g}; must be more than 0")
    if host is not None:
        _be_agent(file, host, seconds, keep)
    elif keep is not None:
        raise InputError("--keep: is for agents; name one with --host")
    else:
        _collect(file, seconds, as_json=json)


def _be_agent(file: ProbeFile, host: str, seconds: float | None, keep: Path | None) -> None:
    import time

    from tutti.observe.network.probe_agent import ProbeAgent
    from tutti.observe.network.report_stream import ReportSender

    sender = ReportSender(file.collector, lambda text: typer.echo(text, err=True))
    agent = ProbeAgent(file, host, sender.send)
    sampling = None
    if keep is not None:
        from tutti.observe.samplers.nic import NicSampler
        from tutti.observe.samplers.sampling import HostSampling

        sampling = HostSampling(keep, samplers=[agent, NicSampler()])
    end = None if seconds is None else time.monotonic() + seconds
    try:
        agent.run(lambda: end is not None and time.monotonic() >= end)
    except KeyboardInterrupt:
        pass
    finally:
        if sampling is not None:
            sampling.close()
        agent.close()
        sender.close()


def _collect(file: ProbeFile, seconds: float | None, *, as_json: bool) -> None:
    import json
    import time

    from tutti.diagnose.fabric.probe_ledger import ProbeLedger, ProbeVerdict
    from tutti.observe.network.report_stream import ReportListener

    ledger, listener = ProbeLedger(file.hosts, file.switches), ReportListener(file.collector)
    started = judged = time.monotonic()
    said, verdict, strange = "", ProbeVerdict(), set[str]()
    try:
        while seconds is None or time.monotonic() - started < seconds:
            for report in listener.reports(_EVERY_S / 2):
                try:
                    ledger.take(report, time.monotonic())
                except InputError as error:  # of a stranger, or for another file: others go on
                    strange.add(str(error))
            if time.monotonic() - judged < _EVERY_S:
                continue
            judged = time.monotonic()
            verdict = ledger.verdict(judged)
            text = json.dumps(_document(verdict)) if as_json else verdict_text(verdict)
            if text != said:
                typer.echo(text if as_json else f"{judged - started:7.1f} s  {text}")
                said = text
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    for text in sorted(strange)[:_MOST_STRANGE]:
        typer.echo(f"left out: {text}", err=True)
    if not verdict.paths:
        raise InputError(f"no agent has reported to {file.collector}")
    if verdict.accused or verdict.gone:
        raise typer.Exit(1)


def _document(verdict: ProbeVerdict) -> dict[str, Any]:
    def plain(blames: tuple[Blame, ...]) -> list[dict[str, Any]]:
        return [{"parts": list(b.parts), "share": round(b.bad / max(1, b.trials), 4)}
                for b in blames]  # fmt: skip

    return {
        "down": plain(verdict.down), "lossy": plain(verdict.lossy), "slow": plain(verdict.slow),
        "stalled": list(verdict.stalled), "gone": list(verdict.gone), "late": list(verdict.late),
        "paths": verdict.paths,
    }  # fmt: skip


def verdict_text(verdict: ProbeVerdict) -> str:
    """Return a verdict as one line."""
    said = [f"{' or '.join(b.parts)}: nothing comes through" for b in verdict.down]
    said += [f"{' or '.join(b.parts)}: loses {100 * b.bad / b.trials:.1f} %" for b in verdict.lossy]
    said += [f"{' or '.join(b.parts)}: slower than its like" for b in verdict.slow]
    said += [f"{host}: its agent stands still, its kernel answers" for host in verdict.stalled]
    said += [
        f"{host}: its agent runs late; only loss of nearly all is held against its links"
        for host in verdict.late
    ]
    said += [f"{host} or its links: nothing comes from there" for host in verdict.gone]
    if not said and not verdict.paths:
        return "no path is known yet"
    return "; ".join(said) or f"{verdict.paths} paths: nothing is broken"

"""Who said a line, and when: rank, host, device and time, in the forms that launchers write them.

Prefixes of torchrun, DeepSpeed, srun, mpirun, pdsh, Ray, NCCL, HCCL, Kubernetes and syslog are
read; what none of them says is None. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class Identity:
    """Who said a line; times are seconds since 1970, without a year those of this year."""

    rank: int | None = None
    host: str | None = None
    device: str | None = None
    time: float | None = None


_RANK = [
    re.compile(p, re.IGNORECASE)
    for p in (
        r"\[rank[ _]?(\d+)\]",  # torch ≥ 2.2
        # also rank[3] of HCCL, rankId: 3, rank_3, global_rank=3, <rank 3>
        r"(?:\b|(?<=global_)|(?<=world_))rank(?:[ _]?id)?(?:\s*[:=#]\s*|\s*[\[(]|[ _-])?(\d+)\b"
        r"(?!\s*(?:nodes|processes)|\.\d)",
        r"^\[\d+,(\d+)\]<std",  # mpirun --tag-output
        r"^\[(\d+)\]<std",  # horovodrun
        r"^\s*(\d{1,5}): (?=\S)",  # srun --label
        r"\btasks? (\d+): ",  # srun: error: node3: task 12: …
        r"\[\[\d+,[1-9]\d*\],(\d+)\]",  # Open MPI's name of a process
        r"\bMPI_Abort\(.{0,80}\) - process (\d+)",  # MPICH
        r"/task:(\d+)\b",  # of JAX and TensorFlow
        r"\bWorker_TP(\d+)\b",  # vLLM
    )
]
# of the ranks of one host, which are those of the job where there is no other host
_LOCAL = re.compile(r"^\[default(\d+)\]:|\blocal_rank\s*[:=]\s*(\d+)")
_NOT_A_RANK = re.compile(
    r"(?:remote|peer|src|dst|source|target|local|node|group|machine|role|agent|lora|matrix|"
    r"tensor|pipeline|data|expert|context|[tpdec]p|parallel)[-_ ]rank|num_?ranks|nranks|"
    r"rank \d+ (?:tensor|array|matri)",
    re.IGNORECASE,
)
_NAME = r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]"
_NODE = r"[A-Za-z0-9][A-Za-z0-9_.-]*[A-Za-z0-9]"  # where only a name can stand
_NUMBERED = r"[A-Za-z][A-Za-z0-9_-]*\d[a-z]?(?:\.[A-Za-z][\w.-]*)?"
_IP = r"\d+\.\d+\.\d+\.\d+"
_SYSLOG = r"(?:<\d+>)?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+)"
_HOST = [
    re.compile(p)
    for p in (
        # NCCL's and RCCL's host:pid:tid [device], behind whatever a launcher puts before it
        rf"(?:^|[\s>\]:])(?=[\w.-]*[A-Za-z])({_NODE}):\d+(?::\d+)? \[[^\]\s]{{1,12}}(?: \w+)*\] ",
        rf"(?<!Remote )(?<!remote )(?<!peer )\b[Hh]ost\s*[:=]\s*({_NAME})",
        rf"^(?:{_SYSLOG}) ({_NODE}) [\w./()-]+(?:\[\d+\])?:",
        rf"\bsrun: error: ({_NAME}): tasks?",
        rf"\b[Nn]ode failure on ({_NODE})",  # Slurm
        rf"^\[({_NAME}):\d+ ?:\d+:\d+\]",  # UCX
        # Open MPI
        rf"^\[({_NAME}):\d+\] (?:\*\*\*|\[ ?\d|mca|PMIX|pmix|PRTE|ORTE|Signal|Failing at)",
        rf"^\[({_NAME})\]?\[\[\d+,\d+\],\d+\]",  # Open MPI's transports
        rf"\bwith PID \d+ on node ({_NODE})\b",  # Open MPI
        rf"\bRUNNING AT ({_NODE})\b",  # MPICH
        rf"^\s+ip: ({_IP})",  # Ray, of an actor that died
        rf"\bON ({_NAME}) CANCELLED",
        rf"\bip=({_IP})",
        rf"\bWorker IP address: ({_IP})",  # Ray
        rf"\bnode id: \w+ and address: ({_IP})",  # Ray
        rf"\bIP: ({_IP})\b",  # Ray
        rf"\bhost ?(?:ip)?\[({_IP})\]",  # HCCL
        r"\bThe node '([\w.-]+?)_\d+_\d+' has",  # torch's rendezvous
        rf"^({_NUMBERED}): \[(?:\d{{4}}-\d\d-\d\d |\s*\d+\.\d+\])",  # pdsh, before a moment
        rf"\bNodes? ({_NUMBERED}) (?:is|not|status|has|was|became|reason|drained)\b",  # Slurm
        rf"\bnode ({_NUMBERED}) (?:state|reason|status|has|was)\b",
        rf"\b[\w-]+-monitor, ({_NUMBERED})\b",  # Kubernetes' node problem detector
        rf"^\[pod/({_NAME})/",  # kubectl logs --prefix
        rf"\b(?:[Nn]ode|[Hh]ost|[Hh]ost[Nn]ame|[Ii]nstance)=\"({_NAME})(?::\d+)?\"",  # labels
    )
]
_MAYBE_HOST = [
    re.compile(p)
    for p in (
        rf"^\[?({_NUMBERED})\]?: (?=\S)",  # pdsh, DeepSpeed's launcher
        rf"\b[Hh]ostname[:=]\s*\"?({_NAME})",
        rf"\b[Nn]ode(?:[Nn]ame)?[:=/ ]+['\"]?({_NUMBERED})(?=$|[\s,;:'\")\]])",
        rf"\b(?:host|machine|server|instance)[=/ ]+['\"]?({_NUMBERED})(?=$|[\s,;:'\")\]])",
        rf"\bpod[/= ]\"?(?:[\w-]+/)?({_NAME})",  # Kubernetes
    )
]
_NOT_HOSTS = re.compile(
    r"^(?:rank|default|gpu|cuda|npu|device|line|step|epoch|iteration|error|errno|code|mlx\d_|frame|"
    r"worker_?process|thread|python\d|worker|exitcode|process|dataloader|attempt|stage|layer|"
    r"shard|local|failed|root|info|warning|warn|fatal|slurmstepd|srun|in|file|nccl|hccl|torch|"
    r"utf|fp|bf|int|float|sha|md|ei|ej|el|e|h|ip|ib|gloo|args|default_?pg)[\d_.:-]*$|Error|Exception|\.py|\.cpp|\.cc|/",
    re.IGNORECASE,
)
_DEVICE = [
    re.compile(p)
    for p in (
        r"\bPCI:([0-9a-fA-F:.]+)",
        r"\bGPU at ([0-9a-fA-F]{4,8}:[0-9a-fA-F:.]+)",
        r"\bGPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d)",
        r"\b(?:device|Device)[ =:]\s*([0-9]+)\b",
        r"\b(?:GPU|NPU|gpu)[ _:]?#?(\d{1,2})\b",
        r"\b((?:mlx5|mlx4|bnxt_re|hns|irdma|erdma|rocep\w+|ibp\w+)_?\w*)\b",
    )
]
_TIMES = (
    (
        re.compile(
            r"(\d{4})[-/](\d\d)[-/](\d\d)[T _-](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?"
            r" ?([+-]\d\d:?\d\d\b)?"
        ),
        "ymd",
    ),
    (re.compile(r"\[[EWIF](\d{3,4}) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?"), "glog"),
    (re.compile(r"\b([A-Z][a-z]{2}) ([ \d]\d) (\d\d):(\d\d):(\d\d)"), "syslog"),
    (re.compile(r"(\d\d)/(\d\d)/(\d{4})[ ,]+(\d\d):(\d\d):(\d\d)"), "mdy"),
    (re.compile(r"^\[\s*(\d+\.\d{4,6})\]"), "uptime"),
)
_MONTHS = (
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
)  # fmt: skip
_THIS_YEAR = datetime.now(tz=UTC).year
_FILE_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker|task)[-_.]?(\d+)(?:\D|$)", re.IGNORECASE)
_FILE_HOST = re.compile(r"^((?:node|host|gpu|worker|cn|nid|slave|machine|pod)[-_]?\w*\d+)", re.I)


def of_file(path: PurePath) -> Identity:
    """Return what a file's name says of who wrote it."""
    rank = _FILE_RANK.search(path.name)
    if rank is None and path.name in {"stderr.log", "stdout.log"} and path.parent.name.isdigit():
        return Identity(rank=int(path.parent.name))  # torchrun's --log-dir: attempt/rank/stderr.log
    host = _FILE_HOST.match(path.stem)
    return Identity(rank=int(rank.group(1)) if rank else None, host=host.group(1) if host else None)


def of_line(text: str, file: Identity) -> Identity:
    """Return who said a line; what it does not say itself, its file may."""
    head = text[:600]
    host = _host(head)
    return Identity(
        rank=_rank(head, file.rank if host is not None else _local(head, file.rank)),
        host=host or file.host,
        device=_device(text[:1200]),
        time=_time(text[:200]),
    )


def with_fields(who: Identity, fields: dict[str, str | None]) -> Identity:
    """Return `who` as a signature's own fields say it."""
    rank, host, device = fields.get("rank"), fields.get("host"), fields.get("device")
    return replace(
        who,
        rank=int(rank) if rank and rank.isdigit() else who.rank,
        host=host or who.host,
        device=device or who.device,
    )


def _rank(text: str, otherwise: int | None) -> int | None:
    text = _NOT_A_RANK.sub("#", text)
    for pattern in _RANK:
        if (match := pattern.search(text)) and int(match.group(1)) < 1_000_000:
            return int(match.group(1))
    return otherwise


def _local(text: str, of_file: int | None) -> int | None:
    if of_file is None and (match := _LOCAL.search(text)):
        return int(match.group(1) or match.group(2))
    return of_file


def _host(text: str) -> str | None:
    for pattern in _HOST:
        if match := pattern.search(text):
            return match.group(1)
    for pattern in _MAYBE_HOST:
        match = pattern.search(text)
        if match and not _NOT_HOSTS.search(match.group(1)):
            return match.group(1)
    return None


def _device(text: str) -> str | None:
    for pattern in _DEVICE:
        if match := pattern.search(text):
            return match.group(1)
    return None


def _time(text: str) -> float | None:
    for pattern, form in _TIMES:
        match = pattern.search(text)
        if match is None:
            continue
        try:
            return _seconds(match, form)
        except ValueError:  # the 31st of February
            continue
    return None


def _seconds(match: re.Match[str], form: str) -> float:
    part = match.groups()
    if form == "uptime":
        return float(part[0])
    fraction = 0.0
    if form == "ymd":
        year, month, day = (int(x) for x in part[:3])
        clock = [int(x) for x in part[3:6]]
        fraction = (float(f"0.{part[6]}") if part[6] else 0.0) - _ahead_s(part[7])
    elif form == "glog":
        year, month, day = _THIS_YEAR, int(part[0][:-2]), int(part[0][-2:])
        clock = [int(x) for x in part[1:4]]
        fraction = float(f"0.{part[4]}") if part[4] else 0.0
    elif form == "syslog":
        year, month, day = _THIS_YEAR, _MONTHS.index(part[0]) + 1, int(part[1])
        clock = [int(x) for x in part[2:5]]
    else:
        month, day, year = (int(x) for x in part[:3])
        clock = [int(x) for x in part[3:6]]
    hour, minute, second = clock
    moment = datetime(year, month, day, hour, minute, min(second, 59), tzinfo=UTC)
    return moment.timestamp() + fraction


def _ahead_s(zone: str | None) -> float:
    """Return by how much a zone is ahead of UTC: "+08:00", "-0530"."""
    if not zone:
        return 0.0
    digits = zone.replace(":", "")
    minutes = 60 * int(digits[1:3]) + int(digits[3:5])
    return 60.0 * (minutes if zone[0] == "+" else -minutes)

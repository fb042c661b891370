"""The columns of traces: ours, and those that others publish, as rows of one form."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from typing import Any

from tutti.fleet.model_jobs import ModelJob

Row = Mapping[str, str]
_STAMP = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%d")
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_NOTHING = ("", "None", "none", "nan", "NaN", "Unknown", "unknown", "NULL", "N/A")


class NoJob(Exception):  # noqa: N818
    """A row that never ran: waiting, cancelled, without chips."""


class TraceColumns:
    """Whose columns they are, which must be there, and how a row is read."""

    name = ""
    needs: tuple[str, ...] = ()

    def read(self, row: Row) -> dict[str, Any]:
        """Return the values of a TraceRow; ValueError: what is wrong; NoJob: it never ran."""
        raise NotImplementedError


def number(row: Row, column: str) -> float:
    """Return a column as a number."""
    text = row[column].strip()
    if text in _NOTHING:
        raise ValueError(f"'{column}' is missing")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"'{column}' is '{text}'; expected a number") from None
    if not math.isfinite(value):
        raise ValueError(f"'{column}' is '{text}'; expected a finite number")
    return value


def whole(row: Row, column: str) -> int:
    """Return a column as a whole number."""
    value = number(row, column)
    if value != int(value):
        raise ValueError(f"'{column}' is {value:g}; expected a whole number")
    return int(value)


def moment(row: Row, column: str) -> float:
    """Return a date and time, or seconds, as seconds; its time zone is dropped."""
    text = re.sub(r"\s*([+-]\d\d:?\d\d|[A-Z]{3,4}|Z)$", "", row[column].strip())
    if text in _NOTHING:
        raise ValueError(f"'{column}' is missing")
    try:
        return float(text)
    except ValueError:
        pass
    for form in _STAMP:
        try:
            stamp = datetime.datetime.strptime(text, form)
        except ValueError:
            continue
        return stamp.replace(tzinfo=datetime.timezone.utc).timestamp()  # noqa: UP017
    raise ValueError(f"'{column}' is '{text}'; expected a time such as 2023-05-01 12:00:00")


def _truth(row: Row, column: str) -> bool:
    """Return a column as yes or no."""
    text = row[column].strip().lower()
    if text not in _TRUTHS:
        raise ValueError(f"'{column}' is '{row[column].strip()}'; expected true or false")
    return _TRUTHS[text]


def _given(row: Row, column: str) -> bool:
    return column in row and row[column].strip() not in _NOTHING


class Ours(TraceColumns):
    """Our own CSV."""

    name = "tutti"
    needs = ("job", "submit_s", "duration_s")
    knows = (*needs, "nodes", "chips", "pool", "priority", "tenant", "estimate_s", "one_group")

    def read(self, row: Row) -> dict[str, Any]:
        """Read a row; nothing is left out."""
        if not row["job"].strip():
            raise ValueError("'job' is missing")
        return {
            "job": row["job"].strip(),
            "submit_s": number(row, "submit_s"),
            "duration_s": number(row, "duration_s"),
            "nodes": whole(row, "nodes") if _given(row, "nodes") else None,
            "chips": whole(row, "chips") if _given(row, "chips") else 0,
            "pool": row.get("pool", "").strip(),
            "priority": whole(row, "priority") if _given(row, "priority") else 0,
            "tenant": row.get("tenant", "").strip(),
            "estimate_s": number(row, "estimate_s") if _given(row, "estimate_s") else None,
            "one_group": _truth(row, "one_group") if _given(row, "one_group") else False,
        }


class Models(TraceColumns):
    """Our own CSV of jobs that are a model and tokens; how long they take the planner says."""

    name = "models"
    needs = ("job", "model", "tokens")
    knows = (
        *needs, "submit_s", "batch", "length", "least_nodes", "most_nodes", "priority", "tenant",
    )  # fmt: skip

    def read(self, row: Row) -> dict[str, Any]:
        """Read a row; nothing is left out."""
        for column in ("job", "model"):
            if not row[column].strip():
                raise ValueError(f"'{column}' is missing")
        sizes = {
            name: whole(row, column)
            for name, column in (
                ("global_batch", "batch"), ("sequence_length", "length"),
                ("least_nodes", "least_nodes"), ("most_nodes", "most_nodes"),
            )
            if _given(row, column)
        }  # fmt: skip
        return {
            "job": row["job"].strip(),
            "submit_s": number(row, "submit_s") if _given(row, "submit_s") else 0.0,
            "duration_s": 0.0, "chips": 0,
            "training": ModelJob(model=row["model"].strip(), tokens=number(row, "tokens"), **sizes),
            "priority": whole(row, "priority") if _given(row, "priority") else 0,
            "tenant": row.get("tenant", "").strip(),
        }  # fmt: skip


class Sacct(TraceColumns):
    """`sacct -X -P -o JobID,Submit,Start,End,Elapsed,NNodes,AllocTRES,…`."""

    name = "sacct"
    needs = ("JobID", "Submit", "Elapsed", "NNodes")

    def read(self, row: Row) -> dict[str, Any]:
        """Read an allocation; steps and jobs that never started are left out."""
        if "." in row["JobID"] or not _given(row, "Submit"):
            raise NoJob
        seconds = self._elapsed(row["Elapsed"])
        if seconds <= 0 or not int(number(row, "NNodes")):
            raise NoJob
        tres = row.get("AllocTRES", "") or row.get("ReqTRES", "")
        gpus = re.search(r"gres/gpu(?::\w+)?=(\d+)", tres)
        limit = row.get("Timelimit", "").strip()
        return {
            "job": row["JobID"].strip(), "submit_s": moment(row, "Submit"), "duration_s": seconds,
            "nodes": whole(row, "NNodes"), "chips": int(gpus[1]) if gpus else 0,
            "tenant": (row.get("Account") or row.get("User") or "").strip(),
            "priority": whole(row, "Priority") if _given(row, "Priority") else 0,
            "estimate_s": self._elapsed(limit) or None if _ELAPSED.fullmatch(limit) else None,
        }  # fmt: skip

    @staticmethod
    def _elapsed(text: str) -> float:
        match = _ELAPSED.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"'Elapsed' is '{text}'; expected [days-]hours:minutes:seconds")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class Acme(TraceColumns):
    """AcmeTrace (NSDI'24): job_id, user, node_num, gpu_num, submit_time, duration, …."""

    name = "Acme"
    needs = ("job_id", "node_num", "gpu_num", "submit_time", "duration")

    def read(self, row: Row) -> dict[str, Any]:
        """Read a row; jobs without chips, or that never began, are left out."""
        if not _given(row, "duration") or not _given(row, "gpu_num") or not whole(row, "gpu_num"):
            raise NoJob
        return {
            "job": row["job_id"].strip(), "submit_s": moment(row, "submit_time"),
            "duration_s": number(row, "duration"), "chips": whole(row, "gpu_num"),
            "nodes": max(1, whole(row, "node_num")) if _given(row, "node_num") else None,
            "tenant": row.get("user", "").strip(),
        }  # fmt: skip


class Helios(TraceColumns):
    """HeliosData (SC'21): job_id, user, vc, gpu_num, node_num, submit_time, duration, …."""

    name = "Helios"
    needs = ("job_id", "gpu_num", "submit_time", "duration", "vc")

    def read(self, row: Row) -> dict[str, Any]:
        """Read a row; jobs of processors alone are left out."""
        if not _given(row, "gpu_num") or not whole(row, "gpu_num") or not _given(row, "duration"):
            raise NoJob
        return {
            "job": row["job_id"].strip(), "submit_s": moment(row, "submit_time"),
            "duration_s": number(row, "duration"), "chips": whole(row, "gpu_num"),
            "nodes": whole(row, "node_num") if _given(row, "node_num") else None,
            "tenant": row["vc"].strip(),
        }  # fmt: skip


class Philly(TraceColumns):
    """Philly (ATC'19), flattened: jobid, vc, submitted_time, start_time, end_time, gpus."""

    name = "Philly"
    needs = ("jobid", "submitted_time", "start_time", "end_time", "gpus")

    def read(self, row: Row) -> dict[str, Any]:
        """Read a row; jobs that never began, or had no chips, are left out."""
        if not all(_given(row, key) for key in ("start_time", "end_time", "gpus")):
            raise NoJob
        if not whole(row, "gpus"):
            raise NoJob
        return {
            "job": row["jobid"].strip(), "submit_s": moment(row, "submitted_time"),
            "duration_s": moment(row, "end_time") - moment(row, "start_time"),
            "chips": whole(row, "gpus"), "tenant": row.get("vc", "").strip(),
        }  # fmt: skip


class Pai(TraceColumns):
    """PAI (NSDI'22), tasks: job_name, inst_num, status, start_time, end_time, plan_gpu (in %)."""

    name = "PAI"
    needs = ("job_name", "inst_num", "start_time", "end_time", "plan_gpu")

    def read(self, row: Row) -> dict[str, Any]:
        """Read a task: so many instances, each with its share of a chip rounded up."""
        if not all(_given(row, key) for key in ("start_time", "end_time", "plan_gpu", "inst_num")):
            raise NoJob
        each = -(-int(number(row, "plan_gpu")) // 100)
        if not each or moment(row, "end_time") < moment(row, "start_time"):
            raise NoJob
        task = row.get("task_name", "").strip()
        return {
            "job": row["job_name"].strip() + (f"/{task}" if task else ""),
            "submit_s": moment(row, "start_time"),  # when it came is not published
            "duration_s": moment(row, "end_time") - moment(row, "start_time"),
            "chips": each * whole(row, "inst_num"), "tenant": row.get("user", "").strip(),
        }  # fmt: skip


FORMATS: tuple[TraceColumns, ...] = (Ours(), Models(), Helios(), Acme(), Philly(), Pai(), Sacct())

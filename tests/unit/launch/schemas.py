"""Checks of launch files against what their readers document.

Kubernetes: the API's JSON schemas (`kubernetes-validate`) and the models that Kubeflow generates
from the OpenAPI of JobSet and Trainer. Slurm: the options of sbatch(1) and srun(1) that we may use,
with the form of their values. Shell: `bash -n` and shellcheck.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubeflow_trainer_api import models

KUBERNETES = "1.31"
_NUMBER = r"[1-9]\d*"
_WORD = r"[^\s#]+"
_NAMES = r"[\w.:-]+(,[\w.:-]+)*"
_SIZE = rf"{_NUMBER}[KMGT]?"

# sbatch(1), srun(1): option → form of its value; None: it takes none.
SBATCH: dict[str, str | None] = {
    "job-name": _WORD,
    "output": _WORD,
    "account": _WORD,
    "qos": _WORD,
    "time": r"(\d+-)?\d+(:\d+){0,2}",
    "reservation": _WORD,
    "switches": rf"{_NUMBER}(@[\d:-]+)?",
    "mail-type": r"[A-Z_]+(,[A-Z_]+)*",
    "nodes": _NUMBER,
    "ntasks-per-node": _NUMBER,
    "partition": _NAMES,
    "gres": rf"\w+(:[\w.-]+)?:{_NUMBER}",
    "cpus-per-task": _NUMBER,
    "mem": _SIZE,
    "constraint": _WORD,
    "nodelist": _NAMES,
    "exclusive": None,
    "no-kill": None,
    "requeue": None,
    "signal": r"([BR]+:)?[A-Z0-9]+(@\d+)?",
}
SRUN: dict[str, str | None] = {
    "het-group": r"\d+",
    "nodes": _NUMBER,
    "ntasks": _NUMBER,
    "ntasks-per-node": _NUMBER,
    "cpus-per-task": _NUMBER,
    "kill-on-bad-exit": "[01]",
    "no-kill": None,
    "wait": r"\d+",
    "label": None,
    # of the plug-in pyxis
    "container-image": _WORD,
    "container-mounts": _WORD,
}


def require_option(text: str, table: dict[str, str | None]) -> tuple[str, str | None]:
    """Return an option and its value, both as documented."""
    match = re.fullmatch(r"--([a-z-]+)(?:=(.*))?", text)
    assert match, f"not a long option: {text}"
    name, value = match.groups()
    assert name in table, f"--{name} is not documented"
    form = table[name]
    if form is None:
        assert value is None, f"--{name} takes no value"
    else:
        assert value is not None, f"--{name} needs a value"
        assert re.fullmatch(form, value), f"--{name}={value}"
    return name, value


def directives(script: str) -> list[dict[str, str | None]]:
    """Return the options of each component, as sbatch reads them: up to the first command."""
    components: list[dict[str, str | None]] = [{}]
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        if line == "#SBATCH hetjob":
            components.append({})
        elif line.startswith("#SBATCH "):
            name, value = require_option(line.removeprefix("#SBATCH "), SBATCH)
            assert name not in components[-1], f"--{name} stands twice"
            components[-1][name] = value
    assert script.count("#SBATCH") == sum(map(len, components)) + len(components) - 1
    return components


def require_shell(text: str, folder: Path) -> None:
    """Refuse what bash cannot parse or shellcheck finds fault with."""
    path = folder / "checked.sh"
    path.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}")
    subprocess.run(["bash", "-n", str(path)], check=True)
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # without activation
    program = shutil.which("shellcheck", path=beside)
    if program is None:
        pytest.skip("shellcheck is not installed (Debian's package of that name)")
    # SC2016: a value of the user's may hold a $ that is meant as it stands; SC1091: what a vendor's
    # tools set up is not on this machine
    done = subprocess.run(
        [program, "--exclude=SC2016,SC1091", str(path)], capture_output=True, text=True
    )
    assert not done.returncode, done.stdout


def require_kubernetes(document: dict[str, Any]) -> None:
    """Refuse an object that the Kubernetes API, JobSet or Trainer would not know."""
    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    kind = document["kind"]
    if kind not in kinds:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    read = kinds[kind].from_dict(document)
    assert read is not None
    _require_kept(document, read.to_dict(), kind)
    for job in replicated_jobs(document):
        kubernetes_validate.validate(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": job["name"], **job["template"].get("metadata", {})},
                "spec": job["template"]["spec"],
            },
            KUBERNETES,
            strict=True,
        )


def replicated_jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the replicated jobs of a JobSet, or of the one inside a runtime."""
    spec = document["spec"]
    if document["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    found: list[dict[str, Any]] = spec.get("replicatedJobs", [])
    return found


def _require_kept(given: Any, kept: Any, place: str) -> None:
    """Refuse a key that a generated model dropped, for then the API does not have it."""
    if isinstance(given, dict):
        for key, value in given.items():
            assert key in kept, f"{place}: unknown key '{key}'"
            _require_kept(value, kept[key], f"{place}.{key}")
    elif isinstance(given, list):
        assert len(given) == len(kept), place
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            _require_kept(value, other, f"{place}[{index}]")
    else:
        assert given == kept, place

"""`--to kubernetes`: a JobSet with one replicated job per pool, or the same under Kubeflow Trainer.

A plan that serves becomes a Deployment that answers clients, a Service before it, and a StatefulSet
per pool whose pods run the engines.

Plan and configuration travel in a ConfigMap, the job's secret in a Secret; checkpoints go to a
volume that every pod mounts. A PyTorchJob has one template for the master and one for all workers,
so it cannot say what a cluster of several kinds of chips needs.
"""

from __future__ import annotations

from tutti.errors import InputError
from tutti.launch.apart import mistaken_pools
from tutti.launch.facts import PoolLaunch, Volume
from tutti.launch.job import Job, Part
from tutti.launch.secret import SECRET_NAME, new_secret
from tutti.launch.templating import render

INPUTS = "/etc/tutti"
_SHARED = Volume(name="shared", mount="/shared", claim="tutti-shared")
_MOST_BYTES = 1_000_000  # of a ConfigMap; the API server refuses more than 1 MiB
_LONGEST_NAME = 63
_SERVE = "serve"
_POD_SUFFIX = "-abcde"  # what Kubernetes adds to the name of a pod


def kubernetes_files(job: Job) -> dict[str, str]:
    """Return the files by name."""
    _check(job)
    job.require_elastic()
    volumes = {part.name: _volumes(part) for part in job.parts}
    if job.serves:
        return _serving_files(job, volumes)
    jobset = job.facts.kubernetes.kind == "jobset"
    jobs = render(
        "jobs.yaml.j2",
        job=job,
        jobset=jobset,
        inputs=INPUTS,
        folder=_folder(job),
        master=f"{job.name}-{job.parts[0].name}-0-0.{job.name}",
        limits={part.name: _limits(part) for part in job.parts},
        requests={part.name: _requests(part) for part in job.parts},
        volumes=volumes,
        alone={part.name: _may_share(part) for part in job.parts},
    ).rstrip("\n")
    kind = job.facts.kubernetes.kind
    return {
        "inputs.yaml": render("inputs.yaml.j2", job=job),
        f"{SECRET_NAME}.yaml": render("secret.yaml.j2", job=job, secret=new_secret()),
        f"{kind}.yaml": render(f"{kind}.yaml.j2", job=job, jobs=jobs),
    }


def _serving_files(job: Job, volumes: dict[str, tuple[Volume, ...]]) -> dict[str, str]:
    manifest = render(
        "serve.yaml.j2",
        job=job,
        inputs=INPUTS,
        limits={part.name: _limits(part) for part in job.parts},
        requests={part.name: _requests(part) for part in job.parts},
        volumes=volumes,
        alone={part.name: _may_share(part) for part in job.parts},
    )
    return {
        "inputs.yaml": render("inputs.yaml.j2", job=job),
        f"{SECRET_NAME}.yaml": render("secret.yaml.j2", job=job, secret=new_secret()),
        f"{_SERVE}.yaml": manifest,
    }


def kubernetes_notes(job: Job) -> list[str]:
    """Return what a reader of the files should know."""
    notes = []
    assumed = dict.fromkeys(p.launch.pool.name for p in job.parts if not p.launch.volumes)
    if assumed:
        what = f"'{job.model_folder}' is read from" if job.serves else "checkpoints go to"
        notes.append(
            f"{what} the PersistentVolumeClaim '{_SHARED.claim}', mounted at "
            f"{_SHARED.mount}; it must exist, or name another under 'volumes' in a launch file "
            "(--with)"
        )
    mistaken = mistaken_pools(job, lambda launch: launch.device, _apart)
    if mistaken:
        pools = ", ".join(launch.pool.name for launch in mistaken)
        devices = ", ".join(dict.fromkeys(launch.device for launch in mistaken))
        notes.append(
            f"Kubernetes calls chips of different pools alike ({pools}: {devices}); give each pool "
            "a 'node_selector' in a launch file (--with), such as nvidia.com/gpu.product"
        )
    return notes


def _apart(one: PoolLaunch, other: PoolLaunch) -> bool:
    """Tell whether a pool asks for nodes that are not the other's."""
    wanted = one.facts.node_selector
    return bool(wanted) and wanted != other.facts.node_selector


def _may_share(part: Part) -> bool:
    """Tell whether a second pod would find room on the machine of a first."""
    return not part.launch.device or part.num_devices < part.component.chips_per_host


def _volumes(part: Part) -> tuple[Volume, ...]:
    return part.launch.volumes or (_SHARED,)


def _folder(job: Job) -> str:
    """Return the working folder of all pods: on a volume that all of them mount."""
    mounts = [{volume.mount for volume in _volumes(part)} for part in job.parts]
    common = set.intersection(*mounts)
    folder = job.facts.folder
    if folder:
        if not any(folder == mount or folder.startswith(f"{mount}/") for mount in common):
            raise InputError(
                f"'folder' is '{folder}', which is on no volume of all pools; their mounts are "
                f"{', '.join(sorted(common)) or 'all different'}"
            )
        return folder
    first = next((v.mount for v in _volumes(job.parts[0]) if v.mount in common), None)
    if first is None:
        raise InputError(
            "the pools share no volume, but checkpoints need one; name it under 'volumes' of the "
            "launch file (--with)"
        )
    return first


def _check(job: Job) -> None:
    for part in job.parts:
        pool, launch = part.launch.pool, part.launch
        if not launch.facts.image:
            raise InputError(
                f"pool '{pool.name}' has no 'image'; name one with tutti and torch for "
                f"{pool.chip.name} in a launch file, --with launch.yaml (pools: {{{pool.name}: "
                "{image: …}})"
            )
        if not launch.known_maker and launch.facts.device is None:
            raise InputError(
                f"pool '{pool.name}': nothing is known of chips by '{pool.chip.vendor}'; say in "
                "a launch file (--with) what Kubernetes calls them, such as "
                "'device: example.com/npu'"
            )
        pod = f"{job.name}-{part.name}-0-{len(part.component.hosts) - 1}{_POD_SUFFIX}"
        if len(pod) > _LONGEST_NAME:
            raise InputError(
                f"pods would be called '{pod}', {len(pod)} letters of at most {_LONGEST_NAME}; "
                "give a shorter 'name' in a launch file (--with)"
            )
    size = sum(len(text.encode()) for text in job.inputs().values())
    if size > _MOST_BYTES:
        raise InputError(
            f"plan and configuration are {size:,} bytes, more than a ConfigMap holds "
            f"({_MOST_BYTES:,}); make the plan again, without what was embedded by hand"
        )


def _limits(part: Part) -> dict[str, str]:
    """Return what a pod gets; extended resources are asked for by their limit."""
    limits = {part.launch.device: str(part.num_devices)} if part.launch.device else {}
    return limits | {name: str(amount) for name, amount in part.launch.facts.resources.items()}


def _requests(part: Part) -> dict[str, str]:
    facts = part.launch.facts
    requests = {"cpu": str(facts.cpus)} if facts.cpus is not None else {}
    return requests | ({"memory": facts.memory} if facts.memory else {})


def next_command(job: Job, folder: str) -> str:
    """Return what to type next."""
    kind = _SERVE if job.serves else job.facts.kubernetes.kind
    files = ("inputs", SECRET_NAME, kind)
    return "kubectl apply " + " ".join(f"-f {folder}/{name}.yaml" for name in files)

"""Launch facts: what the machines of each pool run and how they are asked for.

They come from a launch file (`--with launch.yaml`) and not from the cluster file, for a new image
or partition is no reason to plan again. What a pool does not say, its chip's maker says
(`makers.yaml`); a maker that is not known there has to be described.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from tutti import files
from tutti.document import AtLeast, AtMost, Count, Natural, Place, build
from tutti.errors import InputError, hint
from tutti.hardware.cluster import Cluster
from tutti.hardware.host_names import expand_names
from tutti.hardware.pool import Pool
from tutti.launch.secret import SECRET, SECRET_FILE

Port = Annotated[int, AtLeast(1024), AtMost(65535)]
Variables = Mapping[str, str | int | float]
Words = tuple[str, ...]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST = re.compile(r"[\w.:-]+", re.ASCII)
_SWITCHES = re.compile(r"[1-9]\d{0,4}(@[\d:-]+)?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_OURS = (
    *("TUTTI_NODE", "TUTTI_ATTEMPT", SECRET, SECRET_FILE),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"),
)


def _check_variables(variables: Variables) -> None:
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"environment: '{name}' cannot be the name of a variable")
        if name in _OURS:
            raise ValueError(f"environment: '{name}' is set by the launch files themselves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A folder that every host sees: a Kubernetes claim, or a path of the host."""

    name: str
    mount: str
    claim: str = ""
    host_path: str = ""
    read_only: bool = False

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.name):
            raise ValueError(f"volume '{self.name}': a name is of small letters, digits and dashes")
        if bool(self.claim) == bool(self.host_path):
            raise ValueError(f"volume '{self.name}': give either 'claim' or 'host_path'")
        for key in ("mount", "host_path"):
            path = getattr(self, key)
            if path and not path.startswith("/"):
                raise ValueError(f"volume '{self.name}': '{key}' is '{path}'; it must begin with /")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """How the hosts of one pool are asked for and what runs on them.

    None and empty values stand for the maker's default or for "not asked for".
    """

    image: str = ""
    container: Literal["none", "pyxis", "apptainer"] = "none"
    container_options: Words | None = None
    device: str | None = None
    visible: str | None = None
    environment: Variables = field(default_factory=dict)
    setup: Words | None = None
    launcher: Words = ("torchrun",)
    interface: str = ""
    hosts: Words = ()
    whole_nodes: bool = False
    cpus: Count | None = None
    memory: str = ""
    gres: str | None = None
    partition: str = ""
    constraint: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    resources: Mapping[str, str | int] = field(default_factory=dict)
    capabilities: Words = ()
    volumes: tuple[Volume, ...] = ()

    def __post_init__(self) -> None:
        _check_variables(self.environment)
        if not self.launcher:
            raise ValueError("'launcher' is empty; the usual one is [torchrun]")
        if self.container != "none" and not self.image:
            raise ValueError(f"'container' is '{self.container}', but there is no 'image'")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """What the whole Slurm job asks for; `options` are further directives, such as --mail-type."""

    account: str = ""
    qos: str = ""
    time: str = ""
    reservation: str = ""
    switches: str = ""
    options: Words = ()

    def __post_init__(self) -> None:
        if self.switches and not _SWITCHES.fullmatch(self.switches):
            raise ValueError(
                f"'switches' is '{self.switches}'; write how many, and how long to wait for them "
                "at most, such as '1' or '1@2:00:00'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesFacts:
    """What the whole Kubernetes job asks for."""

    kind: Literal["jobset", "trainjob"] = "jobset"
    namespace: str = ""
    queue: str = ""
    service_account: str = ""
    pull_secrets: Words = ()
    priority_class: str = ""
    topology: str = ""
    topology_mode: Literal["required", "preferred"] = "preferred"
    host_network: bool = False
    shared_memory: str = ""
    keep_seconds: Natural | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFacts:
    """Where a deployment answers clients, and what that needs; for plans that serve.

    `ports` is the first of five ports for each chip of a host. `api_key_secret` names a Kubernetes
    Secret whose `api-key` clients must have; `image` is the front's, else the first pool's.
    """

    port: Port = 8000
    apis: Count = 1
    ports: Port = 29600
    health_port: Port = 8080
    service: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    api_key_secret: str = ""
    image: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A launch file."""

    name: str = ""
    command: Words | None = None  # tutti train, or tutti serve
    folder: str = ""
    port: Port = 29500
    restarts: Natural = 3
    elastic: bool = False  # agents instead of torchrun: a lost host does not end the job
    start_timeout_s: Count = 1800
    environment: Variables = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    slurm: SlurmFacts = SlurmFacts()
    kubernetes: KubernetesFacts = KubernetesFacts()
    serving: ServingFacts = ServingFacts()
    pools: Mapping[str, PoolFacts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_variables(self.environment)
        if self.command is not None and not self.command:
            raise ValueError("'command' is empty; the usual one is [tutti, train]")
        if self.folder and not self.folder.startswith("/"):
            raise ValueError(f"'folder' is '{self.folder}'; it must begin with /")

    @classmethod
    def load(cls, path: Path) -> Facts:
        """Read a launch file."""
        value = files.read_file(path)
        return build(cls, {} if value is None else value, Place(path.name))

    def require_pools_of(self, cluster: Cluster, name: str) -> None:
        """Refuse facts of pools that the cluster does not have."""
        known = [pool.name for pool in cluster.pools]
        for pool in self.pools:
            if pool not in known:
                raise InputError(
                    f"{name}: pools: the plan's cluster '{cluster.name}' has no pool '{pool}'; "
                    f"{hint(pool, known)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """What holds for all chips of one maker."""

    maker: str
    source: str
    device: str = ""
    gres: str = ""
    visible: str = ""
    interface: Words = ()
    apptainer: Words = ()
    environment: Variables = field(default_factory=dict)
    setup: Words = ()


@functools.cache
def makers() -> dict[str, Maker]:
    """Return the makers that ship with the package, by their folded name."""
    text = resources.files("tutti.launch").joinpath("makers.yaml").read_text(encoding="utf-8")
    listed = build(tuple[Maker, ...], files.parse_yaml(text, "makers.yaml"), Place("makers.yaml"))
    return {maker.maker.casefold(): maker for maker in listed}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLaunch:
    """The facts of a pool with every default filled in."""

    facts: PoolFacts
    pool: Pool
    known_maker: bool
    device: str
    gres: str
    visible: str
    environment: Mapping[str, str]
    setup: Words
    container_options: Words
    hosts: Words  # by node, then by host of the node; empty: not known
    volumes: tuple[Volume, ...]


def resolve(facts: Facts, pool: Pool) -> PoolLaunch:
    """Return what holds for a pool: the maker's word, then the file's, then the pool's own."""
    own = facts.pools.get(pool.name, PoolFacts())
    known = makers().get(pool.chip.vendor.casefold())
    maker = known or Maker(maker=pool.chip.vendor, source="")
    cores_per_chip = pool.node.host.cores * pool.node.hosts // pool.node.num_chips
    environment: dict[str, str | int | float] = {"OMP_NUM_THREADS": max(1, cores_per_chip)}
    if own.interface:
        environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", *maker.interface), own.interface)
    environment |= {**maker.environment, **facts.environment, **own.environment}
    options = maker.apptainer if own.container == "apptainer" else ()
    return PoolLaunch(
        facts=own,
        pool=pool,
        known_maker=known is not None,
        device=_first(own.device, maker.device),
        gres=_first(own.gres, maker.gres),
        visible=_first(own.visible, maker.visible),
        environment={name: str(value) for name, value in environment.items()},
        setup=maker.setup if own.setup is None else own.setup,
        container_options=options if own.container_options is None else own.container_options,
        hosts=_named_hosts(own, pool),
        volumes=_joined(facts.volumes, own.volumes),
    )


def _first(own: str | None, default: str) -> str:
    return default if own is None else own


def _joined(common: tuple[Volume, ...], own: tuple[Volume, ...]) -> tuple[Volume, ...]:
    """Return the common volumes with the pool's own; one of the same name replaces."""
    return tuple({volume.name: volume for volume in (*common, *own)}.values())


def _named_hosts(own: PoolFacts, pool: Pool) -> Words:
    names = tuple(name for text in own.hosts for name in expand_names(text))
    for name in names:
        if not _HOST.fullmatch(name):
            raise InputError(f"pool '{pool.name}': hosts: '{name}' cannot be the name of a host")
    wanted = pool.nodes * pool.node.hosts
    if names and len(names) != wanted:
        raise InputError(
            f"pool '{pool.name}': 'hosts' names {len(names)}, but the cluster file has {wanted}; "
            "name each once, in the order of the nodes"
        )
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(f"pool '{pool.name}': 'hosts' names '{min(twice)}' twice")
    return names

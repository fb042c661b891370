"""One job to be launched: plan, training configuration or model, and launch facts together."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tutti.errors import InputError
from tutti.files import pretty_json
from tutti.hardware.cluster import Cluster
from tutti.launch.facts import Facts, PoolLaunch, resolve
from tutti.launch.hosts import Component, Host, dns_label, find_components
from tutti.plan.check import embedded_cluster
from tutti.plan.files import plan_to_document
from tutti.plan.plan import Plan
from tutti.units import many

PLAN = "plan.json"
CONFIG = "train.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A component and how it is started."""

    component: Component
    launch: PoolLaunch

    @property
    def name(self) -> str:
        """The component's name."""
        return self.component.name

    @property
    def num_devices(self) -> int:
        """Devices to ask a scheduler for, per host."""
        component = self.component
        whole = self.launch.facts.whole_nodes
        return component.chips_per_host if whole else component.num_chips

    @property
    def is_exclusive(self) -> bool:
        """Whether the hosts are for this job alone, with all their cores."""
        return self.launch.facts.whole_nodes or not self.component.is_partial

    @property
    def num_cpus(self) -> int | None:
        """Cores to ask Slurm for, per host; where hosts are shared, the share of the chips used."""
        if self.launch.facts.cpus is not None or self.is_exclusive:
            return self.launch.facts.cpus
        component = self.component
        share = component.pool.node.host.cores * component.num_chips // component.chips_per_host
        return max(1, share)

    def environment(self, *, scheduled: bool) -> dict[str, str]:
        """Return the variables of its processes.

        Where a host has chips that the plan does not use, the devices are chosen here, unless a
        scheduler hands out only as many as were asked for.
        """
        variables = dict(self.launch.environment)
        chosen = self.component.is_partial and self.launch.visible
        if chosen and (self.launch.facts.whole_nodes or not scheduled):
            devices = ",".join(map(str, self.component.devices))
            variables.setdefault(self.launch.visible, devices)
        return variables

    def host_name(self, host: Host) -> str:
        """Return a host's name on the network; empty where the facts do not say."""
        index = host.node * self.launch.pool.node.hosts + host.part
        return self.launch.hosts[index] if self.launch.hosts else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that a target needs to write its files."""

    name: str
    plan: Plan
    facts: Facts
    parts: tuple[Part, ...]
    config: str | None = None  # the text of the training configuration
    model_folder: str = ""  # that is served, as every host sees it; "": the job trains
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        plan: Plan,
        facts: Facts,
        *,
        config: str | None = None,
        model_folder: str = "",
        arguments: Sequence[str] = (),
        facts_name: str = "launch facts",
    ) -> Job:
        """Bring a valid plan and launch facts together."""
        cluster: Cluster = embedded_cluster(plan)
        facts.require_pools_of(cluster, facts_name)
        parts = tuple(
            Part(component=component, launch=resolve(facts, component.pool))
            for component in find_components(plan, cluster)
        )
        return cls(
            name=dns_label(facts.name or plan.model.name),
            plan=plan,
            facts=facts,
            parts=parts,
            config=config,
            model_folder=model_folder,
            arguments=tuple(arguments),
        )

    @property
    def serves(self) -> bool:
        """Whether it answers requests; else it trains."""
        return bool(self.model_folder)

    @property
    def goes_on(self) -> bool:
        """Whether it goes on without a host: each host then starts its part again by itself."""
        return self.serves or self.facts.elastic

    @property
    def words(self) -> tuple[str, ...]:
        """The command that all others are made of."""
        return self.facts.command or ("tutti", "serve" if self.serves else "train")

    @property
    def num_hosts(self) -> int:
        """Hosts of all components."""
        return sum(len(part.component.hosts) for part in self.parts)

    @property
    def summary(self) -> str:
        """One line for the head of each file."""
        where = " + ".join(str(part.component) for part in self.parts)
        model = " ".join(self.plan.model.name.split())  # it stands in comments of one line
        return f"{model}, {many(self.plan.num_ranks, 'rank')} on {where}"

    def hosts(self) -> Iterator[tuple[Part, Host]]:
        """Yield every host in the order of torchrun's node ranks."""
        for part in self.parts:
            for host in part.component.hosts:
                yield part, host

    def inputs(self) -> dict[str, str]:
        """Return the files that every rank reads."""
        files = {PLAN: pretty_json(plan_to_document(self.plan)) + "\n"}
        if self.config is not None:
            files[CONFIG] = self.config
        return files

    def command(self, folder: str) -> str:
        """Return the command of one rank as a shell reads it; `folder` holds the inputs."""
        words = [shlex.quote(word) for word in self.words]
        if self.config is not None:
            words.append(f"{folder}/{CONFIG}")
        words += ["--plan", f"{folder}/{PLAN}"]
        return " ".join([*words, *map(shlex.quote, self.arguments)])

    def front_command(self, folder: str, listen: str, host: str) -> str:
        """Return the command that answers clients; hosts join it at `listen`."""
        facts = self.facts.serving
        words = [*self._serving(folder), f'--listen "{listen}:{self.facts.port}"']
        words += [f'--host "{host}" --port {facts.port} --apis {facts.apis}']
        return " ".join([*words, *map(shlex.quote, self.arguments)])

    def host_command(self, folder: str, front: str) -> str:
        """Return the command that runs a host's engines; TUTTI_NODE says which host it is."""
        words = [*self._serving(folder), f'--join "{front}:{self.facts.port}"']
        wait = self.facts.start_timeout_s
        return " ".join([*words, f"--ports {self.facts.serving.ports} --wait {wait}"])

    def _serving(self, folder: str) -> list[str]:
        words = [shlex.quote(word) for word in (*self.words, self.model_folder)]
        return [*words, "--plan", f"{folder}/{PLAN}"]

    def require_elastic(self) -> None:
        """Refuse what agents cannot start; nothing where torchrun does."""
        if self.serves and self.facts.elastic:
            raise InputError(
                "'elastic: true' in the launch file is for training; a deployment goes on without "
                "a host as it is: leave it out"
            )
        if not self.facts.elastic:
            return
        if self.config is None:
            raise InputError(
                "'elastic: true' in the launch file needs a training file (--config): agents train "
                "by its 'elastic:'"
            )
        for part in self.parts:
            if any(not host.is_node for host in part.component.hosts):
                raise InputError(
                    f"pool '{part.launch.pool.name}': its nodes are several hosts each, but an "
                    "agent is a whole node; leave 'elastic' out of the launch file"
                )

    def require_container(self, *supported: str) -> None:
        """Refuse containers that a target cannot start."""
        for part in self.parts:
            kind = part.launch.facts.container
            if kind not in supported:
                raise InputError(
                    f"pool '{part.launch.pool.name}': 'container' is '{kind}', which needs another "
                    f"launcher; here it may be {' or '.join(supported)}"
                )

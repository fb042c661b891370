"""The file that `tutti train` takes: what is trained, on what, with which data, for how long.

Needs no torch: a wrong file is answered before anything is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tutti import files
from tutti.document import Above, AtLeast, AtMost, Count, Natural, Place, Seconds, build, plain
from tutti.errors import InputError
from tutti.models.distillation import Distillation
from tutti.models.objective import Objective
from tutti.models.tuning import Tuning
from tutti.observe.alerts import AlertSettings
from tutti.plan.job import OptimizerName
from tutti.storage.url import is_url
from tutti.train.data.config import SHIPPED, DataConfig, SourceConfig
from tutti.train.engine.learning_rate import LearningRate
from tutti.train.evaluation.config import EvaluateConfig

Positive = Annotated[float, Above(0)]
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorConfig:
    """What is different for the tensors that patterns name; the first that matches counts."""

    match: tuple[str, ...]  # as in `tuning`
    rate: Annotated[float, AtLeast(0)] = 1.0  # times the learning rate
    weight_decay: Annotated[float, AtLeast(0)] | None = None  # default: as for the others

    def __post_init__(self) -> None:
        if not self.match:
            raise ValueError("'match' is empty; name tensors, as in match: ['*norm*']")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How weights move, and how the learning rate does."""

    name: OptimizerName | None = None  # default: the plan's, or AdamW
    learning_rate: Positive = 3e-4
    schedule: Literal["constant", "linear", "cosine", "stable", "wsd"] = "cosine"
    warmup_steps: Natural = 0
    decay_steps: Natural | None = None  # of "stable", at the end; default: a tenth of all steps
    final_share: Annotated[float, AtLeast(0), AtMost(1)] = 0.1  # of the learning rate, at the end
    first_step: Literal[0, 1] = 1  # where on the schedule it is; 0: as in transformers
    weight_decay: Annotated[float, AtLeast(0)] = 0.1
    decay_vectors: bool = False  # whether norms and biases decay, too
    beta1: Annotated[float, AtLeast(0), AtMost(1)] = 0.9
    beta2: Annotated[float, AtLeast(0), AtMost(1)] = 0.95
    epsilon: Positive = 1e-8
    momentum: Annotated[float, AtLeast(0), AtMost(1)] = 0.95  # of Muon's matrices
    clip_norm: Positive | None = 1.0
    tensors: tuple[TensorConfig, ...] = ()

    def rates(self, steps: int) -> LearningRate:
        """Return the learning rate of every step."""
        return LearningRate(
            peak=self.learning_rate,
            kind="stable" if self.schedule == "wsd" else self.schedule,
            steps=steps,
            warmup=self.warmup_steps,
            decay=steps // 10 if self.decay_steps is None else self.decay_steps,
            final_share=self.final_share,
            first=self.first_step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageConfig:
    """A running mean of the weights, which is saved beside them and validated with."""

    decay: Annotated[float, Above(0), AtMost(0.9999999)] = 0.999
    every: Count = 1  # steps
    start: Natural = 0  # steps in which the mean is the weights themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """What the planner is asked when no plan is given; see `tutti plan --help`."""

    sequence_length: Count | None = None
    global_batch: Count | None = None
    precision: str = AUTO  # bf16, or fp32 where this machine's CPU computes and has no bf16
    tp_max: Count | None = None
    cp_max: Count | None = None
    max_stages: Count | None = None
    micro_batch: tuple[Count, ...] = ()
    schedules: tuple[str, ...] = ()
    shard: tuple[Natural, ...] = ()
    pools: tuple[str, ...] = ()
    offload: bool = True
    recompute: bool = True
    mixed_stages: bool = True
    mixed_pipelines: bool = True
    use_all_pools: bool = False
    uniform: bool = False  # the best plan that treats all chips alike, for comparison
    chip_profiles: tuple[str, ...] = ()  # what `tutti profile` wrote, or names of shipped ones


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the state is written, and how much of it is kept."""

    every: Natural = 0  # steps; 0: at the end only
    keep: Count = 2
    keep_every: Natural = 0  # steps of which a checkpoint is never deleted
    keep_best: bool = True  # also the one with the lowest validation loss, if that is taken
    asynchronous: bool = True
    final: bool = True  # also after the last step
    huggingface: bool = True  # at the end, as a folder that transformers or peft loads
    merged: bool = False  # of adapters also the model with them, as a folder for transformers
    missing: Literal["error", "zero"] = "error"  # moments that a resumed checkpoint lacks
    to: str = ""  # a URL that every checkpoint is sent to, and that --resume finds them at
    restore: Literal["auto", "each", "broadcast"] = "auto"  # who reads when a run goes on

    def __post_init__(self) -> None:
        if self.to and not is_url(self.to):
            raise ValueError(
                f"'to' is '{self.to}'; write a URL, such as s3://bucket/run or file:///mnt/run"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """How often the loss on held-out data is taken, and on how much of it."""

    every: Natural = 0  # steps; 0: never
    steps: Count = 1  # global batches


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """Where figures of the run go, besides the terminal and `metrics.jsonl`."""

    every: Count = 1  # steps
    tensorboard: bool = False
    prometheus_port: Annotated[int, AtLeast(1), AtMost(65535)] | None = None
    wandb: str = ""  # a project of Weights & Biases
    wandb_mode: Literal["offline", "online"] = "offline"  # offline: `wandb sync` sends it later
    mlflow: str = ""  # an experiment of MLflow
    mlflow_uri: str = ""  # its tracking server; "": a folder beside the figures
    sinks: tuple[str, ...] = ()  # of installed packages, by their entry points in `tutti.sinks`
    trace_steps: tuple[Count, ...] = ()  # of which a Chrome trace is written
    noise_every: Natural = 0  # steps between two of the gradient's noise scale; 0: never
    tensors: str = ""  # a folder for every step's gradients and weights, which `tutti align` reads
    alerts: AlertSettings = field(default_factory=AlertSettings)
    probes: bool = True  # between hosts that talk to each other: a packet per second and NIC


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillConfig:
    """A fault that is injected for a rehearsal, once; a slow chip, from one step to another."""

    fault: Literal[
        "kill", "stop", "sleep", "spin", "exception", "slow",
        "terminate", "abort", "segfault", "file", "operation", "size", "data",
    ]  # fmt: skip
    rank: Natural = 0
    step: Count = 1  # in which it happens
    instruction: Natural = 0  # of the rank's list
    chip: str = ""  # POOL/NODE/SLOT instead of a rank: a slow chip keeps its place
    factor: Annotated[float, AtLeast(1)] = 1.5  # of a slow chip: times as long as it would take
    spread: Annotated[float, AtLeast(0)] = 0.0  # of its factor, from step to step, as a share
    until: Natural = 0  # the last step in which it is slow; 0: to the end


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """How a job goes on when ranks are lost; see docs/how-to/elastic.md."""

    copies: Natural = 0  # steps between copies of the state in hosts' memory; 0: none
    partners: Natural = 0  # other hosts that get each copy, too
    min_chips: Count = 1  # with fewer it waits
    wait_s: Annotated[Seconds, AtLeast(0)] = 600.0  # for chips, then it gives up
    heartbeat_s: Annotated[Seconds, Above(0)] = 0.25
    death_after_s: Annotated[Seconds, Above(0)] = 2.5  # of silence of a host
    hang_after_s: Annotated[Seconds, Above(0)] = 5.0  # without any progress beyond the plan's
    restarts_per_hour: Count = 60
    replan: Literal["auto", "ask", "never"] = "auto"  # whether a better plan is looked for
    listen: str = ""  # HOST:PORT where agents of other hosts join; empty: all chips are here
    node: str = ""  # POOL/N of the chips that are here; empty: the node of rank 0
    store: str = ""  # etcd://HOST:PORT[,HOST:PORT…]/NAME: any host may lead; empty: the first one
    drill: tuple[DrillConfig, ...] = ()

    def __post_init__(self) -> None:
        if self.partners and not self.copies:
            raise ValueError(
                f"'partners' is {self.partners}, but there are no copies to bring to them; give "
                "'copies', the steps between two"
            )
        if self.death_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"'death_after_s' is {self.death_after_s:g}, but a heartbeat comes every "
                f"{self.heartbeat_s:g} s; give it two heartbeats at least"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole training job."""

    model: str
    cluster: str = "here"
    ranks: Count | None = None  # of "here": so many processes, which share the machine
    plan: str | None = None  # a plan file; without one, the planner is asked
    start: Literal["auto", "pretrained", "random"] = "auto"
    steps: Count = 100
    data: DataConfig
    job: JobConfig = field(default_factory=JobConfig)
    tuning: Tuning | None = None  # what is trained: adapters, or all but what is frozen
    objective: Objective | None = None  # what for, if not the next token: which answer is better
    distillation: Distillation | None = None  # from a teacher's probabilities
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    average: AverageConfig | None = None  # of weights, over steps
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluate: EvaluateConfig | None = None
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    elastic: ElasticConfig | None = None  # with it, a lost rank does not end the job
    balance_loss: Literal["config", "on", "off"] = "config"  # of experts' routers
    padding_row: Literal["config", "trained"] = "config"  # of the embedding
    capture: Literal["auto", "on", "off"] = "auto"  # blocks as graphs: where it pays, or can be
    emulate: Literal["real", "stub"] = "real"  # emulated chips compute, or only take their time
    output: str = "out/train"
    seed: Natural = 0
    dropout: Annotated[float, AtLeast(0), AtMost(1)] | None = None  # 0: none, as is the case anyway
    timeout_s: Annotated[Seconds, Above(0)] = 300.0

    def __post_init__(self) -> None:
        if self.dropout:
            raise ValueError(
                f"'dropout' is {self.dropout:g}, but tutti trains without dropout; leave it "
                "out, or regularise with optimizer.weight_decay"
            )
        if self.objective is not None and self.objective.is_sampled and self.elastic is not None:
            raise ValueError(
                f"'elastic' and {self.objective.kind}: answers that are being sampled are not "
                "kept when ranks are lost; leave 'elastic' out, and go on with --resume"
            )
        if self.distillation is not None and self.objective is not None:
            raise ValueError(
                f"'distillation' is a loss of tokens, objective {self.objective.kind} one of whole "
                "answers; choose one"
            )
        if self.distillation is not None and self.elastic is not None:
            raise ValueError(
                "'elastic' and 'distillation': a teacher is not brought to the ranks that are "
                "left; leave 'elastic' out, and go on with --resume"
            )
        if self.average is not None and self.elastic is not None:
            raise ValueError(
                "'elastic' and 'average': the mean of weights is not brought to the ranks that are "
                "left; leave one of the two out"
            )
        if self.evaluate is not None and self.elastic is not None and self.evaluate.every:
            raise ValueError("'evaluate.every' and 'elastic': evaluate after the run instead")
        if self.objective is not None and self.balance_loss == "on":
            raise ValueError("'balance_loss' is a mean over tokens; it is off beside an objective")

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Read a file; paths in it are taken from where the file lies."""
        config = build(cls, files.read_file(path), Place(path.name))
        return config.relative_to(path.parent)

    def relative_to(self, folder: Path) -> TrainConfig:
        """Return the job with its paths seen from `folder`, unless they are names or absolute."""
        return dataclasses.replace(
            self,
            model=_from(folder, self.model),
            cluster=_from(folder, self.cluster),
            plan=None if self.plan is None else _from(folder, self.plan),
            data=data_from(folder, self.data),
            objective=self._objective_from(folder),
            distillation=self._distillation_from(folder),
            evaluate=self._evaluate_from(folder),
            measure=self._measure_from(folder),
            job=dataclasses.replace(
                self.job, chip_profiles=tuple(_from(folder, p) for p in self.job.chip_profiles)
            ),
        )

    def _objective_from(self, folder: Path) -> Objective | None:
        given = self.objective
        if given is None:
            return None
        sampling = given.sampling
        if sampling is not None:
            named = (name.rpartition(":") for name in sampling.rewards)
            rewards = tuple(f"{_from(folder, file)}:{function}" for file, _, function in named)
            sampling = dataclasses.replace(sampling, rewards=rewards)
        reference = _from(folder, given.reference) if given.reference else ""
        return dataclasses.replace(given, reference=reference, sampling=sampling)

    def _distillation_from(self, folder: Path) -> Distillation | None:
        given = self.distillation
        return given and dataclasses.replace(given, teacher=_from(folder, given.teacher))

    def _evaluate_from(self, folder: Path) -> EvaluateConfig | None:
        given = self.evaluate
        if given is None:
            return None
        tasks = tuple(dataclasses.replace(t, path=_from(folder, t.path)) for t in given.tasks)
        return dataclasses.replace(given, tasks=tasks)

    def _measure_from(self, folder: Path) -> MeasureConfig:
        given = self.measure.alerts
        rules = _from(folder, given.rules) if given.rules else ""
        return dataclasses.replace(self.measure, alerts=dataclasses.replace(given, rules=rules))

    def with_whole_profile_paths(self) -> TrainConfig:
        """Return the job with profiles that are found from any folder; names stay names."""
        whole = tuple(_from(Path.cwd(), name) for name in self.job.chip_profiles)
        return dataclasses.replace(self, job=dataclasses.replace(self.job, chip_profiles=whole))

    @property
    def folder(self) -> Path:
        """Where everything that the run writes goes."""
        return Path(self.output)


def _from(folder: Path, name: str) -> str:
    """Return a path that exists beside the file; anything else as it is."""
    beside = folder / name
    return str(beside) if not Path(name).is_absolute() and beside.exists() else name


def data_from(folder: Path, data: DataConfig) -> DataConfig:
    """Return the data with paths seen from a folder; there may be patterns in them."""

    def moved(source: SourceConfig) -> SourceConfig:
        named = not source.path or source.path.startswith(SHIPPED) or is_url(source.path)
        if named or Path(source.path).is_absolute():
            return source
        return dataclasses.replace(source, path=str(folder / source.path))

    return dataclasses.replace(
        data,
        train=tuple(map(moved, data.train)),
        validation=tuple(map(moved, data.validation)),
        tokenizer=_from(folder, data.tokenizer) if data.tokenizer else "",
    )


def with_changes(
    config: TrainConfig, given: Mapping[str, object], texts: Sequence[str] = ()
) -> TrainConfig:
    """Return the job with keys changed: "steps" or "section.key"; `texts` are "key=value"."""
    changes = dict(given)
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text}: write key=value, such as steps=200")
        changes[key.strip()] = files.parse_yaml(value, f"--set {key}")
    if not changes:
        return config
    written = plain(config)
    assert isinstance(written, dict)
    for key, change in changes.items():
        place = written
        *sections, last = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise InputError(f"--set {key}: '{section}' has no keys inside")
        place[last] = change
    return build(TrainConfig, written, Place("options"))

"""Whole training steps to time on one chip: the engine's, and transformers' with a plain loop."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.accelerator import Accelerator, open_accelerator
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.bench.train_breakdown import best_rates, kernel_seconds, parts
from tutti.cost.plan.sources import Sources
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped
from tutti.hardware.local import local_cluster
from tutti.hardware.profile import shipped_profiles
from tutti.models import read_config
from tutti.models.flops import flops_per_token
from tutti.models.lengths import length_refusal
from tutti.models.load import catalog_config, load_model
from tutti.models.spec import ModelSpec
from tutti.models.tuning import AdapterSpec, Base, Tuning
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.plan.job import PRECISIONS
from tutti.plan.plan import Plan, Recompute
from tutti.ranks.single_rank import NoLinks, plan_alone
from tutti.simulate.estimate import estimate
from tutti.train.engine.engine import Engine
from tutti.train.graphs.captured_blocks import CaptureMode, CaptureSettings
from tutti.train.run.planning import tuned
from tutti.train.state.state import TORCH_DTYPES
from tutti.units import bytes_text, many

WARM_UP = 3
SETTINGS = AdamSettings(learning_rate=1e-4, weight_decay=0.1)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedQuestion:
    """What is timed."""

    model: str
    device: str | None
    micro_batch: int
    sequence_length: int
    layers: int | None
    precision: str
    steps: int
    capture: CaptureMode = "auto"  # our blocks as graphs
    lora: int | None = None  # rank of adapters on every linear layer; the rest is frozen
    base: Base = "wide"  # how frozen weights are held
    recompute: bool = False  # blocks keep their inputs alone

    @property
    def title(self) -> str:
        """What a table says of itself."""
        layers = f", {many(self.layers, 'layer')}" if self.layers else ""
        adapters = f", LoRA of rank {self.lora}" if self.lora else ""
        base = f" on {self.base}" if self.base != "wide" else ""
        return (
            f"{self.model}{layers}{adapters}{base}, "
            f"{self.micro_batch} × {self.sequence_length} tokens, {self.precision}"
        )

    def config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        config = dict(catalog_config(self.model))
        return config | ({"num_hidden_layers": self.layers} if self.layers else {})

    def spec(self) -> ModelSpec:
        """Return the model."""
        whole = self.layers is None
        spec = load_model(self.model) if whole else read_config(self.config(), self.model)
        if self.lora is None:
            return spec
        return tuned(spec, Tuning(adapter=AdapterSpec(rank=self.lora), base=self.base))

    def plan(self, spec: ModelSpec) -> Plan:
        """Return the plan of the one chip."""
        blocks = ((1, spec.head_unit),) if self.recompute else ()
        return plan_alone(
            spec,
            sequence_length=self.sequence_length,
            micro_batch=self.micro_batch,
            precision=PRECISIONS[self.precision],
            recompute=Recompute(full=blocks),
        )


class StepForecast(NamedTuple):
    """What the planner says of a step before it runs."""

    bytes: float  # does not depend on the chip
    step_s: float | None  # None: no profile of the chip ships


def predicted(plan: Plan, spec: ModelSpec, accelerator: Accelerator) -> StepForecast:
    """Return what a planner takes a step on this chip to need."""
    known = next((p for p in shipped_profiles().values() if p.chip == accelerator.chip), None)
    pools = local_cluster().pools
    own = next((pool for pool in pools if pool.chip.name == accelerator.chip), pools[0])
    cluster = Cluster(name="here", pools=(dataclasses.replace(own, name="here"),))
    sources = Sources(profiles=() if known is None else (known,))
    estimated = estimate(plan, spec, cluster, sources)
    memory = estimated.memory[0]
    step_s = None if known is None else estimated.step_seconds
    return StepForecast(memory.total - memory.runtime, step_s)


def _require_room(asked: SpeedQuestion, need: float, accelerator: Accelerator) -> None:
    """Refuse what the device cannot hold: a host would take all memory, then end the process."""
    total = accelerator.memory().total
    if need > total:
        raise InputError(
            f"{asked.title}: takes about {bytes_text(need)}, but {accelerator.chip} has "
            f"{bytes_text(total)}; give --layers, --recompute, or a smaller --micro-batch or "
            "--sequence-length"
        )


def our_speed(asked: SpeedQuestion, say: Say, *, breakdown: bool = False) -> dict[str, Any]:
    """Time the engine."""
    say(f"{asked.title}: tutti")
    gc.collect()
    accelerator, spec = open_accelerator(asked.device), asked.spec()
    accelerator.empty_cache()
    if refusal := length_refusal(spec, asked.sequence_length):
        raise InputError(f"--sequence-length: {refusal}")
    plan = asked.plan(spec)
    expected = predicted(plan, spec, accelerator)
    _require_room(asked, expected.bytes, accelerator)
    accelerator.reset_peak()
    chosen = CaptureSettings(mode=asked.capture, say=say)
    engine = Engine(plan, spec, 0, accelerator, NoLinks(), clip_norm=None, capture=chosen)
    initialize(engine.model, on_device=True)
    engine.take_masters()
    batches = [_tokens(asked, spec, accelerator, i) for i in range(WARM_UP + asked.steps)]
    lengths = [asked.sequence_length] * asked.micro_batch
    first = Batch.of(spec, batches[0][0].flatten(), lengths)

    def step(index: int) -> float:
        tokens, targets = (each.flatten() for each in batches[index])
        batch = Batch.of(spec, tokens, lengths, targets_t=targets, like=first)  # as a feeder does
        return engine.step(lambda _: batch, SETTINGS).loss

    row = _timed("tutti", asked, spec, accelerator, step)
    row |= {"predicted_bytes": expected.bytes, "predicted_s": expected.step_s}
    if breakdown:
        step(0)
        accelerator.synchronize()
        row["breakdown"] = _where(engine)
        rates = best_rates(accelerator, TORCH_DTYPES[plan.job.precision.stream])
        spent = kernel_seconds(lambda: step(0), accelerator)
        row["parts"] = [dataclasses.asdict(part) for part in parts(spent, spec, plan.job, rates)]
    return row


def _where(engine: Engine) -> dict[str, float]:
    """Return seconds by kind of instruction and of unit."""
    spans = engine.recorder.spans()
    head = engine.spec.head_unit
    seconds: dict[str, float] = {}
    for i, entry in enumerate(engine.instructions):
        part = "embedding" if entry.start == 0 else "head" if entry.stop > head else "blocks"
        if entry.stop - entry.start > head:
            part = "all units"
        name = f"{entry.op.value} {part}" if entry.stop else entry.op.value
        seconds[name] = seconds.get(name, 0.0) + float(spans.end[i] - spans.start[i])
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def hugging_face_speed(asked: SpeedQuestion, say: Say, *, liger: bool = False) -> dict[str, Any]:
    """Time the plain loop: from_config, SDPA, loss by labels, fused AdamW on the weights held.

    With `liger`, its kernels take the place of transformers' own, for the rest of the process.
    """
    precision = PRECISIONS[asked.precision]
    who = "transformers + Liger" if liger else "transformers"
    who += " + peft" if asked.lora else ""
    who += ", no masters" if precision.master else ""
    say(f"{asked.title}: {who}")
    gc.collect()
    accelerator, spec = open_accelerator(asked.device), asked.spec()
    accelerator.empty_cache()
    accelerator.reset_peak()
    try:
        model, attention = _peer_model(asked, accelerator)
    except (ImportError, ValueError, KeyError, torch.OutOfMemoryError) as error:
        return {"who": who, **_failure(error)}
    try:
        if liger and not _with_liger(model):
            return {"who": who, "failed": f"has no kernels for {model.config.model_type}"}
    except ImportError as error:
        return {"who": who, **_failure(error)}
    if asked.lora is not None:
        if importlib.util.find_spec("peft") is None:
            return {"who": who, "failed": "peft is not installed"}
        model = _with_adapters(model, asked.lora)
    model.train()
    if asked.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=SETTINGS.learning_rate, betas=(SETTINGS.beta1, SETTINGS.beta2),
        eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay, fused=True,
    )  # fmt: skip
    batches = [_tokens(asked, spec, accelerator, i) for i in range(WARM_UP + asked.steps)]

    def step(index: int) -> float:
        tokens, _ = batches[index]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    try:
        return {**_timed(who, asked, spec, accelerator, step), "attention": attention}
    except torch.OutOfMemoryError as error:
        return {"who": who, **_failure(error)}


def _failure(error: Exception) -> dict[str, str]:
    if isinstance(error, torch.OutOfMemoryError):
        return {"failed": "out of memory"}
    return {"failed": (str(error).strip().splitlines() or [type(error).__name__])[0]}


def speeds(
    asked: SpeedQuestion, say: Say, *, peers: bool, breakdown: bool = False
) -> list[dict[str, Any]]:
    """Time the engine and, with `peers`, transformers as it is and with Liger's kernels."""
    rows = [our_speed(asked, say, breakdown=breakdown)]
    if peers and asked.base == "wide":  # transformers rounds frozen weights by other packages
        rows.append(hugging_face_speed(asked, say))
        if importlib.util.find_spec("liger_kernel") is not None:
            rows.append(hugging_face_speed(asked, say, liger=True))
    for row in rows[1:]:
        if "failed" not in row:
            row["slower"] = row["step_s"] / rows[0]["step_s"]
    return rows


def _peer_model(asked: SpeedQuestion, accelerator: Accelerator) -> tuple[Any, str]:
    """Return transformers' model on the device, and its attention: SDPA where it has that."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = _with_factor(asked.config())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    dtype = TORCH_DTYPES[PRECISIONS[asked.precision].parameters]
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(accelerator.device):
        try:
            return make(config, attn_implementation="sdpa", dtype=dtype), "sdpa"
        except ValueError:  # gpt-oss has sinks, which SDPA does not know
            return make(config, attn_implementation="eager", dtype=dtype), "eager"


def _with_factor(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose scaled positions have the factor that transformers asks for."""
    scaling = values.get("rope_scaling") or {}
    original = scaling.get("original_max_position_embeddings")
    if not original or "factor" in scaling:
        return values
    factor = values["max_position_embeddings"] / original
    return {**values, "rope_scaling": {**scaling, "factor": factor}}


def _with_liger(model: Any) -> bool:
    """Put Liger's kernels into a model; tell whether it has some for it."""
    from liger_kernel.transformers import monkey_patch

    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    monkey_patch._apply_liger_kernel_to_instance(model=model)
    return True


def _with_adapters(model: Any, rank: int) -> Any:
    """Freeze a model and let peft train adapters of every linear layer, in the model's dtype."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=int(AdapterSpec().alpha),
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def _tokens(
    asked: SpeedQuestion, spec: ModelSpec, accelerator: Accelerator, index: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    size = (asked.micro_batch, asked.sequence_length + 1)
    tokens = torch.randint(spec.vocab, size, generator=generator).to(accelerator.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _timed(
    who: str,
    asked: SpeedQuestion,
    spec: ModelSpec,
    accelerator: Accelerator,
    step: Callable[[int], float],
) -> dict[str, Any]:
    """Run steps that follow each other as in training; one lasts from one loss to the next.

    Nobody waits for the chip in between: it may still update weights when the next step begins.
    """
    ends, loss = [], 0.0
    for index in range(WARM_UP + asked.steps):
        loss = step(index)
        ends.append(time.perf_counter())
    accelerator.synchronize()
    seconds = [stop - start for start, stop in itertools.pairwise(ends[WARM_UP - 1 :])]
    median = statistics.median(seconds)
    tokens = asked.micro_batch * asked.sequence_length
    work = flops_per_token(spec, asked.sequence_length) * tokens
    peak = _peak_flops(accelerator, PRECISIONS[asked.precision].compute)
    return {
        "who": who,
        **dataclasses.asdict(asked),
        "step_s": median,
        "spread": (max(seconds) - min(seconds)) / median,
        "tokens_per_s": tokens / median,
        "mfu": None if peak is None else work / median / peak,
        "peak_bytes": accelerator.memory().peak,
        "loss": loss,
    }


def _peak_flops(accelerator: Accelerator, dtype: Dtype) -> float | None:
    """Return the catalog's dense peak of this chip, if it knows the chip."""
    chips = {chip.name: chip for chip in shipped().chips.values()}
    chip = chips.get(accelerator.chip)
    return None if chip is None else chip.peak_flops(dtype, fallback=True)

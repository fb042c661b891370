"""The training steps that are compared on processors: tutti's, and torch's own ways.

Both train a Llama of 16 million parameters in float32 with AdamW, on the same tokens, one thread
for each rank. torch's side is transformers' model in a plain loop; on several ranks in DDP, or in
FSDP2 with each block sharded by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator import open_accelerator
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.comm import Communicator
from tutti.models import read_config
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_model
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.plan import ClusterReference, Pipeline, Plan, Replica, Stage, Synchronisation
from tutti.ranks.single_rank import NoLinks
from tutti.train.engine.engine import Engine
from tutti.train.sync.comm_links import CommLinks

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 704, "vocab_size": 16384,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SETTINGS = AdamSettings(learning_rate=1e-4, weight_decay=0.1)
Step = Callable[[], float]  # trains once, and returns the loss of this rank's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How ranks train together, and what torch calls it."""

    name: str
    ranks: int
    shard_level: int
    peer: str


WAYS = (
    Way(name="one process", ranks=1, shard_level=0, peer="plain loop"),
    Way(name="two replicas", ranks=2, shard_level=0, peer="DDP"),
    Way(name="shard level 3", ranks=2, shard_level=3, peer="FSDP2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A rank's part of a step."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens that a rank takes in a step."""
        return self.sequences * self.length

    def of_rank(self, rank: int) -> Tensor:
        """Return a rank's tokens, with those to predict after the last."""
        shape = (self.sequences, self.length + 1)
        return torch.randint(16384, shape, generator=torch.Generator().manual_seed(rank))


def our_step(way: Way, size: Size, rank: int, comm: Communicator | None) -> Step:
    """Return a step of the engine."""
    spec = read_config(CONFIG, "llama-16m")
    plan = _plan(way, size, spec)
    links = NoLinks() if comm is None else CommLinks(comm, plan, spec)
    engine = Engine(plan, spec, rank, open_accelerator("cpu"), links, clip_norm=None)
    initialize(engine.model)
    engine.take_masters()
    tokens = size.of_rank(rank)
    own, targets = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
    batch = Batch.of(spec, own, [size.length] * size.sequences, targets_t=targets)
    return lambda: engine.step(lambda _: batch, SETTINGS).loss


def their_step(way: Way, size: Size, rank: int) -> Step:
    """Return a step of torch's; process groups are there where there are several ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in CONFIG.items() if name != "model_type"}
    config = AutoConfig.for_model("llama", **values)
    config.use_cache = False
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model = _spread(model, way)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.learning_rate, betas=(SETTINGS.beta1, SETTINGS.beta2),
        eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay, fused=True,
    )  # fmt: skip
    tokens = size.of_rank(rank)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _spread(model: Any, way: Way) -> Any:
    """Return the model as torch trains it on the ranks of a way."""
    if way.ranks == 1:
        return model
    if way.shard_level == 0:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (way.ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _plan(way: Way, size: Size, spec: ModelSpec) -> Plan:
    """Return a plan of equal replicas, one for each rank."""
    chips = ChipSet.of(f"here/0/0-{way.ranks - 1}" if way.ranks > 1 else "here/0/0")
    replicas = (Replica(chips=chips, count=way.ranks, sequences=size.sequences),)
    total = way.ranks * size.sequences
    stage = Stage(units=((0, spec.num_units),), replicas=replicas)
    whole = Synchronisation(units=(0, spec.num_units), shard_level=way.shard_level)
    return Plan(
        model=refer_to_model(spec),
        cluster=ClusterReference(name="here"),
        job=Job(
            sequence_length=size.length, global_batch=total, precision=PRECISIONS["fp32"]
        ),
        pipelines=(Pipeline(micro_batch=total, micro_batches=1, stages=(stage,)),),
        synchronisation=(whole,) if way.ranks > 1 else (),
    )  # fmt: skip

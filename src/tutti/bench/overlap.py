"""`tutti bench overlap`: a block's forward and backward over rate-limited wires, products timed.

Three runs of the same pieces take turns: beside each other, one after the other (which gives the
share of every collective), and without any message (which gives compute). What the second takes
longer than the third is communication. A sample is the time of the slowest rank, a figure the least
of samples: what else the machine does can only add to a timer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.bench.collectives import profile_links
from tutti.bench.emulated_network import BedSpec, bed_ranks
from tutti.bench.overlap_price import Pricing, Subject, could_hide
from tutti.bench.timed_products import Clocked, SilentProducts, TimedOperators
from tutti.comm.communicator import Communicator
from tutti.comm.connect import connect
from tutti.comm.edge_rates import measured_links
from tutti.cost.arrays import Shape
from tutti.launch.secret import Secret, new_secret
from tutti.models import read_config
from tutti.models.spec import ModelSpec
from tutti.nn import Batch, Model, Ranks, initialize
from tutti.nn.parallel.groups import Group, InTurn, shares
from tutti.ranks.comm_group import CommGroup

_DOCUMENT = 64  # tokens
_TIMEOUT_S = 120.0
_BLOCK = 1  # the unit that is run


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to measure."""

    ranks: int
    subject: Subject = "products"
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int = 1024
    hidden: int = 1024
    balance: float = 1.3  # seconds of products per second of the collectives beside them
    rate: float = 100.0  # Mbit/s of every wire
    repeats: int = 3

    @property
    def bed(self) -> BedSpec:
        """Hosts of one rank each."""
        return BedSpec(name="overlap", nics=((self.rate,),) * self.ranks)

    def spec(self) -> ModelSpec:
        """Return a model of one block."""
        config: dict[str, Any] = {
            "model_type": "llama", "vocab_size": 64, "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 11 // 4, "num_hidden_layers": 1,
            "num_attention_heads": self.hidden // 64, "num_key_value_heads": self.hidden // 64,
            "max_position_embeddings": _DOCUMENT, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }  # fmt: skip
        if self.subject == "experts":
            config |= {
                "model_type": "qwen2_moe", "num_experts": 2 * self.ranks, "num_experts_per_tok": 2,
                "moe_intermediate_size": self.hidden // 4, "router_aux_loss_coef": 0.0,
                "shared_expert_intermediate_size": self.hidden,
            }  # fmt: skip
        spec = read_config(config, "overlap")
        # a gate of one column would be a tile wide, and stand beside the way back from experts
        blocks = (
            block
            if block.moe is None
            else replace(block, moe=replace(block.moe, shared_gate=False))
            for block in spec.blocks
        )
        return replace(spec, blocks=tuple(blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """One number of chunks; seconds of a forward and a backward pass, weights included."""

    ranks: int
    subject: Subject
    chunks: int
    step_s: float  # pieces beside each other
    in_turn_s: float  # the same pieces one after the other
    compute_s: float
    communication_s: float
    could_hide_s: float
    priced_exposed_s: float
    overrun: float  # lateness of the host, as a part of the declared time

    @property
    def exposed_s(self) -> float:
        """What the collectives add to compute."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def hidden_s(self) -> float:
        """What they do not."""
        return self.communication_s - self.exposed_s

    @property
    def hidden_share(self) -> float:
        """The hidden part of what could be hidden."""
        return self.hidden_s / self.could_hide_s if self.could_hide_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapOutcome:
    """Rows, the measured link and what each wire carried."""

    rows: tuple[OverlapRow, ...]
    latency_s: float
    bandwidth: float
    same_bits: bool  # pieces beside each other and in turn, with real products
    wires: dict[str, int]


def overlap_on_bed(question: Question) -> OverlapOutcome:
    """Measure on emulated wires."""
    spec = question.bed
    with bed_ranks(spec) as (bed, ranks), tempfile.TemporaryDirectory() as folder:
        before = bed.sent_bytes()
        arguments = (spec, folder, question, Secret(new_secret().encode()))
        answers = ranks.run(_bed_rank, range(spec.world), *arguments, timeout_s=3600)
        after = bed.sent_bytes()
    rows, latency_s, bandwidth = answers[0][:3]
    return OverlapOutcome(
        rows=rows,
        latency_s=latency_s,
        bandwidth=bandwidth,
        same_bits=all(answer[3] for answer in answers),
        wires={name: after[name] - before[name] for name in after},
    )


def _bed_rank(
    rank: int, spec: BedSpec, folder: str, question: Question, secret: Secret
) -> tuple[tuple[OverlapRow, ...], float, float, bool]:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/overlap", spec.world)
    comm = connect(
        store, rank, spec.world, place=spec.place(rank), timeout_s=_TIMEOUT_S, secret=secret
    )
    try:
        (link,) = profile_links(comm)
        comm.chooser.use(measured_links(comm.chooser.links, (link,)))
        pricing = Pricing.of(
            question.subject, Shape.of(question.spec(), 0), ranks=question.ranks,
            tokens=question.tokens, link=link, balance=question.balance,
        )  # fmt: skip
        rows = tuple(_row(comm, question, chunks, pricing) for chunks in question.chunks)
        same = all(same_bits(comm, question.subject, chunks) for chunks in question.chunks)
        return rows, link.latency_s, link.bandwidth, same
    finally:
        comm.close()


# --- one block -------------------------------------------------------------------------------


class OverlapRun:
    """A block on one rank with its tokens, forward and backward."""

    def __init__(self, question: Question, group: Group, chunks: int, operators: Any) -> None:
        spec, tokens = question.spec(), question.tokens
        own = tokens
        if question.subject == "products":
            parallel = Ranks(tensor=group, sequence_parallel=True, overlap_chunks=chunks)
            own = shares(tokens, group.size)[group.rank]
        else:
            counts = shares(spec.num_experts, group.size)
            parallel = Ranks(experts=group, expert_counts=counts)
        self.model = Model(spec, operators, parallel=parallel, units=[_BLOCK], dtype=torch.bfloat16)
        initialize(self.model, seed=1, deviation=0.05)
        generator = torch.Generator().manual_seed(group.rank)
        self._x, self._gradient = (
            torch.randn((own, spec.hidden), generator=generator).to(torch.bfloat16)
            for _ in range(2)
        )
        lengths = [min(_DOCUMENT, tokens - at) for at in range(0, tokens, _DOCUMENT)]
        self._batch = Batch.of(spec, torch.zeros(tokens, dtype=torch.long), lengths)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Return the output and the input's gradient; the weights' are added where they lie."""
        x, later = self._x.clone().requires_grad_(), WeightGradients()
        y, _ = self.model.stream(x, self._batch, later)
        torch.autograd.backward([y], [self._gradient])
        later.run()
        assert x.grad is not None
        return y.detach(), x.grad

    def gradients(self) -> list[Tensor]:
        """Return the weights' gradients, and forget them."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for parameter in self.model.parameters():
            parameter.grad = None
        return gradients


def same_bits(
    comm: Communicator, subject: Subject, chunks: int, *, tokens: int = 90, hidden: int = 256
) -> bool:
    """Tell whether real products beside their collectives give the bits of those in turn."""
    asked = Question(ranks=comm.size, subject=subject, tokens=tokens, hidden=hidden)
    group, results = CommGroup(comm), []
    for own in (group, InTurn(group)):
        run = OverlapRun(asked, own, chunks, Operators("cpu"))
        results.append([*run(), *run.gradients()])
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# --- figures ---------------------------------------------------------------------------------


def _row(comm: Communicator, question: Question, chunks: int, pricing: Pricing) -> OverlapRow:
    real = CommGroup(comm)
    clocked, operators = Clocked(real), TimedOperators(Operators("cpu"), pricing.product_seconds)
    groups: tuple[Group, ...] = (real, clocked, SilentProducts(real))
    runs = [OverlapRun(question, group, chunks, operators) for group in groups]
    samples: list[list[float]] = [[], [], []]
    notes: list[list[float]] = []
    for repeat in range(question.repeats + 1):
        for run, sample in zip(runs, samples, strict=True):
            clocked.seconds.clear()
            seconds = _timed(comm, run)
            run.gradients()
            if repeat:  # the first warms up
                sample.append(seconds)
                notes += [list(clocked.seconds)] if run is runs[1] else []
    step_s, in_turn_s, compute_s = (min(sample) for sample in samples)
    communication_s = max(0.0, in_turn_s - compute_s)
    noted = comm.all_reduce(torch.tensor(notes, dtype=torch.float64)).wait().median(0).values
    each = (noted * (communication_s / float(noted.sum()))).tolist()
    return OverlapRow(
        ranks=question.ranks,
        subject=question.subject,
        chunks=chunks,
        step_s=step_s,
        in_turn_s=in_turn_s,
        compute_s=compute_s,
        communication_s=communication_s,
        could_hide_s=min(compute_s, could_hide(each, pricing.pairs(chunks))),
        priced_exposed_s=pricing.exposed_s(chunks),
        overrun=operators.overrun.share,
    )


def _timed(comm: Communicator, call: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank."""
    comm.barrier().wait()
    start = time.perf_counter()
    call()
    mine = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(comm.all_reduce(mine, "max").wait())

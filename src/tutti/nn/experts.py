"""A layer of experts: a router, the experts each token uses, and shared ones that all use.

Two ways to spread it. Without expert groups every tensor-parallel rank has a slice of every expert
and sees all tokens. With them a rank has whole experts; each rank routes its own share of tokens
and sends rows to the ranks that hold their experts, which send the results back. Shared experts are
computed meanwhile: their first half while rows are on their way, their second while results are.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.quantised import QuantisedWeight
from tutti.accelerator.reference.experts import Routing
from tutti.models import MoeSpec
from tutti.nn.balance import balance_loss
from tutti.nn.batch import Batch
from tutti.nn.linear import Linear
from tutti.nn.low_rank import LowRank
from tutti.nn.mlp import Mlp
from tutti.nn.parallel.collectives import Journey, enter, leave, own_share, rejoin
from tutti.nn.parallel.groups import ParallelContext, own_experts, shares
from tutti.nn.storage import Holder, Maker


class Router(Linear):
    """Chooses each token's experts."""

    correction: Tensor | None
    may_narrow = False  # its choices follow from small differences
    quantisable = ()

    def __init__(self, make: Maker, spec: MoeSpec) -> None:
        # beside expert groups tensor-parallel ranks share out the tokens, whatever the rest does
        super().__init__(make, "moe.router")
        self.spec = spec
        self.hold("correction", make, "moe.router.correction")


class ExpertMlp(Holder):
    """The feed-forward layers of the experts that a rank holds."""

    up_weight: Tensor
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    quantisable = ("up_weight", "down_weight")

    def __init__(self, make: Maker, spec: MoeSpec) -> None:
        super().__init__()
        self.operators, self.spec = make.operators, spec
        names = ("moe.experts.gate", "moe.experts.up") if spec.gated else ("moe.experts.up",)
        for kind in ("weight", "bias"):
            self.hold(f"up_{kind}", make, *(f"{name}.{kind}" for name in names))
            self.hold(f"down_{kind}", make, f"moe.experts.down.{kind}")
        self.low_rank_up = LowRank.of(make, names)
        self.low_rank_down = LowRank.of(make, ("moe.experts.down",))
        sliced = not make.parallel.expert_counts and make.parallel.tensor.size > 1
        # of sliced experts the ranks' outputs are summed: one rank adds the bias
        self.adds_bias = not sliced or make.parallel.tensor.rank == 0

    @property
    def narrow_weights(self) -> list[Tensor]:
        """The weights that are multiplied in 8 bits."""
        return [weight for weight in (self.up_weight, self.down_weight) if self._narrows(weight)]

    def _narrows(self, weight: Tensor) -> bool:
        if not weight.shape[0]:
            return False
        row = weight.new_empty(1, weight.shape[-1])
        return self.operators.narrows("narrow_grouped_linear", row, weight, row)

    def forward(self, rows: Tensor, counts: Tensor, later: WeightGradients | None) -> Tensor:
        """Return the outputs of rows that stand in the order of their experts."""
        spec, operators = self.spec, self.operators
        if not self.up_weight.shape[0]:  # a rank without experts gets no rows
            return rows
        x = operators.grouped_linear(
            rows, self.up_weight, counts, self.up_bias, later=later, may_narrow=True
        )
        if self.low_rank_up is not None:
            x = self.low_rank_up.added_by_experts(x, rows, counts, later)
        if spec.gated:
            x = operators.gated_activation(
                x, kind=spec.activation, alpha=spec.activation_alpha, limit=spec.activation_limit
            )
        else:
            x = operators.activation(x, kind=spec.activation)
        bias = self.down_bias if self.adds_bias else None
        y = operators.grouped_linear(
            x, self.down_weight, counts, bias, later=later, may_narrow=True
        )
        if self.low_rank_down is None:
            return y
        return self.low_rank_down.added_by_experts(y, x, counts, later)


class Experts(Holder):
    """Router, experts and shared experts."""

    def __init__(self, make: Maker, spec: MoeSpec) -> None:
        super().__init__()
        self.operators, self.parallel, self.spec = make.operators, make.parallel, spec
        self.own = own_experts(make.parallel, spec.experts)
        self.router = Router(make, spec)
        self.experts = ExpertMlp(make, spec)
        self.shared = self.shared_gate = None
        if spec.shared_hidden:
            self.shared = Mlp(make, "moe.shared", spec.activation, gated=spec.gated)
            if spec.shared_gate:
                self.shared_gate = Linear(make, "moe.shared_gate")

    def forward(
        self, x: Tensor, batch: Batch, later: WeightGradients | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output, of this rank's tokens, and the balancing loss if any."""
        spread = bool(self.parallel.expert_counts)
        own = own_share(x, self.parallel) if spread else x
        routing = self.operators.route(
            self.router(own, later),
            self.spec.router,
            self.spec.experts_per_token,
            self.router.correction,
        )
        loss = None
        router = self.spec.router
        # without gradients too: what is recomputed runs so first
        if router.balance_loss_on and router.balance_loss and batch.cache is None:
            loss = balance_loss(routing, self.spec, batch, self.parallel, spread=spread)
        if spread:
            return self._spread(x, own, routing, batch.num_tokens, later), loss
        y = self._sliced(x, routing.weights, routing.experts, batch.num_tokens, later)
        if self.shared is not None:
            y = y + self._weighed(self.shared(x, batch.num_tokens, later), x, later)
        return y, loss

    @property
    def asks_host(self) -> bool:
        """Whether the host must read how many rows each rank or expert gets."""
        if self.parallel.expert_counts:
            return True
        weight: Tensor | QuantisedWeight = self.experts.up_weight
        row = torch.empty(1, weight.shape[-1], device=weight.device)
        if isinstance(weight, QuantisedWeight) and weight.widens:
            return True
        if isinstance(weight, QuantisedWeight):
            return self.operators.chosen("quantised_grouped_linear", row, weight, row).asks_host
        row = row.to(weight.dtype)
        narrow = self.experts._narrows(weight)
        kind = "narrow_grouped_linear" if narrow else "grouped_linear"
        return self.operators.chosen(kind, row, weight, row).asks_host

    def _weighed(self, shared: Tensor, x: Tensor, later: WeightGradients | None) -> Tensor:
        """Return the shared experts' output, times its gate's where it has one."""
        if self.shared_gate is None:
            return shared
        return torch.sigmoid(self.shared_gate(x, later)) * shared

    def _sliced(
        self,
        x: Tensor,
        weights_tk: Tensor,
        experts_tk: Tensor,
        num_tokens: int,
        later: WeightGradients | None,
    ) -> Tensor:
        """Every rank: a slice of every expert, all tokens."""
        x = enter(x, self.parallel, num_tokens)
        weights_tk = enter(weights_tk, self.parallel, num_tokens)
        if self.parallel.sequence_parallel and self.parallel.tensor.size > 1:
            rows = shares(num_tokens, self.parallel.tensor.size)
            experts_tk = self.parallel.tensor.all_gather(experts_tk.contiguous(), rows)
        moved = self.operators.permute(x, experts_tk, self.spec.experts)
        y = self.experts(moved.rows, moved.counts, later)
        return leave(self.operators.unpermute(y, moved.order, weights_tk), self.parallel)

    def _spread(
        self,
        x: Tensor,
        own: Tensor,
        routing: Routing,
        num_tokens: int,
        later: WeightGradients | None,
    ) -> Tensor:
        """Every rank: some experts whole, its own tokens; rows travel there and back."""
        moved = self.operators.permute(own, routing.experts, self.spec.experts)
        route = _Route.of(moved.counts, self.parallel, self.own)
        group = self.parallel.experts
        shared: Tensor | None = None
        there = Journey(group, route.send, route.receive).depart(moved.rows)
        if self.shared is not None:
            half = self.shared.widened(x, num_tokens, later)
        rows = there.arrive()
        # they come in order of rank, each rank's in order of expert
        sorted_ = self.operators.permute(rows, route.experts_n.unsqueeze(1), len(self.own))
        y = self.experts(sorted_.rows, sorted_.counts, later)
        ones = torch.ones(rows.shape[0], 1, dtype=y.dtype, device=y.device)
        y = self.operators.unpermute(y, sorted_.order, ones)
        back = Journey(group, route.receive, route.send).depart(y)
        if self.shared is not None:
            shared = self._weighed(self.shared.narrowed(half, later), x, later)
        y = self.operators.unpermute(back.arrive(), moved.order, routing.weights)
        y = rejoin(y, self.parallel, num_tokens)
        return y if shared is None else y + shared


class _Route(NamedTuple):
    """How many rows go where, and what came."""

    send: list[int]
    receive: list[int]
    experts_n: Tensor  # the expert of each row that came, counted from this rank's first

    @classmethod
    def of(cls, counts_e: Tensor, parallel: ParallelContext, own: range) -> _Route:
        """Tell each rank how many rows its experts get."""
        group, held = parallel.experts, parallel.expert_counts
        ends = list(itertools.accumulate(held, initial=0))
        each = counts_e.tolist()
        send = [sum(each[first:last]) for first, last in itertools.pairwise(ends)]
        came = group.all_to_all(counts_e, held, [len(own)] * group.size)
        came_re = came.view(group.size, len(own))
        experts_re = torch.arange(len(own), device=counts_e.device).expand_as(came_re)
        experts_n = torch.repeat_interleave(experts_re.flatten(), came_re.flatten())
        return cls(send, came_re.sum(1).tolist(), experts_n)

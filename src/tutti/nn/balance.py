"""The load-balancing loss of a router, defined per sequence.

For a sequence of T tokens with K of E experts each: fᵢ = E ÷ (K·T) · (choices of expert i), Pᵢ =
the mean of the tokens' probabilities of i, loss = coefficient · Σᵢ fᵢ·Pᵢ, where the coefficient is
the layer's share of the model's (`RouterSpec.balance_share`). What is returned is the
sum of that over the sequences, each times its tokens, like the sum of token losses: divided by the
same number of tokens it is the mean. Only the counts, which have no gradient, need the ranks that
share a sequence, so that no plan changes the training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.reference.experts import Routing
from tutti.models import MoeSpec
from tutti.nn.batch import Batch
from tutti.nn.parallel.groups import ParallelContext, shares


def balance_loss(
    routing: Routing, spec: MoeSpec, batch: Batch, parallel: ParallelContext, *, spread: bool
) -> Tensor:
    """Return this rank's tokens' part of the loss.

    Ranks that route different tokens add theirs up. Tensor-parallel ranks that route the same ones
    each return all of it.
    """
    sequence_t = batch.sequence_t
    group = parallel.tensor
    divided = group.size > 1 and (parallel.sequence_parallel or spread)
    if divided:
        rows = shares(batch.num_tokens, group.size)
        first = sum(rows[: group.rank])
        sequence_t = sequence_t[first : first + rows[group.rank]]
    experts, sequences = spec.experts, len(batch.lengths)
    slots_tk = sequence_t.unsqueeze(1) * experts + routing.experts
    counts = torch.zeros(sequences * experts, dtype=torch.long, device=slots_tk.device)
    counts.scatter_add_(0, slots_tk.flatten(), torch.ones_like(slots_tk).flatten())
    if divided:
        counts = group.all_reduce(counts)
    if parallel.context.size > 1:
        counts = parallel.context.all_reduce(counts)
    probabilities_te = routing.probabilities
    if spec.router.scores == "sigmoid":
        probabilities_te = probabilities_te / probabilities_te.sum(-1, keepdim=True)
    counts_se = counts.view(sequences, experts).to(probabilities_te.dtype)
    share_se = counts_se * experts / (spec.experts_per_token * batch.lengths_s.unsqueeze(1))
    coefficient = spec.router.balance_loss * spec.router.balance_share
    return coefficient * (share_se[sequence_t] * probabilities_te).sum()

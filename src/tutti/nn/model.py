"""`Model`: some units, which are a whole model or a pipeline stage of one.

An interleaved stage has several ranges of units: whoever runs it runs unit by unit (`by_number`).
Those that follow each other can be called as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.errors import InputError
from tutti.models import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.block import Block
from tutti.nn.build import Unit, build_unit
from tutti.nn.embedding import Embedding
from tutti.nn.experts import ExpertMlp
from tutti.nn.head import Head
from tutti.nn.linear import Linear
from tutti.nn.parallel.collectives import enter
from tutti.nn.parallel.groups import ALONE, ParallelContext
from tutti.nn.storage import Logical, logical_tensors
from tutti.plan.plan import ContextKind


class Output(NamedTuple):
    """What a stage computes of a batch; sums over tokens, to be divided by the global count."""

    x: Tensor | None  # the stream, for the next stage; None after the head
    loss: Tensor | None  # Σ weight · loss, after the head
    losses_t: Tensor | None  # each token's, without a gradient
    predictions_n: Tensor | None  # the sum of each extra prediction head
    balance: Tensor | None  # balancing losses of this stage's routers, coefficient included


class Model(nn.Module):
    """Units of a model by number; all of them by default.

    `tied`: where both ends of tied weights are here, they are one parameter. `narrow` says which
    units multiply in 8 bits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        operators: Operators,
        *,
        units: Sequence[int] | None = None,
        parallel: ParallelContext = ALONE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        context_kind: ContextKind = ContextKind.ALL_GATHER,
        tied: bool = True,
        narrow: Callable[[int], bool] = lambda _unit: False,
    ) -> None:
        super().__init__()
        own = range(spec.num_units) if units is None else units
        self.spec, self.operators, self.parallel = spec, operators, parallel
        narrowed = operators.narrowed() if any(map(narrow, own)) else operators
        self.units = nn.ModuleDict(
            {
                str(unit): build_unit(
                    spec,
                    unit,
                    narrowed if narrow(unit) else operators,
                    parallel=parallel,
                    dtype=dtype,
                    device=device,
                    context_kind=context_kind,
                )
                for unit in own
            }
        )
        if tied:
            self._tie()

    def _tie(self) -> None:
        """Let the head use the embedding's weight, where both are here."""
        embedding, head = self.embedding, self.head
        if embedding is None or head is None:
            return
        if self.spec.head.tied:
            head.logits.weight = embedding.token.weight
        if head.token is not None:
            head.token.weight = embedding.token.weight

    @property
    def embedding(self) -> Embedding | None:
        """Unit 0, if it is here."""
        return cast(Embedding, self.units["0"]) if "0" in self.units else None

    @property
    def head(self) -> Head | None:
        """The last unit, if it is here."""
        name = str(self.spec.head_unit)
        return cast(Head, self.units[name]) if name in self.units else None

    def narrow_weights(self) -> list[Tensor]:
        """Return the weights that are multiplied in 8 bits wherever they are used."""
        holders = (m for m in self.modules() if isinstance(m, Linear | ExpertMlp))
        return [weight for holder in holders for weight in holder.narrow_weights]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that are here, in order."""
        return tuple(unit for unit in self.units.values() if isinstance(unit, Block))

    def by_number(self) -> dict[int, Unit]:
        """Return the modules by their unit."""
        return {int(name): cast(Unit, module) for name, module in self.units.items()}

    def logical_tensors(self) -> Iterator[Logical]:
        """Yield every tensor by its logical name, as far as this rank holds it; tied ones once."""
        seen: set[int] = set()
        for name, unit in self.units.items():
            own: set[int] = set()
            for logical in logical_tensors(unit, int(name)):
                if id(logical.owner) not in seen:
                    own.add(id(logical.owner))
                    yield logical
            seen |= own

    def tensors_of_units(self) -> dict[tuple[int, str], Logical]:
        """Return every tensor by its unit and its name there."""
        return {
            (int(unit), name): logical
            for logical in self.logical_tensors()
            for unit, _, name in [logical.name.partition(".")]
        }

    def stream(
        self, x: Tensor | None, batch: Batch, later: WeightGradients | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after the blocks, and their balancing loss if any."""
        own = sorted(self.by_number())
        if not own or own != list(range(own[0], own[0] + len(own))):
            raise InputError(
                f"{self.spec.name}: units {own} do not follow each other; run them one by one"
            )
        if self.embedding is not None:
            x = self.embedding(batch, later)
        if x is None:
            raise ValueError("a stage without the embedding needs the stream of the one before")
        if batch.cache is not None:
            return self._followed(x, batch), None
        balances = []
        for block in self.blocks:
            x, balance = block(x, batch, later)
            balances += [] if balance is None else [balance]
        assert x is not None
        return x, torch.stack(balances).sum() if balances else None

    def _followed(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the stream after the blocks, for inference."""
        added: Tensor | None = None
        for block in self.blocks:
            x, added = block.following(x, added, batch)
        return x if added is None else x + added

    def forward(
        self,
        x: Tensor | None,
        batch: Batch,
        later: WeightGradients | None = None,
        *,
        gradient_scale: float = 1.0,
    ) -> Output:
        """Return the stream after this stage, or the losses after the head.

        `later`: leave the linear layers' weight gradients there in backward (zero bubble).
        """
        x, balance = self.stream(x, batch, later)
        if self.head is None:
            return Output(x, None, None, None, balance)
        answer = self.head(x, batch, later, gradient_scale=gradient_scale)
        if answer.balance is not None:
            balance = answer.balance if balance is None else balance + answer.balance
        return Output(None, answer.loss, answer.losses_t, answer.predictions_n, balance)

    def logits(
        self, batch: Batch, x: Tensor | None = None, *, rows: Tensor | None = None
    ) -> Tensor:
        """Return the logits (T, V) of all tokens, or of the rows named."""
        if self.head is None:
            raise ValueError("a stage without the head has no logits")
        x, _ = self.stream(x, batch)
        if rows is None:
            return cast(Tensor, self.head.logits(self.head.hidden(x), batch.num_tokens))
        return self.head.logits.whole(self.head.logits.own(self.hidden(x, batch, rows)))

    def hidden(self, x: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """Return what the logits of some rows are made of, from the stream; on every rank alike."""
        assert self.head is not None
        if self.parallel.sequence_parallel:
            x = enter(x, self.parallel, batch.num_tokens)
        return self.head.hidden(x[rows])

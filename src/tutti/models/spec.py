"""`ModelSpec`: a decoder language model as units.

Unit 0 is the embedding, 1…L are the blocks, L+1 is the final norm with the head and any extra
prediction heads. Blocks that are equal are written once: `blocks` holds the distinct ones, `cycle`
says which follow each other, as (block, count) runs that repeat until all layers are filled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tutti import document, files
from tutti.document import Count, Natural
from tutti.errors import InputError
from tutti.models.parameters import Parameter, unit_parameters
from tutti.models.parts import BlockSpec, DropoutSpec, EmbeddingSpec, HeadSpec
from tutti.models.tuning import Tuning, layer_of, require_targets

NO_DROPOUT = DropoutSpec()
Cycle = tuple[tuple[Natural, Count], ...]


def cycle_of(indices: Sequence[int]) -> Cycle:
    """Return the shortest cycle of runs that repeats to `indices`."""
    period = next(
        p
        for p in range(1, len(indices) + 1)
        if all(indices[i] == indices[i - p] for i in range(p, len(indices)))
    )
    runs: list[tuple[int, int]] = []
    for index in indices[:period]:
        if runs and runs[-1][0] == index:
            runs[-1] = (index, runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return tuple(runs)


@functools.lru_cache(maxsize=256)
def _kind_table(cycle: Cycle, num_layers: int) -> tuple[str, ...]:
    blocks = (f"block {index}" for index in _layer_table(cycle, num_layers))
    return ("embedding", *blocks, "head")


@functools.lru_cache(maxsize=256)
def _tuned_kinds(spec: ModelSpec) -> tuple[str, ...]:
    """Return kinds that tell units apart of which other tensors are trained."""
    names: dict[object, str] = {}
    counts: dict[str, int] = {}
    for unit, kind in enumerate(_kind_table(spec.cycle, spec.num_layers)):
        key = (kind, spec.parameters(unit))
        if key not in names:
            counts[kind] = counts.get(kind, 0) + 1
            names[key] = kind if counts[kind] == 1 else f"{kind}, tuning {counts[kind]}"
    table = enumerate(_kind_table(spec.cycle, spec.num_layers))
    return tuple(names[kind, spec.parameters(unit)] for unit, kind in table)


@functools.lru_cache(maxsize=256)
def _layer_table(cycle: Cycle, num_layers: int) -> tuple[int, ...]:
    once = [index for index, count in cycle for _ in range(min(count, num_layers))]
    return tuple((once * (num_layers // len(once) + 1))[:num_layers])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A complete description of a decoder language model."""

    name: str
    model_type: str  # as Hugging Face calls it
    num_layers: Count
    hidden: Count
    vocab: Count
    max_length: Count  # of a sequence the model was made for
    embedding: EmbeddingSpec
    blocks: tuple[BlockSpec, ...]
    cycle: Cycle = ((0, 1),)
    head: HeadSpec
    dropout: DropoutSpec = NO_DROPOUT
    prediction_heads: Natural = 0  # extra (multi-token) prediction heads that are trained
    published_prediction_heads: Natural = 0  # what the checkpoint has; transformers drops them
    tuning: Tuning | None = None  # what of it is trained; None: everything
    answers: bool = False  # the loss is on whole answers: the head sees them twice
    taught: bool = False  # a teacher has a part in the loss
    teacher: ModelSpec | None = None  # which then lies beside the head

    def __post_init__(self) -> None:
        if not self.blocks or not self.cycle:
            raise ValueError("'blocks' and 'cycle' must not be empty")
        if any(count < 1 for _, count in self.cycle):
            raise ValueError("a run in 'cycle' must be at least 1 layer long")
        used = {index for index, _ in self.cycle}
        if used - set(range(len(self.blocks))):
            raise ValueError(
                f"'cycle' names block {max(used)}; there are only {len(self.blocks)} blocks"
            )

        if self.prediction_heads and self.embedding.dim != self.hidden:
            raise ValueError(
                f"extra prediction heads need an embedding as wide as the model: it is "
                f"{self.embedding.dim}, the model {self.hidden}"
            )

    def __hash__(self) -> int:
        """Hash by few facts: specs are keys of many look-ups, and all facts take long to hash."""
        return hash((self.name, self.num_layers, self.hidden, self.vocab, self.prediction_heads))

    # --- reading and writing ---------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """A short hash of everything but the name, and but what only training asks about.

        A plan is good whether or not a balancing loss is added and a padding row trained.
        """
        plain = replace(
            self,
            embedding=replace(self.embedding, padding=None),
            answers=False,
            taught=False,
            teacher=None,
            blocks=tuple(block.with_balance(on=False, share=1.0) for block in self.blocks),
        )
        return files.fingerprint({**document.plain(plain), "name": ""})

    def with_training(
        self, *, balance: bool | None = None, padding: bool = False, answers: bool = False
    ) -> ModelSpec:
        """Return the model with its balancing loss on or off, and with a trained padding row.

        Without a choice it stays as the model's own config says. `answers`: with a loss on them.
        """
        spec = self if answers is self.answers else replace(self, answers=answers)
        if padding:
            spec = replace(spec, embedding=replace(spec.embedding, padding=None))
        if balance is not None:
            routers = [block.moe.router for block in self.blocks if block.moe is not None]
            if balance and not any(router.balance_loss for router in routers):
                raise InputError(
                    f"{self.name}: its config has no coefficient of a balancing loss that could be "
                    "switched on (router_aux_loss_coef, or aux_loss_alpha of DeepSeek-V2)"
                )
            blocks = tuple(block.with_balance(on=balance) for block in self.blocks)
            spec = replace(spec, blocks=blocks)
        return spec

    # --- units -----------------------------------------------------------------------------

    @property
    def num_units(self) -> int:
        """Embedding + blocks + head."""
        return self.num_layers + 2

    @property
    def head_unit(self) -> int:
        """The index of the last unit."""
        return self.num_layers + 1

    @property
    def layer_blocks(self) -> tuple[int, ...]:
        """The index into `blocks` of every layer."""
        return _layer_table(self.cycle, self.num_layers)

    def block(self, unit: int) -> BlockSpec:
        """Return the block of unit 1…L."""
        if not 1 <= unit <= self.num_layers:
            raise IndexError(f"unit {unit} is no block; blocks are 1 to {self.num_layers}")
        return self.blocks[self.layer_blocks[unit - 1]]

    def unit_kind(self, unit: int) -> str:
        """Return a key that equal units share: 'embedding', 'block 0', …, 'head'."""
        if not 0 <= unit <= self.head_unit:
            raise IndexError(f"unit {unit} is none of 0 to {self.head_unit}")
        return self.unit_kinds[unit]

    @property
    def unit_kinds(self) -> tuple[str, ...]:
        """The kind of every unit, in order."""
        if self.tuning is not None:
            return _tuned_kinds(self)
        return _kind_table(self.cycle, self.num_layers)

    @property
    def untuned(self) -> ModelSpec:
        """The model itself, whatever of it is trained."""
        return self if self.tuning is None else replace(self, tuning=None)

    def with_tuning(self, tuning: Tuning | None) -> ModelSpec:
        """Return the model with only parts of it, or adapters, trained."""
        if tuning is None:
            return self.untuned
        blocks = range(1, self.head_unit)
        layers = [layer_of(p) for u in blocks for p in self.untuned.parameters(u) if p.matmul_uses]
        require_targets(tuning, layers)
        spec = replace(self, tuning=tuning)
        every = [p for unit in range(spec.num_units) for p in spec.parameters(unit)]
        if not any(p.trainable for p in every):
            raise InputError(f"{self.name}: nothing is left to train; freeze less, or add adapters")
        return spec

    @property
    def ties_weights(self) -> bool:
        """Whether the last unit uses the embedding's weights: its head, or prediction heads."""
        return self.head.tied or self.prediction_heads > 0

    def with_scores(self) -> ModelSpec:
        """Return the model as a reward model: one score of a text in the place of logits."""
        if self.head.scores:
            return self
        head = HeadSpec(norm=self.head.norm, scores=True)
        return replace(self, head=head, prediction_heads=0, answers=False)

    def outputs(self, tp: int = 1) -> int:
        """Return how many numbers a rank's head makes of a token: its logits, or a score."""
        return 1 if self.head.scores else -(-self.vocab // tp)

    def with_prediction_heads(self, count: int) -> ModelSpec:
        """Return the model trained with `count` extra prediction heads."""
        try:
            return replace(self, prediction_heads=count)
        except ValueError as error:
            raise InputError(f"{self.name}: {error}") from None

    def tensor_parallel_problem(self, tp: int) -> str | None:
        """Say in one line why the model cannot be sliced `tp` ways, or None."""
        for block in self.blocks:
            heads, kv_heads = block.attention.heads, block.attention.kv_heads
            if heads % tp:
                return f"tp={tp} does not divide the {heads} attention heads"
            if kv_heads % tp and tp % kv_heads:
                return f"tp={tp} neither divides nor is a multiple of the {kv_heads} kv heads"
            if block.mlp is not None and block.mlp.hidden % tp:
                return f"tp={tp} does not divide the feed-forward width {block.mlp.hidden}"
            if block.moe is not None and block.moe.shared_hidden % tp:
                return f"tp={tp} does not divide the shared experts' {block.moe.shared_hidden}"
        return None

    @property
    def num_experts(self) -> int:
        """Routed experts per layer, the most of any block; 0 for a dense model."""
        return max((block.moe.experts for block in self.blocks if block.moe), default=0)

    # --- parameters ------------------------------------------------------------------------

    def parameters(self, unit: int) -> tuple[Parameter, ...]:
        """Return the named parameter tensors of a unit."""
        return unit_parameters(self, unit)

    @property
    def num_parameters(self) -> int:
        """All parameters; tied ones once."""
        return _parameter_counts(self)[0]

    @property
    def num_trained(self) -> int:
        """The parameters that have a gradient."""
        return _parameter_counts(self)[2]

    @property
    def num_activated(self) -> int:
        """The parameters that one token uses; of the experts only its own."""
        return _parameter_counts(self)[1]


@functools.lru_cache(maxsize=256)
def _parameter_counts(spec: ModelSpec) -> tuple[int, int, int]:
    """Return how many parameters there are, how many a token uses, and how many are trained."""
    units = range(spec.num_units)
    counted = [p for unit in units for p in spec.parameters(unit) if p.counted]
    trained = sum(p.size for p in counted if not p.frozen)
    return sum(p.size for p in counted), sum(p.activated_size for p in counted), trained

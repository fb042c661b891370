"""`Worker`: one rank on one chip. It runs the steps that a scheduler makes.

It holds the model, the pages, the sampler's columns and each slot's last token, all on the device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tutti.accelerator import Accelerator
from tutti.batching.events import FAILS
from tutti.batching.prices import Prices
from tutti.batching.request import Sequence
from tutti.batching.settings import Settings
from tutti.batching.step import LAST, Step
from tutti.nn import Batch, Model, PagedCache
from tutti.nn.experts import Experts
from tutti.serve.adapters import Adapters, Held
from tutti.serve.captured_steps import CapturedSteps, GraphKey
from tutti.serve.handover.handed import Handover
from tutti.serve.inputs import Given, Shape, StepInputs
from tutti.serve.parameters import SamplingParameters
from tutti.serve.sampler import Chosen, Sampler, TopTokens, top_tokens
from tutti.serve.staging import Download, HostPages
from tutti.serve.warm_steps import WarmSteps

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker is told of a sequence beside its tokens."""

    parameters: SamplingParameters
    seed: int
    pooling: str | None = None  # "last" or "mean": its hidden states are wanted, no tokens
    adapter: Held | None = None
    handover: Handover | None = None  # where the keys and values of its prompt go


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step gave, on the host."""

    number: int
    tokens: NDArray[np.int32]
    ends: NDArray[np.int8]
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # chosen; values; tokens
    prompt_logprobs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(
        default_factory=dict
    )  # by sequence: of the tokens after those of its chunk
    pooled: dict[int, Tensor] = field(default_factory=dict)  # by sequence: sums or last states
    culprit: str = ""  # the first module whose output was no number
    failures: dict[int, str] = field(default_factory=dict)  # of others' code, by place of a sample


@dataclass(slots=True, kw_only=True)
class Launched:
    """A step that the device has been given."""

    step: Step
    result: StepResult
    download: Download | None


class Worker:
    """Runs steps: `launch` gives one to the device, `finish` waits for its tokens."""

    def __init__(
        self,
        model: Model,
        accelerator: Accelerator,
        settings: Settings,
        *,
        dtype: torch.dtype,
        codes: torch.dtype | None = None,
        end: tuple[int, ...] = (),
        adapters: Adapters | None = None,
    ) -> None:
        self.model, self.accelerator, self.settings = model, accelerator, settings
        self.adapters = adapters or Adapters(model)
        self.cache = PagedCache(
            model.spec,
            model.operators,
            pages=settings.pages,
            page_size=settings.page_size,
            units=range(min(model.by_number()), max(model.by_number()) + 1),
            parallel=model.parallel,
            dtype=dtype,
            codes=codes,
            device=accelerator.device,
        )
        self.host_pages = HostPages(accelerator, self.cache, settings.host_pages)
        if accelerator.operators.preferred("paged_attention")[0] == "reference":
            log.warning(
                "%s has no operator of its own for attention to pages: the reference runs, slowly",
                accelerator.name,
            )
        self.sampler = Sampler(
            accelerator, settings.slots, model.spec.vocab, end, ahead=settings.ahead
        )
        self._inputs = StepInputs(accelerator, settings, model.spec.vocab)
        self._graphs = CapturedSteps(accelerator, settings, self._inputs)
        self._capturable = _is_capturable(model, self.cache)
        # one more for the samples that fill a step up
        self._last = torch.zeros(settings.slots + 1, dtype=torch.int64, device=accelerator.device)
        self._work: dict[int, Work] = {}
        self._sequences: dict[int, Sequence] = {}

    def expect(self, sequence: Sequence, work: Work) -> None:
        """Take what a sequence wants, before the first step that has it."""
        self._work[sequence.id], self._sequences[sequence.id] = work, sequence

    @cached_property
    def warm_steps(self) -> WarmSteps:
        """Steps that are made before somebody waits for one."""
        graphs = self._graphs if self._capturable else None
        return WarmSteps(graphs, self._inputs, self.sampler, self._plain, self._rooms)

    def prices(self, *, guesses: bool = False) -> Prices | None:
        """Return what steps take here, where something hangs on it, before any request.

        For guesses alone they are not measured where steps are not captured: steps take longer
        there, and their time is a token's times their tokens.
        """
        settings = self.settings
        moves = settings.host_pages > 0 and settings.keep_on_host == "priced"
        if settings.target_s is None and not moves and not (guesses and self._capturable):
            return None
        prices = self.warm_steps.prices(settings, self.accelerator)
        stow_s, fetch_s = self.host_pages.seconds() if moves else (0.0, 0.0)
        return replace(prices, stow_s=stow_s, fetch_s=fetch_s)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that ended."""
        self._work.pop(sequence.id, None)
        self._sequences.pop(sequence.id, None)

    def run(self, step: Step) -> StepResult:
        """Compute a step and choose its tokens."""
        return self.finish(self.launch(step))

    @torch.no_grad()
    def launch(self, step: Step) -> Launched:
        """Give a step to the device; steps are computed in this order."""
        self.host_pages.stow(step.stows)
        if len(step.copies):
            pairs = self.accelerator.to_device(torch.from_numpy(step.copies.astype(np.int64)))
            self.cache.copy(pairs[:, 0], pairs[:, 1])
        self.host_pages.fetch(step.fetches)
        self._begin(step)
        self.sampler.send()
        result = StepResult(
            number=step.number,
            tokens=np.empty(0, np.int32),
            ends=np.empty(0, np.int8),
            logprobs=None,
        )
        outputs = self._replayed(step)
        if outputs is None:
            outputs = self._computed(step, result)
        download = None
        if outputs is not None:
            download = Download(self.accelerator, *outputs)
        return Launched(step=step, result=result, download=download)

    def finish(self, launched: Launched) -> StepResult:
        """Wait for a step's tokens."""
        step, result = launched.step, launched.result
        if launched.download is not None:
            tokens, ends = launched.download.wait()
            count = len(step.sample_slots)
            result.tokens, result.ends = tokens[:count].astype(np.int32), ends[:count]
            self.sampler.noted(step.sample_slots.tolist(), result.tokens.tolist())
            if (result.ends == FAILS).any():
                self._explain(step, result)
        return result

    def _explain(self, step: Step, result: StepResult) -> None:
        """Say why samples cannot go on."""
        failed = result.ends == FAILS
        for place in np.flatnonzero(failed).tolist():
            why = self.sampler.failure(int(step.sample_slots[place]))
            if why:
                result.failures[place] = why
                failed[place] = False
        if failed.any():
            result.culprit = self._culprit(step, failed)

    # --- a step's parts --------------------------------------------------------------------

    def _stream(self, batch: Batch) -> Tensor:
        """Return the residual stream after the blocks."""
        return self.model.stream(None, batch)[0]

    def _begin(self, step: Step) -> None:
        for begin in step.begins:
            work, sequence = self._work[begin.sequence.id], begin.sequence
            if begin.fork_of is None:
                prompt = len(sequence.request.prompt) - work.parameters.answered
                self.sampler.begin(begin.slot, work.parameters, prompt, sequence.tokens, work.seed)
            else:
                self.sampler.fork(begin.slot, begin.fork_of, work.parameters, work.seed)

    def _adapters_of(self, step: Step) -> NDArray[np.int64] | None:
        """Return the slots of the adapters that rows use; None if there are none."""
        return self.adapters.slots_of([self._work[n].adapter for n in step.sequences.tolist()])

    def _rooms(self) -> int:
        """Return how many layers adapters add to in steps that are captured."""
        return self.adapters.rooms if self.adapters.names and self.adapters.capturable else 0

    def _as_is(self, step: Step) -> Given:
        """Write a step of its own size, and tell the model of its adapters."""
        adapters = self._adapters_of(step)
        given = self._inputs.take(step, Shape.of(step), adapters)
        self._use_adapters(given, adapted=adapters is not None)
        return given

    def _use_adapters(self, given: Given, *, adapted: bool) -> None:
        """Tell the model which adapter each token of a step has."""
        self.adapters.use(*((given.adapters_t, given.adapter_order_t) if adapted else (None,)))

    def _replayed(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """Return a step's tokens and ends, filled up to a size; None where that cannot be."""
        slots = step.sample_slots
        if not self._capturable or not self.sampler.is_plain(slots) or self._is_looked_at(step):
            return None
        adapters = self._adapters_of(step)
        adapted = adapters is not None
        if adapted and not self.adapters.capturable:
            return None
        shape = self._graphs.shape_for(Shape.of(step))
        if shape is None:
            return None
        draws = self.sampler.always_draws or self.sampler.draws(slots)
        if not self._graphs.captures(shape):
            given = self._inputs.take(step, shape, adapters)
            return self._plain(given, draws=draws, adapted=adapted)
        rooms = self.adapters.rooms if adapted else 0
        key = GraphKey(shape, draws, self.sampler.columns_key, rooms)
        replay = self._graphs.get(
            key, lambda given: self._plain(given, draws=draws, adapted=adapted)
        )
        if replay is None:
            return None
        self._inputs.take(step, shape, adapters)
        return replay()

    def _plain(self, given: Given, *, draws: bool, adapted: bool = False) -> tuple[Tensor, Tensor]:
        """Compute a step of which tokens are wanted and nothing else: the host is not asked."""
        self._use_adapters(given, adapted=adapted)
        batch, rows = self._batch(given, ones=given.slots_b.shape[0])
        x = self._stream(batch)
        logits, positions = self._logits(x, batch, rows)
        chosen = self.sampler.choose_plain(logits, given.sample_slots_s, positions, draws=draws)
        self._last[given.sample_slots_s] = chosen.tokens_s
        return chosen.tokens_s, chosen.ends_s

    def _computed(self, step: Step, result: StepResult) -> tuple[Tensor, Tensor] | None:
        """Compute a step, whatever its rows want; return tokens and ends, if any are sampled."""
        ones = int((step.queries == 1).sum()) if (step.tokens == LAST).any() else 0
        given = self._as_is(step)
        batch, rows = self._batch(given, ones=ones)
        x = self._stream(batch)
        self._extras(step, x, batch, result)
        if not len(step.sample_slots):
            return None
        return self._sampled(step, given, x, batch, rows, result)

    def _sampled(
        self, step: Step, given: Given, x: Tensor, batch: Batch, rows: Tensor, result: StepResult
    ) -> tuple[Tensor, Tensor] | None:
        """Return the tokens that follow some rows, and how each goes on."""
        logits, positions = self._logits(x, batch, rows)
        slots_s = given.sample_slots_s
        chosen: Chosen = self.sampler.choose(logits, step.sample_slots, slots_s, positions)
        self._last[slots_s] = chosen.tokens_s
        result.logprobs = None if chosen.logprobs is None else _on_host(chosen.logprobs)
        return chosen.tokens_s, chosen.ends_s

    def _batch(self, given: Given, *, ones: int) -> tuple[Batch, Tensor]:
        """Return the batch, and the places of the tokens that are sampled after.

        Only rows of one token may have one that the host does not know, and they come first: it
        is looked for in the first `ones`.
        """
        tokens_t = given.tokens_t
        if ones:
            known_b = tokens_t[:ones]
            first_b = torch.where(known_b == LAST, self._last[given.slots_b[:ones]], known_b)
            rest = ones < len(tokens_t)
            tokens_t = torch.cat((first_b, tokens_t[ones:])) if rest else first_b
        segments = given.segments
        batch = Batch.cached(self.model.spec, tokens_t, self.cache, segments, given.bases_b)
        return batch, given.sample_tokens_s

    def _logits(self, x: Tensor, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits after some tokens, and the positions of those that follow."""
        head = self.model.head
        assert head is not None
        logits = head.logits.whole(head.logits.own(self.model.hidden(x, batch, rows)))
        return logits, batch.positions_t[rows] + 1

    def _is_looked_at(self, step: Step) -> bool:
        """Tell whether a row of a step wants more of it than tokens."""
        wanted = (self._work[number] for number in step.sequences.tolist())
        return any(
            w.parameters.prompt_logprobs is not None or w.pooling or w.handover for w in wanted
        )

    def _extras(self, step: Step, x: Tensor, batch: Batch, result: StepResult) -> None:
        """Take prompts' log-probabilities and hidden states from the rows that want them."""
        ends = np.cumsum(step.queries).tolist()
        for row, number in enumerate(step.sequences.tolist()):
            work = self._work[number]
            count = work.parameters.prompt_logprobs
            if count is None and work.pooling is None:
                continue
            first, last = ends[row] - int(step.queries[row]), ends[row]
            start, prompt = int(step.starts[row]), self._sequences[number].request.prompt
            at = torch.arange(first, last, device=x.device)
            if work.pooling is not None:
                own = at if work.pooling == "mean" else at[-1:]
                states = self.model.hidden(x, batch, own).float()
                result.pooled[number] = states.sum(0).to("cpu")
            following = prompt[start + 1 : start + 1 + last - first]
            if count is not None and following:
                head = self.model.head
                assert head is not None
                hidden = self.model.hidden(x, batch, at[: len(following)])
                logits = head.logits.whole(head.logits.own(hidden))
                tokens = torch.tensor(following, device=x.device)
                result.prompt_logprobs[number] = _on_host(top_tokens(logits, tokens, count))

    @torch.no_grad()
    def _culprit(self, step: Step, failed: NDArray[np.bool_]) -> str:
        """Run the rows that failed again; return the first module whose output was no number.

        Steps behind this one may be under way; they have nothing of these rows but their pages.
        """
        culprits: list[str] = []

        def watch(name: str) -> object:
            def hook(_module: nn.Module, _inputs: object, output: object) -> None:
                first = output[0] if isinstance(output, tuple) else output
                if not culprits and isinstance(first, Tensor) and not torch.isfinite(first).all():
                    culprits.append(name)

            return hook

        handles = [
            module.register_forward_hook(watch(name.removeprefix("units.")))
            for name, module in self.model.named_modules()
            if not any(True for _ in module.children())
        ]
        try:
            again = step.of_rows(np.unique(step.sample_rows[failed]))
            self.cache.steps_apart = True
            batch, _ = self._batch(self._as_is(again), ones=0)
            self._stream(batch)
        finally:
            self.cache.steps_apart = False
            for handle in handles:
                handle.remove()
        return culprits[0] if culprits else "the head"


def _is_capturable(model: Model, cache: PagedCache) -> bool:
    """Tell whether a graph can hold the model: alone on its chip, and no operator asks the host."""
    if model.parallel.tensor.size > 1 or model.parallel.expert_counts:
        return False
    if any(module.asks_host for module in model.modules() if isinstance(module, Experts)):
        return False
    return not any(cache.asks_host(unit, model.spec.block(unit).attention) for unit in cache.units)


def _on_host(tops: TopTokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    chosen, values, tokens = (tensor.to("cpu").numpy() for tensor in tops)
    return chosen, values, tokens

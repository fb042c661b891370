"""`Worker`: one rank on one chip. It runs the steps that a scheduler makes.

It holds the model, the pages, the sampler's columns and each slot's last token, all on the device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tutti.accelerator import Accelerator
from tutti.batching.events import FAILS
from tutti.batching.request import Sequence
from tutti.batching.settings import Settings
from tutti.batching.step import LAST, Step
from tutti.nn import Batch, Model, PagedCache
from tutti.serve.adapters import Adapters, Held
from tutti.serve.inputs import StepInputs
from tutti.serve.parameters import SamplingParameters
from tutti.serve.sampler import Sampler, TopTokens, top_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker is told of a sequence beside its tokens."""

    parameters: SamplingParameters
    seed: int
    pooling: str | None = None  # "last" or "mean": its hidden states are wanted, no tokens
    adapter: Held | None = None


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


class Worker:
    """Runs steps."""

    def __init__(
        self,
        model: Model,
        accelerator: Accelerator,
        settings: Settings,
        *,
        dtype: torch.dtype,
        end: tuple[int, ...] = (),
        adapters: Adapters | None = None,
    ) -> None:
        self.model, self.accelerator, self.settings = model, accelerator, settings
        self.adapters = adapters or Adapters(model, accelerator)
        self.cache = PagedCache(
            model.spec,
            model.operators,
            pages=settings.pages,
            page_size=settings.page_size,
            units=range(min(model.by_number()), max(model.by_number()) + 1),
            parallel=model.parallel,
            dtype=dtype,
            device=accelerator.device,
        )
        if accelerator.operators.preferred("paged_attention")[0] == "reference":
            log.warning(
                "%s has no operator of its own for attention to pages: the reference runs, slowly",
                accelerator.name,
            )
        self.sampler = Sampler(accelerator, settings.slots, model.spec.vocab, end)
        self._inputs = StepInputs(accelerator, settings)
        self._last = torch.zeros(settings.slots, dtype=torch.int64, device=accelerator.device)
        self._work: dict[int, Work] = {}
        self._sequences: dict[int, Sequence] = {}

    def expect(self, sequence: Sequence, work: Work) -> None:
        """Take what a sequence wants, before the first step that has it."""
        self._work[sequence.id], self._sequences[sequence.id] = work, sequence

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that ended."""
        self._work.pop(sequence.id, None)
        self._sequences.pop(sequence.id, None)

    @torch.no_grad()
    def run(self, step: Step) -> StepResult:
        """Compute a step and choose its tokens."""
        if len(step.copies):
            pairs = self.accelerator.to_device(torch.from_numpy(step.copies.astype(np.int64)))
            self.cache.copy(pairs[:, 0], pairs[:, 1])
        self._begin(step)
        batch, rows = self._batch(step)
        x = self._stream(batch)
        result = StepResult(
            number=step.number,
            tokens=np.empty(0, np.int32),
            ends=np.empty(0, np.int8),
            logprobs=None,
        )
        self._extras(step, x, batch, result)
        if len(step.sample_slots):
            self._sample(step, x, batch, rows, result)
        return result

    # --- a step's parts --------------------------------------------------------------------

    def _stream(self, batch: Batch) -> Tensor:
        """Return the residual stream after the blocks."""
        return self.model.stream(None, batch)[0]

    def _begin(self, step: Step) -> None:
        for begin in step.begins:
            work, sequence = self._work[begin.sequence.id], begin.sequence
            if begin.fork_of is None:
                prompt = len(sequence.request.prompt)
                self.sampler.begin(begin.slot, work.parameters, prompt, sequence.tokens, work.seed)
            else:
                self.sampler.fork(begin.slot, begin.fork_of, work.parameters, work.seed)

    def _batch(self, step: Step) -> tuple[Batch, Tensor]:
        """Return the batch, and the places of the tokens that are sampled after."""
        self.adapters.select(step, [self._work[n].adapter for n in step.sequences.tolist()])
        segments, given = self._inputs.take(step)
        tokens_t = given["tokens"].long()
        if (step.tokens == LAST).any():  # these rows have one token each and come first
            ones = int((step.queries == 1).sum())
            known = tokens_t[:ones]
            slots = given["slots"].long()[:ones]
            tokens_t[:ones] = torch.where(known == LAST, self._last[slots], known)
        batch = Batch.cached(self.model.spec, tokens_t, self.cache, segments, given["bases"])
        last = segments.query_starts.long()[1:] - 1
        return batch, last[given["sample_rows"].long()] - given["sample_offsets"].long()

    def _sample(
        self, step: Step, x: Tensor, batch: Batch, rows: Tensor, result: StepResult
    ) -> None:
        head = self.model.head
        assert head is not None
        logits = head.logits.whole(head.logits.own(self.model.hidden(x, batch, rows)))
        positions = batch.positions_t[rows] + 1
        chosen = self.sampler.choose(logits, step.sample_slots, positions)
        own = torch.from_numpy(step.sample_slots.astype(np.int64)).to(self._last.device)
        self._last[own] = chosen.tokens_s
        result.tokens = chosen.tokens_s.to("cpu").numpy().astype(np.int32)
        result.ends = chosen.ends_s.to("cpu").numpy()
        result.logprobs = None if chosen.logprobs is None else _on_host(chosen.logprobs)
        self.sampler.noted(step.sample_slots.tolist(), result.tokens.tolist())
        if (result.ends == FAILS).any():
            result.culprit = self._culprit(step)

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

    def _culprit(self, step: Step) -> str:
        """Run the step's rows again; return the first module that made something not finite."""
        found: list[str] = []

        def watch(name: str) -> object:
            def hook(_module: nn.Module, _inputs: object, output: object) -> None:
                first = output[0] if isinstance(output, tuple) else output
                if not found and isinstance(first, Tensor) and not torch.isfinite(first).all():
                    found.append(name)

            return hook

        handles = [
            module.register_forward_hook(watch(name.removeprefix("units.")))
            for name, module in self.model.named_modules()
            if not any(True for _ in module.children())
        ]
        try:
            batch, _ = self._batch(step)
            self._stream(batch)
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else "the head"


def _on_host(found: TopTokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    chosen, values, tokens = (tensor.to("cpu").numpy() for tensor in found)
    return chosen, values, tokens

"""`Engine`: requests in, tokens out. It runs the scheduler's steps on a worker.

    engine = Engine.from_pretrained("SmolLM2-135M-Instruct")
    for done in engine.generate(["The capital of France is", "Once upon a time"]):
        print(done.text)

`add` and `step` are the loop itself, for those who have one of their own; `stream` yields pieces as
they come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.batching import Cancelled, Finish, Received, Request, Scheduler, Step, Tokens
from tutti.batching import Sequence as Sample
from tutti.errors import InputError
from tutti.serve.drafting import Drafter, Pace
from tutti.serve.live_request import LiveRequest
from tutti.serve.loading import open_drafter, open_worker
from tutti.serve.outputs import Completion, Counters, Piece
from tutti.serve.parameters import (
    Prompt,
    SamplingParameters,
    check_tokens,
    listed_prompts,
    mixed_seed,
)
from tutti.serve.speculation import Speculation, Switch
from tutti.serve.worker import Launched, StepResult, Work

if TYPE_CHECKING:
    from torch import Tensor

    from tutti.huggingface.tokenizer import Message, Tokenizer
    from tutti.serve.adapters import Held
    from tutti.serve.handover.handed import Handover
    from tutti.serve.worker import Worker

GREEDY = SamplingParameters()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request as it stands in the engine."""

    live: LiveRequest
    samples: tuple[Sample, ...]
    adapter: Held | None


class Engine:
    """One model on one worker."""

    def __init__(
        self,
        worker: Worker,
        *,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
        drafter: Drafter | None = None,
        guesses: int = 4,
    ) -> None:
        self.worker, self.tokenizer, self.seed = worker, tokenizer, seed
        prices = worker.prices(guesses=drafter is not None)
        self.scheduler = Scheduler(worker.settings, prices)
        self.counters = Counters()
        self.speculation: Speculation | None = None
        if drafter is not None:
            pace = Pace(guesses, prices)
            self.speculation = Speculation(drafter, pace, self.counters, switch=Switch())
        self._wanted: dict[int, _Wanted] = {}
        self._by_sequence: dict[int, tuple[int, int]] = {}
        self._done: dict[int, Completion] = {}
        self._numbers = 0
        self._launched: deque[Launched] = deque()

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        *,
        seed: int = 0,
        guesses: int = 0,
        draft: Path | str | None = None,
        **options: Any,
    ) -> Engine:
        """Open a model folder; the options are those of `tutti.serve.loading.open_worker`.

        `guesses`: so many tokens ahead are tried at most (0: none): those of a `draft` model, or
        what followed earlier in the text.
        """
        worker, tokenizer = open_worker(folder, **options)
        drafter = open_drafter(worker, draft) if guesses else None
        return cls(worker, tokenizer=tokenizer, seed=seed, drafter=drafter, guesses=guesses)

    # --- whole answers ---------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        parameters: SamplingParameters | Sequence[SamplingParameters] = GREEDY,
    ) -> list[Completion]:
        """Return a completion per prompt, in their order: texts, or lists of tokens."""
        numbers = self._add_all(prompts, parameters)
        waiting = set(numbers)
        while waiting:
            waiting -= {piece.request for piece in self.step() if piece.request in self._done}
        return [self._done.pop(number) for number in numbers]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        parameters: SamplingParameters | Sequence[SamplingParameters] = GREEDY,
    ) -> Iterator[Piece]:
        """Yield what each step adds; who stops reading cancels what is left."""
        numbers = self._add_all(prompts, parameters)
        waiting = set(numbers)
        try:
            while waiting:
                for piece in self.step():
                    if piece.request in waiting:
                        yield piece
                waiting -= set(self._done)
        finally:
            for number in numbers:
                self.cancel(number)
                self._done.pop(number, None)

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: str = "last") -> list[Tensor]:
        """Return a vector per prompt: its last token's hidden state, or the mean of all."""
        if pooling not in ("last", "mean"):
            raise InputError(f"pooling is '{pooling}'; it may be 'last' or 'mean'")
        numbers = [self.add(prompt, pooling=pooling) for prompt in listed_prompts(prompts)]
        lives = [self._wanted[number].live for number in numbers]
        while any(number not in self._done for number in numbers):
            self.step()
        for number in numbers:
            del self._done[number]
        return [live.embedding() for live in lives]

    def chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, **variables: Any
    ) -> list[int]:
        """Return a conversation as tokens, up to where the assistant's turn begins.

        `tools` (their JSON schemas) and other variables are for the chat template.
        """
        tokenizer = self._tokenizer_for("a conversation")
        text = tokenizer.render(messages, prompt=True, tools=tools, variables=variables)
        return [int(token) for token in tokenizer.encode([text])[0]]

    # --- adapters --------------------------------------------------------------------------

    def add_adapter(self, name: str, folder: Path | str) -> None:
        """Let requests name a LoRA adapter (`SamplingParameters.adapter`): a PEFT folder."""
        self.worker.adapters.add(name, folder)

    def drop_adapter(self, name: str) -> None:
        """Take an adapter away; requests that use it go on to their end."""
        self.worker.adapters.drop(name)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture steps of all sizes before anybody waits for one."""
        self.worker.warm_steps.all(progress)

    # --- the loop --------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        parameters: SamplingParameters = GREEDY,
        *,
        pooling: str | None = None,
        handover: Handover | None = None,
    ) -> int:
        """Put a request in line; return its number.

        `handover`: where the keys and values of its prompt go, as they are computed.
        """
        number = self._numbers
        tokens = self._tokens_of(prompt, number)
        vocab = self.worker.model.spec.vocab
        check_tokens(f"request {number}", tokens, vocab)
        parameters.check(f"request {number}", vocab)
        if parameters.stop:
            self._tokenizer_for("'stop'")
        adapter = self.worker.adapters.find(parameters.adapter) if parameters.adapter else None
        # what lies behind a window is no longer in pages, and would be missing elsewhere
        behind = handover is not None and self.worker.settings.window is not None
        request = Request(
            id=number,
            prompt=tuple(tokens),
            most_new=0 if pooling else parameters.max_tokens,
            samples=1 if pooling else parameters.n,
            priority=parameters.priority,
            adapter="" if adapter is None else adapter.key,
            salt=parameters.salt,
            shares_prefix=parameters.prompt_logprobs is None and pooling != "mean" and not behind,
            waits=parameters.looks_back,
            answered=parameters.answered,
        )
        samples = self.scheduler.arrive(request)
        self._numbers += 1  # after all checks: a request refused here is not heard of elsewhere
        if adapter is not None:
            adapter.users += 1
        live = LiveRequest(request, parameters, self.tokenizer, pooling)
        self._wanted[number] = _Wanted(live, samples, adapter)
        seed = self.seed + number if parameters.seed is None else parameters.seed
        for sample in samples:
            self._by_sequence[sample.id] = (number, sample.sample)
            mixed = mixed_seed(seed, sample.sample)
            own = Work(parameters, mixed, pooling=pooling, adapter=adapter, handover=handover)
            self.worker.expect(sample, own)
        return number

    def cancel(self, number: int) -> None:
        """Stop a request; its pieces so far stay what they are."""
        self.scheduler.cancel(number)
        self._ended(self.scheduler.take_finished(), [])

    def step(self) -> list[Piece]:
        """Compute one step; return what it added.

        Where several may be under way, the next is launched before this one is waited for.
        """
        self.launch()
        return self.finish()

    def launch(self) -> None:
        """Give the device as many steps as may be under way."""
        while len(self._launched) < self.worker.settings.ahead:
            if not self._may_go_on():
                break
            made = self.scheduler.next_step()
            if made is None:
                break
            self._launched.append(self.worker.launch(made))

    def finish(self) -> list[Piece]:
        """Wait for the oldest step under way; return what it added."""
        if not self._launched:
            return []
        launched = self._launched.popleft()
        step, result = launched.step, self.worker.finish(launched)
        received = self.scheduler.receive(Tokens(step.number, result.tokens, result.ends))
        self.counters.steps += 1
        self.counters.computed_tokens += step.num_tokens
        self.counters.stowed_pages += len(step.stows)
        self.counters.fetched_pages += len(step.fetches)
        self.counters.sampled_tokens += len(received.tokens)
        self._note_prompts(step, result)
        if self.speculation is not None:
            self.speculation.note(step, received)
        pieces = self._pieces(result, received)
        self._ended(received.finished, pieces)
        for number, sample in self._stopped(pieces):
            event = Cancelled(number, sample, Finish.STOP)
            self.scheduler.handle(event)
            self._ended(self.scheduler.take_finished(), pieces)
        return pieces

    def _may_go_on(self) -> bool:
        """Tell whether another step may be made before the tokens of those under way are there."""
        if self.speculation is None:
            return True
        return self.speculation.ready(self.scheduler, len(self._launched), self._may_try)

    def _may_try(self, sample: Sample) -> bool:
        """Tell whether a sequence may guess: not if it chooses by what was chosen before."""
        own = self._wanted[sample.request.id].live.parameters
        return not (own.penalises or own.looks_back)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return self.scheduler.is_idle

    def take(self, number: int) -> Completion | None:
        """Return a request's completion once, when it is there."""
        return self._done.pop(number, None)

    # --- what a step gave ------------------------------------------------------------------

    def _pieces(self, result: StepResult, received: Received) -> list[Piece]:
        pieces: dict[int, Piece] = {}
        now = time.perf_counter()
        for place, (name, token) in enumerate(
            zip(received.sequences.tolist(), received.tokens.tolist(), strict=True)
        ):
            number, sample = self._by_sequence[name]
            live = self._wanted[number].live
            piece = live.added(sample, token, int(received.kept[place]), result, now)
            pieces[name] = piece if name not in pieces else live.joined(pieces[name], piece)
        return list(pieces.values())

    def _stopped(self, pieces: list[Piece]) -> list[tuple[int, int]]:
        """Return samples whose text came to a stop text."""
        return [
            (piece.request, piece.sample)
            for piece in pieces
            if piece.request in self._wanted
            and piece.finish is None
            and self._wanted[piece.request].live.stopped(piece.sample)
        ]

    def _ended(self, finished: Sequence[Sample], pieces: list[Piece]) -> None:
        now = time.perf_counter()
        for sample in finished:
            number, index = self._by_sequence.pop(sample.id)
            wanted = self._wanted[number]
            self.worker.forget(sample)
            if self.speculation is not None:
                self.speculation.forget(sample)
            assert sample.finish is not None
            kept = self.counters.finished
            kept[sample.finish] = kept.get(sample.finish, 0) + 1
            self.counters.preemptions += sample.preemptions
            last = wanted.live.end(index, sample.finish)
            own = [i for i, p in enumerate(pieces) if (p.request, p.sample) == (number, index)]
            if own:
                pieces[own[0]] = wanted.live.joined(pieces[own[0]], last)
            else:
                pieces.append(last)
            if wanted.live.is_over:
                cached = wanted.samples[0].cached
                self.counters.cached_tokens += cached
                self._done[number] = wanted.live.completion(cached, now)
                if wanted.adapter is not None:
                    self.worker.adapters.release(wanted.adapter)
                del self._wanted[number]

    def _note_prompts(self, step: Step, result: StepResult) -> None:
        starts = dict(zip(step.sequences.tolist(), step.starts.tolist(), strict=True))
        for name, logprobs in result.prompt_logprobs.items():
            if name in self._by_sequence:  # else it was cancelled while the step was under way
                live = self._wanted[self._by_sequence[name][0]].live
                live.note_prompt(starts[name], logprobs)
        for name, states in result.pooled.items():
            if name in self._by_sequence:
                live = self._wanted[self._by_sequence[name][0]].live
                live.note_states(starts[name], states)

    # --- prompts ---------------------------------------------------------------------------

    def _add_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        parameters: SamplingParameters | Sequence[SamplingParameters],
    ) -> list[int]:
        listed = listed_prompts(prompts)
        if isinstance(parameters, SamplingParameters):
            parameters = [parameters] * len(listed)
        if len(parameters) != len(listed):
            raise InputError(
                f"{len(listed)} prompts and {len(parameters)} sets of parameters; give one for "
                "all, or one each"
            )
        numbers: list[int] = []
        try:
            for prompt, own in zip(listed, parameters, strict=True):
                numbers.append(self.add(prompt, own))
        except InputError:
            for number in numbers:
                self.cancel(number)
                self._done.pop(number, None)
            raise
        return numbers

    def _tokens_of(self, prompt: Prompt, number: int) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        tokenizer = self._tokenizer_for(f"request {number}: a prompt of text")
        return [*tokenizer.begin, *(int(token) for token in tokenizer.encode([prompt])[0])]

    def _tokenizer_for(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(
                f"{what} needs a tokenizer, and the folder has none; give tokens instead, or name "
                "a tokenizer"
            )
        return self.tokenizer

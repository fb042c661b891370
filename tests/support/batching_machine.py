"""The scheduler under random arrivals, cancellations, and steps whose tokens come late."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fake_chip import FakeChip, check_pages, expected, next_token
from tutti.batching import (
    Arrived,
    Cancelled,
    Guessed,
    LinearPrices,
    Received,
    Request,
    Room,
    Scheduler,
    Settings,
    Step,
)
from tutti.batching.events import Event

MOST_STEPS = 3000  # to drain: each request needs few


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    max_length = draw(st.integers(4, 24))
    fewest = -(-max_length // page_size)
    pages = 1 + fewest + draw(st.integers(0, fewest))  # few: some must give way
    window = draw(st.sampled_from([None, None, 1, 3, 6]))
    return Settings(
        slots=draw(st.integers(1, 5)),
        pages=pages,
        page_size=page_size,
        max_length=max_length,
        most_tokens=draw(st.integers(1, 20)),
        window=window,
        window_kind=draw(st.sampled_from(["sliding", "chunked"])),
        stretch=draw(st.sampled_from([None, None, 5, 9])),
        stretch_kind=draw(st.sampled_from(["switch", "grow"])),
        prefix=draw(st.booleans()),
        aging=draw(st.sampled_from([0.5, 5.0, 100.0])),
        ahead=draw(st.integers(1, 2)),
        target_s=draw(st.sampled_from([None, 8.0])),
        host_pages=draw(st.sampled_from([0, 1, fewest, 3 * fewest])),
        keep_on_host=draw(st.sampled_from(["always", "priced"])),
    )


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=16)  # few tokens: shared beginnings


class SchedulerMachine(RuleBasedStateMachine):
    """Every step is run by a chip that checks it; in the end everybody must have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler | None = None
        self.log: list[Event] = []
        self.steps: list[Step] = []
        self.requests: dict[int, Request] = {}
        self.sequences: dict[int, tuple[int, int]] = {}
        self.cancelled: set[int] = set()

    @initialize(settings=all_settings())
    def begin(self, settings: Settings) -> None:
        self.begin_with(settings)

    def begin_with(self, settings: Settings) -> None:
        self.settings = settings
        self.prices = LinearPrices(step_s=1.0, token_s=1.0, key_s=0.05, stow_s=1.0, fetch_s=1.5)
        self.scheduler = Scheduler(settings, self.prices)
        self.chip = FakeChip(settings)

    @rule(
        prompt=PROMPTS,
        new=st.integers(0, 12),
        samples=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "a"]),
        waits=st.booleans(),
    )
    def arrive(
        self, prompt: list[int], new: int, samples: int, priority: int, salt: str, waits: bool
    ) -> None:
        assert self.scheduler is not None
        most = self.settings.max_length
        prompt = prompt[: most - 1]
        new = max(1, min(new, most - len(prompt))) if samples > 1 else min(new, most - len(prompt))
        request = Request(
            id=len(self.requests), prompt=tuple(prompt), most_new=new, samples=samples,
            priority=priority, salt=salt, waits=waits,
        )  # fmt: skip
        if self.settings.most_pages(len(prompt) + new) > self.settings.usable_pages:
            return
        self.requests[request.id] = request
        self._handle(Arrived(request))

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        sample = data.draw(st.sampled_from([None, 0, 1]))
        self.cancelled.add(number)
        self._handle(Cancelled(number, sample))

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler is not None and self.scheduler.on_host.owners())
    def cancel_who_waits_on_the_host(self, data: st.DataObject) -> None:
        assert self.scheduler is not None
        owners = self.scheduler.on_host.owners()
        kept = {s.request.id: s for s in self.scheduler.waiting if s.id in owners}
        number = data.draw(st.sampled_from(sorted(kept)))
        self.cancelled.add(number)
        self._handle(Cancelled(number, kept[number].sample))

    @rule(count=st.integers(1, 6))
    def steps_come(self, count: int) -> None:
        for _ in range(count):
            self._advance()

    @rule(wrong=st.integers(0, 4), count=st.integers(1, 4))
    def somebody_guesses(self, wrong: int, count: int) -> None:
        """Guess what comes next, rightly up to some token."""
        guesses = {}
        for sequence, tokens in self.chip.slots.values():
            so_far, found = list(tokens), []
            for place in range(count):
                found.append(next_token(so_far, sequence.sample))
                if place == wrong:
                    found[-1] = 1 + found[-1] % 20
                so_far.append(found[-1])
            guesses[sequence.id] = tuple(found)
        self._handle(Guessed(guesses))
        self._advance()

    @rule()
    def only_made(self) -> None:
        """Make a step although earlier ones are under way."""
        assert self.scheduler is not None
        if self.scheduler.num_in_flight < 3:
            self._handle(Room())

    @invariant()
    def pages_are_conserved(self) -> None:
        if self.scheduler is not None:
            check_pages(self.scheduler)

    def _handle(self, event: Event) -> Step | Received | None:
        assert self.scheduler is not None
        self.log.append(event)
        found = self.scheduler.handle(event)
        if isinstance(found, Step):
            self.steps.append(found)
            self.chip.run(found)
        elif isinstance(found, Received):
            self.chip.received(found)
        for sequence in self.scheduler.take_finished():
            assert sequence.id not in self.chip.done, "ended twice"
            self.chip.done[sequence.id] = sequence.new_tokens
        return found

    def _advance(self) -> bool:
        """Make a step and take the tokens of the oldest; False if there is neither."""
        made = self._handle(Room())
        if self.chip.waiting:
            self._handle(self.chip.waiting.pop(0))
            return True
        return made is not None

    def teardown(self) -> None:
        if self.scheduler is None:
            return
        for _ in range(MOST_STEPS + 100 * len(self.requests)):
            if not self._advance():
                break
            check_pages(self.scheduler)
        assert self.scheduler.is_idle, "somebody never ends"
        check_pages(self.scheduler)
        pool = self.scheduler.pool
        assert pool.free + len(pool.idle) == self.settings.usable_pages, "a page is still used"
        assert self.scheduler.on_host.pool.free == self.settings.host_pages
        self._check_tokens()
        self._check_replay()

    def _check_tokens(self) -> None:
        number = 0
        for request in self.requests.values():
            for sample in range(request.samples):
                found = self.chip.done[number]
                if request.id in self.cancelled:
                    assert found == expected(request, sample)[: len(found)]
                else:
                    assert found == expected(request, sample)
                number += 1

    def _check_replay(self) -> None:
        again = Scheduler(self.settings, self.prices)
        made = [step for event in self.log if isinstance(step := again.handle(event), Step)]
        assert [step.plain() for step in made] == [step.plain() for step in self.steps]

"""The search's thresholds: one frozen record; each has a unit and the reason for its figure.

None of them decides whether a plan is right: a plan is simulated and proven whatever they say. They
decide what is looked at and how long. What the work is counted in stands in `question/effort.py`;
constants of compiled loops stay beside the loop, whose cache on disk knows its own file only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

_Value = TypeVar("_Value", int, float, tuple[float, ...], tuple[int, ...])


def _threshold(value: _Value, unit: str, reason: str) -> _Value:
    """Return a field of the record with its default; its unit and reason stand in its metadata."""
    made: _Value = field(default=value, metadata={"unit": unit, "reason": reason})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What the search looks at, and when it stops looking."""

    # --- the question: what belongs to the space unless the user says otherwise
    sequences_per_chip: int = _threshold(
        8, "sequences", "the default batch: enough micro-batches to fill a pipeline"
    )
    usual_length: int = _threshold(
        4096, "tokens", "the default sequence length, where the model allows as much"
    )
    shortest_local: int = _threshold(
        2048, "tokens", "a search begins with no shorter parts of a sequence: kernels lose more"
    )
    least_local: int = _threshold(
        512, "tokens", "the shortest parts that a local search tries and the bound knows"
    )
    most_virtual: int = _threshold(
        4, "unit ranges per stage", "the bubble shrinks as 1/ranges, messages grow with them"
    )
    usual_sequences: tuple[int, ...] = _threshold(
        (1, 2, 4, 8, 16), "sequences", "micro-batches of a replica that the coarse model looks at"
    )
    larger_sequences: tuple[int, ...] = _threshold(
        (32, 64, 128, 256), "sequences", "of small models: products of few rows are slow"
    )
    local_sequences: int = _threshold(
        64, "sequences", "up to here a local search tries any number; the bound looks at each"
    )
    boundary_numbers: int = _threshold(
        2**28, "numbers between two blocks", "of a micro-batch: beyond it products gain no more"
    )
    other_tokens: int = _threshold(
        2**15, "tokens", "up to here a micro-batch may have any number of sequences"
    )

    # --- small spaces
    exact_chips: int = _threshold(8, "chips", "a larger space is not searched whole")
    exact_batch: int = _threshold(64, "sequences", "a larger batch has too many divisions")

    # --- the coarse model
    hidden_share: float = _threshold(
        0.6, "of a micro-batch's time", "gradient traffic hides behind the backward pass"
    )
    weight_share: float = _threshold(
        1.0 / 3.0, "of a micro-batch's time", "weight passes, beside which gradients travel"
    )
    filled_share: float = _threshold(
        0.7, "of delayed weight passes", "so many go into gaps where stages are unequal"
    )
    optimism: tuple[float, ...] = _threshold(
        (1.04, 1.04, 1.06, 1.10), "× the coarse price, by shard level",
        "simulated steps are longer on average: boundaries, uneven ends, traffic in the open",
    )  # fmt: skip
    most_combinations: int = _threshold(
        4096, "configurations", "of all pools of a chain together: the grid is an array of them"
    )
    chained_sequences: int = _threshold(
        4, "sequences", "larger micro-batches lengthen the fill of a chain over several pools"
    )
    more_chains: int = _threshold(
        2, "chains per group of pools", "with experts the coarse model errs more"
    )
    unlike_candidates: int = _threshold(
        8, "candidates", "of other widths than the best, where experts hide which width pays"
    )
    shared_badly: float = _threshold(
        1.02, "× the price of a divisible batch", "what another micro-batch size reaches as a rule"
    )
    chains_together: float = _threshold(
        64.5,
        "combinations",
        "of chains of several groups; the half keeps a root from rounding",
    )

    # --- the lower bound, which holds at any of these: they say how close it comes
    bound_cells: int = _threshold(8, "ranges of a lead", "before any is divided further")
    bound_shortest: float = _threshold(0.01, "of the step", "a shorter lead is taken for none")
    bound_rounds: int = _threshold(
        2, "rounds", "in which pools' prices follow what a sequence costs on each"
    )
    bound_shares: tuple[float, ...] = _threshold(
        (0.8, 0.6, 0.3, 0.0), "of their price", "at which pools that only help are tried, too"
    )
    bound_halvings: int = _threshold(
        5, "halvings", "of the range in which the best price of a second of lead lies"
    )
    bound_close: float = _threshold(1e-4, "of the bound", "finer than anything it is compared with")
    bound_narrow: float = _threshold(0.01, "of a lead", "a narrower range is not divided further")
    bound_wider: float = _threshold(1.5, "× its beginning", "where a range without an end is cut")

    # --- exact cuts
    beaten: float = _threshold(
        1.02, "× the best so far", "whose least time is above this cannot win: prices err by less"
    )
    hopeless: float = _threshold(
        1.45, "× the best so far", "an exact cut takes 0.7 of the coarse price at the least"
    )
    resized: int = _threshold(6, "candidates", "that are also cut with other micro-batch sizes")
    unlike_copies: float = _threshold(
        1.002, "× the price", "two kinds of copies of one chain: the simpler plan wins a tie"
    )
    alike: int = _threshold(2, "candidates of one kind", "among the resized: others get their turn")
    played_within: float = _threshold(
        1.05, "× the best", "the recurrence errs by so much between kinds of strategies"
    )
    ragged: float = _threshold(
        0.01, "of the step", "less is not worth other sizes: whole micro-batches cost about that"
    )
    varied: int = _threshold(
        24, "candidates", "whose replicas may divide their work otherwise, where experts are spread"
    )
    near_size: float = _threshold(
        2.0, "× the micro-batch", "sizes beyond are candidates of their own"
    )
    around_load: float = _threshold(
        0.2, "of a copy's load", "more or less of the batch than its speed asks for"
    )
    loads_together: float = _threshold(
        20_000.5, "combinations", "of what copies of all chains take; tried one by one"
    )
    worth_resizing: float = _threshold(0.003, "of the step", "below it the recurrence cannot tell")
    host_share: float = _threshold(
        0.8, "of host memory", "the rest is the system's, the data loader's and checkpoints'"
    )
    boundaries: float = _threshold(
        4.0, "boundary tensors", "on a chip at once: two static buffers, one coming, one going"
    )
    more_boundaries: float = _threshold(
        3.0, "boundary tensors per further range", "of a stage: they come before they are used"
    )

    # --- the recurrence
    reduced_later: int = _threshold(
        2, "units", "whose gradients wait for their reduction while weight passes go on"
    )
    message_slack: float = _threshold(
        0.2, "of a micro-batch", "messages may take this before a stage runs further ahead"
    )
    filled_gap: float = _threshold(
        0.6, "of the gap to bare work", "that delayed weight passes close, over 1F1B"
    )

    # --- simulation of drafts
    attempts: int = _threshold(4, "cuts", "with ever less memory, until a simulation fits")
    doublings: int = _threshold(
        8, "doublings", "of the memory set aside, until a cut of whole units moves"
    )
    spared_share: float = _threshold(
        1.02, "× the missing memory", "set aside: a new cut moves some of it to other stages"
    )
    least_spared: float = _threshold(
        2.0**27, "bytes", "set aside at once where a cut took too much: saves further attempts"
    )
    short_groups: int = _threshold(
        3, "groups of interleaved micro-batches", "in the shorter of two short steps"
    )
    long_step: int = _threshold(
        1_500, "passes of all stages", "beyond it the beginning of a step stands for the whole"
    )
    worth_shortening: float = _threshold(
        0.5, "of the step's work", "two short steps that take more save nothing"
    )
    same_price: float = _threshold(1e-9, "relative", "what rounding makes of one price")
    shortened_within: float = _threshold(
        0.05, "relative", "traffic that falls behind little by little shows late in a step"
    )
    most_whole: int = _threshold(5, "drafts", "simulated from the first micro-batch to the last")

    # --- the loop over candidates
    most_tried: int = _threshold(40, "candidates", "while none fits: then parts are searched")
    worth_a_look: float = _threshold(1.01, "× the best", "the price of a candidate errs by as much")
    worth_evening: float = _threshold(
        0.998, "× the best", "promised by other shares of the batch before they are simulated"
    )
    worth_more: float = _threshold(0.998, "× the best", "must be promised once the work is spent")
    false_promise: float = _threshold(
        1.01, "× the promise", "beyond it more than the schedule was priced wrongly"
    )
    curious: int = _threshold(2, "candidates of a kind", "that are given the benefit of the doubt")
    believed: float = _threshold(0.97, "× the promise", "of the first of a kind on a large cluster")
    most_explored: int = _threshold(8, "candidates", "of kinds that were not looked at")
    explored_per_gap: float = _threshold(
        0.03, "of the bound", "one more kind is looked at for so much of a gap"
    )
    explored_within: float = _threshold(
        1.4, "× the best", "a worse promise: no small steps lead from there to a better plan"
    )
    most_starts: int = _threshold(5, "plans", "of different shapes that a local search starts from")
    less_memory: float = _threshold(
        2.0 / 3.0, "of a chip's memory", "of a smaller question: what is found there needs less"
    )
    starts_within: float = _threshold(1.2, "× the best", "worse starts do not catch up")
    unfit: float = _threshold(
        1.05, "× the promise", "held against a kind of which one did not fit after all"
    )

    # --- small steps from a cut
    most_given: int = _threshold(3, "attempts", "to use the memory that a cut left over")
    given_share: float = _threshold(
        0.97, "of the free memory", "the rest covers what a new cut moves elsewhere"
    )
    most_moves: int = _threshold(
        4, "moves", "that look best are simulated before all are looked at anew"
    )
    hopeful: float = _threshold(1.003, "× the price", "the recurrence errs by as much on one move")
    near_ranges: int = _threshold(4, "unit ranges", "over which a unit is handed on")

    # --- local search on plans
    per_start: int = _threshold(
        400_000, "instructions", "of a local search for each start beside the best plan"
    )
    first_share: float = _threshold(
        0.08, "of the work that is left", "for each start, to see which of them lead on"
    )
    second_share: float = _threshold(0.25, "of the work that is left", "for each of the best two")
    alone_share: int = _threshold(
        16, "times less work", "of a local search for a pool alone: it is compared, not run"
    )
    alone_parts: int = _threshold(
        32, "parts of a batch", "a pool's batch alone is rounded up by one of them at most"
    )
    refunded_share: float = _threshold(
        0.5, "of the work", "that is given back where it helped: a search that gains goes on"
    )
    per_plan: int = _threshold(
        2_000, "instructions", "that take as long as what every simulation costs beside them"
    )
    first_moves: int = _threshold(
        3, "moves of a kind", "that are priced in its first turn; twice as many in each later one"
    )
    moves_a_turn: int = _threshold(
        12, "moves of a kind", "that are priced before the other kinds have their turn"
    )
    nearly_as_good: float = _threshold(
        1.005, "× the best, by short steps", "whose whole step may be better after all"
    )
    worth_anew: float = _threshold(
        1e-4, "relative", "gained since kinds of moves began: then those without effect begin anew"
    )
    least_gain: float = _threshold(1e-6, "relative", "a smaller gain is rounding")
    short_enough: float = _threshold(
        0.5, "of the step's passes", "two short steps that take more save nothing"
    )
    far_ranges: int = _threshold(4, "unit ranges", "of a long path over which units are handed on")
    short_path: int = _threshold(24, "unit ranges", "up to here units go between any two ranges")
    few_stages: int = _threshold(6, "stages", "up to here each link's depth is tried early")
    nearly_busiest: float = _threshold(
        1.02, "× the busiest stage", "a stage that becomes busier than that only slows the step"
    )

    # --- comparison with uniform plans
    uniform_simulated: int = _threshold(2, "kinds of layouts", "the best of each is simulated")
    uniform_large: int = _threshold(
        256, "chips", "beyond it simulating layouts that share all states takes long"
    )
    uniform_passes: int = _threshold(
        40_000, "passes of all chips", "in further simulations; a large cluster has none"
    )
    uniform_sure: float = _threshold(0.95, "× the slowest pool's blocks", "a step cannot take less")

    # --- what does not fit, and clusters that change
    most_memory: float = _threshold(
        128.0, "× a chip's memory", "beyond it memory is not what is missing"
    )
    memory_halvings: int = _threshold(
        4, "halvings", "of the range of least memory: within 9 % of it"
    )
    survivor_tries: int = _threshold(
        64, "combinations of micro-batches", "with which a running plan goes on, the largest first"
    )


THRESHOLDS = Thresholds()

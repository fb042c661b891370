"""Collective programs as data, and an interpreter that proves what they compute.

A collective across unlike chips is a small list of steps. `comm` executes the list, `cost` prices
the same list, and here it is written, checked and run on numpy arrays. No torch.

**Who.** A `Group` lists islands of ranks that share native links; islands may be of unequal size,
each rank has a rail and a relative NIC bandwidth. A *seat* is an index into the group's order, and
every number in a program is a seat. Two seats are joined by an `Edge`: island, rail or cross.

**What.** An operation's data are *sections*: one for all_reduce, reduce, broadcast and barrier; one
per seat for reduce_scatter, all_gather, gather and scatter (of any lengths); one per pair for
all_to_all; one per message for send_receive. A `Slice` is an interval of exact fractions of some
sections; fraction f of a section of `count` elements lies at element floor(f·count). A program
therefore fits every size, and a slice names content, not a place: no step permutes anything.
`layout` says who holds which sections before and after each operation.

**How.** A `CollectiveProgram` is a list of `Step`s. A step is an action (all_gather, reduce, …) by
a pattern (native, ring, tree, binary, doubling, direct) in several `Team`s at the same time; a team
is an ordered list of members and a rule (`Cut`, `Owned`, `Pieces`, `Blocks`, `Reshard`) that says
what is whose. A native step is one call of the island's own library. A step of the action
`exchange` has its transfers written out. `after` names the steps that a step waits for.

**Meaning.** Every step stands for rounds of transfers (`rounds`): those of a round read first and
take effect in their order, which fixes the order of all additions. `chunks` runs all steps once per
equal piece of the data, as a pipeline (`issue_order`); `connections` stripes each message between
islands (`stripes`).

    program = build("all_reduce", "hierarchical", Group.of([[0, 1, 2], [3, 4]]), chunks=4)
    check(program)                                  # right for every size, or a ProgramError
    interpret.interpret(program, inputs, 1000)      # outputs and traffic by rank (needs numpy)
    load(program, 1, Layout.of(program, 1000))      # rounds and elements per link, for the price
    seat_rounds(program, program.steps[1], seat)    # what one rank sends and receives

`algorithms(operation, group)` lists what applies. Which one to use is the cost model's choice.
"""

from tutti.collective.builder import algorithms, build
from tutti.collective.check import ProgramError, Reason, check
from tutti.collective.expand import (
    LocalRound,
    in_chunk,
    rounds,
    seat_rounds,
    stripes,
    written_out,
)
from tutti.collective.group import Edge, Group, Island
from tutti.collective.layout import Layout, held_after, held_before, num_sections
from tutti.collective.load import Load, load
from tutti.collective.parts import Blocks, Cut, Owned, Pieces, Reshard
from tutti.collective.program import (
    Action,
    CollectiveProgram,
    Operation,
    Pattern,
    Round,
    Step,
    Team,
    Transfer,
)
from tutti.collective.slices import Part, Slice
from tutti.collective.traffic import Traffic

__all__ = [
    "Action",
    "Blocks",
    "CollectiveProgram",
    "Cut",
    "Edge",
    "Group",
    "Island",
    "Layout",
    "Load",
    "LocalRound",
    "Operation",
    "Owned",
    "Part",
    "Pattern",
    "Pieces",
    "ProgramError",
    "Reason",
    "Reshard",
    "Round",
    "Slice",
    "Step",
    "Team",
    "Traffic",
    "Transfer",
    "algorithms",
    "build",
    "check",
    "held_after",
    "held_before",
    "in_chunk",
    "load",
    "num_sections",
    "rounds",
    "seat_rounds",
    "stripes",
    "written_out",
]

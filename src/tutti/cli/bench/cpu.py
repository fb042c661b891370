"""`tutti bench cpu`: training steps on processors, beside a plain loop, DDP and FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import ProgressLine
from tutti.cli.shared.torch_needed import require_torch

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.bench.cpu.turns import WayRounds


def cpu(
    sequences: Annotated[int, typer.Option(help="Of a rank's step.", min=1)] = 2,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 512,
    rounds: Annotated[int, typer.Option(help="Each is a figure of its own.", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="Of each side in a round.", min=1)] = 6,
    json: Json = False,
) -> None:
    """Time steps of ranks on processors: tokens per CPU second beside torch's own ways."""
    require_torch("bench cpu")
    from tutti.bench.cpu.contenders import Size
    from tutti.bench.cpu.turns import TurnsQuestion, measure

    size = Size(sequences=sequences, length=sequence_length)
    asked = TurnsQuestion(size=size, rounds=rounds, steps=steps)
    with ProgressLine("training", wanted=not json) as line:
        answers = list(measure(asked, line.say))
    if json:
        print_json({"rows": [_row(answer) for answer in answers]})
        return
    print_rich(_table(answers))


def _row(answer: WayRounds) -> dict[str, Any]:
    return {
        "way": answer.way.name,
        "peer": answer.way.peer,
        "ranks": answer.way.ranks,
        "rounds": [
            {"tokens_per_cpu_s": r.ours, "peer_tokens_per_cpu_s": r.theirs, "ratio": r.ratio}
            for r in answer.rounds
        ],
        "loss": answer.our_loss,
        "peer_loss": answer.their_loss,
    }


def _table(answers: list[WayRounds]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="Tokens per CPU second, float32, one thread per rank", box=box.HEAVY_HEAD)
    table.add_column("way", no_wrap=True)
    for name in ("ranks", "tutti", "peer", "peer has", "tutti is, by round", "losses"):
        table.add_column(name, justify="right")
    for answer in answers:
        ours = sum(r.ours for r in answer.rounds) / len(answer.rounds)
        theirs = sum(r.theirs for r in answer.rounds) / len(answer.rounds)
        table.add_row(
            answer.way.name,
            str(answer.way.ranks),
            f"{ours:,.0f}",
            answer.way.peer,
            f"{theirs:,.0f}",
            ", ".join(f"{r.ratio:.2f}×" for r in answer.rounds),
            f"{answer.our_loss:.3f}, {answer.their_loss:.3f}",
        )
    return table

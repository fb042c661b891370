"""The planner's answer as tables for the terminal, and as plain values."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tutti.plan.drawing_serving import service_text
from tutti.plan.files import plan_to_document
from tutti.plan.plan import Pipeline
from tutti.plan.serving import Role
from tutti.search.serving.evaluate import shares
from tutti.search.serving.planner import ServeAnswer
from tutti.simulate.serving.table import serving_table
from tutti.units import many, seconds_text


def answer_table(answer: ServeAnswer) -> RenderableType:
    """Return the deployment, what it serves, and what stands beside it."""
    problem, best = answer.problem, answer.best
    title = Text(f"{problem.model.name} on {problem.cluster.name}: ", style="bold")
    title.append(_headline(answer), style="bold")
    return Group(
        title,
        Text(service_text(problem.service), style="dim"),
        Text(),
        _engines(answer),
        Text(),
        _compared(answer),
        Text(),
        Text("simulated at that rate:", style="bold"),
        serving_table(best.result),
        Text(
            f"{many(answer.num_engines, 'kind')} of engines priced, planned in "
            f"{seconds_text(answer.seconds)}",
            style="dim",
        ),
    )


def _headline(answer: ServeAnswer) -> str:
    best = answer.best
    chips = many(best.plan.num_ranks, "chip")
    if not best.rate:
        return f"no rate keeps the limits by simulation; the nearest is {answer.winner}, {chips}"
    return f"{best.rate:.4g} requests/s within limits on {chips} ({answer.winner})"


def _engines(answer: ServeAnswer) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("pipeline", "role", "engines", "each", "slots", "pages", "requests"):
        table.add_column(name, justify="left" if name in ("role", "each") else "right")
    rows = zip(answer.plan.pipelines, shares(answer.plan), strict=True)
    for number, (pipeline, share) in enumerate(rows):
        engine = pipeline.engine
        assert engine is not None
        role = "prefill + decode" if engine.role is Role.BOTH else engine.role.value
        table.add_row(
            str(number), role, f"{pipeline.copies:,}", _stages(pipeline), f"{pipeline.slots:,}",
            f"{engine.pages:,}", f"{100 * share:.1f} %",
        )  # fmt: skip
    return table


def _stages(pipeline: Pipeline) -> str:
    """Return the stages in short: "l4 ×5 (4 layers), a100 ×4 (15 layers)"."""
    words: list[str] = []
    last, count, units = "", 0, 0
    for stage in pipeline.stages:
        replica = stage.replicas[0]
        name = replica.chips.pools[0] + (f" tp {replica.tp}" if replica.tp > 1 else "")
        if name == last:
            count, units = count + 1, units + stage.num_units
            words[-1] = f"{name} × {count} stages ({units} units)"
        else:
            last, count, units = name, 1, stage.num_units
            words.append(f"{name} ({units} units)")
    return " → ".join(words)


def _compared(answer: ServeAnswer) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("beside it")
    for name in ("promised", "simulated", "chips"):
        table.add_column(name, justify="right")
    for row in answer.compared:
        said = "cannot win" if row.simulated is None else f"{row.simulated:.4g}/s"
        table.add_row(
            f"{row.name}{', ' + row.note if row.note else ''}", f"{row.promised:.4g}/s", said,
            f"{row.chips:,}",
        )  # fmt: skip
    gap = f"gap {100 * answer.gap:.1f} %" if answer.problem.objective == "rate" else ""
    table.add_row("bound of every mixture of these engines", f"{answer.bound:.4g}/s", gap, "")
    return table


def answer_document(answer: ServeAnswer) -> dict[str, object]:
    """Return the answer for JSON."""
    return {
        "plan": plan_to_document(answer.plan),
        "winner": answer.winner,
        "requests_per_s": answer.best.rate,
        "promised_per_s": answer.best.promised,
        "bound_per_s": answer.bound,
        "gap": answer.gap,
        "compared": [
            {"name": c.name, "promised": c.promised, "simulated": c.simulated, "chips": c.chips}
            for c in answer.compared
        ],
        "simulation": answer.best.result.to_document(),
        "engines_priced": answer.num_engines,
        "seconds": answer.seconds,
    }

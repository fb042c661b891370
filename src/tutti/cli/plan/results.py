"""What `tutti plan` leaves behind: the plan, its export, its page; checked before the search."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from tutti.hardware.cluster import Cluster
    from tutti.models.spec import ModelSpec
    from tutti.plan.plan import Plan
    from tutti.search.answer.result import SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Where results go."""

    output: Path | None = None
    html: Path | None = None
    export: str | None = None
    export_to: Path | None = None
    json: bool = False

    @property
    def prints_export(self) -> bool:
        """Whether the export takes the place of the tables."""
        return self.export is not None and self.export_to is None

    def check(self, cluster: str, old_plan: Path | None) -> None:
        """Refuse what could not be written before anything is searched."""
        from tutti.files import require_apart

        if self.export is not None and self.export not in _EXPORTERS:
            raise InputError(f"--export: '{self.export}'; {hint(self.export, _EXPORTERS)}")
        if self.export_to is not None and self.export is None:
            raise InputError("--export-to: goes with --export megatron or --export flagscale")
        if self.prints_export and self.json:
            raise InputError("--export and --json both print; give --export-to FILE")
        targets = [path for path in (self.output, self.html, self.export_to) if path is not None]
        require_apart(Path(cluster), *targets)
        if old_plan is not None:
            require_apart(old_plan, *targets)
        for path in targets:
            if not path.parent.is_dir():
                raise InputError(f"{path}: cannot be written (there is no folder {path.parent})")

    def write_plan(self, plan: Plan) -> None:
        """Write the plan file."""
        from tutti.plan.files import save_plan

        if self.output is not None:
            save_plan(plan, self.output)

    def write_page(self, result: SearchResult, model: ModelSpec, cluster: Cluster) -> None:
        """Write the page about the plan."""
        from tutti.report.planning import write_planning_page

        if self.html is not None:
            write_planning_page(self.html, result, model, cluster)

    def write_export(
        self, plan: Plan, model: ModelSpec, cluster: Cluster, *, searched: bool = False
    ) -> None:
        """Print or write the plan in another program's words; what they cannot say is refused."""
        from tutti.files import write_text

        if self.export is None:
            return
        try:
            text = _EXPORTERS[self.export](plan, model, cluster)
        except InputError as error:
            if not searched:
                raise
            remedy = f"plan with --exportable {self.export} to search only what it can run"
            raise InputError(f"{error}; {remedy}") from None
        if self.export_to is not None:
            write_text(self.export_to, text)
        else:
            sys.stdout.write(text)

    def say_written(self) -> None:
        """Name the files on the terminal."""
        if self.json:
            return
        for path in filter(None, (self.output, self.export_to, self.html)):
            typer.echo(f"written to {path}")


def _megatron(plan: Plan, model: ModelSpec, cluster: Cluster) -> str:
    from tutti.export.megatron import megatron_arguments

    return _lines(megatron_arguments(plan, model, cluster))


def _lines(arguments: list[str]) -> str:
    """Write one option with its values per line, so that a shell reads them as one command."""
    import shlex

    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("--") or not lines:
            lines.append(shlex.quote(argument))
        else:
            lines[-1] += " " + shlex.quote(argument)
    return " \\\n".join(lines) + "\n"


def _flagscale(plan: Plan, model: ModelSpec, cluster: Cluster) -> str:
    from tutti.export.flagscale import flagscale_yaml

    return flagscale_yaml(plan, model, cluster)


_EXPORTERS: dict[str, Callable[[Plan, ModelSpec, Cluster], str]] = {
    "megatron": _megatron,
    "flagscale": _flagscale,
}

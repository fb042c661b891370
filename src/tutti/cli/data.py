"""`tutti data show`: what training data become: text, tokens, mask, lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text

    from tutti.huggingface.tokenizer import Tokenizer
    from tutti.train.data.config import DataConfig
    from tutti.train.data.preview import Example, Look

app = typer.Typer(help="Training data: what they become.", no_args_is_help=True)

MARKS = ("{+", "+}")  # around what is trained on, where there is no colour; as `git --word-diff`
LONGEST_BAR = 40


@app.callback()
def _group() -> None:
    """Training data: what they become."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The sources to look at."""

    data: DataConfig
    tokenizer: str
    sequence_length: int | None = None


@app.command()
def show(
    file: Annotated[str, typer.Argument(help="A file or folder of data, or a training file.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="A Hugging Face folder, or bytes, if not the file's own.")
    ] = None,
    most: Annotated[int, typer.Option(min=0, help="Examples to show of each source.")] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", help="List every token, too.")] = False,
    whole: Annotated[
        bool, typer.Option("--all", help="Read all of it, not the first 16 MiB of each source.")
    ] = False,
    json: Json = False,
) -> None:
    """Show data as they are trained on: rendered text, tokens, what has a loss, lengths."""
    from tutti.huggingface.tokenizer import open_tokenizer
    from tutti.train.data.preview import look

    asked = _asked(file, tokenizer)
    opened = open_tokenizer(asked.tokenizer)
    looks = [
        look(source, opened, end=asked.data.end_of_document, most=most, whole=whole)
        for source in (*asked.data.train, *asked.data.validation)
        if source.path
    ]
    if not looks:
        raise InputError(f"{file}: names no file of data; a synthetic source has no text to show")
    if json:
        print_json(
            {
                "tokenizer": opened.name,
                "sequence_length": asked.sequence_length,
                "sources": [_document(one, opened) for one in looks],
            }
        )
        return
    for one in looks:
        print_rich(*_rendered(one, opened, asked, tokens=tokens))


def _asked(file: str, tokenizer: str | None) -> _Asked:
    from tutti.document import Place, build
    from tutti.files import read_file
    from tutti.train.data.config import DataConfig, SourceConfig
    from tutti.train.run.config import TrainConfig, data_from

    path = Path(file)
    if path.suffix not in (".yaml", ".yml"):
        data = DataConfig(train=(SourceConfig(path=file),))
        return _Asked(data=data, tokenizer=tokenizer or "bytes")
    values = read_file(path)
    if isinstance(values, dict) and "train" in values and "model" not in values:
        data = data_from(path.parent, build(DataConfig, values, Place(path.name)))
        return _Asked(data=data, tokenizer=tokenizer or data.tokenizer or "bytes")
    from tutti.train.run.weights import model_folder

    config = TrainConfig.load(path)
    folder = model_folder(config.model)
    own = config.data.tokenizer or (str(folder) if folder is not None else "")
    if not (tokenizer or own):
        raise InputError(
            f"{file}: names no tokenizer, and its model has no folder with one; give --tokenizer"
        )
    return _Asked(
        data=config.data,
        tokenizer=tokenizer or own,
        sequence_length=config.job.sequence_length,
    )


def _document(source: Look, tokenizer: Tokenizer) -> dict[str, Any]:
    from tutti.train.data.preview import histogram

    return {
        "source": source.name,
        "kind": source.kind.value,
        "form": source.form.value,
        "whole": source.whole,
        "examples": len(source.lengths),
        "skipped": source.skipped,
        "tokens": int(source.lengths.sum()),
        "trained_tokens": source.num_trained,
        "lengths": [
            {"from": low, "to": high, "count": count}
            for low, high, count in histogram(source.lengths.tolist())
        ],
        "first": [
            {
                "tokens": example.tokens.tolist(),
                "trained": example.trained.tolist(),
                "text": [
                    {"text": text, "trained": trained} for text, trained in example.runs(tokenizer)
                ],
            }
            for example in source.examples
        ],
    }


# --- drawing ---------------------------------------------------------------------------------


def _rendered(source: Look, tokenizer: Tokenizer, asked: _Asked, *, tokens: bool) -> list[Any]:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    coloured = console.color_system is not None and not console.no_color
    total = int(source.lengths.sum())
    read = "" if source.whole else " of the first 16 MiB (--all)"
    head = f"{source.name}  {source.kind.value}, {source.form.value}, tokenizer {tokenizer.name}"
    share = f"{source.num_trained / total:.1%}" if total else "none"
    said = f"{len(source.lengths):,} examples{read}, {total:,} tokens, {share} trained on"
    if source.skipped:
        said += f", {source.skipped:,} skipped (no text, or no loss)"
    legend = Text("what is trained on: ").append_text(_marked("like this", True, coloured))
    lines: list[Any] = [Text(head, "bold"), Text(said), legend]
    for number, example in enumerate(source.examples):
        lines += [Text(), _title(number, example), _text(example, tokenizer, coloured)]
        if tokens:
            lines.append(_table(example, tokenizer, coloured))
    return [*lines, Text(), *_lengths(source, asked.sequence_length)]


def _title(number: int, example: Example) -> Text:
    from rich.text import Text

    trained = int(example.trained.sum())
    return Text(f"example {number + 1}: {len(example.tokens):,} tokens, {trained:,} trained on")


def _text(example: Example, tokenizer: Tokenizer, coloured: bool) -> Text:
    from rich.text import Text

    whole = Text()
    for text, trained in example.runs(tokenizer):
        whole.append_text(_marked(text, trained, coloured))
    return whole


def _marked(text: str, trained: bool, coloured: bool) -> Text:
    from rich.text import Text

    shown = "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
    if coloured:
        return Text(shown, "bold green" if trained else "dim")
    return Text(f"{MARKS[0]}{shown}{MARKS[1]}" if trained else shown)


def _table(example: Example, tokenizer: Tokenizer, coloured: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("token", justify="right")
    table.add_column("text")
    table.add_column("")
    for token, trained in zip(example.tokens.tolist(), example.trained.tolist(), strict=True):
        style = ("bold green" if trained else "dim") if coloured else ""
        text = Text(repr(tokenizer.decode([token])), style)
        table.add_row(str(token), text, "trained" if trained else "")
    return table


def _lengths(source: Look, row: int | None) -> list[Any]:
    """Return the lengths as bars, and how many examples are longer than a row."""
    from rich.table import Table

    from tutti.train.data.preview import histogram

    bars = histogram(source.lengths.tolist())
    if not bars:
        return []
    table = Table(box=None, pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("examples", justify="right")
    table.add_column("")
    most = max(count for *_, count in bars)
    for low, high, count in bars:
        table.add_row(f"{low:,}-{high:,}", f"{count:,}", "█" * round(LONGEST_BAR * count / most))
    lines: list[Any] = [table]
    if row is not None:
        longer = int((source.lengths > row).sum())
        lines.append(
            f"{longer:,} of {len(source.lengths):,} are longer than a row of {row:,} tokens"
        )
    return lines

"""What a person writes about training data: the `data:` part of a training file.

Only facts and their checks; `opening` turns them into rows. A source may be written as its path
alone. A relative path is meant from the folder of the file that names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tutti.document import Above, AtLeast, AtMost, Count, Natural, Place, build_fields, plain_fields

SHIPPED = "shipped:"  # before the name of a text that comes with tutti

# what to do about a row that cannot be trained on
MEND = "mend the row, or leave such rows out with broken: skip"


class SourceKind(StrEnum):
    """How a source's bytes are laid out."""

    AUTO = "auto"
    TEXT = "text"
    JSONL = "jsonl"
    JSON = "json"  # one array of objects
    PARQUET = "parquet"
    DATASET = "dataset"  # a folder of Hugging Face's `Dataset.save_to_disk`
    MEGATRON = "megatron"  # a pair of .bin and .idx, tokenised already
    SYNTHETIC = "synthetic"


class Form(StrEnum):
    """What a record holds, and so which of its tokens have a loss."""

    AUTO = "auto"
    TEXT = "text"  # a document; loss on all of it
    CHAT = "chat"  # messages; loss on the assistant's
    PAIRS = "pairs"  # a prompt and its completion; loss on the completion
    ALPACA = "alpaca"  # instruction, perhaps an input, and output; loss on the output
    TOKENS = (
        "tokens"  # `input_ids`, perhaps with `labels` and `attention_mask`, as transformers has
    )
    PREFERENCES = "preferences"  # a chosen and a rejected answer, perhaps with their prompt
    JUDGED = "judged"  # a prompt, its completion, and whether that is wanted
    PROMPTS = "prompts"  # a prompt alone, which the model answers itself


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """One source of rows."""

    path: str = ""
    kind: SourceKind = SourceKind.AUTO
    weight: Annotated[float, Above(0)] = 1.0
    form: Form = Form.AUTO
    loss: Literal["answers", "last", "all"] = "answers"  # all answers, the last, or every token
    text: str = "text"
    messages: str = ""  # "": `messages` or `conversations`, whichever is there
    prompt: str = "prompt"
    completion: str = "completion"
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str = "margin"  # by how much the chosen answer is better; may be absent
    label: str = "label"
    tools: str = "tools"
    row_weight: str = ""  # the field that holds a row's weight
    broken: Literal["error", "skip"] = "error"  # rows that cannot be trained on
    split: str = ""  # of a dataset folder with several
    documents: Literal["file", "block"] = "file"
    vocabulary: Natural = 0  # synthetic; 0: the model's
    document_length: Natural = 0  # synthetic; 0: the length of a row
    surprise: Annotated[float, AtLeast(0), AtMost(1)] = 0.1

    document_shape: ClassVar[tuple[type, ...]] = (str, dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", SourceKind(self.kind))  # Python code may write plain text
        object.__setattr__(self, "form", Form(self.form))
        if self.kind is SourceKind.SYNTHETIC and self.path:
            raise ValueError(f"a synthetic source has no path; found '{self.path}'")
        if self.kind is not SourceKind.SYNTHETIC and not self.path:
            raise ValueError("'path' is missing")

    @classmethod
    def from_document(cls, value: object, place: Place) -> SourceConfig:
        """Read a path alone, or the fields."""
        if isinstance(value, str):
            value = {"path": value}
        return build_fields(cls, value, place)

    def to_document(self) -> object:
        """Write the path alone where nothing else is said."""
        written = plain_fields(self)
        return self.path if set(written) == {"path"} else written

    @property
    def in_blocks(self) -> bool:
        """Whether blank lines part the documents of a plain text."""
        return self.documents == "block" or self.path.startswith(SHIPPED)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path or self.kind.value


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingConfig:
    """How documents become rows of one length.

    "cut" joins documents and cuts the result into rows: a document may go on in another row.
    "fit" puts whole examples into rows, "apart" each into a row of its own. "auto" fits supervised
    sources and cuts the others.
    """

    kind: Literal["auto", "cut", "fit", "apart"] = "auto"
    # examples longer than a row, with "fit" and "apart"
    long: Literal["truncate", "drop", "split", "error"] = "truncate"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The `data:` part of a training file."""

    train: tuple[SourceConfig, ...]
    validation: tuple[SourceConfig, ...] = ()
    holdout: Annotated[float, AtLeast(0), AtMost(0.5)] = 0.0  # part of the training rows
    tokenizer: str = ""  # "bytes", or a folder; "": the model's own folder
    end_of_document: bool = True  # whether documents end with the tokenizer's end token
    packing: PackingConfig = field(default_factory=PackingConfig)
    seed: Natural = 0
    cache: str = ""  # "": a folder of the user's cache
    processes: Natural = 0  # that tokenise; 0: as many as large inputs need
    prefetch: Count = 4  # micro-batches that lie ready

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("'train' is empty; name at least one source")
        if self.holdout and self.validation:
            raise ValueError("'holdout' and 'validation' are both given; choose one")

    def folders(self, base: Path) -> list[Path]:
        """Return the folders of files that sources name, as seen from the file that names them."""
        paths = [source.path for source in (*self.train, *self.validation)]
        own = [path for path in paths if path and "://" not in path]
        named = [base / Path(path).expanduser() for path in own if not path.startswith(SHIPPED)]
        return [path if path.is_dir() else path.parent for path in named]

"""`open_data`: from a `DataConfig` to training and validation rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tutti.document import Natural
from tutti.errors import InputError
from tutti.files import fingerprint
from tutti.huggingface.tokenizer import Tokenizer, find_tokenizer, open_tokenizer
from tutti.models.objective import Objective
from tutti.storage.url import is_url
from tutti.train.data.answer_rows import AnswerRows
from tutti.train.data.cache import CacheSettings, Progress, default_folder, open_store, silent
from tutti.train.data.config import DataConfig, SourceConfig, SourceKind
from tutti.train.data.megatron import open_megatron
from tutti.train.data.order import DataPart, TrainingOrder, ValidationRows, split
from tutti.train.data.packing import CutRows, FitRows, PackingReport
from tutti.train.data.prompt_rows import PromptRows
from tutti.train.data.row import Rows
from tutti.train.data.sources.find import find, kind_of
from tutti.train.data.sources.remote import brought_here, remote_files
from tutti.train.data.store import TokenStore
from tutti.train.data.synthetic import SyntheticRows


@dataclass(frozen=True, slots=True, kw_only=True)
class DataState:
    """Where a run is in its data: all that a checkpoint keeps of it."""

    next_sample: Natural
    seed: Natural
    fingerprint: str


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What a source gave."""

    name: str
    use: str  # "train" or "validation"
    packing: PackingReport | None  # None: synthetic
    skipped: int

    def __str__(self) -> str:
        if self.packing is None:
            return f"{self.name} ({self.use}): synthetic, without end"
        packing = self.packing
        said = [
            f"{self.name} ({self.use}): {_counted(packing.documents, packing.noun)}",
            _counted(packing.tokens, "token"),
            _counted(packing.rows, "row"),
            f"{packing.padding / (packing.padding + packing.tokens):.1%} padding",
        ]
        for count, what in (
            (packing.truncated, "truncated"), (packing.split, "split"),
            (packing.dropped, "dropped"), (self.skipped, "skipped"),
        ):  # fmt: skip
            if count:
                said.append(f"{count:,} {what}")
        return ", ".join(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedData:
    """Rows for training and validation, found by their numbers."""

    train: TrainingOrder
    validation: ValidationRows | None
    reports: tuple[SourceReport, ...]
    tokenizer: Tokenizer | None  # None: nothing here was text
    seed: int
    fingerprint: str  # of all tokens, their packing and their order; the same on every node

    def state(self, next_sample: int) -> DataState:
        """Return what a checkpoint keeps."""
        return DataState(next_sample=next_sample, seed=self.seed, fingerprint=self.fingerprint)

    def check(self, state: DataState) -> None:
        """Refuse to resume on other data than the run had."""
        if state.fingerprint != self.fingerprint:
            raise InputError(
                "data: not what the checkpoint was trained on (sources, tokenizer, packing, "
                "sequence length or seed differ); restore them, or start from its weights alone"
            )


def check_data(
    config: DataConfig, *, base: Path = Path(), model_folder: Path | None = None
) -> None:
    """Raise where a source or the tokenizer is not there; nothing of them is read."""
    kinds = {
        _checked_kind(source, base)
        for source in (*config.train, *config.validation)
        if not _endless(source)
    }
    if kinds - {SourceKind.MEGATRON}:
        find_tokenizer(_tokenizer_name(config, model_folder), folder=base)


def _checked_kind(source: SourceConfig, base: Path) -> SourceKind:
    """Return a source's kind; at a URL, of what is there."""
    if not is_url(source.path):
        return find(source, base)[0]
    _, files = remote_files(source)
    if source.kind is not SourceKind.AUTO:
        return source.kind
    known = [kind for file in files if (kind := kind_of(file.name)) is not None]
    if not known:
        raise InputError(f"{source.path}: has no file of a known kind; say 'kind'")
    return known[0]


def _tokenizer_name(config: DataConfig, model_folder: Path | None) -> str:
    if config.tokenizer:
        return config.tokenizer
    if model_folder is not None:
        return str(model_folder.resolve())
    raise InputError(
        "data: 'tokenizer' is missing, and the model has no folder with one; name a Hugging Face "
        "folder or 'bytes'"
    )


def open_data(
    config: DataConfig,
    *,
    sequence_length: int,
    vocabulary: int,
    base: Path = Path(),
    model_folder: Path | None = None,
    objective: Objective | None = None,
    progress: Progress = silent,
) -> PackedData:
    """Tokenise what is not yet tokenised, and lay out rows of `sequence_length`.

    Relative paths are meant from `base`. `model_folder` holds the model's own tokenizer. With an
    objective, sources hold answers to compare.
    """
    opener = _Opener(config, sequence_length, vocabulary, base, model_folder, progress)
    opener.objective = objective
    rows = [opener.rows(source, number, "train") for number, source in enumerate(config.train)]
    pairs = [
        split(own, seed=config.seed, number=number, holdout=_holdout(config, source))
        for number, (own, source) in enumerate(zip(rows, config.train, strict=True))
    ]
    held = [part for _, part in pairs if part is not None]
    for number, source in enumerate(config.validation, len(rows)):
        own = opener.rows(source, number, "validation")
        count = min(own.num_rows, _SYNTHETIC_VALIDATION_ROWS) if _endless(source) else own.num_rows
        held.append(DataPart(own, seed=config.seed, number=number, first=0, count=count))
    if config.holdout and not held:
        raise InputError("data: 'holdout' needs a source with an end; a synthetic one has none")
    return PackedData(
        train=TrainingOrder([part for part, _ in pairs], [s.weight for s in config.train]),
        validation=ValidationRows(held, length=sequence_length, pad=opener.pad) if held else None,
        reports=tuple(opener.reports),
        tokenizer=opener.tokenizer,
        seed=config.seed,
        fingerprint=opener.fingerprint(),
    )


_SYNTHETIC_VALIDATION_ROWS = 64


def _endless(source: SourceConfig) -> bool:
    return source.kind is SourceKind.SYNTHETIC


def _holdout(config: DataConfig, source: SourceConfig) -> float:
    return 0.0 if _endless(source) else config.holdout


class _Opener:
    """Opens the sources of one configuration."""

    def __init__(
        self,
        config: DataConfig,
        length: int,
        vocabulary: int,
        base: Path,
        model_folder: Path | None,
        progress: Progress,
    ) -> None:
        self.config, self._length, self._vocabulary, self._base = config, length, vocabulary, base
        self._model_folder = model_folder
        self.tokenizer: Tokenizer | None = None
        self.objective: Objective | None = None
        self.reports: list[SourceReport] = []
        self._digests: list[object] = []
        self._cache = CacheSettings(
            folder=base / Path(config.cache).expanduser() if config.cache else default_folder(),
            end_of_document=config.end_of_document,
            processes=config.processes,
            progress=progress,
        )

    @property
    def pad(self) -> int:
        """The token of padding."""
        pad = self.tokenizer.pad if self.tokenizer is not None else 0
        return pad if pad < self._vocabulary else 0

    def rows(self, source: SourceConfig, number: int, use: str) -> Rows:
        """Return the rows of a source."""
        if _endless(source):
            if self.objective is not None:
                raise _no_answers(source.name, self.objective)
            return self._synthetic(source, number, use)
        here = brought_here(source, self._cache.folder, self._cache.progress)
        kind, files = find(here, self._base)
        if self.objective is not None and self.objective.is_sampled:
            return self._prompts(source, kind, files, use)
        if kind is SourceKind.MEGATRON:
            store = open_megatron(files[0], source.name)
        else:
            store = open_store(here, self._opened(), self._cache, base=self._base)
        if store.largest is not None and store.largest >= self._vocabulary:
            raise InputError(
                f"{source.name}: token {store.largest} is not in the model's vocabulary of "
                f"{self._vocabulary}; use the tokenizer that belongs to the model"
            )
        rows = self._packed(store)
        self.reports.append(
            SourceReport(name=source.name, use=use, packing=rows.report, skipped=store.skipped)
        )
        laid = "apart" if self._is_apart(rows) else type(rows).__name__
        self._digests.append([store.digest, source.weight, use, laid])
        return rows

    def _prompts(
        self, source: SourceConfig, kind: SourceKind, files: list[Path], use: str
    ) -> PromptRows:
        assert self.objective is not None
        assert self.objective.sampling is not None
        rows = PromptRows(
            source, kind, files, self._opened(), length=self._length,
            answer=self.objective.sampling.max_tokens, vocabulary=self._vocabulary,
        )  # fmt: skip
        self.reports.append(
            SourceReport(name=source.name, use=use, packing=rows.report, skipped=rows.skipped)
        )
        self._digests.append([rows.digest, source.weight, use, "prompts"])
        return rows

    def _opened(self) -> Tokenizer:
        if self.tokenizer is None:
            name = _tokenizer_name(self.config, self._model_folder)
            self.tokenizer = open_tokenizer(name, folder=self._base)
        return self.tokenizer

    def _packed(self, store: TokenStore) -> CutRows | FitRows | AnswerRows:
        packing, objective = self.config.packing, self.objective
        if store.group > 1 or objective is not None:
            return self._answers(store)
        whole = packing.kind in ("fit", "apart")
        if whole or (packing.kind == "auto" and store.is_supervised):
            return FitRows(
                store, self._length, pad=self.pad, vocabulary=self._vocabulary, long=packing.long,
                apart=packing.kind == "apart",
            )  # fmt: skip
        return CutRows(store, self._length, pad=self.pad, vocabulary=self._vocabulary)

    def _is_apart(self, rows: Rows) -> bool:
        return isinstance(rows, FitRows) and self.config.packing.kind == "apart"

    def _answers(self, store: TokenStore) -> AnswerRows:
        objective, packing = self.objective, self.config.packing
        if objective is None:
            raise InputError(
                f"{store.name}: holds answers to compare; say how with an objective, as in "
                "objective: {kind: dpo}"
            )
        paired = store.weights is not None and bool((store.weights[1::2] < 0).all())
        if store.group == 1 or paired is not objective.is_paired:
            raise _no_answers(store.name, objective)
        if packing.kind == "cut":
            raise InputError("data: packing: {kind: cut} would cut answers; leave it out")
        return AnswerRows(
            store, self._length, paired=paired, pad=self.pad, vocabulary=self._vocabulary,
            long=packing.long,
        )  # fmt: skip

    def _synthetic(self, source: SourceConfig, number: int, use: str) -> SyntheticRows:
        if source.vocabulary > self._vocabulary:
            raise InputError(
                f"synthetic: a vocabulary of {source.vocabulary}, more than the model's "
                f"{self._vocabulary}"
            )
        rows = SyntheticRows(
            vocabulary=source.vocabulary or self._vocabulary,
            length=self._length,
            document_length=source.document_length,
            surprise=source.surprise,
            seed=self.config.seed,
        )
        self.reports.append(SourceReport(name=source.name, use=use, packing=None, skipped=0))
        facts = (rows.vocabulary, source.document_length, source.surprise, source.weight, use)
        self._digests.append([number, *facts])
        return rows

    def fingerprint(self) -> str:
        """Return a hash of everything that decides the rows and their order."""
        packing = self.config.packing
        return fingerprint(
            [self._digests, self._length, packing.long, self.config.seed, self.config.holdout]
        )


def _no_answers(name: str, objective: Objective) -> InputError:
    if objective.is_sampled:
        return InputError(f"{name}: objective {objective.kind} needs prompts, and these are none")
    wanted = (
        "pairs (fields chosen and rejected, perhaps prompt)"
        if objective.is_paired
        else "judged answers (fields prompt, completion and label)"
    )
    return InputError(f"{name}: objective {objective.kind} needs {wanted}, and these are none")

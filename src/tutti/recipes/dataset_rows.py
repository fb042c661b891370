"""Rows of a data set, as transformers' Trainer takes them, as plain mappings.

A collator makes batches in transformers; here it only says what is trained on. Those that
transformers ships for causal models are understood: they pad, which tutti does itself, and one of
them says that labels are the tokens. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tutti.errors import InputError

NO_LABEL = -100
_PADDING = ("DataCollatorWithPadding", "DataCollatorForSeq2Seq", "default_data_collator",
            "DefaultDataCollator")  # fmt: skip
_LABELLING = "DataCollatorForLanguageModeling"


def rows_of(dataset: Any, collator: Any, *, most: int, what: str) -> list[dict[str, Any]]:
    """Return the rows; of a stream without an end as many as are trained on (`most`; 0: all)."""
    if dataset is None:
        return []
    if isinstance(dataset, Mapping):
        raise InputError(f"Trainer: '{what}' is a mapping of data sets; give one of them")
    if not hasattr(dataset, "__len__") and not most:
        raise InputError(f"Trainer: '{what}' has no length; give max_steps")
    labels = _labels_of(collator)
    plain_rows = []
    for row in islice(_iterated(dataset), most or None):
        if not isinstance(row, Mapping):
            raise InputError(f"Trainer: a row of '{what}' is no mapping; give {{'input_ids': …}}")
        plain = {name: _plain(value) for name, value in row.items()}
        if labels is not None and "input_ids" in plain:
            pad = labels
            plain["labels"] = [NO_LABEL if one == pad else one for one in plain["input_ids"]]
        plain_rows.append(plain)
    return plain_rows


def _iterated(dataset: Any) -> Iterator[Any]:
    """Return the rows of what may be torch's kind of data set: indices below its length."""
    if hasattr(dataset, "__iter__"):
        yield from dataset
    else:
        yield from (dataset[index] for index in range(len(dataset)))


def _plain(value: Any) -> Any:
    """Return lists of what is a tensor or an array."""
    return value.tolist() if hasattr(value, "tolist") else value


def _labels_of(collator: Any) -> int | None:
    """Return the token that has no label if labels are the tokens (-1: all have one)."""
    if collator is None:
        return None
    name = getattr(collator, "__name__", type(collator).__name__)
    if name in _PADDING:
        return None
    if name == _LABELLING and not getattr(collator, "mlm", True):
        pad = getattr(getattr(collator, "tokenizer", None), "pad_token_id", None)
        return -1 if pad is None else int(pad)
    known = ", ".join((*_PADDING, f"{_LABELLING}(mlm=False)"))
    raise InputError(
        f"Trainer: 'data_collator' {name} would change the result, and tutti pads and packs by "
        f"itself; give rows with input_ids and labels, or one of {known}"
    )

"""Text to tokens: the built-in bytes, or a Hugging Face folder's own tokenizer.

A tokenizer encodes text without adding anything; which tokens open and close a document (`begin`,
`end`) are facts beside it, so that documents, prompts and chats put them where they belong. Its
`digest` is part of the key of every cache made with it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.huggingface.template import ChatTemplate
from tutti.models.load import hub_error, is_hub_id
from tutti.optional_imports import library

Ids = NDArray[np.int64]
Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer."""

    name: str  # "bytes", or the folder
    size: int  # one more than its largest token
    begin: tuple[int, ...]  # before a document
    end: int | None  # behind a document
    pad: int  # for places without a loss
    special: frozenset[int]  # tokens that are no text: ends of turns and the like
    digest: str

    @property
    def has_template(self) -> bool:
        """Whether it can render conversations."""

    @property
    def template(self) -> str | None:
        """The text of its chat template, where it has one."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of each text, nothing added."""

    def encode_with_offsets(self, text: str) -> tuple[Ids, Ids]:
        """Return tokens, and the character at which each begins."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool,
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text; with `prompt`, up to where the assistant's turn begins.

        `tools` and other `variables` are for the folder's chat template.
        """

    def marked_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> tuple[Ids, NDArray[np.bool_]] | None:
        """Return tokens and the assistant's among them where the template itself marks them."""


class ByteTokenizer:
    """Every byte of UTF-8 is a token; three more begin and end documents and fill rows.

    A turn of a conversation stands between the control characters STX and ETX.
    """

    name = "bytes"
    size = 259
    begin: tuple[int, ...] = (256,)
    end: int | None = 257
    pad = 258
    special = frozenset((256, 257, 258))
    digest = "bytes-1"
    has_template = True
    template: str | None = None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[Ids, Ids]:
        """Return bytes, and the character that each is of."""
        tokens = self.encode([text])[0]
        return tokens, np.cumsum((tokens & 0xC0) != 0x80) - 1  # 10xxxxxx continues a character

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, without the three tokens that are no bytes."""
        return bytes(token for token in tokens if 0 <= token < 256).decode(errors="replace")

    def render(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool,
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return turns between STX and ETX, each with its role on the first line."""
        del variables
        if tools:
            raise InputError("bytes: this chat template has no tools; take a folder's tokenizer")
        turns = [f"\x02{message['role']}\n{message['content']}\x03" for message in messages]
        return "".join(turns) + ("\x02assistant\n" if prompt else "")

    def marked_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> None:
        """Nothing is marked: the turns are found by rendering."""
        del messages, tools


_KEPT_IN = ("*token*", "vocab*", "*.model", "merges.txt")  # what tokenizers are kept in


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder.

    `tokenizer.json` is read by the `tokenizers` library alone; transformers is imported only for
    folders that have none.
    """

    def __init__(self, folder: Path) -> None:
        self.name, self._folder = str(folder), folder
        self._transformers: Any = None
        self._fast: Any = None
        if (folder / "tokenizer.json").is_file():
            tokenizers = library("tokenizers", f"{folder}/tokenizer.json")
            try:
                self._fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception as error:  # the library raises bare Exception
                raise InputError(f"{folder}/tokenizer.json: cannot be read ({error})") from None
            self._fast.no_truncation()
            self._fast.no_padding()
            self.size = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            self._settings = _settings(folder)
        else:
            whole = self._whole
            self.size = max(whole.get_vocab().values(), default=-1) + 1
            self._settings = {"eos_token": whole.eos_token, "pad_token": whole.pad_token}
        plain, special = (self._ids("a", special=s) for s in (False, True))
        at = next((i for i in range(len(special)) if special[i : i + len(plain)] == plain), 0)
        self.begin = tuple(special[:at])
        self.end = self._named("eos_token")
        pad = self._named("pad_token")
        self.pad = next((token for token in (pad, self.end) if token is not None), 0)
        self.special = frozenset(self._added())
        self._template = ChatTemplate.of_folder(folder, _settings(folder))
        self.digest = _digest(folder)

    @property
    def _whole(self) -> Any:
        """The folder as transformers sees it."""
        if self._transformers is None:
            transformers = library("transformers", f"{self._folder}: its tokenizer")
            try:
                self._transformers = transformers.AutoTokenizer.from_pretrained(str(self._folder))
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                if not any(p for n in _KEPT_IN for p in self._folder.glob(n)):
                    reason = "it holds none"
                raise InputError(
                    f"{self._folder}: no tokenizer can be read ({reason}); name the folder of "
                    "another one, or bytes"
                ) from None
        return self._transformers

    @property
    def has_template(self) -> bool:
        """Whether the folder holds a chat template."""
        return self._template is not None

    @property
    def template(self) -> str | None:
        """The text of the folder's chat template."""
        return None if self._template is None else self._template.text

    def _added(self) -> Iterator[int]:
        """Return the tokens that were added to the vocabulary of text; some add runs of spaces."""
        if self._fast is not None:
            added = self._fast.get_added_tokens_decoder()
        else:
            added = self._whole.added_tokens_decoder
        yield from (token for token, about in added.items() if about.content.strip())

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if self._fast is not None:
            ids: list[int] = self._fast.encode(text, add_special_tokens=special).ids
            return ids
        return list(self._whole.encode(text, add_special_tokens=special))

    def _named(self, key: str) -> int | None:
        value = self._settings.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if not isinstance(content, str):
            return None
        if self._fast is not None:
            token: int | None = self._fast.token_to_id(content)
            return token
        return int(self._whole.convert_tokens_to_ids(content))

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of each text."""
        if self._fast is None:
            return [np.asarray(self._ids(text, special=False), np.int64) for text in texts]
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int64) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[Ids, Ids]:
        """Return tokens, and the character at which each begins."""
        if self._fast is None:
            raise InputError(
                f"{self._folder}: has no tokenizer.json, which says where in a text tokens begin; "
                "save it with a fast tokenizer first"
            )
        encoding = self._fast.encode(text, add_special_tokens=False)
        starts = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)[:, 0]
        return np.asarray(encoding.ids, np.int64), starts

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        decoder = self._whole if self._fast is None else self._fast
        text: str = decoder.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text

    def render(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool,
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return what the folder's chat template makes of a conversation."""
        if self._template is None:
            raise InputError(
                f"{self._folder}: the tokenizer has no chat template, which conversations need"
            )
        return self._template.render(messages, prompt=prompt, tools=tools, variables=variables)

    def marked_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> tuple[Ids, NDArray[np.bool_]] | None:
        """Use `{% generation %}` where the template has it."""
        if self._template is None or not self._template.marks:
            return None
        text, spans = self._template.spans(messages, tools=tools)
        tokens, starts = self.encode_with_offsets(text)
        supervised = np.zeros(len(tokens), np.bool_)
        for first, last in spans:
            supervised |= (starts >= first) & (starts < last)
        return tokens, supervised


_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        path = folder / name
        if path.is_file():
            try:
                settings |= json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, TypeError) as error:
                raise InputError(f"{path}: cannot be read ({error})") from None
    return settings


def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for name in (*_FILES, *_SETTINGS):
        path = folder / name
        if path.is_file():
            whole.update(name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


@functools.lru_cache(maxsize=4)
def find_tokenizer(name: str, *, folder: Path = Path()) -> Path | None:
    """Return the folder of the tokenizer called `name`; None for "bytes", which needs none."""
    if name == "bytes":
        return None
    path = folder / Path(name).expanduser()
    if path.name == "tokenizer.json":
        path = path.parent
    if not path.is_dir() and is_hub_id(name):
        raise hub_error(name)
    if not path.is_dir():
        raise InputError(f"tokenizer: no folder '{path}'; name a Hugging Face folder or 'bytes'")
    return path


def open_tokenizer(name: str, *, folder: Path = Path()) -> Tokenizer:
    """Return the tokenizer called `name`: "bytes", or a Hugging Face folder."""
    path = find_tokenizer(name, folder=folder)
    return ByteTokenizer() if path is None else FolderTokenizer(path)

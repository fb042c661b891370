"""Tokens to text while they come: whole characters only, and the texts that end an answer."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.huggingface.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of a character that is not whole
_MOST_HELD = 16  # tokens: then it is no beginning of a character


class TextStream:
    """One answer's text, with the last characters held back while they may become a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._first = self._read = 0  # decoded from the one, said up to the other
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """Take tokens; return the text that is certain now."""
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            self._held += self._decoded()
            self._look_for_stop()
        return self._certain()

    def close(self) -> str:
        """Return what is left when no tokens come any more."""
        if self.stopped:
            return ""
        rest = self._held + self._decoded(final=True)
        self._held = ""
        return rest

    def _decoded(self, *, final: bool = False) -> str:
        """Return the text of tokens that are new; decoding begins a little before them.

        A token's text may depend on the one before it (a space, parts of a character).
        """
        before = self._tokenizer.decode(self._tokens[self._first : self._read])
        whole = self._tokenizer.decode(self._tokens[self._first :])
        waiting = len(self._tokens) - self._read
        if whole.endswith(_BROKEN) and not final and waiting < _MOST_HELD:
            return ""
        if len(whole) <= len(before):
            return ""
        self._first, self._read = self._read, len(self._tokens)
        return whole[len(before) :]

    def _look_for_stop(self) -> None:
        stops = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if stops:
            self._held, self.stopped = self._held[: min(stops)], True

    def _certain(self) -> str:
        keep = 0
        if not self.stopped:
            for text in self._stop:
                for count in range(min(len(text) - 1, len(self._held)), keep, -1):
                    if self._held.endswith(text[:count]):
                        keep = count
                        break
        cut = len(self._held) - keep
        said, self._held = self._held[:cut], self._held[cut:]
        return said

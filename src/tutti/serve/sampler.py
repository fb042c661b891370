"""`Sampler`: from logits to tokens on the device, for every slot as its request wants it.

What a slot's request wants stands in columns on the device, written when the slot begins. Wishes
that few requests have (penalties, biases, masks) cost nothing while nobody has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.batching.events import FAILS, GOES_ON, STOPS
from tutti.serve.guarded_calls import GuardedCalls
from tutti.serve.parameters import SamplingParameters
from tutti.serve.staging import Upload

_REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_INTEGERS = ("top_k", "seed", "least")
NO_TOKEN = -1


class TopTokens(NamedTuple):
    """Log-probabilities of some rows: of the chosen token, and of the likeliest."""

    chosen_s: Tensor
    values_sk: Tensor
    tokens_sk: Tensor


class Chosen(NamedTuple):
    """What was sampled, on the device."""

    tokens_s: Tensor
    ends_s: Tensor  # as events say it
    logprobs: TopTokens | None


@dataclass(slots=True)
class _Wishes:
    """What one slot's request wants, on the host."""

    parameters: SamplingParameters
    prompt: int  # tokens
    tokens: list[int]  # that were generated; kept up where they are looked at
    others: GuardedCalls  # grammars and hooks
    bias_tokens: np.ndarray
    bias_values: np.ndarray


class Sampler:
    """Chooses tokens."""

    def __init__(
        self,
        accelerator: Accelerator,
        slots: int,
        vocab: int,
        end: Sequence[int],
        *,
        ahead: int = 1,
    ) -> None:
        self._accelerator, self._operators = accelerator, accelerator.operators
        self._depth = ahead + 1
        # a kernel that draws and takes the largest in one pass costs no more for drawing
        self.always_draws = self._operators.preferred("sample")[0] != "reference"
        slots += 1  # the last one is nobody's: what fills a step up is sampled there
        self._device, self._vocab, self.end = accelerator.device, vocab, tuple(end)
        self._wishes: list[_Wishes | None] = [None] * slots
        self._reals = np.zeros((len(_REALS), slots), np.float32)
        self._integers = np.zeros((len(_INTEGERS), slots), np.int64)
        self._stops = np.full((slots, 4), NO_TOKEN, np.int64)
        self._flags = np.zeros((5, slots), np.bool_)  # which wishes it has, in the order of _set
        self._logprobs_of = np.full(slots, -1)
        self._on_device: tuple[Upload, Upload, Upload] | None = None
        self._changed = True
        self._in_prompt: Tensor | None = None  # (slots, V): made when first asked for
        self._counts: Tensor | None = None

    # --- slots -----------------------------------------------------------------------------

    def begin(
        self,
        slot: int,
        parameters: SamplingParameters,
        prompt: int,
        tokens: Sequence[int],
        seed: int,
    ) -> None:
        """Take a slot's request; `tokens` are its prompt and what was generated before."""
        self._set(slot, parameters, prompt, tokens[prompt:], seed)
        if parameters.penalises:
            self._count(slot, prompt, tokens)

    def fork(self, slot: int, source: int, parameters: SamplingParameters, seed: int) -> None:
        """Let a slot go on as another one's sample."""
        wishes = self._wishes[source]
        assert wishes is not None
        self._set(slot, parameters, wishes.prompt, wishes.tokens, seed)
        if parameters.penalises and self._in_prompt is not None and self._counts is not None:
            self._in_prompt[slot] = self._in_prompt[source]
            self._counts[slot] = self._counts[source]

    def _set(
        self, slot: int, own: SamplingParameters, prompt: int, tokens: Sequence[int], seed: int
    ) -> None:
        self._reals[:, slot] = (
            own.temperature, own.top_p, own.min_p, own.repetition_penalty, own.presence_penalty,
            own.frequency_penalty,
        )  # fmt: skip
        self._integers[:, slot] = (own.top_k, seed, prompt + own.answered + own.min_tokens)
        self._set_stops(slot, own)
        special = bool(own.logit_bias or own.bad_words or own.masks or own.changes)
        self._flags[:, slot] = (own.draws, own.cuts, own.penalises, own.min_tokens > 0, special)
        self._logprobs_of[slot] = -1 if own.logprobs is None else own.logprobs
        bias = np.array(list(own.logit_bias.items()), np.float64).reshape(-1, 2)
        single = [word[0] for word in own.bad_words if len(word) == 1]
        self._wishes[slot] = _Wishes(
            own,
            prompt,
            list(tokens),
            GuardedCalls(own),
            np.concatenate((bias[:, 0].astype(np.int64), np.array(single, np.int64))),
            np.concatenate((bias[:, 1], np.full(len(single), -np.inf))).astype(np.float32),
        )
        self._changed = True

    def _set_stops(self, slot: int, own: SamplingParameters) -> None:
        stops = sorted({*own.stop_tokens, *(() if own.ignore_end else self.end)})
        if len(stops) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(stops)), NO_TOKEN, np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
            self._on_device = None
        self._stops[slot] = stops[0] if stops else NO_TOKEN  # repeated: writing twice is the same
        self._stops[slot, : len(stops)] = stops

    def _count(self, slot: int, prompt: int, tokens: Sequence[int]) -> None:
        if self._in_prompt is None or self._counts is None:
            shape = (len(self._wishes), self._vocab)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._counts = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self._in_prompt[slot] = False
        self._counts[slot] = 0.0
        given = torch.tensor(list(tokens), device=self._device)
        self._in_prompt[slot, given[:prompt]] = True
        new = given[prompt:]
        self._counts[slot].index_add_(0, new, torch.ones(len(new), device=self._device))

    # --- choices ---------------------------------------------------------------------------

    def send(self) -> None:
        """Let the device have what the slots' requests want, where that has changed."""
        columns: tuple[np.ndarray, ...] = (self._reals, self._integers, self._stops)
        if self._on_device is None:
            reals, integers, stops = (
                Upload(self._accelerator, column.shape, torch.from_numpy(column).dtype, self._depth)
                for column in columns
            )
            self._on_device = (reals, integers, stops)
            self._changed = True
        if self._changed:
            for upload, column in zip(self._on_device, columns, strict=True):
                upload.host()[...] = column
                upload.send()
            self._changed = False

    @property
    def columns_key(self) -> int:
        """A number that stays while the columns stay where they are on the device."""
        return self._stops.shape[1]

    def is_plain(self, slots: np.ndarray) -> bool:
        """Tell whether these slots want nothing but temperatures and stop tokens."""
        return not self._flags[1:, slots].any() and self._logprobs_of[slots].max(initial=-1) < 0

    def draws(self, slots: np.ndarray) -> bool:
        """Tell whether any of these slots has a temperature."""
        return bool(self._flags[0, slots].any())

    @torch.no_grad()
    def choose(
        self, logits_sv: Tensor, slots: np.ndarray, slots_s: Tensor, positions_s: Tensor
    ) -> Chosen:
        """Return a token for each slot from its row of logits; positions are the new tokens'.

        The slots are given twice: on the host, and on the device.
        """
        if self.is_plain(slots):
            return self.choose_plain(logits_sv, slots_s, positions_s, draws=self.draws(slots))
        reals, integers, stops_sk = self._columns(slots_s)
        flags: list[bool] = [bool(row.any()) for row in self._flags[:, slots]]
        bad_s = ~torch.isfinite(logits_sv.amax(-1)) | logits_sv.isnan().any(-1)
        x = torch.where(bad_s.unsqueeze(1), 0.0, logits_sv.float())
        raw = x
        if flags[4]:
            x = self._biased(x, slots)
            if failed := [bool(self.failure(slot)) for slot in slots.tolist()]:
                bad_s = bad_s | torch.tensor(failed, device=self._device)
        if flags[2]:
            x = self._penalised(x, slots_s, reals)
        if flags[3]:
            early = positions_s < integers[2]
            at = stops_sk.clamp_min(0)
            held = early.unsqueeze(1) & (stops_sk >= 0)
            x = x.scatter(1, at, x.gather(1, at).masked_fill(held, float("-inf")))
        tokens_s = self._drawn(x, reals, integers, positions_s, flags)
        if flags[2] and self._counts is not None:
            ones = torch.ones(len(slots), device=self._device)
            self._counts.index_put_((slots_s, tokens_s), ones, accumulate=True)
        ends_s = _ends(tokens_s, stops_sk, bad_s)
        return Chosen(tokens_s, ends_s, self._logprobs(raw, tokens_s, slots))

    @torch.no_grad()
    def choose_plain(
        self, logits_sv: Tensor, slots_s: Tensor, positions_s: Tensor, *, draws: bool
    ) -> Chosen:
        """Return a token for each slot that wants no more than a temperature.

        Nothing is asked of the host. The largest of numbers among which one is none is none.
        """
        reals, integers, stops_sk = self._columns(slots_s)
        tokens_s = self._drawn(logits_sv, reals, integers, positions_s, [draws, False])
        best_s = logits_sv.gather(1, tokens_s.unsqueeze(1)).squeeze(1)
        bad_s = best_s - best_s != 0  # of what is infinite, or no number
        return Chosen(tokens_s, _ends(tokens_s, stops_sk, bad_s), None)

    @torch.no_grad()
    def draw(self, logits_sv: Tensor, slots: np.ndarray, positions_s: Tensor) -> Tensor:
        """Return tokens as `choose` would from these logits, without anything that looks back."""
        self.send()
        reals, integers, _ = self._columns(
            torch.from_numpy(slots.astype(np.int64)).to(self._device)
        )
        flags = [bool(row.any()) for row in self._flags[:, slots]]
        return self._drawn(logits_sv.float(), reals, integers, positions_s, flags)

    def _drawn(
        self, x: Tensor, reals: Tensor, integers: Tensor, positions_s: Tensor, flags: list[bool]
    ) -> Tensor:
        return self._operators.sample(
            x,
            temperature=reals[0],
            top_k=integers[0],
            top_p=reals[1],
            min_p=reals[2],
            seeds=integers[1],
            positions=positions_s,
            draws=flags[0],
            cuts=flags[1],
        )

    def noted(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Remember tokens of slots whose masks and bad words look at them."""
        for slot, token in zip(slots, tokens, strict=True):
            wishes = self._wishes[slot]
            if wishes is not None and wishes.parameters.looks_back:
                wishes.tokens.append(token)

    def _columns(self, slots_s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return real and whole numbers, and stop tokens, of slots."""
        assert self._on_device is not None, "send() comes first"
        reals, integers, stops = self._on_device
        own = slots_s.long()
        return reals.device[:, own], integers.device[:, own], stops.device[own]

    def failure(self, slot: int) -> str:
        """Return why code of others cannot go on with a slot's request; empty: it can."""
        wishes = self._wishes[slot]
        return "" if wishes is None else wishes.others.failed

    def _biased(self, x: Tensor, slots: np.ndarray) -> Tensor:
        """Let hooks change logits, add biases, take away what bad words and masks forbid."""
        rows, tokens, values, masks, changed = [], [], [], {}, {}
        for row, slot in enumerate(slots.tolist()):
            wishes = self._wishes[slot]
            assert wishes is not None
            if wishes.parameters.changes:
                changed[row] = wishes.others.changed(x[row], wishes.tokens)
            if len(wishes.bias_tokens):
                rows.append(np.full(len(wishes.bias_tokens), row))
                tokens.append(wishes.bias_tokens)
                values.append(wishes.bias_values)
            for word in wishes.parameters.bad_words:
                if len(word) > 1 and tuple(wishes.tokens[1 - len(word) :]) == word[:-1]:
                    rows.append(np.array([row]))
                    tokens.append(np.array([word[-1]]))
                    values.append(np.array([-np.inf], np.float32))
            allowed = wishes.others.allowed(wishes.tokens)
            if allowed is not None:
                masks[row] = allowed
        if changed:
            x = x.clone()  # log-probabilities are of what the model said
            for row, new in changed.items():
                x[row] = new
        if rows:
            at = torch.from_numpy(np.stack((np.concatenate(rows), np.concatenate(tokens))))
            at_dn = at.to(self._device)
            more = torch.from_numpy(np.concatenate(values)).to(self._device)
            x = x.index_put((at_dn[0], at_dn[1]), more, accumulate=True)
        for row, allowed in masks.items():
            kept = torch.from_numpy(allowed).to(self._device)
            x = x.index_put((torch.tensor([row], device=self._device),),
                            x[row].masked_fill(~kept, float("-inf")).unsqueeze(0))  # fmt: skip
        return x

    def _penalised(self, x: Tensor, own: Tensor, reals: Tensor) -> Tensor:
        if self._in_prompt is None or self._counts is None:
            return x
        counts_sv = self._counts[own]
        repetition, presence, frequency = reals[3:6].unsqueeze(2)
        seen = self._in_prompt[own] | (counts_sv > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        penalised: Tensor = x - frequency * counts_sv - presence * (counts_sv > 0)
        return penalised

    def _logprobs(self, raw: Tensor, tokens_s: Tensor, slots: np.ndarray) -> TopTokens | None:
        most = int(self._logprobs_of[slots].max(initial=-1))
        return top_tokens(raw, tokens_s, most) if most >= 0 else None


def _ends(tokens_s: Tensor, stops_sk: Tensor, bad_s: Tensor) -> Tensor:
    """Return how each goes on, as events say it."""
    ends_s = torch.full_like(tokens_s, GOES_ON, dtype=torch.int8)
    ends_s = ends_s.masked_fill((tokens_s.unsqueeze(1) == stops_sk).any(1), STOPS)
    return ends_s.masked_fill(bad_s, FAILS)


def top_tokens(logits_sv: Tensor, tokens_s: Tensor, count: int) -> TopTokens:
    """Return log-probabilities of tokens, and of the `count` likeliest."""
    all_sv = torch.log_softmax(logits_sv.float(), dim=-1)
    values, tokens = all_sv.topk(min(count, all_sv.shape[1]), dim=-1)
    return TopTokens(all_sv.gather(1, tokens_s.unsqueeze(1)).squeeze(1), values, tokens)

"""What rewards say of the answers to a batch of prompts, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tutti.errors import InputError
from tutti.huggingface.tokenizer import Tokenizer
from tutti.models.sampling import Sampling
from tutti.recipes.reinforcement.rewards import RewardProcess
from tutti.train.data.prompt_rows import PromptRecord

Tokens = list[int]


class Judge:
    """The rewards of a job, in one place of it."""

    def __init__(
        self,
        sampling: Sampling,
        tokenizer: Tokenizer,
        ends: Sequence[int],
        warn: Callable[[str], None],
    ) -> None:
        self._sampling, self._tokenizer, self._ends = sampling, tokenizer, frozenset(ends)
        self._process = RewardProcess(sampling.rewards, time_limit_s=sampling.time_limit_s)
        self._warn, self._said = warn, set[str]()
        self._bad = 0

    def start(self) -> str:
        """Start the process; return why it cannot be."""
        try:
            self._process.start()
        except InputError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def judged(
        self, prompts: Sequence[PromptRecord], by_prompt: Mapping[int, list[Tokens]]
    ) -> dict[str, Any]:
        """Return answers and judgements as plain values; or the error that ends the run."""
        answers = [by_prompt[i] for i in range(len(prompts))]
        verdicts: list[tuple[tuple[float, ...], str]] = []
        texts: list[str] = []
        for prompt, group in zip(prompts, answers, strict=True):
            own = [self._text(tokens) for tokens in group]
            texts = texts or own
            said = self._process.judge(own, prompt.record)
            problem = self._noted(said.problem) if said.problem else ""
            if problem:
                return {"error": problem}
            verdicts.append((said.rewards, said.problem))
        return {"answers": answers, "judged": verdicts, "texts": texts}

    def _noted(self, problem: str) -> str:
        """Count a group that is left out; return why that ends the run, if it does."""
        self._bad += 1
        text, given = f"rewards: {problem}", self._sampling
        if given.bad_rewards == "error":
            return f"{text}; mend it, or leave such groups out"
        if self._bad > given.most_bad:
            return (
                f"{text}; {self._bad} groups were left out, more than sampling.most_bad "
                f"({given.most_bad})"
            )
        if text not in self._said:
            self._said.add(text)
            self._warn(f"{text}: the group is left out")
        return ""

    def _text(self, tokens: Tokens) -> str:
        said = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        special = self._tokenizer.special
        return self._tokenizer.decode([token for token in said if token not in special])

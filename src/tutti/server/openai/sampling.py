"""A client's request as the engine takes it: token ids and wishes, checked before it leaves."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from tutti.errors import InputError
from tutti.huggingface.tokenizer import Tokenizer
from tutti.serve.parameters import SamplingParameters, mixed_seed
from tutti.server.grammar import ANY_OBJECT, of_lark, of_regex, of_schema
from tutti.server.messages import State, Wishes
from tutti.server.openai import tools
from tutti.server.openai.errors import ApiError, refused
from tutti.server.openai.requests import ChatRequest, CompletionRequest, NamedTool, Sampled

COMPLETION_TOKENS = 16  # where a completion does not say how many: OpenAI's default


def sampled_wishes(
    asked: Sampled, prompt: int, most: int | None, adapter: str, state: State, grammar: str = ""
) -> list[Wishes]:
    """Return the wishes of each sample of a request with so many tokens in its prompt."""
    left = state.context - prompt
    if prompt < 1:
        raise refused("the prompt is empty", "prompt")
    if left < 1 or (most is not None and most > left):
        new = "" if most is None else f" and {most} new ones"
        raise refused(
            f"a prompt of {prompt} tokens{new}: the context holds {state.context}",
            code="context_length_exceeded",
        )
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    temperature = 1.0 if asked.temperature is None else asked.temperature
    logprobs, prompt_logprobs = _logprobs(asked)
    shared: dict[str, Any] = {
        "max_tokens": max(1, left if most is None else most),
        "min_tokens": asked.min_tokens,
        "temperature": temperature,
        "top_k": max(0, asked.top_k),
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "presence_penalty": asked.presence_penalty or 0.0,
        "frequency_penalty": asked.frequency_penalty or 0.0,
        "logit_bias": _biases(asked.logit_bias or {}),
        "stop_tokens": tuple(asked.stop_token_ids or ()),
        "ignore_end": asked.ignore_eos,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "priority": asked.priority,
        "adapter": adapter,
    }
    named = asked.hooks or {}
    try:
        parameters = SamplingParameters(**shared, stop=asked.stops)
        parameters.check("request", state.vocab)
    except InputError as error:
        raise refused(str(error).removeprefix("request: ")) from None
    return [
        Wishes(**shared, grammar=grammar, hooks=named, seed=mixed_seed(seed, sample))
        for sample in range(asked.n or 1)
    ]


def grammar_of(asked: Sampled, kind: tools.Format | None) -> str:
    """Return the grammar that an answer is to follow; "": none. One way of asking at a time."""
    ways: dict[str, str] = {}
    if asked.response_format is not None and asked.response_format.type != "text":
        wanted = asked.response_format.json_schema
        ways["response_format"] = of_schema(ANY_OBJECT if wanted is None else wanted.schema_)
    if asked.regex is not None:
        ways["regex"] = of_regex(asked.regex)
    if asked.grammar is not None:
        ways["grammar"] = of_lark(asked.grammar)
    if isinstance(asked, ChatRequest) and asked.tools and kind is not None:
        chosen = asked.tool_choice
        names = [chosen.function.name] if isinstance(chosen, NamedTool) else None
        if names is not None or chosen == "required":
            several = asked.parallel_tool_calls is not False and names is None
            ways["tool_choice"] = of_lark(
                tools.grammar([tool.function for tool in asked.tools], names, kind, several)
            )
    if len(ways) > 1:
        raise refused(f"{' and '.join(ways)} cannot both be followed; give one of them")
    return next(iter(ways.values()), "")


def _logprobs(asked: Sampled) -> tuple[int | None, int | None]:
    """Return how many log-probabilities are wanted of an answer, and of its prompt."""
    if isinstance(asked, CompletionRequest):
        return asked.logprobs, asked.logprobs if asked.echo else None
    if isinstance(asked, ChatRequest) and asked.logprobs:
        return asked.top_logprobs or 0, None
    return None, None


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in biases.items()}
    except ValueError:
        raise refused("'logit_bias' is by token ids", "logit_bias") from None


def prompts_of(
    given: str | list[str] | list[int] | list[list[int]], tokenizer: Tokenizer | None, vocab: int
) -> list[list[int]]:
    """Return prompts as token ids: texts, or ids as they are."""
    if isinstance(given, list) and given and isinstance(given[0], int):
        listed: list[Any] = [given]
    else:
        listed = given if isinstance(given, list) else [given]
    if not listed:
        raise refused("the prompt is empty", "prompt")
    token_lists = []
    for one in listed:
        tokens = encoded(one, tokenizer) if isinstance(one, str) else [int(t) for t in one]
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise refused(f"token {wrong}: the vocabulary has 0 to {vocab - 1}", "prompt")
        if not tokens:
            raise refused("the prompt is empty", "prompt")
        token_lists.append(tokens)
    return token_lists


def encoded(text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Return a text's tokens, with what begins a document."""
    own = needed(tokenizer)
    return [*own.begin, *(int(token) for token in own.encode([text])[0])]


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer; refuse texts where there is none."""
    if tokenizer is None:
        raise refused("the model's folder has no tokenizer: give token ids")
    return tokenizer


def conversation(asked: ChatRequest, tokenizer: Tokenizer | None) -> list[int]:
    """Return a conversation as token ids, up to where the assistant's turn begins."""
    own = needed(tokenizer)
    if not own.has_template:
        raise refused("the tokenizer has no chat template; use /v1/completions", "messages")
    tools = None
    if asked.tools and asked.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools]
    try:
        text = own.render(
            [_plain(message) for message in asked.messages],
            prompt=asked.add_generation_prompt,
            tools=tools,
            variables=asked.chat_template_kwargs,
        )
    except InputError as error:
        raise refused(str(error), "messages") from None
    return [int(token) for token in own.encode([text])[0]]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its parts as one text, as templates read them."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise refused("a message needs a 'role'", "messages")
    if isinstance(content, list):
        content = "".join(_text(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise refused(f"a message's content is text, or parts of it, not {content!r}", "messages")
    return {**message, "content": content if content is not None else ""}


def _text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "input_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ApiError(
        400, f"a part of type '{kind}': this model reads text alone", parameter="messages"
    )

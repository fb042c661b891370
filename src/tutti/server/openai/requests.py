"""What clients may ask for, as pydantic reads it; what is not known is refused by its name.

Fields of OpenAI's that change nothing of an answer are taken and left alone; those that would and
that we do not have are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, WithJsonSchema, model_validator

from tutti.errors import hint

# they change nothing of an answer
LEFT_ALONE = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction", "verbosity",
    }
)  # fmt: skip

# neither `true` nor "1" is a number, and 1 is no `true`
Flag = Annotated[bool, Strict()]
Number = Annotated[float, Strict()]
Integer = Annotated[int, Strict()]
Temperature = Annotated[Number, Field(ge=0.0, le=2.0)]
Share = Annotated[Number, Field(ge=0.0, le=1.0)]
Penalty = Annotated[Number, Field(ge=-2.0, le=2.0)]
Stop = str | list[str] | None
Whole = Annotated[Integer, Field(ge=0, le=2**31 - 1)]

_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPTS = [
    _TEXT,
    {"type": "array", "minItems": 1, "items": _TEXT},
    _TOKENS,
    {"type": "array", "minItems": 1, "items": _TOKENS},
]
# what is empty is refused by a line of our own, and not by pydantic's for each of the kinds
Prompts = Annotated[
    str | list[str] | list[Integer] | list[list[Integer]], WithJsonSchema({"anyOf": _PROMPTS})
]


def _closed(schema: dict[str, Any]) -> None:
    """Say in a schema what is done: fields that are not known are refused."""
    schema["properties"] |= {name: {} for name in sorted(LEFT_ALONE)}
    schema["additionalProperties"] = False


class Asked(BaseModel):
    """A request that names a model."""

    model_config = ConfigDict(extra="allow", strict=False, json_schema_extra=_closed)

    model: str = ""

    @model_validator(mode="after")
    def _known(self) -> Asked:
        known = set(type(self).model_fields)
        for name, value in (self.model_extra or {}).items():
            if name in LEFT_ALONE or value is None:
                continue
            raise ValueError(f"unknown field '{name}'; {hint(name, sorted(known))}")
        return self


class StreamOptions(BaseModel):
    """What a stream has beside its pieces."""

    model_config = ConfigDict(extra="allow")

    include_usage: Flag = False


class JsonSchema(BaseModel):
    """A schema that an answer is to follow."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    name: str = "answer"
    schema_: dict[str, Any] | Flag = Field(default_factory=dict, alias="schema")
    strict: Flag | None = None


class ResponseFormat(BaseModel):
    """What an answer is to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs a 'json_schema'")
        return self


class Sampled(Asked):
    """What both kinds of completions have."""

    frequency_penalty: Penalty | None = None
    hooks: dict[str, dict[str, Any]] | None = None
    ignore_eos: Flag = False
    logit_bias: dict[str, Annotated[Number, Field(ge=-100.0, le=100.0)]] | None = None
    max_tokens: Whole | None = None
    min_p: Share = 0.0
    min_tokens: Whole = 0
    n: Annotated[Integer, Field(ge=1, le=128)] | None = None
    presence_penalty: Penalty | None = None
    priority: Annotated[Integer, Field(ge=-1000, le=1000)] = 0
    regex: str | None = None
    grammar: str | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100.0)] = 1.0
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = None
    stop_token_ids: list[Whole] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] = 0
    top_p: Share | None = None
    response_format: ResponseFormat | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Sampled):
    """`/v1/completions`."""

    prompt: Prompts
    best_of: Integer | None = None
    echo: Flag = False
    logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("'suffix' is not served: this is no model for gaps in a text")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("'best_of' is served where it equals 'n'; leave it out")
        if self.echo and self.stream:
            raise ValueError("'echo' is not served in streams; leave one of them out")
        return self


class ToolFunction(BaseModel):
    """A function that a model may call."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(BaseModel):
    """The name of a function."""

    name: str


class NamedTool(BaseModel):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampled):
    """`/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    add_generation_prompt: Flag = True
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: Flag | None = None
    max_completion_tokens: Whole | None = None
    parallel_tool_calls: Flag | None = None
    reasoning_effort: str | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    tools: list[Tool] | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _possible(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs': true")
        calls = isinstance(self.tool_choice, NamedTool) or self.tool_choice in ("required", "auto")
        if calls and not self.tools:
            raise ValueError("'tool_choice' needs 'tools'")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or ()]
            wanted = self.tool_choice.function.name
            if wanted not in names:
                raise ValueError(f"'tool_choice': {hint(wanted, names)}")
        if self.reasoning_effort is not None:
            raise ValueError(
                "'reasoning_effort' is not served; the template's own switch goes into "
                "'chat_template_kwargs'"
            )
        return self


class EmbeddingRequest(Asked):
    """`/v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    pooling: Literal["last", "mean"] = "last"


def _one_of_two(schema: dict[str, Any]) -> None:
    _closed(schema)
    schema["oneOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]


class TokenizeRequest(Asked):
    """`/tokenize`: a text, or a conversation."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_one_of_two)

    prompt: Annotated[str | None, WithJsonSchema({"type": "string"})] = None
    messages: Annotated[
        list[dict[str, Any]] | None,
        Field(min_length=1),
        WithJsonSchema({"type": "array", "minItems": 1, "items": {"type": "object"}}),
    ] = None
    add_special_tokens: Flag = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give 'prompt' or 'messages'")
        return self


class DetokenizeRequest(Asked):
    """`/detokenize`."""

    tokens: list[Whole]


class AdapterRequest(Asked):
    """`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: str | None = None

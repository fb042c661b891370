"""Answers that follow a grammar, whatever the model says."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("torch")
jsonschema = pytest.importorskip("jsonschema")

from tests.support.served import write_tokenizer  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface.tokenizer import Tokenizer, open_tokenizer  # noqa: E402
from tutti.server.grammar import Grammars, of_lark, of_regex, of_schema  # noqa: E402
from tutti.server.openai import tools  # noqa: E402
from tutti.server.openai.requests import ToolFunction  # noqa: E402

VOCAB, END = 512, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return open_tokenizer(str(folder))


def wander(
    folder: Path, tokenizer: Tokenizer, grammar: str, seed: int, most: int = 400
) -> str | None:
    """Return a text that random choices among allowed tokens make; None: it did not end."""
    drawn = np.random.default_rng(seed)
    masks = Grammars(folder, VOCAB, (END,)).masks(grammar)
    mask, tokens = masks.new(), []
    for _ in range(most):
        allowed = np.flatnonzero(mask.allowed(tokens))
        assert len(allowed), "nothing may come next"
        over = END in allowed and len(tokens) > 40
        token = END if over else int(drawn.choice(allowed))
        if token == END:
            return tokenizer.decode(tokens)
        tokens.append(token)
    return None


NAMES = ("x", "a b", "é", "", "name", 'quo"te', "back\\slash", "$ref", "line\nbreak", "😀")
CONSTANTS: tuple[Any, ...] = ("a", "ä", 3, -0.5, None, True, 'quote"s', "\u2028", [1], {"k": []})
PATTERNS = ("^[a-c]{1,3}$", r"^\d{4}-\d{2}$", "^(ab|c)*d$", r"^[^\x00-\x7f]{1,2}$", "b+")
FORMATS = ("date", "time", "uuid", "ipv4", "email")
FLAT = ("integer", "number", "boolean", "null", "enum", "const", "string", "pattern", "format")
NESTED = ("object", "array", "tuple", "anyOf", "oneOf", "map", "named", "several", "again")


def drawn_schema(r: random.Random, depth: int = 0, deepest: int = 3) -> dict[str, Any]:
    """Return a schema; what `again` refers to is at the root."""
    if depth < deepest and (not depth or r.random() < 0.6):
        return nested_schema(r, r.choice(NESTED), depth, deepest)
    match r.choice(FLAT):
        case "enum":
            return {"enum": r.sample(CONSTANTS, 3)}
        case "const":
            return {"const": r.choice(CONSTANTS)}
        case "string":
            least = r.randint(0, 2)
            return {"type": "string", "minLength": least, "maxLength": least + r.randint(0, 4)}
        case "pattern":
            return {"type": "string", "pattern": r.choice(PATTERNS)}
        case "format":
            return {"type": "string", "format": r.choice(FORMATS)}
        case "integer":
            bounds = {"minimum": -9, "maximum": r.randint(-9, 9999)}
            return {"type": "integer", **bounds, **r.choice(({}, {"multipleOf": 3}))}
        case "number":
            return {"type": "number", "exclusiveMinimum": -1.5, "maximum": r.choice((0.25, 7, 1e3))}
        case kind:
            return {"type": kind}


def nested_schema(r: random.Random, kind: str, depth: int, deepest: int) -> dict[str, Any]:
    """Return a schema with others in it."""

    def inner() -> dict[str, Any]:
        return drawn_schema(r, depth + 1, deepest)

    match kind:
        case "array":
            least = r.randint(0, 2)
            return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + 1}
        case "tuple":
            return {"type": "array", "prefixItems": [inner(), inner()], "items": False}
        case "anyOf":
            return {"anyOf": [inner(), inner()]}
        case "oneOf":  # told apart by what they must have
            return {"oneOf": [tagged(tag, inner()) for tag in ("a", "b")]}
        case "map":
            return {"type": "object", "additionalProperties": inner(), "maxProperties": 2}
        case "named":
            return {
                "type": "object", "patternProperties": {"^k[0-9]$": inner()},
                "additionalProperties": False,
            }  # fmt: skip
        case "several":
            return {"allOf": [{"type": ["integer", "null"]}, {"minimum": r.randint(-5, 5)}]}
        case "again" if depth:
            return {"type": "array", "items": {"$ref": "#/$defs/again"}, "maxItems": 1}
    names = r.sample(NAMES, r.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: inner() for name in names},
        "required": names[: r.randint(0, 2)],
        "additionalProperties": False,
    }


def tagged(tag: str, inner: dict[str, Any]) -> dict[str, Any]:
    properties = {"tag": {"const": tag}, "of": inner}
    return {
        "type": "object", "properties": properties, "required": ["tag", "of"],
        "additionalProperties": False,
    }  # fmt: skip


def check_schemas(folder: Path, tokenizer: Tokenizer, seeds: range) -> None:
    """Let random choices answer; what ended must be valid, and nearly everything must end."""
    ended, refused = 0, []
    for seed in seeds:
        r = random.Random(seed)
        again = {"type": "object", "properties": {"next": {"$ref": "#/$defs/again"}},
                 "additionalProperties": False}  # fmt: skip
        schema = {**drawn_schema(r, 0, 2 + seed // 100), "$defs": {"again": again}}
        try:
            grammar = of_schema(schema)
        except InputError as error:
            refused.append(str(error))
            continue
        text = wander(folder, tokenizer, grammar, seed, 800)
        if text is not None:
            jsonschema.validate(
                json.loads(text), schema, jsonschema.Draft202012Validator,
                format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
            )  # fmt: skip
            ended += 1
    print(f"{ended} of {len(seeds)} ended, {len(refused)} refused: {Counter(refused)}")
    assert len(refused) < 0.15 * len(seeds), Counter(refused)
    assert ended > 0.75 * len(seeds)


def test_answers_follow_their_schema(folder: Path, tokenizer: Tokenizer) -> None:
    check_schemas(folder, tokenizer, range(40))


@pytest.mark.slow
def test_answers_follow_hundreds_of_schemas(folder: Path, tokenizer: Tokenizer) -> None:
    check_schemas(folder, tokenizer, range(40, 340))


def test_regular_expressions_and_grammars(folder: Path, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        text = wander(folder, tokenizer, of_regex(r"([0-9]{1,3}\.){3}[0-9]{1,3}"), seed)
        assert text is not None
        assert re.fullmatch(r"([0-9]{1,3}\.){3}[0-9]{1,3}", text)
        text = wander(folder, tokenizer, of_lark('start: "yes" | "no"\n'), seed)
        assert text in ("yes", "no")


@pytest.mark.parametrize("kind", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("several", [False, True])
def test_calls_that_are_required(
    folder: Path, tokenizer: Tokenizer, kind: tools.Format, several: bool
) -> None:
    digit = {"type": "integer", "maximum": 9, "minimum": 0}
    number = {
        "type": "object",
        "properties": {"n": digit},
        "required": ["n"],
        "additionalProperties": False,
    }
    functions = [ToolFunction(name=name, parameters=number) for name in ("add", "take")]
    for seed in range(4):
        for names in (None, ["take"]):
            written = of_lark(tools.grammar(functions, names, kind, several))
            text = wander(folder, tokenizer, written, seed)
            assert text is not None
            said, calls = tools.parsed(text, kind)
            assert not said
            assert calls
            assert several or len(calls) == 1
            for call in calls:
                assert call.name in (names or ["add", "take"])
                jsonschema.validate(json.loads(call.arguments), number)


def test_an_answer_goes_on_where_another_engine_left_it(folder: Path, tokenizer: Tokenizer) -> None:
    masks = Grammars(folder, VOCAB, (END,)).masks(of_regex("abcabc"))
    tokens = [int(t) for t in tokenizer.encode(["abcab"])[0]]
    followed, later = masks.new(), masks.new()
    for count in range(len(tokens) + 1):
        step_by_step = followed.allowed(tokens[:count])
    assert (later.allowed(tokens) == step_by_step).all()
    assert not (masks.new().allowed([]) == step_by_step).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_schema({"type": "frob"}),
        lambda: of_regex("a("),
        lambda: of_lark("start: nobody"),
        lambda: of_regex("a" * (1 << 19)),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(make: Any) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        Grammars(tmp_path, VOCAB, (END,)).masks(of_regex("a"))

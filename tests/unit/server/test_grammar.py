"""Answers that follow a grammar, whatever the model says."""

from __future__ import annotations

import json
import random
import re
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


def drawn_schema(r: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of growing nastiness."""
    kinds = ["integer", "boolean", "null", "enum", "string", "pattern"]
    if depth < 3:
        kinds += ["object", "array", "anyOf"]
    match r.choice(kinds):
        case "enum":
            return {"enum": r.sample(["a", "ä", 3, None, True, 'quote"s', [1]], 3)}
        case "string":
            return {"type": "string", "maxLength": r.randint(0, 4)}
        case "pattern":
            return {"type": "string", "pattern": r.choice(["^[a-c]{1,3}$", "^\\d{4}-\\d{2}$"])}
        case "integer":
            return {"type": "integer", "minimum": -9, "maximum": r.randint(-9, 99)}
        case "array":
            return {"type": "array", "items": drawn_schema(r, depth + 1), "maxItems": 2}
        case "anyOf":
            return {"anyOf": [drawn_schema(r, depth + 1), drawn_schema(r, depth + 1)]}
        case "object":
            names = r.sample(["x", "a b", "é", "", "name"], r.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: drawn_schema(r, depth + 1) for name in names},
                "required": names[:1],
                "additionalProperties": False,
            }
        case kind:
            return {"type": kind}


def check_schemas(folder: Path, tokenizer: Tokenizer, seeds: range) -> None:
    ended = 0
    for seed in seeds:
        schema = drawn_schema(random.Random(seed))
        text = wander(folder, tokenizer, of_schema(schema), seed)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    assert ended > 0.9 * len(seeds)


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

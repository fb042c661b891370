"""`tutti generate`: text from a model folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tutti.cli.shared.adapters import adapter_folders
from tutti.cli.shared.output import Json, print_json
from tutti.cli.shared.quantities import bytes_of
from tutti.cli.shared.torch_needed import require_torch

if TYPE_CHECKING:
    from tutti.serve import Completion, Engine, SamplingParameters
    from tutti.serve.parameters import Prompt


File = Annotated[
    Path | None,
    typer.Option(help="Prompts: a line each, or JSON lines with 'prompt' or 'messages'."),
]
Tokens = Annotated[
    list[str] | None,
    typer.Option(help="A prompt as numbers of tokens, '5 9 2'; may be repeated."),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="A prompt is what a user says to the assistant.")
]
MinP = Annotated[
    float, typer.Option(help="Draw from those that are so many times as likely as the best.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="A text that ends an answer; may be repeated.")
]
IgnoreEnd = Annotated[bool, typer.Option("--ignore-end", help="Go on after the model's own end.")]
Logprobs = Annotated[
    int | None, typer.Option(help="With --json: log-probabilities, and of so many others.")
]
Guesses = Annotated[
    int, typer.Option(help="Tokens ahead that are tried at once, at most; 0: none.")
]
Draft = Annotated[
    Path | None, typer.Option(help="A small model's folder that guesses; else the text does.")
]
PageDtype = Annotated[
    str | None, typer.Option(help="int8 or fp8: of keys and values; the model's dtype.")
]
Tokenizer = Annotated[str | None, typer.Option(help="Another folder's tokenizer, or 'bytes'.")]
Memory = Annotated[str | None, typer.Option(help="For weights and pages: '4 GiB'; what is free.")]
HostMemory = Annotated[
    str | None,
    typer.Option(help="On the host, for pages of answers that give way: '4 GiB'; none."),
]
Weights = Annotated[
    str | None, typer.Option(help="Round weights to fp8, int8 or int4 while loading.")
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(help="NAME=FOLDER: a LoRA adapter of PEFT; may be repeated, the first is used."),
]


class _Asked(NamedTuple):
    """A prompt, and the adapter that it names."""

    prompt: Prompt
    adapter: str | None = None


def generate(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face or a tutti folder.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to go on with.")] = None,
    file: File = None,
    tokens: Tokens = None,
    chat: Chat = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens, at most.")] = 64,
    min_tokens: Annotated[int, typer.Option(help="New tokens before an end, at least.")] = 0,
    n: Annotated[int, typer.Option(help="Answers to each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest with this share.")] = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less of what is there.")] = 1,
    stop: Stop = None,
    ignore_end: IgnoreEnd = False,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers.")] = None,
    logprobs: Logprobs = None,
    guesses: Guesses = 0,
    draft: Draft = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1, …; the best here.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; the weights'.")] = None,
    weights: Weights = None,
    activations: Annotated[
        str | None, typer.Option(help="Round what meets weights in fp8: fp8.")
    ] = None,
    adapter: Adapter = None,
    tokenizer: Tokenizer = None,
    memory: Memory = None,
    host_memory: HostMemory = None,
    slots: Annotated[int, typer.Option(help="Answers that are computed at a time.")] = 64,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    page_dtype: PageDtype = None,
    max_length: Annotated[int | None, typer.Option(help="Of a context; the model's.")] = None,
    json: Json = False,
) -> None:
    """Go on with prompts, all of them together; one prompt's answer is printed as it comes."""
    require_torch("generate")
    from tutti.errors import InputError
    from tutti.serve import Engine, SamplingParameters

    given: dict[str, Any] = {
        "device": device, "dtype": dtype, "tokenizer": tokenizer, "weights": weights,
        "activations": activations,
    }  # fmt: skip
    sizes: dict[str, Any] = {
        "slots": slots, "page_size": page_size, "max_length": max_length, "page_dtype": page_dtype
    }  # fmt: skip
    if memory is not None:
        sizes["memory_bytes"] = bytes_of("--memory", memory)
    if host_memory is not None:
        sizes["host_bytes"] = bytes_of("--host-memory", host_memory)
    parameters = SamplingParameters(
        max_tokens=max_tokens, min_tokens=min_tokens, n=n, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, stop=tuple(stop or ()),
        ignore_end=ignore_end, seed=seed, logprobs=logprobs,
    )  # fmt: skip
    if not (prompts or file or tokens):
        raise InputError("no prompt: give a text, --file or --tokens")
    if draft is not None and not guesses:
        guesses = 4
    folders = adapter_folders(adapter or [])
    given["adapters"] = folders
    engine = Engine.from_pretrained(folder, guesses=guesses, draft=draft, **given, **sizes)
    every = _prompts(engine, prompts or [], file, tokens or [], chat=chat)
    asked = [one.prompt for one in every]
    first = next(iter(folders), "")
    each = [replace(parameters, adapter=first if o.adapter is None else o.adapter) for o in every]
    if json:
        print_json([_plain(done) for done in engine.generate(asked, each)])
    elif len(asked) == 1 and n == 1:
        _streamed(engine, asked[0], each[0])
    else:
        for number, done in enumerate(engine.generate(asked, each)):
            for sample, answer in enumerate(done.answers):
                name = f"{number}.{sample}" if n > 1 else str(number)
                sys.stdout.write(f"[{name}] {_shown(answer.text, answer.tokens)}\n")


def _prompts(
    engine: Engine, texts: list[str], file: Path | None, tokens: list[str], *, chat: bool
) -> list[_Asked]:
    from tutti.errors import InputError

    prompts: list[_Asked] = []
    if file is not None:
        prompts += _of_file(engine, file, chat=chat)
    for text in texts:
        said = engine.chat_prompt([{"role": "user", "content": text}]) if chat else text
        prompts.append(_Asked(said))
    for text in tokens:
        try:
            prompts.append(_Asked([int(word) for word in text.replace(",", " ").split()]))
        except ValueError:
            raise InputError(f"--tokens is '{text}'; write numbers: '5 9 2'") from None
    return prompts


def _of_file(engine: Engine, file: Path, *, chat: bool) -> list[_Asked]:
    """Return the prompts of a file: lines of text, or JSON lines."""
    import json as reader

    from tutti import files
    from tutti.errors import InputError
    from tutti.huggingface.chat import messages_of

    lines = [line for line in files.read_text(file).splitlines() if line.strip()]
    prompts: list[_Asked] = []
    for number, line in enumerate(lines):
        place = f"{file}: line {number + 1}"
        value: Any = {"prompt": line}
        if file.suffix == ".jsonl":
            try:
                value = reader.loads(line)
            except ValueError as error:
                raise InputError(f"{place}: is no JSON ({error})") from None
        named = value.get("adapter") if isinstance(value, dict) else None
        if isinstance(value, dict) and "messages" in value:
            messages = messages_of(value["messages"], lambda place=place: place)  # type: ignore[misc]
            prompts.append(_Asked(engine.chat_prompt(messages, value.get("tools")), named))
        elif isinstance(value, dict) and isinstance(value.get("prompt"), str | list):
            text = value["prompt"]
            asked = [{"role": "user", "content": text}]
            said = engine.chat_prompt(asked) if chat and isinstance(text, str) else text
            prompts.append(_Asked(said, named))
        else:
            raise InputError(f"{place}: expected an object with 'prompt' or 'messages'")
    return prompts


def _streamed(engine: Engine, prompt: Prompt, parameters: SamplingParameters) -> None:
    from tutti.batching import Finish
    from tutti.errors import TuttiError

    for piece in engine.stream([prompt], parameters):
        text = piece.text if piece.text is not None else "".join(f"{t} " for t in piece.tokens)
        sys.stdout.write(text)
        sys.stdout.flush()
        if piece.finish is Finish.FAILED:
            raise TuttiError(piece.reason)
    sys.stdout.write("\n")


def _shown(text: str | None, tokens: tuple[int, ...]) -> str:
    return text if text is not None else " ".join(map(str, tokens))


def _plain(done: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": len(done.prompt),
        "cached_tokens": done.cached_tokens,
        "first_token_s": done.times.first_token_s,
        "whole_s": done.times.whole_s,
        "answers": [
            {
                "text": answer.text,
                "tokens": list(answer.tokens),
                "finish": answer.finish.value,
                **({"reason": answer.reason} if answer.reason else {}),
                **(
                    {}
                    if answer.logprobs is None
                    else {
                        "logprobs": [
                            {"token": one.token, "logprob": one.logprob, "top": dict(one.top)}
                            for one in answer.logprobs
                        ]
                    }
                ),
            }
            for answer in done.answers
        ],
    }

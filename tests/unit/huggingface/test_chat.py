"""Loss on the assistant's tokens alone, with tokenizers and chat templates as folders hold them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tutti.errors import InputError
from tutti.huggingface.chat import encode_chat, messages_of
from tutti.huggingface.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer, open_tokenizer
from tutti.train.data import DataConfig, SourceConfig, open_data

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = MARKED.replace("{% generation %}", "{%- generation -%}")
FORGETFUL = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else '…' }}")
STRICT = "{{ raise_exception('roles must alternate') }}"

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Näh?"},
    {"role": "assistant", "content": "Grüße, dear user."},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": "Yes."},
]
SPOKEN = "Grüße, dear user.<|im_end|>Yes.<|im_end|>"


def write_folder(folder: Path, template: str | None = PLAIN, *, begin: bool = False) -> Path:
    """A byte-level BPE tokenizer, as `save_pretrained` writes it."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    fast.train_from_iterator(["dear user, assistant, yes", "be kind " * 9] * 20, trainer)
    if begin:
        fast.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>"
    )
    whole.chat_template = template
    whole.save_pretrained(str(folder))
    return folder


def spoken(tokenizer: Tokenizer, talk=TALK) -> tuple[list[int], str]:
    tokens, supervised = encode_chat(tokenizer, talk, lambda: "here")
    assert tokens.shape == supervised.shape
    return tokens.tolist(), tokenizer.decode(tokens[supervised].tolist())


@pytest.mark.parametrize("template", [PLAIN, MARKED, TRIMMED], ids=["plain", "marked", "trimmed"])
def test_only_the_assistant_has_a_loss(template: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", template)
    tokens, said = spoken(FolderTokenizer(folder))
    assert said == SPOKEN
    assert (FolderTokenizer(folder).marked_chat(TALK) is None) == (template == PLAIN)
    whole = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert tokens == list(whole.apply_chat_template(TALK, tokenize=True, return_dict=False))


def test_marks_and_prefixes_agree(tmp_path: Path) -> None:
    found = [
        spoken(FolderTokenizer(write_folder(tmp_path / name, template)))
        for name, template in (("plain", PLAIN), ("marked", MARKED))
    ]
    assert found[0] == found[1]


# As published models have them, reduced to roles: what ends a turn, and what stands behind that.
TEMPLATES = {
    "chatml": (PLAIN, "<|im_end|>"),
    "llama-2": (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}",
        " </s>",
    ),
    "llama-3": (
        "<s>{% for m in messages %}<|im_start|>{{ m.role }}<|im_start|>\n\n{{ m.content | trim }}"
        "<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}",
        "<|im_end|>",
    ),
    "gemma": (
        "<s>{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
        "<|im_end|>",
    ),
    "zephyr": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "</s>",
    ),
    "end of text behind the turn": (
        PLAIN.replace("<|im_end|>\n", "<|im_end|>\n{{ '</s>\n' if m.role == 'assistant' }}"),
        "<|im_end|>",
    ),
    "marked with its line break": (MARKED, "<|im_end|>"),
    # Nothing but a blank line ends a turn: it is trained, or the model never stops.
    "no token": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "\n\n",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_is_trained_up_to_its_end_and_no_further(name: str, tmp_path: Path) -> None:
    template, end = TEMPLATES[name]
    tokenizer = FolderTokenizer(write_folder(tmp_path, template))
    talk = TALK[1:]
    tokens, supervised = encode_chat(tokenizer, talk, lambda: "here")
    runs = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(supervised)) + 1)
    said = [tokenizer.decode(tokens[run].tolist()) for run in runs if supervised[run[0]]]
    space = " " if name == "llama-2" else ""  # of the template, before the content
    assert said == [f"{space}{m['content']}{end}" for m in talk if m["role"] == "assistant"]


def test_content_that_ends_with_white_space_keeps_it(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(write_folder(tmp_path))
    talk = [TALK[1], {"role": "assistant", "content": "Yes.\n\n"}]
    assert spoken(tokenizer, talk)[1] == "Yes.\n\n<|im_end|>"


def test_bytes() -> None:
    _, said = spoken(ByteTokenizer())
    assert said == "Grüße, dear user.\x03Yes.\x03"


def test_an_assistant_that_begins() -> None:
    _, said = spoken(ByteTokenizer(), [{"role": "assistant", "content": "Hello"}])
    assert said == "Hello\x03"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (FORGETFUL, r"here: the chat template of .* changes earlier text when message 2 is added"),
        (STRICT, r"here: the chat template refuses it \(roles must alternate\)"),
        (None, "the tokenizer has no chat template"),
    ],
)
def test_templates_that_cannot_be_used(template: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        spoken(FolderTokenizer(write_folder(tmp_path, template)))


def test_other_spellings_of_messages() -> None:
    given = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert messages_of(given, str) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_rows_of_conversations(tmp_path: Path) -> None:
    """From JSON lines to targets: every supervised token is a target once, in the right place."""
    folder = write_folder(tmp_path / "model")
    talks = [TALK[: 3 + 2 * (i % 2)] for i in range(7)]
    lines = [json.dumps({"id": i, "messages": talk}) for i, talk in enumerate(talks)]
    lines.append(json.dumps({"id": 7, "messages": TALK[:2]}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = DataConfig(train=(SourceConfig(path="a.jsonl"),), cache="cache")
    data = open_data(
        config, sequence_length=160, vocabulary=400, base=tmp_path, model_folder=folder
    )
    assert data.reports[0].skipped == 1  # the assistant says nothing
    assert data.tokenizer is not None
    rows = [data.train.parts[0].rows.row(i) for i in range(data.train.parts[0].count)]
    targets = np.concatenate([row.targets[row.targets >= 0] for row in rows])
    short = SPOKEN[: SPOKEN.index("Yes")]
    said = data.tokenizer.decode(targets.tolist())
    end = "<|im_end|>"
    assert sorted(said.split(end)) == sorted((short * 4 + SPOKEN * 3).split(end))


# --- the tokenizer of a folder ---------------------------------------------------------------


@pytest.mark.parametrize("begin", [False, True])
def test_as_transformers_encodes(begin: bool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, begin=begin)
    ours = open_tokenizer(str(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    texts = ["dear user", "Grüße 🙂\n\n", "<|im_end|> kind"]
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert [*ours.begin, *ids.tolist()] == theirs.encode(text)
        with_offsets, starts = ours.encode_with_offsets(text)
        assert with_offsets.tolist() == ids.tolist()
        assert (np.diff(starts) >= 0).all()
        assert ours.decode(ids.tolist()) == text
    assert ours.begin == ((0,) if begin else ())
    assert ours.end == theirs.eos_token_id
    assert ours.pad == theirs.eos_token_id
    assert ours.size == len(theirs)


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"be read \(it holds none\); name the folder of"):
        FolderTokenizer(tmp_path)


def test_a_damaged_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read"):
        FolderTokenizer(tmp_path)


def test_another_template_is_another_cache_key(tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / str(i), t) for i, t in enumerate((PLAIN, MARKED))]
    assert len({FolderTokenizer(folder).digest for folder in folders}) == 2

"""Chat templates: what they see, what they cannot reach, and that transformers is not needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tutti.errors import InputError
from tutti.huggingface.template import ChatTemplate, TemplateRefusedError

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


def template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, tokens, "here")


def text(source: str, messages: Any = TALK, *, prompt: bool = False, **options: Any) -> str:
    return template(source, bos_token="<s>").render(messages, prompt=prompt, **options)


HOSTILE = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of strftime_now": "{{ strftime_now.__globals__['datetime'] }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "map over attributes": "{{ [''] | map(attribute='__class__') | list }}",
    "subscript": "{{ ''['__class__'] }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "format_map": "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "the template itself": "{{ self.__init__.__globals__ }}",
    "the cycler": "{{ cycler.__init__.__globals__.os }}",
    "the namespace": "{{ namespace.__init__.__globals__ }}",
    "names of Python in a namespace": "{% set n = namespace(__class__=1) %}{{ n }}",
    "and set later": "{% set n = namespace() %}{% set n.__html__ = 1 %}",
    "a macro": "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "the loop": "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "a generator's frame": "{{ (messages | map('upper')).gi_frame }}",
    "change of a message": "{{ messages.append(1) }}",
    "change of a mapping": "{{ messages[0].update({'role': 'x'}) }}",
    "another file": "{% include '/etc/hostname' %}",
    "an import": "{% import 'os' as os %}",
    "a long range": "{{ range(10 ** 7) | list }}",
    "a long text": "{{ 'x' * 10 ** 9 }}",
    "a large number": "{{ 10 ** 10 ** 8 }}",
    "no lipsum": "{{ lipsum.__globals__ }}",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_template_reaches_nothing(what: str) -> None:
    try:
        found = text(HOSTILE[what])
    except TemplateRefusedError:
        found = ""
    assert found in ("", "[Undefined]"), "what is not there is written as nothing"
    assert TALK == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


@pytest.mark.parametrize("what", ["class", "globals of a function", "attr filter", "the cycler"])
def test_without_the_sandbox_they_would(what: str) -> None:
    free = jinja2.Environment()
    free.globals["raise_exception"] = write
    assert free.from_string(HOSTILE[what]).render(messages=TALK)


def test_objects_do_not_reach_a_template() -> None:
    with pytest.raises(InputError, match="here: a conversation holds a PosixPath; it is made of"):
        text("{{ messages }}", [{"role": "user", "content": Path("/")}])

    class Loud(str):
        def shout(self) -> str:
            return "reached"

    with pytest.raises(TemplateRefusedError, match="has no attribute 'shout'"):
        text("{{ messages[0].content.shout() }}", [{"role": "user", "content": Loud("a")}])


def test_what_a_template_says_against_a_conversation_is_one_line() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('begin\nso') }}{% endif %}"
    with pytest.raises(
        InputError, match=r"^here: the chat template refuses the conversation \(beg"
    ):
        text(source)
    with pytest.raises(InputError, match=r"here: the chat template cannot be read \(line 2: "):
        text("a\n{% for %}")


def test_variables() -> None:
    assert text("{{ bos_token }}|{{ eos_token }}|{{ tools }}|{{ documents }}") == "<s>||None|None"
    assert text("{{ add_generation_prompt }}", prompt=True) == "True"
    tools = [{"name": "f", "text": "ä<b>"}]
    assert text("{{ tools | tojson }}", tools=tools) == '[{"name": "f", "text": "ä<b>"}]'
    said = "{{ tools[0] | tojson(indent=1, separators=(',', ':'), sort_keys=true) }}"
    assert json.loads(text(said, tools=tools)) == tools[0]
    assert text("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"
    assert len(text("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert text("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "user"
    none = [{"role": "assistant", "content": None, "reasoning": "hm"}]
    assert text("{{ 'content' in messages[0] }}", none) == "False"
    assert text("{{ messages[0].thinking + messages[0].reasoning_content }}", none) == "hmhm"


def test_marks_are_found_and_leave_no_trace() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}.{% endgeneration %}{% endif %}{% endfor %}"
    )
    own = template(source)
    said, spans = own.spans([*TALK, TALK[1]])
    assert said == "[user][assistant]Yes.[assistant]Yes."
    assert [said[first:last] for first, last in spans] == ["Yes.", "Yes."]
    assert own.marks
    assert not template("{# generation #}{% macro m() %}{{ caller() }}{% endmacro %}").marks


def write(folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_where_templates_are(tmp_path: Path) -> None:
    def found(folder: Path) -> ChatTemplate | None:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        return ChatTemplate.of_folder(folder, settings)

    def rendered(folder: Path, **options: Any) -> str:
        own = found(folder)
        assert own is not None
        return own.render(TALK, prompt=False, **options)

    assert found(write(tmp_path / "none")) is None
    assert rendered(write(tmp_path / "one", chat_template="one", bos_token="x")) == "one"
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = write(tmp_path / "several", chat_template=several)
    assert rendered(folder) == "a"
    assert rendered(folder, tools=[]) == "b"
    (folder / "chat_template.jinja").write_text("{{ eos_token }}file")
    assert rendered(folder) == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert rendered(folder, tools=[]) == "tools"
    token = {"content": "</s>", "lstrip": False}
    folder = write(tmp_path / "token", chat_template="{{ eos_token }}", eos_token=token)
    assert rendered(folder) == "</s>"
    odd = write(tmp_path / "odd", chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(InputError, match="chat templates rag, and none is called 'default'"):
        rendered(odd)


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = write(
        tmp_path / "model", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    code = (
        "import sys; from tutti.huggingface.tokenizer import open_tokenizer; "
        f"t = open_tokenizer({str(folder)!r}); assert t.has_template; "
        "print(t.render([{'role': 'user', 'content': 'Hi'}], prompt=True)); "
        "assert not {'transformers', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Hi\n", "")

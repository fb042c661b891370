"""Every command that the README and docs/ show is run, in order, in one folder per page.

A `console` block holds commands (`$ tutti …`, `$ python FILE …`, `$ cat FILE`) and what they print;
a shown line must be a line of the real output, `…` stands for anything. Blocks with a `title` are
files that are written first. `<!-- fails -->` above a block: its command must exit with 2 and the
one line that the block shows; `<!-- finds -->`: with 1. `<!-- figures vary -->`: what is shown must
be printed, but numbers, bars and line breaks may differ. `<!-- varies -->`: the output is not
compared.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from tutti.cli.main import app, run
from tutti.collective.check import Reason
from tutti.document import Place
from tutti.files import parse_yaml
from tutti.hardware import chip, cluster, fabric, node, profile, storage
from tutti.hardware.library import shipped
from tutti.launch import facts
from tutti.models.distillation import Distillation
from tutti.models.families.decoder import Attention, Decoder, Mlp
from tutti.models.objective import Objective
from tutti.models.sampling import Sampling
from tutti.models.spec import ModelSpec
from tutti.models.tuning import AdapterSpec, Tuning
from tutti.observe.record import PoolTimes, StepRecord
from tutti.plan import job, plan, serving
from tutti.train.data.config import DataConfig, PackingConfig, SourceConfig
from tutti.train.evaluation.config import EvaluateConfig, TaskConfig
from tutti.train.run import config as training

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
REFERENCE = DOCS / "reference"
SKIPPED = (".", "make", "pip", "pre-commit")

FENCE = re.compile(
    r"(?:^<!-- (?P<mark>fails|finds|varies|figures vary) -->\n+)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Command(NamedTuple):
    arguments: list[str]
    shown: list[str]
    mark: str | None


def blocks(page: Path) -> Iterator[re.Match[str]]:
    return FENCE.finditer(page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[Command]:
    for block in blocks(page):
        if block["language"] != "console":
            continue
        found: Command | None = None
        for line in block["body"].replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                if found is not None:
                    yield found
                found = Command(shlex.split(line[2:], comments=True), [], block["mark"])
            elif found is not None:
                found.shown.append(line)
        if found is not None:
            yield found


def called(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- commands --------------------------------------------------------------------------------


def execute(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    if arguments[0] == "python":
        done = subprocess.run(
            [sys.executable, *arguments[1:]], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout, done.stderr
    if arguments[0] == "cat":
        return 0, Path(arguments[1]).read_text(encoding="utf-8"), ""
    with pytest.raises(SystemExit) as stopped:
        run(arguments[1:])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def words(line: str) -> str:
    return " ".join(line.split())


def is_printed(shown: str, output: list[str]) -> bool:
    pattern = ".*".join(map(re.escape, words(shown).split("…")))
    return not shown.strip("… ") or any(re.fullmatch(pattern, line) for line in output)


FIGURE = re.compile(r"(?<![A-Za-z])[-+−]?\d[\d,.]*( [KMGT](?= ))?|[█▉▊▋▌▍▎▏]+")


def without_figures(text: str) -> str:
    """Return a text with one sign for every number and bar, however its lines are broken."""
    return words(re.sub(r"\b([mµn]?s)\b", "s", FIGURE.sub("#", text)))


def not_printed(shown: str, output: str) -> str:
    """Return the first part between two `…` that the output does not have after those before."""
    found = without_figures(output)
    for part in map(str.strip, without_figures(shown).split("…")):
        at = found.find(part)
        if at < 0:
            return part
        found = found[at + len(part) :]
    return ""


@pytest.mark.parametrize("page", [p for p in PAGES if any(commands(p))], ids=called)
def test_commands_of_a_page(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_search_per_question: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUTTI_DEBUG", raising=False)
    for block in blocks(page):
        if block["title"]:
            file = tmp_path / block["title"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["body"], encoding="utf-8")
    for arguments, shown, mark in commands(page):
        if arguments[0] in SKIPPED:
            continue
        text = shlex.join(arguments)
        assert arguments[0] in ("tutti", "python", "cat"), (
            f"{called(page)}: '$ {text}' is not tested"
        )
        code, out, err = execute(arguments, capsys)
        if mark == "fails":
            assert code == 2, f"$ {text}"
            assert len(err.splitlines()) == 1, err
            assert words(err) in map(words, shown), err
            continue
        assert code == (1 if mark == "finds" else 0), f"$ {text}\n{err}"
        if mark == "figures vary":
            missing = not_printed("\n".join(shown), out)
            assert not missing, f"'$ {text}' does not print, whatever the figures: {missing}"
        elif mark != "varies":
            printed = [words(line) for line in out.splitlines()]
            for line in shown:
                assert is_printed(line, printed), f"'$ {text}' does not print: {line}"


def test_bad_blocks_are_found() -> None:
    output = ["a b", "… 266 more (--most)"]
    assert is_printed("  a   b", output)
    assert is_printed("…", output)
    assert is_printed("… 266 more", output) is False
    assert is_printed("a …", output)
    assert is_printed("a c", output) is False


def test_figures_may_vary_and_words_may_not() -> None:
    output = "this plan  ████  370.1 ms\nrunner-up  █████▌ 1.2 s  +2.1 %\nheld by 3 pools"
    assert not_printed("this plan █ 12 ms\nrunner-up ██ 99 ms -7 %\n…\nby 12\npools", output) == ""
    assert not_printed("runner-up …\nthis plan …", output) == "this plan"
    assert not_printed("this plan █ 12 ms\nbest uniform ██ 99 s\n…", output).startswith("this plan")
    assert not_printed("…\nheld by two pools", output) == "held by two pools"


# --- links -----------------------------------------------------------------------------------

LINK = re.compile(r"\]\((?!\w+:)(?P<file>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles
    }


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.finditer(text):
        target = (page.parent / link["file"]).resolve() if link["file"] else page
        assert target.exists(), f"{called(page)}: {link[0]}"
        if link["anchor"]:
            assert link["anchor"] in anchors(target), f"{called(page)}: {link[0]}"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/-]+\.md", text))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize("contents", [ROOT / "README.md", DOCS / "index.md"], ids=called)
def test_every_page_is_in_the_contents(contents: Path) -> None:
    text = FENCE.sub("", contents.read_text(encoding="utf-8"))
    linked = {(contents.parent / link["file"]).resolve() for link in LINK.finditer(text)}
    missing = {called(page) for page in DOCS.rglob("*.md") if page not in {*linked, contents}}
    assert not missing


def test_pictures_are_shown_and_small() -> None:
    pictures = set((DOCS / "images").glob("*.png"))
    shown = {
        (page.parent / link["file"]).resolve()
        for page in PAGES
        for link in LINK.finditer(page.read_text(encoding="utf-8"))
        if link["file"].endswith(".png")
    }
    assert pictures == shown
    assert max(picture.stat().st_size for picture in pictures) < 200_000


# --- the reference names every key -----------------------------------------------------------

CLUSTER_KEYS: dict[type, set[str]] = {  # class → keys that only the written form has
    cluster.Cluster: {"chips", "nodes"},
    cluster.Pool: {"chip", "chips_per_node"},
    chip.Chip: {"base"},
    node.NodeType: {"base"},
    node.Island: set(),
    node.Bridge: set(),
    node.Nic: set(),
    node.NicPerChip: set(),
    node.Host: set(),
    fabric.Fabric: set(),
    fabric.Tier: set(),
    fabric.CrossLink: set(),
    storage.Storage: set(),
    storage.StorageTarget: set(),
    storage.NodeStorage: set(),
}
PLAN_KEYS: dict[type, set[str]] = {
    plan.Plan: {"format"},
    plan.ModelReference: set(),
    plan.ClusterReference: set(),
    plan.ProfileReference: set(),
    job.Job: set(),
    job.Precision: set(),
    plan.Pipeline: set(),
    plan.Stage: set(),
    plan.Replica: set(),
    plan.Recompute: set(),
    plan.Offload: set(),
    plan.ExpertGroup: set(),
    plan.Order: set(),
    plan.Synchronisation: set(),
    plan.Share: set(),
    plan.CollectiveChoice: set(),
    serving.Service: set(),
    serving.Traffic: set(),
    serving.Lengths: set(),
    serving.Limits: set(),
    serving.Engine: set(),
    serving.Route: set(),
    ModelSpec: set(),
}

PROFILE_KEYS = (
    profile.Profile,
    profile.OperatorTime,
    profile.LinkFigure,
    profile.CollectiveTime,
    profile.StorageFigure,
)
DATA_KEYS = (DataConfig, SourceConfig, PackingConfig)
TRAIN_KEYS = (
    training.TrainConfig,
    training.JobConfig,
    training.OptimizerConfig,
    training.TensorConfig,
    training.AverageConfig,
    training.CheckpointConfig,
    training.ValidationConfig,
    training.MeasureConfig,
)


LAUNCH_KEYS = (
    facts.Facts,
    facts.PoolFacts,
    facts.Volume,
    facts.SlurmFacts,
    facts.KubernetesFacts,
    facts.ServingFacts,
)


def table_rows(page: Path, title: str) -> dict[str, list[str]]:
    """Return the rows of the table under the heading that ends with `title`, by their key."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^## [^\n]*\({title}\)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{called(page)} has no section ({title})"
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", found[1], re.MULTILINE)
    return {key: [cell.strip() for cell in rest.split(" | ")] for key, rest in rows}


@pytest.mark.parametrize(
    ("page", "kind", "extra"),
    [
        *((REFERENCE / "cluster-file.md", kind, extra) for kind, extra in CLUSTER_KEYS.items()),
        *((REFERENCE / "plan-file.md", kind, extra) for kind, extra in PLAN_KEYS.items()),
        *((REFERENCE / "profile-file.md", kind, set()) for kind in PROFILE_KEYS),
        *((DOCS / "how-to/training-data.md", kind, set()) for kind in DATA_KEYS),
        *((REFERENCE / "launch-file.md", kind, set()) for kind in LAUNCH_KEYS),
        *((DOCS / "how-to/adapters.md", kind, set()) for kind in (Tuning, AdapterSpec)),
        (DOCS / "how-to/preferences.md", Objective, set()),
        (DOCS / "how-to/distillation.md", Distillation, set()),
        (DOCS / "how-to/reinforcement.md", Sampling, set()),
        *((DOCS / "how-to/evaluate.md", kind, set()) for kind in (EvaluateConfig, TaskConfig)),
        *((DOCS / "how-to/train.md", kind, set()) for kind in TRAIN_KEYS),
        *((DOCS / "extend/add-a-model.md", kind, set()) for kind in (Decoder, Attention, Mlp)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_reference_names_every_key(page: Path, kind: type, extra: set[str]) -> None:
    rows = table_rows(page, kind.__name__)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    assert set(rows) == set(fields) | extra
    for name, field in fields.items():
        _, default, meaning = rows[name]
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        assert default.startswith("required") == required, f"{kind.__name__}.{name}: {default}"
        assert meaning


def test_every_figure_of_a_step_is_explained() -> None:
    text = (DOCS / "how-to/train.md").read_text(encoding="utf-8")
    section = text.partition("## Figures")[2].partition("## ")[0]
    named = {
        name
        for row in re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert named == {f.name for kind in (StepRecord, PoolTimes) for f in dataclasses.fields(kind)}


def test_the_command_line_reference_names_every_option() -> None:
    text = (REFERENCE / "command-line.md").read_text(encoding="utf-8")

    def walk(command: object, path: str) -> Iterator[tuple[str, object]]:
        inner = getattr(command, "commands", {})
        if not inner:
            yield path, command
        for name, sub in inner.items():
            yield from walk(sub, f"{path} {name}")

    for path, command in walk(typer.main.get_command(app), "tutti"):
        found = re.search(rf"^## {path}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert found, f"'{path}' is not described"
        for parameter in command.params:  # type: ignore[attr-defined]
            names = parameter.opts if parameter.param_type_name == "option" else [parameter.name]
            for option in names:
                wanted = option if option.startswith("-") else option.upper()
                described = f"`{wanted}" in found[1] or wanted in ("-h", "--help")
                assert described, f"{path}: {wanted} is not described"


def test_every_reason_is_explained() -> None:
    text = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    sources = "".join(p.read_text() for p in (ROOT / "src/tutti/plan").glob("check*.py"))
    codes = set(re.findall(r"Problem\(\s*\"(\w+)\"", sources))
    assert len(codes) > 10
    missing = {code for code in codes | {r.value for r in Reason} if f"| `{code}` |" not in text}
    assert not missing


# --- the extension pages, followed to the letter ---------------------------------------------


def titled(page: Path, title: str) -> str:
    return next(block["body"] for block in blocks(page) if block["title"] == title)


def test_a_chip_in_the_catalog() -> None:
    page = DOCS / "extend/add-a-chip.md"
    folder = "src/tutti/hardware/catalog"
    chips = parse_yaml(titled(page, f"{folder}/chips.yaml"), "chips.yaml")
    nodes = parse_yaml(titled(page, f"{folder}/nodes.yaml"), "nodes.yaml")
    library = shipped().with_definitions(chips, nodes, Place("add-a-chip.md"))
    (added,) = set(library.chips) - set(shipped().chips)
    new = library.chips[added]
    assert all(new.source(figure) != "not stated" for figure in new.figures)
    assert library.node_for(new).source


def test_a_model_type_in_the_source() -> None:
    """The declaration on the page is the one that its script registers."""
    page = DOCS / "extend/add-a-model.md"
    declared = titled(page, "src/tutti/models/families/llama_like.py").strip().rstrip(",")
    script = titled(page, "try_it.py")
    assert words(declared) in words(script)
    mapped = titled(page, "src/tutti/huggingface/maps/llama_like.py")
    assert words(mapped) in words(titled(page, "try_weights.py"))

"""The reference names every key, option and reason; the extension pages are as they say."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tests.support.pages import DOCS, ROOT, blocks, called, words
from tutti.cli.main import app
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
from tutti.observe.alerts import AlertSettings
from tutti.observe.record import PoolTimes, StepRecord
from tutti.plan import job, plan, serving
from tutti.train.data.config import DataConfig, PackingConfig, SourceConfig
from tutti.train.evaluation.config import EvaluateConfig, TaskConfig
from tutti.train.run import config as training

REFERENCE = DOCS / "reference"

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
    AlertSettings,
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

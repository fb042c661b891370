"""Plans as files: strict, versioned JSON both ways."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from tutti.document import Place, build, plain_fields, shown
from tutti.errors import InputError
from tutti.files import parse_json, pretty_json, read_text, write_text
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.plan import FORMAT, ClusterReference, ModelReference, Plan


def plan_to_document(plan: Plan) -> dict[str, object]:
    """Return the plan as plain values, its format first."""
    return {"format": FORMAT, **plain_fields(plan)}


def plan_hash(plan: Plan) -> str:
    """Return what tells plans apart: the same wherever the same plan is read."""
    text = json.dumps(plan_to_document(plan), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_from_document(value: object, name: str) -> Plan:
    """Read a plan from plain values; `name` is what messages call the file."""
    place = Place(name)
    if not isinstance(value, dict):
        raise place.error(f"not a plan: expected a JSON object, found {shown(value)}")
    fields = dict(value)
    version = fields.pop("format", None)
    if version != FORMAT:
        if (other := _other_kind(fields)) is not None:
            raise place.error(f"{other}; expected a plan, as tutti plan -o writes it")
        said = "has no 'format'" if version is None else f"'format' is {shown(version)}"
        raise place.error(f"{said}; this version of tutti reads '{FORMAT}'")
    plan = build(Plan, fields, place)
    _verify_hashes(plan, place)
    return plan


def _other_kind(fields: Mapping[str, object]) -> str | None:
    """Say what a file is that was given for a plan, where its keys tell."""
    if "operators" in fields and "chip" in fields:
        return "is a chip's profile (--chip-profile)"
    if "pools" in fields:
        return "is a cluster file"
    if "model_type" in fields or "architectures" in fields:
        return "is a model's config.json"
    return None


def _verify_hashes(plan: Plan, place: Place) -> None:
    spec, cluster = plan.model.spec, plan.cluster.cluster
    hashes = {
        "model": (plan.model.hash, spec.fingerprint if spec is not None else None),
        "cluster": (plan.cluster.hash, cluster.fingerprint() if cluster is not None else None),
    }
    for key, (said, is_now) in hashes.items():
        if said and is_now is not None and said != is_now:
            raise place.key(key).value_error(
                f"has the hash {is_now}, but the plan was made for {shown(said)}: it was edited "
                "afterwards, or the chip catalog changed; plan again"
            )


def load_plan(path: Path) -> Plan:
    """Read a plan file."""
    text = read_text(path)
    if path.suffix in (".yaml", ".yml"):
        raise InputError(
            f"{path.name}: is YAML; expected a plan, as tutti plan -o writes it (JSON)"
        )
    return plan_from_document(parse_json(text, path.name), path.name)


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan file as a whole or not at all."""
    write_text(path, pretty_json(plan_to_document(plan)) + "\n")


def refer_to_model(spec: ModelSpec) -> ModelReference:
    """Embed a model in a plan."""
    return ModelReference(name=spec.name, hash=spec.fingerprint, spec=spec)


def refer_to_cluster(cluster: Cluster) -> ClusterReference:
    """Embed a cluster in a plan."""
    return ClusterReference(name=cluster.name, hash=cluster.fingerprint(), cluster=cluster)

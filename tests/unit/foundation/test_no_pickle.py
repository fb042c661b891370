"""Nothing that comes from a socket or a file is ever executed: no pickle is loaded in `tutti`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tutti

SOURCE = Path(tutti.__file__).parent
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
LOADING = {"load", "loads", "Unpickler"}
COLLECTIVES = {
    "gather_object", "all_gather_object", "scatter_object_list", "broadcast_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
# Reads torch's metadata with a list of classes of its own, none of which does anything.
RESTRICTED = {("train/checkpoint/storage.py", "pickle.Unpickler")}


def loads(path: Path) -> Iterator[str]:
    """Yield what a file loads that could run something."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "") in MODULES:
            yield f"from {node.module}"
        if isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            if base in MODULES and node.attr in LOADING:
                yield f"{base}.{node.attr}"
            if node.attr in COLLECTIVES:
                yield node.attr
        if isinstance(node, ast.Name) and node.id in COLLECTIVES:
            yield node.id
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            base = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if (base, node.func.attr) == ("torch", "load") and words.get(
                "weights_only"
            ) is not True:
                yield "torch.load without weights_only"
            if words.get("allow_pickle") or words.get("trust_remote_code"):
                yield "allow_pickle or trust_remote_code"


def test_no_pickle_is_loaded() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 300
    found = {(path.relative_to(SOURCE).as_posix(), what) for path in files for what in loads(path)}
    assert found == RESTRICTED


def test_the_search_finds_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "import pickle, torch\nimport torch.distributed as dist\nfrom pickle import loads\n"
        "pickle.loads(b'')\ntorch.load('x')\ntorch.load('x', weights_only=True)\n"
        "dist.gather_object(1)\nnp.load('x', allow_pickle=True)\n"
    )
    assert sorted(loads(path)) == [
        "allow_pickle or trust_remote_code", "from pickle", "gather_object", "pickle.loads",
        "torch.load without weights_only",
    ]  # fmt: skip

"""Nothing above the accelerator layer names a kind of device.

Read from the syntax tree, so that comments, documentation and catalog data do not count. `hardware`
knows vendors' tools and catalog words, and imports no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src/tutti"
ALLOWED = ("accelerator", "hardware")
DEVICE_TYPES = {"cuda", "npu", "xpu", "mps", "hpu", "mlu", "musa", "privateuseone"}
MODULES = {"torch_npu", "torch_xmlir", "torch_xpu", "torch_mlu", "torch_musa", "triton"}


def device_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of everything that names a device type."""
    tree = ast.parse(text)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in DEVICE_TYPES:
                yield node.lineno, ast.unparse(node)
            case ast.Constant(value=str(value)) if id(node) not in documentation:
                if value.split(":")[0] in DEVICE_TYPES:
                    yield node.lineno, repr(value)
            case ast.Import(names=names):
                for alias in names:
                    root = alias.name.split(".")
                    if root[0] in MODULES or (root[0] == "torch" and set(root) & DEVICE_TYPES):
                        yield node.lineno, f"import {alias.name}"
            case ast.ImportFrom(module=str(module), names=names):
                parts = [*module.split("."), *(alias.name for alias in names)]
                if parts[0] in MODULES or (parts[0] == "torch" and set(parts) & DEVICE_TYPES):
                    yield node.lineno, f"from {module} import …"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch.cuda.synchronize()", True),
        ("x.cuda()", True),
        ("x.to('cuda')", True),
        ("x.to('cuda:1')", True),
        ("torch.device(type='npu')", True),
        ("from torch.cuda import Stream", True),
        ("from torch import cuda", True),
        ("import torch.npu as npu", True),
        ("import torch_npu", True),
        ("import triton.language as tl", True),
        ("f'{kind}' == 'mps'", True),
        ("# torch.cuda is fast", False),
        ("'''About cuda.'''", False),
        ("def f():\n    'cuda'\n    return 'gpu'", False),
        ("x.to(accelerator.device)", False),
        ("name = 'cuda graphs'", False),
    ],
)
def test_the_guard_itself(text: str, found: bool) -> None:
    assert bool(list(device_names(text))) == found


def test_nothing_above_the_accelerators_names_a_device() -> None:
    named, read = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        if inside.parts[0] in ALLOWED:
            continue
        read += 1
        named += [f"{inside}:{line}: {what}" for line, what in device_names(path.read_text())]
    assert read > 200
    assert not named, "name devices in accelerator/ alone:\n" + "\n".join(named)


def test_hardware_needs_no_torch() -> None:
    """It may say "npu" because it cannot mean torch's."""
    for path in (SOURCE / "hardware").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module)):
                    modules = [module]
                case _:
                    continue
            assert not any(name.split(".")[0] == "torch" for name in modules), path

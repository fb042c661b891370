"""Our own model as a side of `tutti align`, watched at the same points as transformers'.

It stands here because it joins two rooms that do not know each other: `nn` and `huggingface`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator import open_accelerator
from tutti.huggingface import open_checkpoint
from tutti.huggingface.alignment_sides import Task
from tutti.huggingface.dumps import DumpWriter
from tutti.nn import Batch, Model, load


def run(task: Task, writer: DumpWriter) -> None:
    """Run a Hugging Face or a tutti folder forward and, if asked for, backward."""
    accelerator = open_accelerator(task.device)
    dtype: torch.dtype = getattr(torch, task.dtype)
    model = Model(task.spec, accelerator.operators, dtype=dtype, device=accelerator.device)
    load(model, open_checkpoint(task.folder))
    tokens = torch.from_numpy(task.batch.tokens)
    batch = _batch(task, tokens, accelerator.device)
    outputs: dict[str, Tensor] = {}
    shape = (*tokens.shape, -1)
    handles = [
        module.register_forward_hook(_keep(outputs, n, shape)) for n, module in _points(model)
    ]
    with torch.set_grad_enabled(task.gradients):
        out = model(None, batch)
        with torch.no_grad():
            logits = model.logits(batch)
    for handle in handles:
        handle.remove()
    for name, tensor in outputs.items():
        writer.record(f"forward/{name}", tensor)
    writer.record("forward/logits", logits.reshape(shape))
    loss = out.loss / (tokens.shape[0] * (tokens.shape[1] - 1))
    writer.record("forward/loss", loss.detach().reshape(1))
    if task.gradients:
        loss.backward()
        _record_gradients(model, writer)


def _batch(task: Task, tokens: Tensor, device: torch.device) -> Batch:
    """Return the batch packed; each token's target is the next one of its sequence."""
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    return Batch.of(
        task.spec,
        tokens.flatten().to(device),
        [tokens.shape[1]] * tokens.shape[0],
        targets_t=targets.flatten().to(device),
    )


def _points(model: Model) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules whose outputs have a name on every side."""
    points: list[tuple[str, torch.nn.Module]] = []
    for name, unit in model.units.items():
        if name == "0":
            points.append((name, unit))
        elif unit is model.head:
            if model.head.norm is not None:
                points.append((f"{name}.norm", model.head.norm))
        else:
            points.append((f"{name}.attention", unit.get_submodule("attention")))
            inner = "moe" if model.spec.block(int(name)).moe is not None else "mlp"
            points.append((f"{name}.mlp", unit.get_submodule(inner)))
            points.append((name, unit))
    return points


def _keep(outputs: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Callable[..., None]:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        outputs.setdefault(name, tensor.detach().reshape(shape))

    return hook


def _record_gradients(model: Model, writer: DumpWriter) -> None:
    """Record them from the last layer to the first, as they are computed."""
    gradients = {logical.name: logical.gradient for logical in model.logical_tensors()}
    for unit in reversed(range(model.spec.num_units)):
        for parameter in reversed(model.spec.parameters(unit)):
            gradient = gradients.get(f"{unit}.{parameter.name}")
            if gradient is not None and parameter.trainable and parameter.tied_to is None:
                writer.record(f"gradient/{unit}.{parameter.name}", gradient)

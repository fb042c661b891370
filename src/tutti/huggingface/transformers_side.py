"""The Hugging Face side of an alignment: transformers' own model, watched by hooks.

Which module is which follows from the weight map. Gradients pass through transformers' own saving
and our weight map, so that they arrive under our names whatever is fused in memory.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tutti.errors import InputError
from tutti.huggingface.alignment_sides import Task
from tutti.huggingface.dumps import DumpWriter
from tutti.huggingface.hf_folder import HfFolder
from tutti.huggingface.manifest import MANIFEST
from tutti.huggingface.maps import key_table
from tutti.huggingface.pieces import whole
from tutti.huggingface.weight_map import KeyTable
from tutti.models import ModelSpec


def run(task: Task, writer: DumpWriter) -> None:
    """Run a Hugging Face folder forward and, if asked for, backward."""
    # a processor without bf16 instructions multiplies all the same, slowly; the user asked for it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        _run(task, writer)


def _run(task: Task, writer: DumpWriter) -> None:
    if (task.folder / MANIFEST).is_file():
        raise InputError(
            f"{task.folder}: is a tutti folder; the hf side runs Hugging Face folders "
            "(tutti convert makes one)"
        )
    model = _load(task)
    tokens = torch.from_numpy(task.batch.tokens).to(task.device)
    shape = (*tokens.shape, task.spec.hidden)
    outputs: dict[str, torch.Tensor] = {}
    first, watched = _watched(model, task.spec)
    handles = [module.register_forward_hook(_keep(outputs, n, shape)) for n, module in watched]
    handles.append(first.register_forward_pre_hook(_keep_input(outputs, "0"), with_kwargs=True))
    with torch.set_grad_enabled(task.gradients):
        result = model(input_ids=tokens, labels=tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    for name, tensor in outputs.items():
        writer.record(f"forward/{name}", tensor)
    writer.record("forward/logits", result.logits)
    writer.record("forward/loss", result.loss.reshape(1))
    if task.gradients:
        result.loss.backward()
        _record_gradients(model, task.spec, writer)


def _load(task: Task) -> Any:
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            task.folder, dtype=getattr(torch, task.dtype), attn_implementation="eager"
        )
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{task.folder}: transformers cannot load it ({first})") from None
    whole: Any = model
    whole.config.output_router_logits = False  # the token loss alone is compared
    return whole.to(task.device).eval()  # dropout would make the sides differ


def _keep(
    outputs: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]
) -> Callable[..., None]:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        outputs[name] = tensor.detach().reshape(shape).clone()  # Falcon adds to it in place

    return hook


def _keep_input(outputs: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def hook(_module: Any, inputs: Any, options: Any) -> None:
        outputs[name] = (inputs[0] if inputs else options["hidden_states"]).detach()

    return hook


def _watched(model: Any, spec: ModelSpec) -> tuple[Any, list[tuple[str, Any]]]:
    """Return the first block and the modules whose outputs have a name on every side."""
    modules = dict(model.named_modules())
    table = key_table(spec)
    blocks = next(m for m in modules.values() if isinstance(m, torch.nn.ModuleList))
    watched: list[tuple[str, Any]] = []
    for unit in range(1, spec.num_layers + 1):
        block = blocks[unit - 1]
        output = _module_of(table, f"{unit}.attention.output.weight")
        watched.append((f"{unit}.attention", modules[output]))
        if spec.block(unit).mlp is not None:
            down = _module_of(table, f"{unit}.mlp.down.weight")
            watched.append((f"{unit}.mlp", modules[down]))
        else:  # in memory all types call it so
            watched.append((f"{unit}.mlp", block.mlp))
        watched.append((str(unit), block))
    norm = f"{spec.head_unit}.norm.weight"
    if norm in table.tensors:
        watched.append((f"{spec.head_unit}.norm", modules[_module_of(table, norm)]))
    return blocks[0], watched


def _module_of(table: KeyTable, name: str) -> str:
    return table.tensors[name].pieces[0].key.rpartition(".")[0]


def _record_gradients(model: Any, spec: ModelSpec, writer: DumpWriter) -> None:
    """Save the gradients as if they were the weights and read them back by our names."""
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        saved = HfFolder(Path(folder))
        for unit in reversed(range(spec.num_units)):
            for parameter in reversed(spec.parameters(unit)):
                if not parameter.trainable or parameter.tied_to is not None:
                    continue
                name = f"{unit}.{parameter.name}"
                raw = saved.raw(name, whole(parameter.shape))
                writer.record_raw(f"gradient/{name}", raw, saved.dtype(name))

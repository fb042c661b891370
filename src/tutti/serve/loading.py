"""Opens a model folder for serving: weights, tokenizer, and as many pages as there is room for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tutti.accelerator import Accelerator, Operators, open_accelerator
from tutti.accelerator.inference import INVARIANT
from tutti.accelerator.prepared import has_halves, round_to_halves
from tutti.accelerator.products import widens
from tutti.batching import Settings
from tutti.batching.settings import PAGES_SHARE
from tutti.errors import InputError, hint
from tutti.huggingface import Checkpoint, open_checkpoint
from tutti.huggingface.peft.adapter import open_adapter
from tutti.huggingface.tokenizer import Tokenizer, open_tokenizer
from tutti.models import ModelSpec
from tutti.nn import Model, load
from tutti.nn.cache import token_bytes
from tutti.nn.head import Logits
from tutti.nn.linear import Linear
from tutti.nn.quantised import load_quantised, narrow_inputs, weight_bytes
from tutti.nn.rotary import stretch
from tutti.serve.adapters import RANK, SLOTS, Adapters
from tutti.serve.draft_model import DraftModel, check_draft
from tutti.serve.drafting import Drafter, NgramDrafter
from tutti.serve.worker import Worker
from tutti.units import bytes_text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a user may ask of an engine's sizes; None: what fits."""

    slots: int = 64
    page_size: int = 16
    pages: int | None = None
    page_dtype: str | None = None  # int8 or fp8: of keys and values in pages; the model's dtype
    memory_bytes: int | None = None  # for weights and pages together
    host_bytes: int = 0  # of pinned memory, for pages of sequences that lose their slots
    host_pages: int | None = None  # as many instead
    keep_on_host: Literal["priced", "always"] = (
        "priced"  # who is kept there, instead of computed again
    )
    max_length: int | None = None  # of a sequence: the model's own
    most_tokens: int = 2048  # of a step
    prefix: bool = True
    ahead: int | None = None  # steps under way at a time: two where the chip has graphs
    target_s: float | None = None  # prompts are cut such that a step beside decodes keeps it
    adapter_slots: int = SLOTS  # LoRA adapters at a time
    adapter_rank: int = RANK  # the largest, of those that are added later

    @property
    def codes(self) -> torch.dtype | None:
        """The dtype of pages that are not the model's."""
        if self.page_dtype is not None and self.page_dtype not in CODES:
            raise InputError(f"page_dtype is '{self.page_dtype}'; {hint(self.page_dtype, CODES)}")
        return None if self.page_dtype is None else CODES[self.page_dtype]


def open_worker(
    folder: Path | str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    invariant: bool = False,
    weights: str | None = None,
    activations: str | None = None,
    adapters: Mapping[str, Path | str] | None = None,
    sizes: Sizes | None = None,
    **options: Any,
) -> tuple[Worker, Tokenizer | None]:
    """Return a worker with the model of a Hugging Face or a tutti folder, and its tokenizer.

    `device`: as `tutti accelerator list` names it; the best that is here. `dtype`: fp32, bf16 or
    fp16 (on hosts without such products: of the weights alone, whose products are made in float32);
    the weights' own where the device multiplies in it. `invariant`: a request's logits have
    the same bits alone, in any batch, chunks and pages. `weights`: fp8, int8 or int4, to which
    plain weights are rounded; quantised ones stay what they are. `activations`: fp8, to which the
    rows that meet weights in fp8 are rounded, each by its own scale. `adapters`: PEFT folders by
    name.
    `tokenizer`: another folder, or "bytes". Other options are those of `Sizes`.
    """
    sizes = sizes or _sizes(options)
    if invariant and sizes.codes is not None:
        raise InputError("batch-invariant mode has no form for pages of 8 bits; leave one out")
    checkpoint = open_checkpoint(folder, quantised=True)
    spec = checkpoint.spec
    accelerator = open_accelerator(device)
    number = _dtype(dtype, checkpoint.dtype(next(iter(checkpoint.names()))).name, accelerator)
    operators = (
        invariant_operators(spec, accelerator) if invariant else accelerator.operators.as_serving()
    )
    model = open_model(checkpoint, operators, number, accelerator, weights)
    if activations is not None:
        if activations != "fp8":
            raise InputError(f"activations is '{activations}'; it may be 'fp8'")
        narrow_inputs(model)
    if not invariant:
        prepare(model, asked=dtype)
    end = end_tokens(Path(folder), spec)
    opened = _tokenizer(tokenizer, Path(folder))
    if not end and opened is not None and opened.end is not None:
        end = (opened.end,)
    held = open_adapters(adapters or {}, model, sizes)
    settings = settings_for(spec, sizes, accelerator, number, model, held.num_bytes)
    worker = Worker(
        model, accelerator, settings, dtype=number, codes=sizes.codes, end=end, adapters=held
    )
    return worker, opened


def open_adapters(folders: Mapping[str, Path | str], model: Model, sizes: Sizes) -> Adapters:
    """Return adapters in their slots, with room for those that are given."""
    opened = [open_adapter(folder, model.spec).rank for folder in folders.values()]
    held = Adapters(
        model,
        slots=max(sizes.adapter_slots, len(folders)),
        rank=max(sizes.adapter_rank, *opened, 1),
    )
    for name, folder in folders.items():
        held.add(name, folder)
    return held


def open_model(
    checkpoint: Checkpoint,
    operators: Operators,
    dtype: torch.dtype,
    accelerator: Accelerator,
    weights: str | None = None,
) -> Model:
    """Return a checkpoint's model, with its weights on the device."""
    stored = getattr(checkpoint, "method", None)
    if stored is not None and weights is not None:
        raise InputError(
            f"{checkpoint.folder}: the weights are quantised already ({stored}); leave 'weights' "
            "out"
        )
    if stored is None and weights is None:
        model = Model(checkpoint.spec, operators, dtype=dtype, device=accelerator.device)
        load(model, checkpoint)
    else:
        model = Model(checkpoint.spec, operators, dtype=dtype, device="meta")
        load_quantised(model, checkpoint, accelerator.device, weights)
    checkpoint.drop()
    return model.eval().requires_grad_(False)


def invariant_operators(spec: ModelSpec, accelerator: Accelerator) -> Operators:
    """Return operators for which the batch changes no bit; refuse models that have others."""
    attentions = [block.attention for block in spec.blocks]
    experts = [block.moe for block in spec.blocks if block.moe is not None]
    scalings = [a.rotary.scaling for a in attentions if a.rotary and a.rotary.scaling]
    lacking = {
        "latent attention": any(a.latent is not None for a in attentions),
        "biases rounded to bfloat16": any(a.alibi and a.alibi.bfloat16 for a in attentions),
        "dynamic rotary scaling": any(scaling.kind == "dynamic" for scaling in scalings),
        "gates of shared experts": any(moe.shared_gate for moe in experts),
        "routers with sigmoids": any(moe.router.scores == "sigmoid" for moe in experts),
    }
    for what, there in lacking.items():
        if there:
            raise InputError(
                f"{spec.name}: batch-invariant mode has no form for {what}; leave it off"
            )
    own = INVARIANT if experts else [name for name in INVARIANT if "grouped" not in name]
    return accelerator.operators.as_invariant(own)


def open_drafter(worker: Worker, folder: Path | str | None) -> Drafter:
    """Return what guesses for a worker: a draft model's folder, or the text itself."""
    if folder is None:
        return NgramDrafter()
    checkpoint = open_checkpoint(folder, quantised=True)
    check_draft(worker.model.spec, checkpoint.spec)
    accelerator, dtype = worker.accelerator, next(worker.model.parameters()).dtype
    model = open_model(checkpoint, accelerator.operators.as_serving(), dtype, accelerator)
    prepare(model)
    return DraftModel(
        model,
        accelerator,
        worker.sampler,
        slots=worker.settings.slots,
        max_length=worker.settings.max_length,
        dtype=dtype,
    )


def prepare(model: Model, *, asked: str | None = None) -> None:
    """Let the device lay out the weights of all products, rounded if that was `asked` for."""
    for module in model.modules():
        if not isinstance(module, Linear | Logits):
            continue
        weight: object = module.weight  # or a quantised one
        halves = asked == "fp16" and isinstance(weight, Tensor) and weight.dtype is torch.float32
        if halves and not round_to_halves(module.weight):
            raise InputError(
                f"{model.spec.name}: a weight is beyond float16's ±65,504; leave dtype fp16 out"
            )
        model.operators.prepare(module.weight, halves=halves)


def _sizes(options: dict[str, Any]) -> Sizes:
    known = Sizes.__dataclass_fields__
    for name in options:
        if name not in known:
            raise InputError(f"engine: no option '{name}'; {hint(name, known)}")
    return Sizes(**options)


def _dtype(asked: str | None, stored: str, accelerator: Accelerator) -> torch.dtype:
    if asked is not None:
        if asked not in DTYPES:
            raise InputError(f"dtype is '{asked}'; {hint(asked, DTYPES)}")
        wanted = DTYPES[asked]
        return torch.float32 if keeps_halves(wanted, accelerator) else wanted
    dtype: torch.dtype = getattr(torch, stored)
    if dtype not in DTYPES.values():
        return torch.float32
    slow = widens(torch.empty(0, dtype=dtype, device=accelerator.device))
    return torch.float32 if slow else dtype


def keeps_halves(dtype: torch.dtype, accelerator: Accelerator) -> bool:
    """Tell whether float16 is the format of weights alone: what meets them is float32.

    So it is on hosts that lack products of float16.
    """
    if dtype is not torch.float16 or not widens(
        torch.empty(0, dtype=dtype, device=accelerator.device)
    ):
        return False
    return has_halves()


def dtype_for(folder: Path | str, asked: str | None, accelerator: Accelerator) -> torch.dtype:
    """Return the dtype in which a folder's model is computed: as asked, or the weights' own."""
    checkpoint = open_checkpoint(folder, quantised=True)
    return _dtype(asked, checkpoint.dtype(next(iter(checkpoint.names()))).name, accelerator)


def _tokenizer(asked: str | None, folder: Path) -> Tokenizer | None:
    if asked is not None:
        return open_tokenizer(asked)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if any((folder / name).is_file() for name in files):
        return open_tokenizer(str(folder))
    return None


def end_tokens(folder: Path, spec: ModelSpec) -> tuple[int, ...]:
    """Return the tokens that end an answer, as the folder says."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            end_token = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from None
        if end_token is not None:
            tokens = end_token if isinstance(end_token, list) else [end_token]
            return tuple(int(token) for token in tokens if 0 <= int(token) < spec.vocab)
    return ()


def window_of(spec: ModelSpec) -> tuple[int | None, Any]:
    """Return the window that holds for all layers: pages behind it are nobody's."""
    kinds = {(block.attention.window, block.attention.window_kind) for block in spec.blocks}
    if any(window is None for window, _ in kinds) or len({kind for _, kind in kinds}) > 1:
        return None, "sliding"
    window, kind = max((window or 0, kind) for window, kind in kinds)
    if kind == "chunked" and len(kinds) > 1:
        return None, "sliding"
    return window, kind


def settings_for(
    spec: ModelSpec,
    sizes: Sizes,
    accelerator: Accelerator,
    dtype: torch.dtype,
    model: Model | None = None,
    beside: int = 0,
) -> Settings:
    """Return the scheduler's settings: as many pages as asked for, or as memory has room for.

    `beside`: bytes that adapters take beside the model's weights.
    """
    longest = sizes.max_length or spec.max_length
    if spec.embedding.positions and longest > spec.embedding.positions:
        raise InputError(
            f"{spec.name}: a context of {longest} tokens; it has learned positions for "
            f"{spec.embedding.positions}"
        )
    window, kind = window_of(spec)
    stretched = stretch(spec)
    weights, token = beside, token_bytes(spec, dtype, codes=sizes.codes)
    if model is not None:
        weights, own = beside + weight_bytes(model), model.by_number()
        units = range(min(own), max(own) + 1)
        token = token_bytes(spec, dtype, units, model.parallel.tensor.size, sizes.codes)
    pages = sizes.pages
    if pages is None:
        pages = _pages_that_fit(sizes, accelerator, token, longest, weights)
    return Settings(
        slots=sizes.slots,
        pages=pages,
        page_size=sizes.page_size,
        max_length=longest,
        most_tokens=sizes.most_tokens,
        window=window,
        window_kind=kind,
        stretch=None if stretched is None else stretched[0],
        stretch_kind="switch" if stretched is None else stretched[1],  # type: ignore[arg-type]
        prefix=sizes.prefix,
        ahead=sizes.ahead or (1 if accelerator.graph_pool() is None else 2),
        target_s=sizes.target_s,
        host_pages=_host_pages(sizes, token),
        keep_on_host=sizes.keep_on_host,
    )


def _host_pages(sizes: Sizes, token: int) -> int:
    """Return how many pages the host has room for."""
    if sizes.host_pages is not None:
        return sizes.host_pages
    return sizes.host_bytes // (max(1, token) * sizes.page_size)  # a stage may hold no block


def _pages_that_fit(
    sizes: Sizes, accelerator: Accelerator, token: int, longest: int, weights: int
) -> int:
    """Return how many pages there is room for, at most what all slots can use."""
    page_bytes = max(1, token) * sizes.page_size  # a stage may hold no block
    if sizes.memory_bytes is not None:
        total, left = sizes.memory_bytes, sizes.memory_bytes - weights
    else:
        left = int(accelerator.free_bytes() * PAGES_SHARE)
        total = weights + left
    needed = -(-longest // sizes.page_size)
    room = left // page_bytes
    if room < needed + 1:
        raise InputError(
            f"weights take {bytes_text(weights)} of {bytes_text(total)}; one request of "
            f"{longest:,} tokens needs {bytes_text((needed + 1) * page_bytes)} of pages and "
            f"{bytes_text(max(0, left))} is left: give more memory, or a shorter max_length"
        )
    return int(min(room, sizes.slots * needed + 1))

"""Streams a checkpoint from Hugging Face's form into ours, and back, byte for byte.

What is written is decided first, as a list of files; each file is then a stream of blocks from the
source. Peak memory is a block, or the largest tensor that Hugging Face stores fused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tutti.errors import InputError
from tutti.files import fingerprint
from tutti.huggingface.checkpoint import Checkpoint
from tutti.huggingface.dtypes import Dtype
from tutti.huggingface.folders import open_checkpoint
from tutti.huggingface.hf_folder import INDEX, HfFolder
from tutti.huggingface.layout import Layout, plan_layout, unit_layout
from tutti.huggingface.manifest import (
    MANIFEST,
    File,
    HuggingFaceFile,
    Manifest,
    Part,
    Tensor,
    manifest_text,
)
from tutti.huggingface.maps import key_table
from tutti.huggingface.outputs import (
    Formats,
    OutputFile,
    carried_file,
    index_text,
    stored_files,
    tutti_files,
)
from tutti.huggingface.tutti_folder import TuttiFolder
from tutti.huggingface.workspace import Workspace, require_free
from tutti.plan.files import plan_to_document
from tutti.plan.plan import Plan

CARRIED = "carried.safetensors"
_COPY_BYTES = 1 << 22
Form = Literal["tutti", "hf"]
Progress = Callable[[str, int, int], None]  # doing, bytes done, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did."""

    target: Path
    form: Form
    model_type: str
    num_tensors: int
    num_bytes: int
    files: Mapping[str, File] = field(repr=False)
    kept: int  # files that an earlier, stopped run had finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Everything that is to be written."""

    files: tuple[OutputFile, ...]
    copied: tuple[str, ...]  # from the source's folder, as they are
    texts: Mapping[str, str]  # written anew

    def names(self) -> set[str]:
        """Return the names of all files."""
        return {file.name for file in self.files} | set(self.copied) | set(self.texts)


def convert(
    source: Path,
    target: Path,
    *,
    form: Form | None = None,
    plan: Plan | None = None,
    dtype: Dtype | None = None,
    resume: bool = False,
    progress: Progress = lambda _doing, _done, _whole: None,
) -> Conversion:
    """Convert a folder; without `form` theirs becomes ours, and ours theirs."""
    _check_apart(source, target)
    require_free(target, resume=resume)
    checkpoint = open_checkpoint(source)
    form = form or ("hf" if isinstance(checkpoint, TuttiFolder) else "tutti")
    if plan is not None and form == "hf":
        raise InputError("--plan lays out a tutti folder; a Hugging Face folder follows no plan")
    job = {
        "source": checkpoint.identity(),
        "form": form,
        "dtype": dtype.name if dtype else None,
        "plan": fingerprint(plan_to_document(plan)) if plan else None,
    }
    work, manifest = _prepare(checkpoint, form, plan, dtype)
    _check_source(checkpoint, progress)
    with Workspace(target, job, resume=resume) as space:
        return carry_out(checkpoint, form, work, manifest, space, progress)


def export(
    source: Checkpoint,
    target: Path,
    *,
    dtype: Dtype | None = None,
    texts: Mapping[str, str] | None = None,
    progress: Progress = lambda _doing, _done, _whole: None,
) -> Conversion:
    """Write weights, wherever they come from, as a Hugging Face folder; `texts` are files anew."""
    _check_apart(source.folder, target)
    require_free(target, resume=False)
    work, manifest = _prepare(source, "hf", None, dtype)
    if texts:
        copied = tuple(name for name in work.copied if name not in texts)
        anew = {**work.texts, **texts}
        if INDEX in copied:  # it says how large the weights are
            copied = tuple(name for name in copied if name != INDEX)
            anew[INDEX] = index_text(work.files)
        work = replace(work, copied=copied, texts=anew)
    with Workspace(target, {"source": source.identity()}, resume=False) as space:
        return carry_out(source, "hf", work, manifest, space, progress)


def _check_apart(source: Path, target: Path) -> None:
    inside = source.resolve(), target.resolve()
    if inside[0] == inside[1] or inside[0] in inside[1].parents:
        raise InputError(f"{target}: is in the folder that is read; choose another name")


def _check_source(source: Checkpoint, progress: Progress) -> None:
    if isinstance(source, HfFolder):
        source.check_tied()
    if isinstance(source, TuttiFolder):
        whole = sum(file.num_bytes for file in source.manifest.files.values())
        done = 0

        def seen(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress("checking the source", done, whole)

        source.verify(seen)


def _prepare(
    source: Checkpoint, form: Form, plan: Plan | None, dtype: Dtype | None
) -> tuple[Work, Manifest | None]:
    formats = Formats(source, dtype)
    texts: dict[str, str] = {}
    if dtype is not None:
        texts["config.json"] = _config_with(source.folder / "config.json", dtype)
    if form == "tutti":
        names = [name for name in source.names() if source.owner(name) == name]
        widths = {name: formats.of(name).num_bytes for name in names}
        layout = (
            unit_layout(source.spec, widths)
            if plan is None
            else plan_layout(source.spec, plan, widths)
        )
        files = list(tutti_files(layout, formats))
        if source.carried:
            files.append(carried_file(CARRIED, source))
        manifest = _manifest(source, layout, formats)
    else:
        keys = [key for file in source.stored.values() for key in file.tensors]
        files = list(stored_files(source, key_table(source.spec, keys), formats))
        manifest = None
        if len(files) > 1 and (dtype is not None or INDEX not in source.plain_files()):
            texts[INDEX] = index_text(files)
    copied = tuple(name for name in source.plain_files() if name not in texts)
    return Work(files=tuple(files), copied=copied, texts=texts), manifest


def _config_with(path: Path, dtype: Dtype) -> str:
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return json.dumps({**config, key: dtype.name}, indent=2) + "\n"


def _manifest(source: Checkpoint, layout: Layout, formats: Formats) -> Manifest:
    """Return the manifest, still without the checksums of its files."""
    tensors: dict[str, Tensor] = {}
    for file, placed in layout.items():
        for item in placed:
            shape = source.parameter(item.name).shape
            dtype = formats.of(item.name).name
            if not item.part:
                tensors[item.name] = Tensor(dtype=dtype, shape=shape, file=file)
                continue
            part = Part(file=file, start=item.start, stop=item.stop)
            earlier = tensors[item.name].parts if item.name in tensors else ()
            parts = tuple(sorted((*earlier, part), key=lambda part: part.start))
            tensors[item.name] = Tensor(dtype=dtype, shape=shape, dim=item.dim, parts=parts)
    return Manifest(
        model_type=source.spec.model_type,
        model_hash=source.spec.fingerprint,
        parameters=source.spec.num_parameters,
        files={},
        tensors={name: tensors[name] for name in source.names() if name in tensors},
        carried={
            key: Tensor(dtype=dtype.name, shape=source.carried_raw(key).shape, file=CARRIED)
            for key, dtype in source.carried.items()
        },
        huggingface={
            name: HuggingFaceFile(tensors=file.tensors, metadata=file.metadata)
            for name, file in source.stored.items()
        },
    )


def carry_out(
    source: Checkpoint,
    form: Form,
    work: Work,
    manifest: Manifest | None,
    space: Workspace,
    progress: Progress,
) -> Conversion:
    """Write all files of a piece of work and give the folder its name."""
    whole = sum(file.num_bytes for file in work.files)
    done = 0

    def seen(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress("converting", done, whole)

    space.keep_finished(work.names(), seen)
    kept = len(space.done)
    space.require_room(sum(f.num_bytes for f in work.files if f.name not in space.done))
    for file in work.files:
        if file.name not in space.done:
            space.write(file.name, _file_blocks(file, source, seen))
    for name in work.copied:
        if name not in space.done:
            space.write(name, _copied_blocks(source.folder / name))
    for name, text in work.texts.items():
        if name not in space.done:
            space.write(name, [text.encode()])
    files = dict(sorted(space.done.items()))
    if manifest is not None:
        space.write(MANIFEST, [manifest_text(replace(manifest, files=files)).encode()])
    space.finish()
    return Conversion(
        target=space.target,
        form=form,
        model_type=source.spec.model_type,
        num_tensors=sum(len(file.tensors) for file in work.files),
        num_bytes=whole,
        files=files,
        kept=kept,
    )


def _file_blocks(
    file: OutputFile, source: Checkpoint, seen: Callable[[int], None]
) -> Iterator[memoryview | bytes]:
    header = file.header()
    seen(len(header))
    yield header
    for tensor in file.tensors:
        for raw, dtype in tensor.content.blocks(source):
            if dtype != tensor.dtype:
                from tutti.huggingface.tensors import cast

                raw = cast(raw, dtype, tensor.dtype)
            if raw.size:
                yield raw.reshape(-1).view(np.uint8).data
            seen(raw.nbytes)
            source.drop()


def _copied_blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while block := stream.read(_COPY_BYTES):
                yield block
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None

"""HF → tutti → HF gives every file back, byte for byte, for every model type."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402

from tests.support.hf_models import saved, tiny_model  # noqa: E402
from tests.support.slow_types import with_slow  # noqa: E402
from tests.support.tiny_configs import TINY, tiny_config  # noqa: E402
from tutti.huggingface import open_checkpoint, outputs  # noqa: E402
from tutti.huggingface.conversion import convert  # noqa: E402
from tutti.huggingface.dtypes import BY_NAME  # noqa: E402
from tutti.huggingface.maps import key_table, mapped_types  # noqa: E402
from tutti.models import catalog_names, load_model  # noqa: E402
from tutti.models.families import model_types  # noqa: E402


def tensors_of(folder: Path) -> dict[str, Any]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                found[key] = opened.get_tensor(key)
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_type_has_a_map() -> None:
    assert set(mapped_types()) == set(model_types())
    assert len(mapped_types()) >= 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", with_slow(TINY))
def test_a_checkpoint_comes_back_byte_for_byte(name: str, dtype: Any, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(name), dtype)
    source = saved(model, tmp_path / "hf")
    convert(source, tmp_path / "tutti")
    convert(tmp_path / "tutti", tmp_path / "back")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert set(after) == set(before)
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert after[key].shape == tensor.shape
        assert torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert files_of(tmp_path / "back") == files_of(source)
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]


@pytest.mark.parametrize("name", ["llama", "mixtral/4", "gpt2"])
def test_sharded_checkpoints_come_back_in_their_shards(name: str, tmp_path: Path) -> None:
    source = saved(tiny_model(tiny_config(name)), tmp_path / "hf", max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    convert(source, tmp_path / "tutti")
    convert(tmp_path / "tutti", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)


@pytest.mark.parametrize("name", with_slow(TINY))
def test_both_folders_read_alike_and_in_slices(name: str, tmp_path: Path) -> None:
    source = saved(tiny_model(tiny_config(name)), tmp_path / "hf")
    convert(source, tmp_path / "tutti")
    theirs, ours = open_checkpoint(source), open_checkpoint(tmp_path / "tutti")
    assert theirs.names() == ours.names()
    for tensor in theirs.names():
        whole = theirs.read(tensor)
        assert theirs.info(tensor) == ours.info(tensor) == ("float32", tuple(whole.shape))
        assert torch.equal(whole, ours.read(tensor))
        for cut in _cuts(tuple(whole.shape)):
            assert torch.equal(whole[cut], theirs.read(tensor, cut)), (tensor, cut)
            assert torch.equal(whole[cut], ours.read(tensor, cut)), (tensor, cut)


def _cuts(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Return halves, which fall on heads, and ranges that fall on nothing."""
    half = tuple(slice(size // 2, size) for size in shape)
    return [half[:1], half, tuple(slice(size // 3, size // 3 + 1) for size in shape)]


def test_logical_tensors_are_what_transformers_computes_with(tmp_path: Path) -> None:
    """The fused layouts mean what we say: queries by themselves give the model's queries."""
    for name in ("gpt_neox", "bloom", "falcon/new", "falcon", "falcon/alibi", "gpt2", "phi3"):
        model = tiny_model(tiny_config(name))
        source = saved(model, tmp_path / name.replace("/", "-"))
        checkpoint = open_checkpoint(source)
        seen = _projected(model, name)
        for part, found in seen.items():
            weight = checkpoint.read(f"1.attention.{part}.weight")
            bias = 0
            if f"1.attention.{part}.bias" in checkpoint.names():
                bias = checkpoint.read(f"1.attention.{part}.bias")
            expected = INPUT @ weight.T + bias
            assert torch.allclose(found.reshape(expected.shape), expected, atol=1e-6), (name, part)


INPUT = torch.linspace(-1, 1, 5 * 64).reshape(5, 64)


def _projected(model: Any, name: str) -> dict[str, Any]:
    """Return query, key and value of block 0 for INPUT, split by the model's own code."""
    block = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))[0]
    with torch.no_grad():
        if name == "gpt_neox":
            fused = block.attention.query_key_value(INPUT).view(5, 8, 3 * 8)
            query, key, value = fused.chunk(3, dim=-1)
        elif name == "phi3":
            fused = block.self_attn.qkv_proj(INPUT)
            query, key, value = fused[:, :64], fused[:, 64:128], fused[:, 128:]
        elif name == "gpt2":
            query, key, value = block.attn.c_attn(INPUT).split(64, dim=-1)
        elif name == "bloom":
            fused = block.self_attention.query_key_value(INPUT)[None]
            query, key, value = (
                x.transpose(1, 2).reshape(5, -1) for x in block.self_attention._reshape(fused)
            )
        else:
            attention = block.self_attention
            query, key, value = attention._split_heads(attention.query_key_value(INPUT)[None])
            if attention.new_decoder_architecture:  # transformers repeats each key-value head
                groups = attention.num_heads // attention.num_kv_heads
                key, value = key[0, :, ::groups], value[0, :, ::groups]
    return {"query": query, "key": key, "value": value}


def test_a_tied_head_that_is_stored_comes_back_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = saved(tiny_model(tiny_config("llama/gqa")), tmp_path / "hf")
    file = source / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    convert(source, tmp_path / "tutti")
    convert(tmp_path / "tutti", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)
    assert (
        "5.logits.weight" not in json.loads((tmp_path / "tutti/tutti.json").read_text())["tensors"]
    )


def test_tensors_nobody_needs_are_carried(tmp_path: Path) -> None:
    """Prediction heads that transformers drops, rotary frequencies, causal masks."""
    from safetensors.torch import load_file, save_file

    extras = {
        "deepseek_v3/small": {"model.layers.4.eh_proj.weight": torch.randn(64, 128)},
        "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4)},
        "gpt2": {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        },
    }
    for name, extra in extras.items():
        folder = tmp_path / name.replace("/", "-")
        source = saved(tiny_model(tiny_config(name)), folder / "hf")
        config = json.loads((source / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        (source / "config.json").write_text(json.dumps(config))
        tensors = load_file(source / "model.safetensors") | extra
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        convert(source, folder / "tutti")
        convert(folder / "tutti", folder / "back")
        assert files_of(folder / "back") == files_of(source)


def test_keys_without_the_base_models_name(tmp_path: Path) -> None:
    """GPT-2's published files say "h.0…", not "transformer.h.0…"."""
    from safetensors.torch import load_file, save_file

    source = saved(tiny_model(tiny_config("gpt2")), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    save_file(bare, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "tutti")
    convert(tmp_path / "tutti", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)


@pytest.mark.parametrize("name", with_slow(TINY))
def test_weights_that_never_were_in_files_get_new_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after training from scratch: no list of keys, only the weight map and the tensors."""
    source = saved(tiny_model(tiny_config(name)), tmp_path / "hf")
    convert(source, tmp_path / "ours")
    manifest = json.loads((tmp_path / "ours" / "tutti.json").read_text())
    del manifest["huggingface"]
    (tmp_path / "ours" / "tutti.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(outputs, "MOST_STORED_BYTES", 200_000)
    convert(tmp_path / "ours", tmp_path / "back")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert set(after) == set(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]


def test_rounding_leaves_buffers_alone(tmp_path: Path) -> None:
    """A router's correction is kept in fp32 on purpose."""
    model = tiny_model(tiny_config("deepseek_v3/small"))
    source = saved(model, tmp_path / "hf", max_shard_size="300KB")
    convert(source, tmp_path / "bf16", form="hf", dtype=BY_NAME["bfloat16"])
    before, after = tensors_of(source), tensors_of(tmp_path / "bf16")
    assert set(after) == set(before)
    for key, tensor in after.items():
        correction = key.endswith("e_score_correction_bias")
        wanted = before[key] if correction else before[key].to(torch.bfloat16)
        assert torch.equal(tensor, wanted)
    index = json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())
    sizes = sum(tensor.numel() * tensor.element_size() for tensor in after.values())
    assert index["metadata"]["total_size"] == sizes
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("name", catalog_names())
def test_full_size_models_have_all_their_tensors_mapped(name: str) -> None:
    spec = load_model(name)
    table = key_table(spec)
    counted = sum(
        math.prod(parts[0][1].shape)
        for parts in table.stored.values()
        if any(table.tensors[tensor].parameter.counted for tensor, _ in parts)
    )
    assert counted == spec.num_parameters

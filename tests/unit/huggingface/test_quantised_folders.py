"""Quantised folders are read as they are, and what is wrong with one is a line with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.support.packing import FORMATS, pack_folder, random_folder  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.accelerator.quantised import QuantisedWeight  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface import open_checkpoint  # noqa: E402
from tutti.nn import ALONE, Model, load  # noqa: E402
from tutti.nn.parallel.groups import ParallelContext  # noqa: E402
from tutti.nn.quantised import load_quantised, weight_bytes  # noqa: E402
from tutti.nn.storage import Holder  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 67, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "phi3": {"model_type": "phi3", **SIZES, "pad_token_id": 0},  # query, key and value in one
    "falcon": {  # and by heads
        "model_type": "falcon", **SIZES, "new_decoder_architecture": True, "num_kv_heads": 2,
        "ffn_hidden_size": 96,
    },
    "experts": {
        "model_type": "qwen3_moe", **SIZES, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "head_dim": 16,
    },
}  # fmt: skip
HOST = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("plain")
    return {name: random_folder(root / name, config) for name, config in CONFIGS.items()}


def opened(folder: Path, kind: str | None = None, parallel: ParallelContext = ALONE) -> Model:
    checkpoint = open_checkpoint(folder, quantised=True)
    model = Model(checkpoint.spec, Operators("cpu"), device="meta", parallel=parallel)
    load_quantised(model, checkpoint, HOST, kind)
    return model


def loaded(folder: Path) -> Model:
    checkpoint = open_checkpoint(folder)
    model = Model(checkpoint.spec, Operators("cpu"))
    load(model, checkpoint)
    return model.requires_grad_(False)


def weights(model: Model) -> dict[str, Any]:
    return {
        f"{name}.{attribute}": getattr(module, attribute)
        for name, module in model.named_modules()
        if isinstance(module, Holder)
        for attribute in module.pieces
    }


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_every_format_stands_for_its_numbers(
    plain: dict[str, Path], tmp_path: Path, kind: str, form: str
) -> None:
    twin = pack_folder(plain[kind], tmp_path / "q", FORMATS[form])
    ours, expected = weights(opened(tmp_path / "q")), weights(loaded(twin))
    assert ours.keys() == expected.keys()
    held = [name for name, weight in ours.items() if isinstance(weight, QuantisedWeight)]
    assert len(held) == 8, "four products in each of two blocks"
    for name, weight in ours.items():
        if name in held:
            weight = weight.dequantised(torch.float32)
        torch.testing.assert_close(weight, expected[name].data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["falcon", "experts"])
@pytest.mark.parametrize("form", ["fp8/block", "int8", "gptq/sorted", "compressed/int4 zeros"])
def test_heads_and_experts(plain: dict[str, Path], tmp_path: Path, kind: str, form: str) -> None:
    twin = pack_folder(plain[kind], tmp_path / "q", FORMATS[form])
    ours, expected = weights(opened(tmp_path / "q")), weights(loaded(twin))
    for name, weight in ours.items():
        if isinstance(weight, QuantisedWeight):
            weight = weight.dequantised(torch.float32)
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7, check_dtype=False)
    # where each expert sorts its columns otherwise, they become numbers
    wide = [n for n, w in ours.items() if "up_weight" in n and not isinstance(w, QuantisedWeight)]
    assert bool(wide) == (kind == "experts" and form == "gptq/sorted")


def test_a_folder_takes_the_memory_of_its_bits(plain: dict[str, Path], tmp_path: Path) -> None:
    pack_folder(plain["llama"], tmp_path / "q", FORMATS["compressed/int4"])
    narrow, wide = opened(tmp_path / "q"), loaded(plain["llama"])
    blocks = sum(p.numel() for n, p in wide.named_parameters() if "norm" not in n and p.dim() == 2)
    blocks -= 2 * 67 * 64  # embedding and head stay wide
    scales = blocks // 32
    assert weight_bytes(wide) - weight_bytes(narrow) == blocks * 4 - blocks // 2 - scales * 4


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_plain_weights_are_rounded_while_loading(
    plain: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    for name in ("llama", "experts"):
        ours, wide = weights(opened(plain[name], kind)), weights(loaded(plain[name]))
        most = {"fp8": 0.04, "int8": 0.01, "int4": 0.12}[kind]
        held = 0
        for key, weight in ours.items():
            if isinstance(weight, QuantisedWeight):
                held += 1
                assert weight.kind == kind
                apart = (weight.dequantised(torch.float32) - wide[key]).norm() / wide[key].norm()
                assert 0 < float(apart) < most, key
            else:
                assert torch.equal(weight, wide[key]), key
        assert held == 8
    router = [key for key in ours if "router" in key]
    assert router
    assert not any(isinstance(ours[key], QuantisedWeight) for key in router)


def test_slices_of_ranks(plain: dict[str, Path], tmp_path: Path) -> None:
    pack_folder(plain["llama"], tmp_path / "q", FORMATS["compressed/int4 zeros"])
    weight = opened(tmp_path / "q").blocks[0].mlp.down.weight
    whole = weight.dequantised(torch.float32)
    part = weight.part(slice(32, 64), slice(32, 96))
    assert torch.equal(part.dequantised(torch.float32), whole[32:64, 32:96])
    with pytest.raises(InputError, match="blocks of 32 columns cannot be cut at columns 48 to 96"):
        weight.part(slice(0, 64), slice(48, 96))


def test_the_engine_serves_it(plain: dict[str, Path], tmp_path: Path) -> None:
    twin = pack_folder(plain["llama"], tmp_path / "q", FORMATS["gptq/sorted"])
    own = SamplingParameters(max_tokens=12, ignore_end=True)
    prompts = [[5, 9, 2, 40, 11], [7, 8], [3] * 9]
    narrow = Engine.from_pretrained(tmp_path / "q").generate(prompts, own)
    wide = Engine.from_pretrained(twin).generate(prompts, own)
    assert [d.tokens for d in narrow] == [d.tokens for d in wide]
    same = Engine.from_pretrained(tmp_path / "q", invariant=True).generate(prompts, own)
    assert [d.tokens for d in same] == [d.tokens for d in wide]
    rounded = Engine.from_pretrained(plain["llama"], weights="int8").generate(prompts, own)
    assert all(len(done.tokens) == 12 for done in rounded)


# --- what is wrong ---------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def say(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {**config["quantization_config"], **values}
    path.write_text(json.dumps(config))


Damage = Callable[[Path], None]
BAD: dict[str, tuple[str, Damage, str]] = {
    "unknown": (
        "awq", lambda f: say(f, quant_method="nf4x"),
        r"config.json: 'quantization_config': 'quant_method' is 'nf4x'; ",
    ),
    "misspelled": ("awq", lambda f: say(f, quant_method="gtpq"), "did you mean 'gptq'"),
    "another layout": (
        "awq", lambda f: say(f, version="gemv"), "'version' is 'gemv'; tutti reads AWQ's 'gemm'",
    ),
    "bits": ("gptq", lambda f: say(f, bits=5), "'bits' is 5; tutti reads 2, 3, 4 and 8"),
    "group": ("gptq", lambda f: say(f, group_size=0), "'group_size' is 0"),
    "wrong group": (
        "gptq", lambda f: say(f, group_size=16), r"scales' \[2, .*\]: expected \[4, .*groups of 16",
    ),
    "nf4": (
        "bitsandbytes", lambda f: say(f, load_in_8bit=False), "bitsandbytes with 4 bits",
    ),
    "format": (
        "compressed/int4", lambda f: say(f, format="nvfp4-pack-quantized"),
        "group 'group_0': 'format' is 'nvfp4-pack-quantized'",
    ),
    "sparse": (
        "compressed/int4", lambda f: say(f, sparsity_config={"format": "sparse-24-bitmask"}),
        "weights are sparse",
    ),
    "no groups": ("compressed/int4", lambda f: say(f, config_groups={}), "'config_groups' is "),
    "scale missing": (
        "fp8/block", lambda f: edit(f, lambda t: t.pop(f"{UP}.weight_scale_inv")),
        rf"tensor '{UP}.weight' is F8_E4M3, and no '{UP}.weight_scale' says",
    ),
    "zeros missing": (
        "awq", lambda f: edit(f, lambda t: t.pop(f"{UP}.qzeros")),
        rf"tensor '{UP}.qzeros' is missing beside '{UP}.qweight'",
    ),
    "scale of another shape": (
        "fp8/block",
        lambda f: edit(f, lambda t: t.update({f"{UP}.weight_scale_inv": torch.ones(2, 2)})),
        rf"tensor '{UP}.weight_scale_inv' \[2, 2\] has no scales for a weight \[96, 64\] in blocks",
    ),
    "zeros of another shape": (
        "gptq", lambda f: edit(f, lambda t: t.update({f"{UP}.qzeros": torch.ones(1, 3).int()})),
        rf"tensor '{UP}.qzeros' \[1, 3\]: expected \[2, 12\]",
    ),
    "groups of unequal size": (
        "gptq", lambda f: edit(f, lambda t: t[f"{UP}.g_idx"].zero_()),
        rf"tensor '{UP}.g_idx' \[64\]: expected 32 columns in each of 2 groups",
    ),
    "packed otherwise": (
        "compressed/int4",
        lambda f: edit(f, lambda t: t.update({f"{UP}.weight_shape": torch.tensor([96, 63])})),
        rf"tensor '{UP}.weight_packed' \[96, 8\]: a weight \[96, 63\]|expected \[96, 64\]",
    ),
    "another model's": (
        "int8", lambda f: edit(f, lambda t: t.update({f"{UP}.weight": torch.ones(95, 64).char()})),
        rf"tensor '{UP}.weight': expected \[96, 64\], found \[95, 64\]",
    ),
    "nothing quantised": (
        "int8",
        lambda f: edit(
            f, lambda t: [t.update({k: v.float()}) for k, v in list(t.items())]
            and [t.pop(k) for k in list(t) if k.endswith("weight_scale")]
        ),
        "'quantization_config' says int8, and no tensor is quantised",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_one_line(plain: dict[str, Path], tmp_path: Path, what: str) -> None:
    form, damage, expected = BAD[what]
    folder = tmp_path / "q"
    pack_folder(plain["llama"], folder, FORMATS[form])
    damage(folder)
    with pytest.raises(InputError, match=expected) as caught:
        Engine.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_conversion_and_wishes_beside_quantised_weights(
    plain: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "q"
    pack_folder(plain["llama"], folder, FORMATS["awq"])
    with pytest.raises(InputError, match="the weights are quantised; tutti serves them"):
        open_checkpoint(folder)
    with pytest.raises(InputError, match=r"quantised already \(awq\); leave 'weights' out"):
        Engine.from_pretrained(folder, weights="int8")
    with pytest.raises(InputError, match="weights is 'int9'; did you mean 'int8'"):
        Engine.from_pretrained(plain["llama"], weights="int9")
    with pytest.raises(InputError, match=r"up_proj\.weight' is quantised; it has no plain numbers"):
        open_checkpoint(folder, quantised=True).read("1.mlp.up.weight")

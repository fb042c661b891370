"""Many adapters on one model: each request's tokens are those of the merged weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.support.engines import engine_with_graphs  # noqa: E402
from tests.support.packing import FORMATS, pack_folder, random_folder  # noqa: E402
from tests.support.peft_folders import ALL, write_adapter  # noqa: E402
from tutti.accelerator.conformance import check  # noqa: E402
from tutti.accelerator.devices.cpu import CpuAccelerator  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface import open_checkpoint  # noqa: E402
from tutti.huggingface.peft.adapter import open_adapter  # noqa: E402
from tutti.nn import Batch, Model, load  # noqa: E402
from tutti.nn.adapters import Slots  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 67, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
PROMPT = [5, 9, 2, 40, 11, 3, 8, 8, 1]
OWN = SamplingParameters(max_tokens=10, ignore_end=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tmp_path_factory.mktemp("adapters") / "plain", LLAMA)


@pytest.fixture(scope="module")
def adapters(plain: Path) -> dict[str, Path]:
    """Merged folders by the name of the adapter, which lies beside the plain folder."""
    root = plain.parent
    return {
        "few": write_adapter(plain, root / "few", seed=1),
        "all": write_adapter(plain, root / "all", seed=2, modules=ALL, rank=7, use_rslora=True),
        "pattern": write_adapter(
            plain, root / "pattern", seed=3, modules=ALL, alpha_pattern={"mlp.up_proj": 3.0}
        ),
    }


def said(folder: Path, prompts: Sequence[Sequence[int]], **options: Any) -> list[Any]:
    done = Engine.from_pretrained(folder, **options).generate(list(prompts), OWN)
    return [one.tokens for one in done]


def logits(model: Model, tokens: Sequence[int]) -> Any:
    with torch.no_grad():
        return model.logits(Batch.of(model.spec, torch.tensor(list(tokens)), [len(tokens)]))


def model_of(folder: Path, operators: Operators | None = None) -> Model:
    checkpoint = open_checkpoint(folder)
    model = Model(checkpoint.spec, operators or Operators("cpu"))
    load(model, checkpoint)
    return model.eval().requires_grad_(False)


def test_requests_with_several_adapters_share_a_batch(
    plain: Path, adapters: dict[str, Path]
) -> None:
    engine = Engine.from_pretrained(
        plain, adapters={name: plain.parent / name for name in adapters}, page_size=4
    )
    names = ["", *adapters, "few", ""]
    prompts = [PROMPT, PROMPT, PROMPT, PROMPT[:5], [7, 7, 2], [7, 7, 2]]
    done = engine.generate(prompts, [replace(OWN, adapter=name) for name in names])
    for name, prompt, own in zip(names, prompts, done, strict=True):
        assert own.tokens == said(adapters.get(name, plain), [prompt])[0], name
    assert len({own.tokens for own in done[:3]}) == 3, "they are meant to differ"


@pytest.mark.parametrize("name", ["few", "all", "pattern"])
def test_they_equal_the_merged_weights(plain: Path, adapters: dict[str, Path], name: str) -> None:
    model = model_of(plain)
    before = logits(model, PROMPT)
    slots = Slots(model, slots=3, rank=8)
    slots.put(1, open_adapter(plain.parent / name, model.spec).factors)
    assert torch.equal(logits(model, PROMPT), before)
    slots.rows_t = torch.ones(len(PROMPT), dtype=torch.int64)
    merged = logits(model_of(adapters[name]), PROMPT)
    assert float((logits(model, PROMPT) - merged).abs().max()) <= 1e-5
    assert float((merged - before).abs().max()) > 0.01
    slots.clear(1)
    assert torch.equal(logits(model, PROMPT), before)


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one product in the file": (
        {"model_type": "phi3", **SIZES, "pad_token_id": 0}, {"modules": ("qkv_proj", "down_proj")},
    ),
    "stored transposed": (
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 67},
        {"modules": ("c_attn", "c_fc"), "transposed": True, "fan_in_fan_out": True},
    ),
    "by heads": (
        {"model_type": "falcon", **SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},
        {"modules": ("query_key_value", "dense")},
    ),
    "latent": (
        {
            "model_type": "deepseek_v3", **SIZES, "num_key_value_heads": 4, "q_lora_rank": 24,
            "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
            "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        },
        {"modules": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_other_layouts(tmp_path: Path, kind: str) -> None:
    config, how = MODELS[kind]
    folder = random_folder(tmp_path / "plain", config)
    merged = write_adapter(folder, tmp_path / "a", **how)
    engine = Engine.from_pretrained(folder, adapters={"a": tmp_path / "a"})
    (done,) = engine.generate([PROMPT], replace(OWN, adapter="a"))
    assert done.tokens == said(merged, [PROMPT])[0]
    assert done.tokens != said(folder, [PROMPT])[0]


def test_beside_quantised_weights_and_without_change_by_the_batch(
    plain: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    twin = pack_folder(plain, tmp_path / "q", FORMATS["awq"])
    merged = write_adapter(twin, tmp_path / "a", modules=ALL)
    engine = Engine.from_pretrained(tmp_path / "q", adapters={"a": tmp_path / "a"})
    (done,) = engine.generate([PROMPT], replace(OWN, adapter="a"))
    assert done.tokens == said(merged, [PROMPT])[0]
    same = Engine.from_pretrained(plain, adapters={"few": plain.parent / "few"}, invariant=True)
    both = same.generate([PROMPT, [7, 2]], [replace(OWN, adapter="few", logprobs=0), OWN])
    alone = same.generate([PROMPT], replace(OWN, adapter="few", logprobs=0, salt="x"))
    assert both[0].answers[0].logprobs == alone[0].answers[0].logprobs


# --- added and dropped while running ---------------------------------------------------------


def test_an_adapter_that_is_dropped_serves_who_has_it(
    plain: Path, adapters: dict[str, Path]
) -> None:
    engine = Engine.from_pretrained(plain, adapter_slots=1, adapter_rank=8, page_size=4)
    engine.add_adapter("a", plain.parent / "few")
    number = engine.add(PROMPT, replace(OWN, adapter="a"))
    engine.step()
    engine.drop_adapter("a")
    with pytest.raises(InputError, match="no adapter 'a'; the engine has none"):
        engine.add(PROMPT, replace(OWN, adapter="a"))
    with pytest.raises(InputError, match="all 1 slots are taken"):
        engine.add_adapter("b", plain.parent / "all")
    while not engine.is_idle:
        engine.step()
    done = engine.take(number)
    assert done is not None
    assert done.tokens == said(adapters["few"], [PROMPT])[0]
    engine.add_adapter("a", plain.parent / "all")  # another one under the old name
    (again,) = engine.generate([PROMPT], replace(OWN, adapter="a"))
    assert again.cached_tokens == 0, "what the old one computed is not its own"
    assert again.tokens == said(adapters["all"], [PROMPT])[0]
    (third,) = engine.generate([PROMPT], replace(OWN, adapter="a"))
    assert third.cached_tokens == 8
    assert third.tokens == again.tokens


def test_who_is_cancelled_lets_go(plain: Path, adapters: dict[str, Path]) -> None:
    engine = Engine.from_pretrained(plain, adapter_slots=1)
    engine.add_adapter("a", plain.parent / "few")
    number = engine.add(PROMPT, replace(OWN, adapter="a", n=2))
    engine.drop_adapter("a")
    engine.cancel(number)
    engine.add_adapter("b", plain.parent / "few")
    assert engine.worker.adapters.names == ("b",)


def test_memory_of_adapters_is_taken_from_the_pages(plain: Path, adapters: dict[str, Path]) -> None:
    limit: dict[str, Any] = {"memory_bytes": 2 << 20, "max_length": 64}
    without = Engine.from_pretrained(plain, **limit)
    engine = Engine.from_pretrained(plain, adapters={"all": plain.parent / "all"}, **limit)
    taken = engine.worker.adapters.num_bytes
    # 8 slots, rank 16: (in + out) of each product, that of several layers as often as there are
    widths = 3 * (64 + 128) + (64 + 64) + 2 * (64 + 192) + (96 + 64)
    assert taken == 2 * 8 * 16 * widths * 4
    pages = [own.worker.settings.pages for own in (without, engine)]
    assert (pages[0] - pages[1]) * 16 * 2 * 2 * 32 * 4 == pytest.approx(taken, rel=0.05)


# --- what is wrong ---------------------------------------------------------------------------


def say(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "holds no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safe"),
    "another kind": (
        lambda f: say(f, peft_type="LOHA"), "'peft_type' is 'LOHA'; tutti serves LORA",
    ),
    "dora": (lambda f: say(f, use_dora=True), "'use_dora' is true; tutti serves plain LoRA"),
    "alpha": (lambda f: say(f, lora_alpha="8"), "'lora_alpha' is '8'; expected a number"),
    "more layers": (
        lambda f: edit(f, lambda t: t.update({A.replace("layers.0", "layers.9"): t.pop(A)})),
        "'model.layers.0.self_attn.q_proj.lora_A.weight' is missing",
    ),
    "another model": (
        lambda f: edit(
            f, lambda t: [t.update({k.replace("layers.1", "layers.9"): t.pop(k)}) for k in list(t)]
        ),
        "adapts 'model.layers.9.*plain does not have; the adapter is for another model "
        r"\('somewhere/a-model'\)",
    ),
    "another width": (
        lambda f: edit(f, lambda t: t.update({A: torch.ones(4, 60)})),
        r"A \[4, 60\] and B \[64, 4\]; a weight \[64, 64\] of plain takes \[rank, 64\]",
    ),
    "embeddings": (
        lambda f: edit(f, lambda t: t.update({"base_model.model.x.lora_embedding_A": t.pop(A)})),
        "is no A or B of a linear layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_one_line(plain: Path, tmp_path: Path, what: str) -> None:
    damage, expected = BAD[what]
    write_adapter(plain, tmp_path / "a")
    damage(tmp_path / "a")
    engine = Engine.from_pretrained(plain)
    with pytest.raises(InputError, match=expected) as caught:
        engine.add_adapter("a", tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert engine.worker.adapters.names == ()


def test_ranks_heads_and_names(plain: Path, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(plain)
    write_adapter(plain, tmp_path / "wide", rank=17)
    with pytest.raises(
        InputError, match="'wide' has the rank 17; there is room for ranks up to 16"
    ):
        engine.add_adapter("wide", tmp_path / "wide")
    Engine.from_pretrained(plain, adapters={"wide": tmp_path / "wide"})  # room is made for it
    write_adapter(plain, tmp_path / "head", modules=("lm_head",))
    with pytest.raises(
        InputError, match=r"adds to '3\.logits\.weight'; tutti adapts linear layers"
    ):
        engine.add_adapter("head", tmp_path / "head")
    write_adapter(plain, tmp_path / "a")
    engine.add_adapter("first", tmp_path / "a")
    with pytest.raises(InputError, match="'first' is there already; drop it first"):
        engine.add_adapter("first", tmp_path / "a")
    with pytest.raises(InputError, match="no adapter 'frist'; did you mean 'first'"):
        engine.generate([PROMPT], replace(OWN, adapter="frist"))


def test_the_kit_passes() -> None:
    assert check(CpuAccelerator(), ["adapted_linear"]).passed


def test_steps_with_adapters_are_captured(plain: Path, adapters: dict[str, Path]) -> None:
    """Graphs read each token's slot where the step wrote it; one that is outgrown is dropped."""
    model = model_of(plain, Operators("cpu", forced={"adapted_linear": "reference"}))
    engine = engine_with_graphs(model, slots=4, page_size=4, max_length=48)
    graphs = engine.worker._graphs
    names = ["", "few", "few", "", "few", ""]
    prompts = [PROMPT, PROMPT, PROMPT[:5], PROMPT[:4], [7, 7, 2], [7, 7, 2]]

    def run(names: list[str]) -> None:
        before = engine.counters.steps
        done = engine.generate(prompts, [replace(OWN, adapter=name) for name in names])
        for name, prompt, own in zip(names, prompts, done, strict=True):
            assert own.tokens == said(adapters.get(name, plain), [prompt])[0], name
        assert engine.counters.steps > before

    run([""] * 6)
    assert {key.rooms for key in graphs._graphs} == {0}
    engine.add_adapter("few", plain.parent / "few")
    few = engine.worker.adapters.rooms
    run(names)
    assert {key.rooms for key in graphs._graphs} == {0, few}
    engine.add_adapter("all", plain.parent / "all")  # adds to more layers
    rooms = engine.worker.adapters.rooms
    assert rooms > few
    run(["all", *names[1:]])
    assert {key.rooms for key in graphs._graphs} == {0, rooms}
    # a slot that changes hands is read anew by the graphs that are there
    engine.generate([PROMPT], [replace(OWN, adapter="few")])
    engine.drop_adapter("few")
    engine.add_adapter("few", plain.parent / "pattern")
    count = graphs.count
    done = engine.generate([PROMPT], [replace(OWN, adapter="few")])
    assert done[0].tokens == said(adapters["pattern"], [PROMPT])[0]
    assert graphs.count == count

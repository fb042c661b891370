"""What of a model is trained is what transformers trains: padding rows, balancing losses."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.hf_models import tiny_model  # noqa: E402
from tests.support.parity import hf_model, our_model  # noqa: E402
from tests.support.tiny_bases import EXPERT_TYPES  # noqa: E402
from tests.support.tiny_configs import TINY, tiny_config  # noqa: E402
from tutti.models import read_config  # noqa: E402
from tutti.nn import Batch  # noqa: E402

TYPES = sorted({str(values["model_type"]) for values in TINY.values()})
BALANCED = ("ernie4_5_moe", "gpt_oss", "mixtral/4", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize("kind", TYPES)
def test_padding_rows(kind: str) -> None:
    """Of a token that the config names, and of the type's default, in a vocabulary that has it."""
    name = next(name for name, values in TINY.items() if values["model_type"] == kind)
    default = getattr(transformers.AutoConfig.for_model(kind), "pad_token_id", None)
    for given in ({"pad_token_id": 3}, {"pad_token_id": -1}, {"pad_token_id": None}, {}):
        values: dict[str, Any] = {**tiny_config(name), **given}
        if not given:
            values["vocab_size"] = max(160, (default or 0) + 1)
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(**values)
            theirs = transformers.AutoModelForCausalLM.from_config(config)
        wanted = theirs.get_input_embeddings().padding_idx
        assert read_config(values, name).embedding.padding == wanted, given


def test_a_padding_token_outside_the_vocabulary_is_none() -> None:
    values = {**tiny_config("phi3"), "pad_token_id": 32000}
    assert read_config(values, "phi3").embedding.padding is None


@pytest.mark.parametrize("name", [*EXPERT_TYPES, "mixtral/4"])
@pytest.mark.parametrize("wanted", [None, True])
def test_a_balancing_loss_is_added_where_transformers_adds_one(
    name: str, wanted: bool | None
) -> None:
    values = tiny_config(name) | ({} if wanted is None else {"output_router_logits": wanted})
    adds = "aux_loss" in inspect.getsource(type(tiny_model(values)).forward)
    assert adds == (name in BALANCED)
    routers = [b.moe.router for b in read_config(values, name).blocks if b.moe]
    assert all(router.balance_loss_on == bool(adds and wanted) for router in routers)


@pytest.mark.parametrize("name", BALANCED)
def test_a_balancing_loss_is_as_strong_as_transformers(name: str) -> None:
    """One layer of experts and one sequence: then both definitions are the same."""
    values: dict[str, Any] = {
        **tiny_config(name), "num_hidden_layers": 2, "output_router_logits": True,
        "router_aux_loss_coef": 0.25, "decoder_sparse_step": 2, "moe_layer_start_index": 1,
        "pad_token_id": None, "layer_types": None,
    }  # fmt: skip
    if name in ("mixtral/4", "gpt_oss", "olmoe", "phimoe"):
        values["num_hidden_layers"] = 1
    spec = read_config(values, name)
    sparse = [u for u in range(1, spec.num_layers + 1) if spec.block(u).moe is not None]
    assert len(sparse) == 1
    hf = hf_model(name, values)
    for key, tensor in hf.state_dict().items():
        if "correction" in key:  # it steers the choice, which transformers' loss does not look at
            tensor.zero_()
    tokens = torch.randint(0, spec.vocab, (24,), generator=torch.Generator().manual_seed(3))
    theirs = hf(input_ids=tokens[None], labels=tokens[None])
    batch = Batch.of(spec, tokens, [24], targets_t=tokens)
    ours = our_model(hf, spec)(None, batch)
    assert ours.balance is not None
    assert float(ours.balance.detach() / 24) == pytest.approx(
        0.25 * float(theirs.aux_loss.detach()), rel=1e-4
    )


def test_one_choice_does_not_change_the_plan() -> None:
    spec = read_config({**tiny_config("qwen3_moe"), "pad_token_id": 0}, "tiny")
    other = spec.with_training(balance=True, padding=True)
    assert other != spec
    assert other.fingerprint == spec.fingerprint
    wider = replace(spec, embedding=replace(spec.embedding, scale=2.0))
    assert wider.fingerprint != spec.fingerprint

"""A model as units: cuts, packing, deferred weight gradients, dtypes, devices, bad input."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.models import (  # noqa: E402
    CONFIGS,
    LENGTHS,
    batch_of,
    gradients_of,
    make,
    spec_of,
    total_loss,
    whole_run,
)
from tutti.accelerator.gradients import WeightGradients  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.nn import Batch, Model, build_unit  # noqa: E402

KINDS = ("dense", "latent", "experts")


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], rel: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        assert float((a[name] - tensor).norm()) <= rel * max(1e-30, float(tensor.norm())), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_two_stages_are_one_model(kind: str, cut: int) -> None:
    spec = spec_of(kind)
    loss, expected = whole_run(spec)
    first = make(spec, units=range(cut))
    second = make(spec, units=range(cut, spec.num_units))
    batch = batch_of(spec)
    before = first(None, batch)
    x = before.x.detach().requires_grad_()
    after = second(x, batch)
    total = total_loss(after)
    total.backward()
    value = float(total.detach())
    outputs, gradients = [before.x], [x.grad]
    if before.balance is not None:
        value += float(before.balance.detach())
        outputs.append(before.balance)
        gradients.append(torch.ones_like(before.balance))
    torch.autograd.backward(outputs, gradients)
    assert value == pytest.approx(loss, rel=1e-12)
    close({**gradients_of(first), **gradients_of(second)}, expected)


def test_a_tied_weight_is_one_parameter_in_one_stage_and_two_in_two() -> None:
    spec = spec_of("tied")
    whole = make(spec)
    names = [logical.name for logical in whole.logical_tensors()]
    assert "0.token.weight" in names
    assert f"{spec.head_unit}.logits.weight" not in names
    _, expected = whole_run(spec)
    first, second = make(spec, units=range(2)), make(spec, units=range(2, spec.num_units))
    batch = batch_of(spec)
    before = first(None, batch)
    x = before.x.detach().requires_grad_()
    total_loss(second(x, batch)).backward()
    before.x.backward(x.grad)
    table = gradients_of(first)["0.token.weight"]
    head = gradients_of(second)[f"{spec.head_unit}.logits.weight"]
    torch.testing.assert_close(table + head, expected["0.token.weight"], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", [*KINDS, "expert-bias", "prediction"])
def test_weight_gradients_can_wait(kind: str) -> None:
    spec = spec_of("latent", prediction_heads=1) if kind == "prediction" else spec_of(kind)
    loss, expected = whole_run(spec)
    later = WeightGradients()
    model = make(spec)
    total_loss(model(None, batch_of(spec), later)).backward()
    waiting = [
        logical.name
        for logical in model.logical_tensors()
        if logical.gradient is None and logical.piece.parameter.trainable
    ]
    linear = [name for name in expected if ".attention.output." in name or ".down." in name]
    assert set(linear) <= set(waiting), "the products' weights wait"
    assert len(later) >= len(linear)
    later.run()
    close(gradients_of(model), expected)
    assert whole_run(spec, WeightGradients())[0] == loss


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_sequences_do_not_see_each_other(kind: str) -> None:
    spec = spec_of(kind)
    model, whole = make(spec), batch_of(spec)
    with torch.no_grad():
        together = model.logits(whole).split(list(LENGTHS))
        for tokens, expected in zip(whole.tokens_t.split(list(LENGTHS)), together, strict=True):
            alone = model.logits(Batch.of(spec, tokens, [len(tokens)]))
            torch.testing.assert_close(alone, expected, rtol=1e-12, atol=1e-12)


def test_logits_and_losses_agree() -> None:
    spec = spec_of("tied")  # capped logits
    model, batch = make(spec), batch_of(spec)
    out = model(None, batch)
    logits = model.logits(batch)
    expected = torch.nn.functional.cross_entropy(
        logits, batch.targets_t, reduction="none", ignore_index=-100
    )
    torch.testing.assert_close(out.losses_t, expected.detach())
    assert float(out.loss.detach()) == pytest.approx(float(expected.detach().sum()), rel=1e-12)


def test_token_weights_weigh_the_loss() -> None:
    spec = spec_of("dense")
    model, batch = make(spec), batch_of(spec)
    losses = model(None, batch).losses_t
    weights = torch.rand(batch.num_tokens, dtype=torch.float64)
    weighted = Batch.of(spec, batch.tokens_t, LENGTHS, targets_t=batch.targets_t, weights_t=weights)
    found = model(None, weighted).loss
    assert float(found.detach()) == pytest.approx(float((losses * weights).sum()), rel=1e-12)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logical_tensors_are_the_models(kind: str) -> None:
    spec = spec_of(kind)
    model = Model(spec, Operators("cpu"), device="meta", dtype=torch.bfloat16)
    found = {logical.name: tuple(logical.view.shape) for logical in model.logical_tensors()}
    assert found == {
        f"{unit}.{parameter.name}": parameter.shape
        for unit in range(spec.num_units)
        for parameter in spec.parameters(unit)
        if parameter.tied_to is None
    }
    assert all(p.device.type == "meta" for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert total == sum(torch.Size(shape).numel() for shape in found.values()), "nothing is padded"


def test_products_are_fused() -> None:
    block = build_unit(spec_of("dense"), 1, Operators("cpu"))
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters()}
    assert shapes["attention.qkv.weight"] == (4 * 8 + 2 * 2 * 8, 32)
    assert shapes["mlp.up.weight"] == (2 * 48, 32)


def test_a_view_writes_the_parameter() -> None:
    model = make(spec_of("dense"))
    with torch.no_grad():
        for logical in model.logical_tensors():
            if logical.name == "1.attention.key.weight":
                logical.view.fill_(7.0)
    weight = model.blocks[0].attention.qkv.weight
    assert (weight[32:48] == 7.0).all()
    assert (weight[:32] != 7.0).all()


def test_half_precision_runs_and_is_near() -> None:
    for kind in KINDS:
        spec = spec_of(kind)
        exact = float(make(spec)(None, batch_of(spec)).loss.detach())
        half = float(make(spec, dtype=torch.bfloat16)(None, batch_of(spec)).loss.detach())
        assert half == pytest.approx(exact, rel=0.02)


def test_a_prediction_head_sees_the_next_token_and_predicts_the_one_after() -> None:
    spec = spec_of("latent", prediction_heads=2)
    batch = batch_of(spec)
    tokens, targets = batch.tokens_t, batch.targets_t
    assert batch.next_tokens_nt is not None
    assert batch.next_targets_nt is not None
    assert batch.next_tokens_nt[1, 4] == tokens[6]
    assert batch.next_targets_nt[1, 4] == targets[6]
    last = LENGTHS[0] - 1
    assert batch.next_tokens_nt[0, last] == -1, "not the next sequence's"
    assert batch.next_targets_nt[0, last] == -100
    out = make(spec)(None, batch)
    assert out.predictions_n.shape == (2,)
    # the last token of a sequence changes no loss of a head that would have to see beyond it
    changed = tokens.clone()
    changed[0] = (tokens[0] + 1) % spec.vocab
    other = make(spec)(None, Batch.of(spec, changed, LENGTHS, targets_t=targets))
    assert float(other.predictions_n[0].detach()) != float(out.predictions_n[0].detach())


def test_what_cannot_be_built_is_said() -> None:
    spec = spec_of("dense")
    with pytest.raises(InputError, match="there is no unit 9; units are 0 to 3"):
        build_unit(spec, 9, Operators("cpu"))
    with pytest.raises(InputError, match="units \\[0, 2\\] do not follow each other"):
        Model(spec, Operators("cpu"), units=[0, 2])(
            None, Batch.of(spec, torch.zeros(4, dtype=torch.long), [4])
        )
    with pytest.raises(InputError, match="sequences of 5 tokens in all, 4 given"):
        Batch.of(spec, torch.zeros(4, dtype=torch.long), [2, 3])
    with pytest.raises(ValueError, match="no targets"):
        make(spec)(None, Batch.of(spec, torch.zeros(4, dtype=torch.long), [4]))

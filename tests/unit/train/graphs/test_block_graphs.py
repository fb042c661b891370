"""A block's gradients, each where it belongs: on its sum, or left with its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.any_plan import Draft
from tutti.accelerator import open_accelerator
from tutti.nn import Batch, build_unit
from tutti.nn.block import Block
from tutti.train.graphs.block_graphs import BlockGraphs, Slot


def a_block() -> tuple[Block, Batch, Tensor]:
    torch.manual_seed(0)
    spec = Draft().line((((0, 4),), [{}])).plan().model.spec
    assert spec is not None
    block = build_unit(spec, 1, open_accelerator("cpu").operators)
    assert isinstance(block, Block)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.zeros(16, dtype=torch.long)
    return block, Batch.of(spec, tokens, [16]), torch.randn(16, spec.hidden)


def test_gradients_go_onto_their_sums_and_the_rest_stays_with_weights() -> None:
    block, batch, x = a_block()
    gradient = torch.randn_like(x)
    y, _ = block(x, batch)
    named = dict(block.named_parameters())
    expected = dict(zip(named, torch.autograd.grad(y, list(named.values()), gradient), strict=True))
    sums = {
        id(parameter): torch.full(parameter.shape, 2.0)
        for name, parameter in named.items()
        if "down" in name or "qkv" in name
    }
    graphs = BlockGraphs(
        block, batch, Slot(None), lambda work, pool: None, {}, None,
        is_lowest=True, is_highest=True,
    )  # fmt: skip
    for passes in (1, 2):
        torch.testing.assert_close(graphs.forward(x), y)
        graphs.backward_input(gradient)
        graphs.backward_weight(lambda weight: sums.get(id(weight)))
        for name, parameter in named.items():
            total = sums.get(id(parameter))
            if total is None:
                assert parameter.grad is not None, name
                torch.testing.assert_close(parameter.grad, expected[name])
            else:
                assert parameter.grad is None, name
                torch.testing.assert_close(total, 2.0 + passes * expected[name])

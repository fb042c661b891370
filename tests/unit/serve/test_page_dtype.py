"""Keys and values in pages of 8 bits: what is stored, and that nothing else of serving changes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of  # noqa: E402
from tests.support.serving import pair  # noqa: E402
from tutti.accelerator import PagedSegments  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.models.cached import cached_bytes  # noqa: E402
from tutti.models.load import load_model  # noqa: E402
from tutti.nn.cache import token_bytes  # noqa: E402
from tutti.serve import SamplingParameters  # noqa: E402
from tutti.serve.loading import Sizes  # noqa: E402

CODES = {"int8": (torch.int8, 0.5 / 127), "fp8": (torch.float8_e4m3fn, 2.0**-4)}
WISHES = SamplingParameters(max_tokens=10, ignore_end=True)


@pytest.mark.parametrize("name", CODES)
def test_what_is_stored_is_near_by_the_head_s_largest(name: str) -> None:
    codes, near = CODES[name]
    operators = Operators("cpu", forced={})
    torch.manual_seed(0)
    k, v = torch.randn(6, 2, 8) * 30, torch.randn(6, 2, 8) / 30
    k[2, 1] = 0.0
    pages = [torch.zeros(8, 4, 2, 8, dtype=codes) for _ in range(2)]
    scales = [torch.full((8, 4, 2), torch.nan) for _ in range(2)]
    rows = PagedSegments.of((6,), (6,), [[5, 2]], 4)
    places = rows.places(*rows.rows_and_positions())
    operators.store_quantised_pages(k, v, *pages, *scales, places)
    for given, page, scale in zip((k, v), pages, scales, strict=True):
        wide = page.float() * scale.unsqueeze(-1)
        found = wide.view(-1, 2, 8)[places]
        largest = given.abs().amax(-1, keepdim=True)
        assert ((found - given).abs() <= near * largest + 1e-12).all()
    q = torch.randn(6, 4, 8)
    found = operators.quantised_paged_attention(q, *pages, *scales, rows, scale=0.3)
    assert torch.isfinite(found).all(), "places that nobody wrote to are not looked at"
    one = PagedSegments.of((1,), (4,), [[5, 2]], 4)
    again = operators.quantised_paged_attention(q[3:4], *pages, *scales, one, scale=0.3)
    torch.testing.assert_close(again[0], found[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_dtype", CODES)
@pytest.mark.parametrize(
    "name", ["llama/gqa", pytest.param("gemma2", marks=pytest.mark.slow), "gpt_oss", "bloom"]
)
def test_chunks_pages_and_preemption_change_nothing(name: str, page_dtype: str) -> None:
    """Codes are made token by token: however a sequence is computed, its pages are the same."""
    model = pair(name).model
    prompts = [[3 + i, 5, 7, 11, 2, 9, 4, 8, 6, 1][: 4 + i] for i in range(5)]
    roomy = engine_of(model, slots=1, page_size=16, page_dtype=page_dtype, max_length=32)
    tight = engine_of(
        model, slots=4, page_size=2, pages=18, most_tokens=5, page_dtype=page_dtype, max_length=32
    )
    expected = [roomy.generate([prompt], WISHES)[0].tokens for prompt in prompts]
    found = [done.tokens for done in tight.generate(prompts, WISHES)]
    assert found == expected
    assert tight.counters.preemptions > 0


def test_tokens_take_less_room() -> None:
    spec = pair("llama/gqa").spec
    plain = token_bytes(spec, torch.float32)
    heads = sum(spec.block(unit).attention.kv_heads for unit in range(1, spec.num_layers + 1))
    scales = 2 * heads * 4
    assert token_bytes(spec, torch.float32, codes=torch.int8) == plain // 4 + scales


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InputError, match="page_dtype is 'int7'"):
        _ = Sizes(page_dtype="int7").codes


@pytest.mark.parametrize("name", ["qwen3-8b", "deepseek-v2-lite", "gemma-2-2b"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_planner_counts_the_same_bytes(name, tp):
    spec = load_model(name)
    units = range(1, 5)
    plain = token_bytes(spec, torch.bfloat16, units, tp)
    assert cached_bytes(spec, units, tp=tp) == plain
    narrow = token_bytes(spec, torch.bfloat16, units, tp, torch.int8)
    assert cached_bytes(spec, units, tp=tp, stored=1.0) == narrow

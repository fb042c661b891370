from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.comm.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    found = RankPool(8)
    yield found
    found.close()

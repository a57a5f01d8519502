"""One pool of ranks for all tests that need several."""

from collections.abc import Iterator

import pytest
from dist.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    shared = Pool()
    yield shared
    shared.close()

import pytest

from tests.rank_pool import end_workers


@pytest.fixture(scope="package", autouse=True)
def _workers_end_with_this_folder():
    yield
    end_workers()

import pytest

from tests.launch.site import Site


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(tmp_path)

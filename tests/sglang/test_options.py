"""Slime's tables and command lines against the parsers of the packages that are installed."""

from __future__ import annotations

import pytest

from slime.backends.sglang_utils.installed import differences, installed_options
from slime.backends.sglang_utils.router import router_argv
from slime.utils.sglang_install import find_sglang
from tests.args import make_args
from tests.unit.test_sglang_command import SEED, command


def words(found: dict[str, list[str]]) -> list[str]:
    return [word for option, values in found.items() for word in (option, *values)]


def test_the_tables_are_those_of_the_installed_version():
    install = find_sglang()
    assert install is not None
    assert differences(install) == []


@pytest.mark.parametrize("on_gpu", [True, False])
def test_sglang_parses_what_slime_writes(on_gpu):
    install = find_sglang()
    assert install is not None
    argv = words(command(make_args(**SEED), install.version, rank=3, on_gpu=on_gpu))
    installed_options(install, "sglang", argv)
    with pytest.raises(ValueError, match="no-such-option"):
        installed_options(install, "sglang", [*argv, "--no-such-option"])


def test_the_router_parses_what_slime_writes():
    install = find_sglang()
    assert install is not None
    args = make_args(
        rollout_engine="sglang", router_policy="manual", router_disable_retries=True
    )  # fmt: skip
    argv = router_argv(args, python="python", host="127.0.0.1", port=1, metrics_port=2)
    assert argv[:3] == ["python", "-m", "sglang_router.launch_router"]
    installed_options(install, "sglang_router", argv[3:])

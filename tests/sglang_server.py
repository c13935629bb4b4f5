"""A real SGLang server for tests, started by the code that starts it in a run, minus Ray."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.command import Node, server_command
from slime.backends.sglang_utils.ports import find_ports
from slime.backends.sglang_utils.readiness import wait_until_ready
from slime.backends.sglang_utils.process import ServerProcess
from slime.utils.sglang_install import find_sglang
from tests.args import make_args
from tests.engines import TOKEN, EngineServer

HERE = "SLIME_SGLANG_PYTHON" in os.environ
HOST = "127.0.0.1"


@contextlib.contextmanager
def sglang_server(model_path: str | Path, label: str, **flags: Any) -> Iterator[EngineServer]:
    """`flags` are those of a run: sglang_max_total_tokens=4096."""
    install = find_sglang()
    assert install is not None
    args = make_args(rollout_engine="sglang", hf_checkpoint=str(model_path), **flags)
    with tempfile.TemporaryDirectory() as folder:
        ports, config = find_ports(HOST), Path(folder) / "key.yaml"
        config.write_text(f"admin-api-key: {TOKEN}\n")
        command = server_command(
            args,
            index=0,
            node=Node(host=HOST),
            ports=ports,
            meeting_host=HOST,
            install=install,
            on_gpu=False,
            label=label,
            config_file=str(config),
        )
        log = Path(folder) / "log"
        env = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = ServerProcess(command, log, env)
        url = f"http://{HOST}:{ports.server}"
        try:
            wait_until_ready(url, label=label, log_path=log, ended=process.status)
            yield EngineServer(url=url, pid=process.pid)
        except Exception:
            print(process.last_lines(40))
            raise
        finally:
            process.stop()

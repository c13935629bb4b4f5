"""A real SGLang server for tests, started by the code that starts it in a run, minus Ray."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.command import Node, cpu_env, server_command
from slime.config.arguments import Args
from slime.config.installed import find_sglang
from slime.serving.servers import ServerProcess, wait_until_ready
from slime.utils.addresses import Ports, find_ports
from tests.args import make_args
from tests.engines import TOKEN, EngineServer

HERE = "SLIME_SGLANG_PYTHON" in os.environ
HOST = "127.0.0.1"


@contextlib.contextmanager
def sglang_server(
    model_path: str | Path, label: str, *, ranks: int = 1, nodes: int = 1, **flags: Any
) -> Iterator[EngineServer]:
    """`flags` are those of a run: sglang_max_total_tokens=4096."""
    args = make_args(
        rollout_engine="sglang",
        hf_checkpoint=str(model_path),
        rollout_num_gpus=ranks,
        rollout_num_gpus_per_engine=ranks,
        num_gpus_per_node=ranks // nodes,
        **flags,
    )
    ports = find_ports(HOST)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = [
            _start(args, Path(folder), ports, Node(host=HOST, rank=rank, count=nodes), label)
            for rank in range(nodes)
        ]
        for process in processes:
            stack.callback(process.stop)
        url = f"http://{HOST}:{ports.server}"
        try:
            wait_until_ready(
                url,
                label=label,
                log_path=processes[0].log_path,
                ended=processes[0].status,
                owns_port=processes[0].listens_at,
                key=TOKEN,
            )
            yield EngineServer(url=url, pid=processes[0].pid)
        except Exception:
            print(*(process.last_lines(40) for process in processes), sep="\n\n")
            raise


def _start(args: Args, folder: Path, ports: Ports, node: Node, label: str) -> ServerProcess:
    install, config = find_sglang(), folder / "key.yaml"
    assert install is not None
    config.write_text(f"api-key: {TOKEN}\nadmin-api-key: {TOKEN}\n")
    command = server_command(
        args,
        index=0,
        node=node,
        ports=ports,
        rendezvous_host=HOST,
        install=install,
        on_gpu=False,
        label=label,
        config_file=str(config),
    )
    env = {
        **cpu_env(args.rollout_num_gpus_per_engine),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return ServerProcess(command, folder / f"log_{node.rank}", env)

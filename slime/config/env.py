"""All environment variables that slime reads, in one typed record."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Env:
    host_ip: str | None  # SLIME_HOST_IP: address other nodes reach this one at
    several_nodes: bool  # SLIME_SEVERAL_NODES=1, set by the run: its processes are on several nodes
    engine_token: str | None  # SLIME_ENGINE_TOKEN: the run's token for control routes
    rm_token: str | None  # SLIME_RM_TOKEN: key of the service at --rm-url
    sglang_python: str | None  # SLIME_SGLANG_PYTHON: interpreter of an environment with SGLang
    ray_address: str | None  # RAY_ADDRESS: a cluster that is already running
    head_timeout_s: float  # RAY_gcs_rpc_server_reconnect_timeout_s: of Ray without its head
    wandb_api_key: str | None
    cuda_visible_devices: str | None  # CUDA_VISIBLE_DEVICES; empty hides every GPU
    python_path: str | None
    omp_num_threads: str | None  # threads of each process, instead of an equal share of the cores
    plain_output: bool  # NO_COLOR or CI is set: no live display


_SECRET_NAME = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    """Return whether a variable or setting with this name must never be printed or logged."""
    return bool(_SECRET_NAME.search(name))


def read_env() -> Env:
    get = os.environ.get
    return Env(
        host_ip=get("SLIME_HOST_IP"),
        several_nodes=get("SLIME_SEVERAL_NODES") == "1",
        engine_token=get("SLIME_ENGINE_TOKEN"),
        rm_token=get("SLIME_RM_TOKEN"),
        sglang_python=get("SLIME_SGLANG_PYTHON"),
        ray_address=get("RAY_ADDRESS"),
        head_timeout_s=float(get("RAY_gcs_rpc_server_reconnect_timeout_s") or 60),
        wandb_api_key=get("WANDB_API_KEY"),
        cuda_visible_devices=get("CUDA_VISIBLE_DEVICES"),
        python_path=get("PYTHONPATH"),
        omp_num_threads=get("OMP_NUM_THREADS"),
        plain_output=bool(get("NO_COLOR") or get("CI")),
    )


_OF_LIBRARIES = ("CUDA_", "GLOO_", "NCCL_", "NVSHMEM_", "OMP_", "SLIME_HOST_IP", "TORCH_NCCL_")


def library_env(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that configure collectives and devices, and those with these names."""
    names = set(names)
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_OF_LIBRARIES) or name in names
    }


def child_env(**extra: str) -> dict[str, str]:
    """Return this process's environment with additions, for a child process."""
    return {**os.environ, **extra}


def set_env(**values: str) -> None:
    """Set variables that libraries read at import or at first use."""
    os.environ.update(values)


def replace_env(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables, or remove those whose value is None; return the old values."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def set_default_env(**values: str) -> None:
    """Set variables that are not set yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)

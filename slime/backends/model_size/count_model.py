"""Count parameters per rank in a subprocess: `python -m slime.backends.model_size.count_model`.

It reads pickled requests from stdin, which only `count_models` writes, and prints one JSON line. It
is a subprocess because building Megatron on the meta device patches torch process-wide.
"""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import slime
from slime.backends.model_size.rank_model import ModelCount, WholeModel
from slime.config.env import child_env, read_env
from slime.core.errors import ConfigError, UserError
from slime.utils.machine import usable_cores

if TYPE_CHECKING:
    from slime.config.arguments import Args

_ANSWER = "COUNTED "
_TIMEOUT_S = 600
_MOST_CHILDREN = 8  # each needs up to 1 GB of host memory


@dataclass(frozen=True, kw_only=True)
class CountRequest:
    """The `ranks` of `world_size` to count; the --hf-checkpoint folder needs only a config.json."""

    args: Args
    ranks: list[int]
    world_size: int


def count_models(requests: list[CountRequest]) -> list[ModelCount | UserError]:
    """Return one result per request: a count, or an error if the model or layout is unsupported.

    Building the tens of thousands of modules of an MoE takes seconds, so requests run in parallel.
    """
    children = max(min(len(requests), usable_cores(), _MOST_CHILDREN), 1)
    shares = [requests[child::children] for child in range(children)]
    with ThreadPoolExecutor(children) as pool:
        answers = list(pool.map(_count_in_child, shares))
    return [answers[i % children][i // children] for i in range(len(requests))]


def _count_in_child(requests: list[CountRequest]) -> list[ModelCount | UserError]:
    command = [sys.executable, "-m", "slime.backends.model_size.count_model"]
    path = [str(Path(slime.__file__).parents[1]), read_env().python_path or ""]
    env = child_env(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONPATH=":".join(path))
    done = subprocess.run(
        command, input=pickle.dumps(requests), capture_output=True, env=env, timeout=_TIMEOUT_S
    )
    lines = done.stdout.decode().splitlines()
    answers = [line.removeprefix(_ANSWER) for line in lines if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        raise UserError(f"counting the model failed:\n{done.stderr.decode()[-2000:]}")
    return [_read(answer) for answer in json.loads(answers[-1])]


def _read(answer: dict) -> ModelCount | UserError:
    if "error" in answer:
        return ConfigError(answer["error"])
    return ModelCount.from_json(answer)


def main() -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    requests = pickle.loads(sys.stdin.buffer.read())
    print(_ANSWER + json.dumps([_answer(request) for request in requests]), flush=True)


def _answer(request: CountRequest) -> dict:
    try:
        return _count(request).to_json()
    except UserError as error:
        return {"error": str(error)}


def _count(request: CountRequest) -> ModelCount:
    import torch

    from slime.backends.kernels.packed_attention import repeats_keys

    whole = _count_whole(request.args.hf_checkpoint)  # before Megatron patches torch
    if request.args.train_backend == "fsdp":
        from slime.backends.fsdp_utils.meta_model import count_rank
    else:
        from slime.backends.megatron_utils.meta_model import count_rank
    ranks = [count_rank(request.args, rank, request.world_size) for rank in request.ranks]
    return ModelCount(
        whole=whole,
        ranks=ranks,
        attention_repeats_keys=repeats_keys(),
        torch_version=torch.__version__,
    )


@functools.cache  # requests are often several parallel layouts of one model
def _count_whole(folder: str) -> WholeModel:
    from slime.backends.model_size.whole_model import count_whole

    return count_whole(folder)


if __name__ == "__main__":
    main()

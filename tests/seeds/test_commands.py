"""Commands of the documents: Ray's and torchrun's own parsers take their words, scripts and loops run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from ray.scripts.scripts import cli as ray_cli
from torch.distributed.run import get_args_parser

from slime.backends.megatron_utils.conversion.setup import conversion_args
from slime.config.env import library_env, read_env
from tests.parity.model_facts import MODELS
from tests.seeds.documents import ROOT, quote, quotes, variables
from tests.seeds.test_flags import GLM, bash
from tests.tiny import make_tiny_checkpoint

VALUES = {"MASTER_ADDR": "10.0.0.1", "WORKER_IP": "10.0.0.2", "MLP_WORKER_0_HOST": "10.0.0.1"}


def ray_commands() -> list[tuple[str, str]]:
    """Return (place, command) of every `ray ...` in the documents, those over ssh included."""
    found = []
    for q in quotes("shell", "train", "words"):
        text = q.text.replace("\\\n", " ")
        pattern = r"\bray (?:start|stop|status|list|job)\b[^;&\"\n]*(?:\"[^\"]*\"[^;&\"\n]*)*"
        for command in re.findall(pattern, text):
            if not command.startswith("ray job submit"):
                found.append((q.place, command.split(" on all")[0].strip()))
    return found


def parse(words: list[str]) -> dict[str, object]:
    """Return the options as Ray's own command line reads them; click refuses an unknown one."""
    command: click.Command = ray_cli
    while isinstance(command, click.Group) and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command.make_context("ray", list(words)).params


@pytest.mark.parametrize(("place", "command"), ray_commands())
def test_ray_takes_the_command(place, command):
    text = re.sub(r"\$\{(\w+)\}", lambda m: VALUES[m[1]], command).replace("<job-id>", "job-1")
    params = parse(shlex.split(text)[1:])
    assert params.get("num_gpus", 8) in (8, None)


@pytest.mark.parametrize("place", ["distributed:22", "distributed:83", "distributed:199"])
def test_ray_takes_the_job(place):
    """Ray sees train.py as the command of the job, and the runtime environment is JSON."""
    text = quote(place).text.replace("\n...\n", "\n").replace('"NVL",', '"NVL"')
    script = f'ray() {{ printf "%s\\0" "$@"; }}\n{text.replace("...", "")}'
    arrays = "".join(f"{n}=(--lr 1e-6)\n" for n in set(re.findall(r"\$\{(\w+)\[@\]\}", text)))
    words = bash(arrays + script, MASTER_ADDR="10.0.0.1")
    params = parse(words)
    assert params["entrypoint"][:2] == ("python3", "train.py")
    assert json.loads(params["runtime_env_json"])["env_vars"]["PYTHONPATH"] == "/root/Megatron-LM/"


def test_loops_over_a_hostfile_start_every_worker_but_the_head(tmp_path):
    (tmp_path / "mpi_hostfile").write_text("10.0.0.1 slot=8\n10.0.0.2 slot=8\n10.0.0.3 slot=8\n")
    for place in ("glm45:36", "distributed:156"):
        text = quote(place).text.replace("/root/mpi_rack_hostfile", f"{tmp_path}/mpi_hostfile")
        calls = tmp_path / place.replace(":", "-")
        stubs = f'ssh() {{ echo "$@" >>{calls}; }}\nray() {{ :; }}\n'
        bash(stubs + text, BASE_DIR=tmp_path, **VALUES)
        lines = sorted(calls.read_text().splitlines())
        assert [line.split()[0] for line in lines] == ["root@10.0.0.2", "root@10.0.0.3"]
        assert all("ray start --address=10.0.0.1:6379 --num-gpus 8" in line for line in lines)


def test_conversion_command(tmp_path):
    """torchrun takes its options, and the tool MODEL_ARGS of the 355B model as its script has them."""
    model = tmp_path / "GLM-4.5-355B-A32B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[GLM]().to_dict()))
    text = quote("glm45:15").text.removeprefix("cd slime/\n")
    script = f'torchrun() {{ printf "%s\\0" "$@"; }}\n{text}'
    words = bash(script, BASE_DIR=tmp_path, NODE_RANK=1, MASTER_ADDR="10.0.0.1")
    options = get_args_parser().parse_args(words)
    assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 1)
    assert (ROOT / options.training_script).exists()
    args = conversion_args(options.training_script_args)
    assert args.num_layers == 92 and args.save == f"{tmp_path}/GLM-4.5-355B-A32B_torch_dist/"


def test_fp8_command_converts_a_model(tmp_path):
    make_tiny_checkpoint(tmp_path / "GLM-4.5-355B-A32B", hidden_size=128)
    text = quote("glm45:114").text.replace("python ", f"{sys.executable} ", 1)
    bash(text, BASE_DIR=tmp_path)
    made = json.loads((tmp_path / "GLM-4.5-355B-A32B-FP8" / "config.json").read_text())
    assert made["quantization_config"]["weight_block_size"] == [128, 128]


def test_download_command():
    words = shlex.split(quote("glm45:13").text)
    hf = Path(sys.executable).parent / words[0]
    usage = subprocess.run([hf, words[1], "--help"], capture_output=True, text=True, check=True)
    assert "--local-dir" in usage.stdout


def test_model_script_is_found_as_a_run_script_finds_it():
    script = quote("glm45:50").text.replace("${BASH_SOURCE[0]}", "scripts/run-x.sh")
    assert "--num-experts" in bash(script + '\nprintf "%s\\0" "${MODEL_ARGS[@]}"')


def test_nccl_variables_are_the_defaults_of_the_run_scripts():
    exported = 'compgen -e | while read -r n; do printf \'%s=%s\\0\' "$n" "${!n}"; done'
    ours = set(bash(f"source scripts/lib/nccl.sh; nccl_defaults; {exported}"))
    theirs = bash(f"{quote('distributed:186').text}; {exported}")
    wanted = {word for word in theirs if word.startswith(("NCCL_", "TORCH_NCCL_"))}
    assert len(wanted) == 12 and wanted <= ours


@pytest.mark.parametrize("name", variables())
def test_variable_reaches_the_processes_of_a_run(name, monkeypatch):
    monkeypatch.setenv(name, "10.0.0.9")
    if name == "MASTER_ADDR":  # of the scripts, which start Ray there
        settings = "source scripts/lib/launch.sh; settings 1 1; printf '%s' $MASTER_ADDR"
        assert bash(settings) == ["10.0.0.9"]
    else:
        assert library_env()[name] == "10.0.0.9"
        assert name != "SLIME_HOST_IP" or read_env().host_ip == "10.0.0.9"


def test_network_commands_print_an_address():
    line = quote("distributed:129").text.splitlines()[0].removeprefix("export ")
    assert bash(f"{line}; printf '%s' $SLIME_HOST_IP") != []

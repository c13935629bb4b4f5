"""The command line of `slime plan`: flags of train.py, resolved for the planned machine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cli.plan.memory import GIB
from slime.cli.plan.model_shape import config_from_flags, write_config
from slime.cli.plan.plan import Machine
from slime.config.arguments import Args, read_given, resolve
from slime.config.flags.draft import Draft, Origin
from slime.config.flags.spec import option_of
from slime.config.installed import count_gpus, find_sglang
from slime.core.errors import ConfigError
from slime.utils.machine import gpus as local_gpus

DEFAULT_GPU_GIB = 80.0


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the planner itself. Sizes in GiB, as nvidia-smi and free count them."""

    gpu_memory: float | None = None
    host_memory: float | None = None
    gpus: int | None = None
    as_json: bool = False
    html: str | None = None
    suggest: bool = False
    every_value: bool = False  # of --dry-run: print defaults too

    @property
    def describes_machine(self) -> bool:
        return (self.gpu_memory, self.host_memory, self.gpus) != (None, None, None)

    def refuse(self, names: tuple[str, ...], command: str) -> None:
        """Raise ConfigError if an option is given that belongs to another command."""
        for option, name in (*_SWITCHES.items(), ("--html", "html")):
            if name in names and getattr(self, name):
                raise ConfigError(
                    f"{option} is an option of {command}: remove it, or use {command}"
                )


_NUMBERS = {
    "--gpu-memory": "gpu_memory",
    "--plan-gpu-memory": "gpu_memory",
    "--host-memory": "host_memory",
    "--gpus": "gpus",
}
_SWITCHES = {"--json": "as_json", "--suggest": "suggest", "--all": "every_value"}


def split_options(argv: list[str]) -> tuple[PlanOptions, list[str]]:
    """Split the planner's own options from the flags of the run."""
    own: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if name in _SWITCHES:
            own[_SWITCHES[name]] = True
        elif name in _NUMBERS:
            own[_NUMBERS[name]] = _number(name, value or next(words, ""))
        elif name == "--html":
            own["html"] = _file_name(value or next(words, None))
        elif word != "--dry-run":
            rest.append(word)
    return PlanOptions(**own), rest


@contextmanager
def planned_args(argv: list[str], options: PlanOptions) -> Iterator[Args]:
    """Yield the resolved flags; inside, --hf-checkpoint is a folder with at least a config.json."""
    given, origins = read_given(argv)
    with tempfile.TemporaryDirectory(prefix="slime-plan-") as folder:
        warnings = _give_config(given, Path(folder))
        warnings += _assume(given, origins)
        several = (given.get("actor_num_nodes") or 1) > 1
        gpus = _gpus_per_node(given)
        draft = Draft(given, origins, gpus=gpus, offline=True, cluster=several)
        args = resolve(draft)
        _check_gpus(args, options)
        yield Args(args.to_dict(redact=False), draft.origins, (*warnings, *args.warnings))


def machine_of(options: PlanOptions) -> Machine:
    size, source = DEFAULT_GPU_GIB, "assumed, as there is no GPU here: give --gpu-memory"
    if options.gpu_memory is not None:
        size, source = options.gpu_memory, "--gpu-memory"
    elif found := local_gpus():
        size, source = found[0].memory_mib / 1024, f"the {found[0].name} of this machine"
    host = None if options.host_memory is None else options.host_memory * GIB
    return Machine(gpu_bytes=size * GIB, source=source, host_bytes=host)


def _give_config(given: dict[str, Any], folder: Path) -> list[str]:
    """Write a config.json from MODEL_ARGS if there is none; return notes for the user."""
    named = given.get("hf_checkpoint")
    if named and (Path(named).expanduser() / "config.json").is_file():
        return []
    config = config_from_flags(given, fp8="fp8" in str(named).lower())
    if config is None:
        raise ConfigError(
            "the plan needs the model's shape: give --hf-checkpoint with a folder that has a config.json, "
            "or the MODEL_ARGS of scripts/models"
        )
    given["hf_checkpoint"] = str(write_config(config, folder / Path(named or "model").name))
    shape = f"the shape of the model ({config['model_type']}) comes from MODEL_ARGS"
    fp8 = ", and FP8 weights in blocks of 128 x 128 from its name"
    if not named:
        return [shape]
    extra = fp8 if "quantization_config" in config else ""
    return [f"--hf-checkpoint: {named} does not exist; {shape}{extra}"]


def _assume(given: dict[str, Any], origins: dict[str, Origin]) -> list[str]:
    """Fill in required flags that a plan can assume; return notes for the user."""
    wanted: dict[str, Any] = {
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "prompt_data": ["prompts.jsonl"],
        "rollout_max_response_len": 8192,
    }
    if given.get("num_epoch") is None:
        wanted["num_rollout"] = 1
    if given.get("rollout_batch_size") is not None:
        wanted.pop("n_samples_per_prompt")
    if given.get("rollout_engine") in (None, "auto") and not (count_gpus() and not find_sglang()):
        wanted["rollout_engine"] = "sglang"
        given.pop("rollout_engine", None)
    if given.get("num_gpus_per_node") is None and given.get("actor_num_nodes", 1) == 1:
        wanted["num_gpus_per_node"] = _gpus_per_node(given)
    missing = {name: value for name, value in wanted.items() if given.get(name) is None}
    given.update(missing)
    for name in missing:
        origins.setdefault(name, "derived")
    shown = ("rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len")
    return [
        f"{option_of(name)} is not given: {missing[name]} assumed"
        for name in shown
        if name in missing
    ]


def _gpus_per_node(given: dict[str, Any]) -> int:
    per_node = given.get("num_gpus_per_node")
    return per_node or max(8, given.get("actor_num_gpus_per_node") or 0)


def _check_gpus(args: Args, options: PlanOptions) -> None:
    training = args.num_training_gpus
    needed = training if args.colocate else training + args.rollout_num_gpus
    if options.gpus is None or options.suggest or needed <= options.gpus:
        return
    both = f"{training} GPUs for training + {args.rollout_num_gpus} for rollout = {needed}"
    how = f"{training} GPUs for training" if args.colocate else both
    advice = "" if args.colocate else "add --colocate, "
    raise ConfigError(
        f"the job needs {how}, and there are {options.gpus}: {advice}lower "
        "--actor-num-gpus-per-node or --rollout-num-gpus, or use more machines"
    )


def _number(name: str, text: str) -> float | int:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is not a number") from None
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, not {text}")
    if name == "--gpus" and value != int(value):
        raise ConfigError(f"--gpus must be a whole number, not {text}")
    return int(value) if name == "--gpus" else value


def _file_name(text: str | None) -> str:
    if not text or text.startswith("--"):
        raise ConfigError("--html needs the name of the file to write: --html plan.html")
    if not Path(text).absolute().parent.is_dir():
        raise ConfigError(f"--html {text}: {Path(text).absolute().parent} does not exist")
    return text

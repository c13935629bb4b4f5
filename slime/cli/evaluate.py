"""`slime eval`: the evaluation of `slime train`, with neither a trainer nor training data.

It is a run of zero rollouts: `slime train --debug-rollout-only --num-rollout 0 --eval-interval 1`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

from slime.api import load_run
from slime.config.arguments import read_given
from slime.config.derive import RUN_DIR
from slime.config.flags.registry import all_flags
from slime.config.flags.spec import option_of
from slime.core.errors import ConfigError
from slime.runlog import metric_names as names
from slime.runlog.earlier_runs import METRICS_FILE, RESOLVED_FILE
from slime.runlog.format import number
from slime.runlog.own_config import read_config
from slime.runlog.run_folder import RunData, read_run
from slime.utils.printable import safe_text

_USAGE = """usage: slime eval MODEL --eval-prompt-data NAME PATH [NAME PATH ...] [OPTIONS]

MODEL is the folder of a Hugging Face model, or of a run that was trained with --save-hf. For a run, its data,
reward and sampling options are used too, unless given here. OPTIONS are those of `slime train`, such as --rm-type or
--custom-rm-path, --label-key, --n-samples-per-eval-prompt, --eval-temperature and --run-dir.
Prints a table; metrics, samples and report.html are in the run folder."""
_ALWAYS = {
    "debug_rollout_only": True,
    "num_rollout": 0,
    "rollout_batch_size": 1,
    "eval_interval": 1,
}
# Flags that an evaluation copies from a run, besides those of these groups.
_GROUPS = ("Evaluation", "Reward")
_COPIED = (
    "apply_chat_template", "apply_chat_template_kwargs", "input_key", "label_key", "metadata_key", "tool_key",
    "rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_max_context_len", "rollout_max_response_len",
    "rollout_stop", "rollout_stop_token_ids", "rollout_skip_special_tokens", "rollout_seed",
    "custom_generate_function_path", "custom_config_path", "rollout_engine", "rollout_num_gpus",
    "rollout_num_gpus_per_engine", "log_samples",
)  # fmt: skip
# Copied flags that name code, option files, addresses or permissions: never from another user's run.
_NEED_TRUST = ("allow_unsandboxed_code", "rm_url", "eval_config")
_OF_TRAINING = (
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "skip_eval_before_train",
)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0].startswith("-"):
        raise ConfigError("slime eval needs a model as its first argument; see slime eval --help")
    words, run_dir = _command(argv[0], argv[1:])
    from slime.cli.loop import main as train

    status = train(words, print_summary=False)
    if status == 0 and (run_dir / METRICS_FILE).exists():  # missing after --dry-run
        print(safe_text("\n".join(["", *table(read_run(run_dir)), "", f"Results: {run_dir}"])))
        sys.stdout.flush()
    return status


def _command(model: str, rest: list[str]) -> tuple[list[str], Path]:
    """Return the command line of `slime train` and the run folder."""
    given, _ = read_given(rest)
    for name in ("hf_checkpoint", *_ALWAYS):
        if name in given and name != "rollout_batch_size":
            raise ConfigError(f"slime eval sets {option_of(name)} itself: remove it")
    folder = Path(model).expanduser()
    values = {"train_backend": "fsdp", **_from_run(folder, given), **_ALWAYS}
    run_dir = Path(
        given.get("run_dir")
        or f"runs/eval-{folder.resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    if (run_dir / METRICS_FILE).exists():
        raise ConfigError(f"--run-dir {run_dir} already holds results: name another folder")
    values = {"hf_checkpoint": str(folder), "run_dir": str(run_dir), **values}
    replaced = set(given)
    if "eval_config" in given or "eval_prompt_data" in given:
        replaced |= {"eval_config", "eval_prompt_data"}
    if "rm_type" in given or "custom_rm_path" in given:
        replaced |= {"rm_type", "custom_rm_path", "group_rm"}
    words = [w for n, v in values.items() if n not in replaced for w in _words(n, v)]
    return [*words, *rest], run_dir


def _from_run(folder: Path, own: Container[str]) -> dict[str, Any]:
    """Return the exported model of a run and its evaluation flags, except those in the user's `own` options."""
    if not (folder / RESOLVED_FILE).exists():
        return {}
    model = load_run(folder).model
    if (model / "adapter_config.json").exists():
        raise ConfigError(
            f"{model} is a LoRA adapter: merge it first, slime convert merge-lora --base MODEL "
            f"--adapter {model} --output-dir DIR"
        )
    given, is_own = read_config(folder)
    names = [n for n in given if n in all_flags() and n not in own and _is_copied(n)]
    copied = {n: given[n] for n in names if RUN_DIR not in str(given[n])}
    unsafe = [n for n in copied if _needs_trust(n)]
    if unsafe and not is_own:
        raise ConfigError(
            f"{folder} is not a run of this user, or its config.yaml was changed, and it sets "
            f"{', '.join(map(option_of, unsafe))}, which can run code: give these options yourself, or "
            f"evaluate the model alone: slime eval {model}"
        )
    return {**copied, "hf_checkpoint": str(model)}


def _is_copied(name: str) -> bool:
    if name in _OF_TRAINING:
        return False
    return name in _COPIED or name.startswith("sglang_") or all_flags()[name].group in _GROUPS


def _needs_trust(name: str) -> bool:
    return name in _NEED_TRUST or name.endswith("_path") or name.startswith("sglang_")


def _words(name: str, value: Any) -> list[str]:
    """Return what to type for a value; nothing for one that is not set."""
    if value is None or value == []:
        return []
    if isinstance(value, bool):
        flag = all_flags()[name]
        return [flag.option] if value else [*flag.off_options[:1]]
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, str) and item.startswith("-") for item in items):
        raise ConfigError(
            f"the run's {name} {value!r} would be read as an option: give it yourself"
        )
    return [option_of(name), *(json.dumps(i) if isinstance(i, dict) else str(i) for i in items)]


def table(run: RunData) -> list[str]:
    """Return a header and one line per dataset: the metrics `eval/<dataset>/...` of the last evaluation."""
    rows = {
        dataset: {
            name.removeprefix(f"eval/{dataset}/"): number(points[-1][1])
            for name, points in run.series.items()
            if name.startswith(f"eval/{dataset}/")
        }
        for dataset in names.eval_rewards(run.series)
    }
    heads = list(dict.fromkeys(head for row in rows.values() for head in row))
    heads.sort(key=lambda head: not head.startswith("reward"))
    width = max(map(len, ("dataset", *rows)))
    sizes = {
        head: max(len(head), *(len(row.get(head, "")) for row in rows.values())) for head in heads
    }
    lines = [("dataset", {head: head for head in heads}), *rows.items()]
    return [
        f"{label:<{width}}" + "".join(f"  {row.get(head, ''):>{sizes[head]}}" for head in heads)
        for label, row in lines
    ]

"""Training from Python: `slime.train` writes its inputs into the run folder and starts the same loop as `slime train`.

    model, dataset, reward, options ──▶ RUN_DIR/inputs/ ──▶ slime.cli.loop.steps ──▶ Run (reads RUN_DIR)

RUN_DIR/inputs/   options.yaml  train.jsonl  eval.jsonl  functions.pkl
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.api_inputs import Dataset, plain_value, to_sample, write_config, write_inputs
from slime.core.errors import ConfigError, UserError
from slime.core.types import RolloutBatch, Sample
from slime.runlog.checkpoint_folder import CheckpointFolder
from slime.runlog.earlier_runs import CONFIG_FILE, INPUTS, METRICS_FILE, RESOLVED_FILE
from slime.runlog.jsonl import read_lines
from slime.runlog.metric_names import RECORD_KEYS
from slime.runlog.own_config import adopt_config, read_own_config
from slime.runlog.run_yaml import read_resolved
from slime.runlog.sample_log import SAMPLES_FILE
from slime.serving.local_engine import generate_texts

__all__ = ["Batch", "Run", "load_run", "prepare", "train"]

Prompt = str | list[dict[str, Any]]
_TEMPLATE = re.compile(r"(?:[^{}]|\{\{|\}\}|\{rollout_id(?::\d{0,2}d?)?\})*")


def train(
    model: str | os.PathLike[str],
    dataset: Dataset,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    **options: Any,
) -> Run:
    """Train until the end or Ctrl-C and return the run; parameters and options are those of `prepare`."""
    run = prepare(model, dataset, reward, **options)
    for _ in run:
        pass
    return run


def prepare(
    model: str | os.PathLike[str],
    dataset: Dataset,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    *,
    generate: Callable[..., Any] | None = None,
    eval_dataset: Dataset | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Run:
    """Return a run that starts when it is iterated over; options have the names of the flags.

    `dataset` is a path, or rows with a "prompt" (text or messages): a list or a Hugging Face Dataset.
    `reward` is a function `reward(sample)`, `reward(args, sample)` or `reward(completions, **columns)`, as
    TRL calls it, or a list of such functions, whose sum is trained on. A mistake raises UserError.
    """
    folder = _new_folder(run_dir, model)
    with _remove_inputs_on_error(folder):
        values = write_inputs(
            folder / INPUTS, model, dataset, reward, generate, eval_dataset, options
        )
        return Run(folder, write_config(folder, values))


@contextmanager
def _remove_inputs_on_error(folder: Path) -> Iterator[None]:
    """After an error before the start, remove the inputs, so that the folder's name can be used again."""
    try:
        yield
    except BaseException:
        if not (folder / CONFIG_FILE).exists():
            shutil.rmtree(folder / INPUTS, ignore_errors=True)
        raise


def load_run(run_dir: str | os.PathLike[str], *, trust: bool = False) -> Run:
    """Return the run of a folder, made by `slime.train` or by the command line.

    `trust=True` takes over the run of another user or home folder: its options and functions can run any code.
    """
    folder = Path(run_dir).expanduser().absolute()
    if not (folder / RESOLVED_FILE).exists():
        raise UserError(f"{run_dir} is not the folder of a run: it has no {RESOLVED_FILE}")
    if trust:
        from slime.ray import python_functions

        adopt_config(folder)
        python_functions.adopt(folder / INPUTS)
    return Run(folder)


@dataclass(frozen=True)
class Batch:
    """One rollout, generated and scored; it is trained on when the loop continues."""

    rollout_id: int
    metrics: dict[str, float]  # rollout and perf metrics; run.metrics later has the others
    _refs: list[Any]

    @property
    def ranks(self) -> list[RolloutBatch]:
        """Return the rows of each trainer rank: tokens, rewards, loss masks, log-probs of the engine."""
        from slime.ray.remote import fetch

        return fetch(self._refs)


class Run:
    """A run and its folder; every property reads the files again."""

    def __init__(self, path: Path, command_line: list[str] | None = None) -> None:
        self.path = path
        self.exit_status: int | None = None  # 0: trained to the end; 130: Ctrl-C; None: neither
        self._command_line = command_line  # set until the run is started

    def __iter__(self) -> Iterator[Batch]:
        """Train, and yield each rollout before it is trained on; a run that has trained is continued.

        Leaving the loop early, by break or an error, saves and stops as Ctrl-C does.
        """
        from slime.cli.loop import steps

        argv = self._command_line or self.prepare()._command_line
        self._command_line = None
        rollouts = steps(argv, print_summary=False)
        with _remove_inputs_on_error(self.path), closing(rollouts):
            while True:
                try:
                    result = next(rollouts)
                except StopIteration as end:
                    self.exit_status = end.value
                    return
                yield Batch(result.rollout_id, dict(result.metrics), result.batch_refs)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self.metrics)} rollouts)"

    @property
    def config(self) -> dict[str, Any]:
        """Return every resolved value by the name of its flag."""
        return {n: e["value"] for n, e in read_resolved(self.path / RESOLVED_FILE).items()}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one dictionary per rollout; -1 is the evaluation before training."""
        rows: dict[int, dict[str, Any]] = {}
        for record in read_lines(self.path / METRICS_FILE):
            if type(number := record.get("rollout_id")) is int:
                row = rows.setdefault(number, {"rollout_id": number})
                row |= {name: value for name, value in record.items() if name not in RECORD_KEYS}
        return [rows[rollout_id] for rollout_id in sorted(rows)]

    def to_pandas(self) -> Any:
        """Return the metrics as a pandas DataFrame with one row per rollout."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise UserError("run.to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.metrics).set_index("rollout_id")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Return the logged samples of each rollout: prompt, response, reward, advantage, ..."""
        return list(read_lines(self.path / SAMPLES_FILE))

    @property
    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        folder = CheckpointFolder(str(self.config["save"])) if self.config.get("save") else None
        return [folder.path(number) for number in folder.rollout_ids()] if folder else []

    @property
    def model(self) -> Path:
        """Return the folder of the trained model in Hugging Face format."""
        trained = [row["rollout_id"] for row in self.metrics] or [0]
        last = max(0, *trained)
        if self.checkpoints:
            last = int(self.checkpoints[-1].name.removeprefix("iter_"))
        template = str(self.config.get("save_hf") or "none")
        if not _TEMPLATE.fullmatch(template):  # a hostile width of 10 digits takes all memory
            raise UserError(
                f"--save-hf of the run, {template[:100]!r}, is not the name of a folder"
            )
        folder = Path(template.format(rollout_id=last))
        if not folder.is_dir():
            raise UserError(f"{self.path} has no exported model: train with save_hf, to the end")
        return folder

    def resume(self, **options: Any) -> Run:
        """Continue from the last checkpoint, for example with a larger `num_rollout`."""
        for _ in self.prepare(**options):
            pass
        return self

    def prepare(self, **options: Any) -> Run:
        """Make the next iteration continue from the last checkpoint with these options; return the run."""
        if not (self.path / RESOLVED_FILE).exists() or not self.checkpoints:
            raise UserError(f"{self.path} has no checkpoint to resume from")
        given = read_own_config(self.path)
        (self.path / INPUTS).mkdir(exist_ok=True)
        values = {**given, "load": given["save"]} | {
            n: plain_value(n, v) for n, v in options.items()
        }
        self._command_line = write_config(self.path, values)
        return self

    def generate(self, prompts: Sequence[Prompt], **sampling: Any) -> list[str]:
        """Return one response of the trained model per prompt; the engine runs during this call.

        Texts are rendered as in training. `sampling` has OpenAI's names, such as max_tokens and temperature.
        """
        config = self.config
        chosen = {
            "max_tokens": config["rollout_max_response_len"],
            "temperature": config["rollout_temperature"],
            "top_p": config["rollout_top_p"],
            **sampling,
        }
        chat = config["apply_chat_template"]
        conversations = [
            [{"role": "user", "content": p}] if chat and isinstance(p, str) else p for p in prompts
        ]
        return generate_texts(self.model, conversations, chosen)

    def evaluate(
        self,
        dataset: Iterable[Mapping[str, Any]],
        reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Generate a response per row and score it, by default with the run's own functions.

        Return {"reward": the mean, "samples": [{"prompt", "response", "label", "reward"}, ...]}.
        """
        from slime.ray import python_functions

        functions = python_functions.make_functions(reward, None)
        if reward is None:
            functions = python_functions.load(self.path / INPUTS)
        config = SimpleNamespace(**self.config)
        keys = {"input_key": config.input_key, "label_key": config.label_key}
        samples = [to_sample(row, keys) for row in dataset]
        responses = self.generate([sample.prompt for sample in samples], **sampling)
        for sample, response in zip(samples, responses, strict=True):
            sample.response = response

        def score(sample: Sample) -> Any:
            value = python_functions.score(functions, config, sample)
            return asyncio.run(value) if inspect.iscoroutine(value) else value

        with ThreadPoolExecutor(32) as pool:
            rewards = list(pool.map(score, samples))
        return _evaluation(samples, rewards, config.reward_key or python_functions.REWARD_KEY)


def _evaluation(samples: list[Sample], rewards: list[Any], key: str) -> dict[str, Any]:
    numbers = [float(value[key] if isinstance(value, dict) else value) for value in rewards]
    rows = [
        {"prompt": s.prompt, "response": s.response, "label": s.label, "reward": value}
        for s, value in zip(samples, rewards, strict=True)
    ]
    return {"reward": sum(numbers) / max(1, len(numbers)), "samples": rows}


def _new_folder(run_dir: str | os.PathLike[str] | None, model: str | os.PathLike[str]) -> Path:
    name = f"{Path(model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(run_dir or Path("runs") / name).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"run_dir {folder} already exists: name a new folder, or continue that run with "
            "slime.load_run(run_dir).resume()"
        )
    return folder

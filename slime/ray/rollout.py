"""The rollout manager: data source, rollout function, group rewards, and the batches of the trainer ranks.

data source ──▶ rollout function ──▶ groups ──▶ rewards by group ──▶ one RolloutBatch
     ▲               │  ▲                                               │ dealt by dp_schedule
     └── surplus ────┘  └── HTTP ── engines                             ▼
                                                    one object per data-parallel rank
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from slime.config.arguments import Args
from slime.config.datasets import dataset_names
from slime.config.engine_groups import ServedModel, default_model, models_of
from slime.config.env import read_env
from slime.config.flags.spec import option_of
from slime.config.lora import served_adapter
from slime.core.types import ModelAddress, RolloutResult, Sample
from slime.data.images import thumbnail
from slime.data.stored_samples import load_debug_samples, save_debug_samples
from slime.data.tokenizer import token_texts
from slime.rollout.base_types import (
    DataSource,
    EvalLogFunction,
    RolloutFunction,
    RolloutLogFunction,
    as_eval_output,
    as_train_output,
)
from slime.rollout.context import RolloutContext, WeightClock
from slime.rollout.engine_pool import EnginePool
from slime.rollout.metrics import eval_metrics, rollout_metrics
from slime.rollout.train_data import samples_to_batch, split_batch
from slime.runlog.logging import open_process_log
from slime.runlog.perf_metrics import ModelShape, Timer, train_flops
from slime.runlog.sample_log import SampleLog
from slime.utils.engine_keys import remember_key
from slime.utils.http import run
from slime.utils.load_function import load_class, load_function, load_hook

_STATE_FILE = "rollout.json"
_OF_SAMPLING = ("rollout/reward_mean", "rollout/zero_std_groups")


class RolloutManager:
    """Runs in an actor with several threads: `save` can be called while `generate` runs."""

    def __init__(self, args: Args, token: str):
        open_process_log(args.run_dir, "rollout")
        self.args = args
        self.generate_rollout = load_function(
            args.rollout_function_path, flag="--rollout-function-path", protocol=RolloutFunction
        )
        self.eval_path = args.eval_function_path or args.rollout_function_path
        self.eval_rollout = load_function(
            self.eval_path, flag="--eval-function-path", protocol=RolloutFunction
        )
        source = load_class(args.data_source_path, flag="--data-source-path", protocol=DataSource)
        self.data_source: Any = source(args)
        self.pools = {model.name: self._make_pool(token, model) for model in models_of(args)}
        clock = WeightClock(interval=args.update_weights_interval)
        pool = self.pools[default_model(args).name]
        self.context = RolloutContext(pool=pool, models=self.pools, clock=clock)
        self.context.share()
        if args.rm_url:
            remember_key([args.rm_url], read_env().rm_token)
        config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
        self.shape = ModelShape.from_hf_config(config)
        self.sample_log = SampleLog(
            args.run_dir,
            limit=args.log_samples,
            decode=lambda ids: token_texts(args.hf_checkpoint, ids),
            thumbnail=thumbnail,
            datasets=dataset_names(args.prompt_data or []),
        )
        self.timer = Timer()
        self.dp_size, self.cp_size = 1, 1
        self._first_version: int | None = None  # of weights that no rollout has used yet
        # The data source's state when generation of a rollout began, by rollout id.
        self._states_before: dict[int, dict[str, Any] | None] = {}

    def set_engines(self, models: dict[str, ModelAddress]) -> None:
        """Send the requests for each model to these engines from now on, through its router if there is one.

        Running requests on other engines are retried on these.
        """
        for name, address in models.items():
            self.pools[name].set_urls(address.urls, address.router)
        up = {name: address for name, address in models.items() if address.urls}
        urls = {name: address.router or address.urls[0] for name, address in up.items()}
        self.args.set_model_routers(urls)
        default = default_model(self.args).name
        if default in urls:
            self.args.set_router(urls[default])

    def _make_pool(self, token: str, model: ServedModel) -> EnginePool:
        return EnginePool(
            [],
            token=token,
            concurrency=self.args.sglang_server_concurrency,
            deadline_s=self.args.rollout_no_engine_timeout,
            adapter=served_adapter(self.args) if model.update_weights else None,
        )

    def set_weight_version(self, version: int, next_rollout_id: int | None) -> None:
        """Note that engines hold `version`, and the first rollout generated with it, if known."""
        if next_rollout_id is None:
            self._first_version = version
        else:
            self.context.clock.set(version, next_rollout_id)

    def set_parallel(self, dp_size: int, cp_size: int) -> None:
        self.dp_size, self.cp_size = dp_size, cp_size

    # ---- work

    def generate(self, rollout_id: int) -> RolloutResult:
        with self.context.active(), self.timer.phase("generate"):
            result = self._generate(rollout_id)
        result.activity = self.timer.activity()
        return result

    def eval(self, rollout_id: int) -> dict[str, float]:
        with self.context.active(), self.timer.phase("eval"):
            return self._eval(rollout_id)

    def _generate(self, rollout_id: int) -> RolloutResult:
        self._states_before = {rollout_id: self._state(rollout_id - 1)}
        if self._first_version is not None:
            self.context.clock.set(self._first_version, rollout_id)
            self._first_version = None
        start = time.perf_counter()
        groups, extra = self._groups(rollout_id)
        seconds = time.perf_counter() - start
        samples = [sample for group in groups for sample in group]
        metrics = {**rollout_metrics(self.args, groups), **extra}
        if self.args.loss_type == "sft_loss":  # nothing was sampled, nothing was scored
            metrics = {k: v for k, v in metrics.items() if k not in _OF_SAMPLING}
        else:
            metrics["perf/rollout_tokens_per_second"] = metrics["rollout/tokens"] / seconds
        hook = self._hook("custom_rollout_log_function_path", RolloutLogFunction)
        if hook and hook(rollout_id, self.args, samples, metrics, seconds):
            metrics = {}
        save_debug_samples(self.args.save_debug_rollout_data, rollout_id, samples)
        if self.args.debug_rollout_only:
            rewards = [None if s.reward is None else s.get_reward_value(self.args) for s in samples]
            self.sample_log.log_scored(rollout_id, samples, rewards)
            return RolloutResult(rollout_id=rollout_id, metrics=metrics)
        batch = samples_to_batch(self.args, samples)
        metrics["perf/train_flops"] = train_flops(self.shape, batch.total_lens)
        self.sample_log.log_batch(rollout_id, samples, batch)
        parts = split_batch(self.args, batch, dp_size=self.dp_size, cp_size=self.cp_size)
        refs = [ray.put(part) for part in parts]
        return RolloutResult(rollout_id=rollout_id, batch_refs=refs, metrics=metrics)

    def _eval(self, rollout_id: int) -> dict[str, float]:
        result = self.eval_rollout(self.args, rollout_id, self.data_source, evaluation=True)
        output = as_eval_output(result, self.eval_path)
        for name, dataset in output.data.items():
            if dataset.samples:
                self.sample_log.log_scored(
                    rollout_id, dataset.samples, dataset.rewards, f"eval/{name}"
                )
        self.sample_log.require()
        metrics = {**eval_metrics(output.data), **output.metrics}
        hook = self._hook("custom_eval_rollout_log_function_path", EvalLogFunction)
        return {} if hook and hook(rollout_id, self.args, output.data, metrics) else metrics

    def stall_warning(self) -> str | None:
        """Return a warning if no sample has finished for a long time."""
        return self.context.progress.stall_warning()

    # ---- checkpoint

    def save(self, path: str, rollout_id: int, *, before_generate: bool = False) -> None:
        """Write the data position and buffer; with `before_generate`, as of the next rollout's start."""
        after = rollout_id + 1
        begun = before_generate and after in self._states_before
        state = self._states_before[after] if begun else self._state(rollout_id)
        self.sample_log.require()
        if state is None:
            self.data_source.save(rollout_id)
        else:
            (Path(path) / _STATE_FILE).write_text(json.dumps(state))

    def load(self, path: str, rollout_id: int) -> None:
        file = Path(path) / _STATE_FILE
        if file.exists():
            self.data_source.load_state_dict(json.loads(file.read_text()))
        else:
            self.data_source.load(rollout_id)

    # ---- parts

    def _groups(self, rollout_id: int) -> tuple[list[list[Sample]], dict[str, float]]:
        if self.args.load_debug_rollout_data:
            return load_debug_samples(self.args.load_debug_rollout_data, rollout_id), {}
        result = self.generate_rollout(self.args, rollout_id, self.data_source, evaluation=False)
        output = as_train_output(result, self.args.rollout_function_path)
        return output.samples, output.metrics

    def _hook(self, name: str, protocol: type) -> Callable[..., Any] | None:
        path = getattr(self.args, name)
        flag = option_of(name)
        return load_hook(path, flag=flag, protocol=protocol) if path else None

    def _state(self, last_trained: int) -> dict[str, Any] | None:
        """Return the data source's state; None for a user's data source that saves its state itself."""
        if not hasattr(self.data_source, "state_dict"):
            return None
        return run(self._read_state(last_trained))

    async def _read_state(self, last_trained: int) -> dict[str, Any]:
        """Read the state on the event loop, where generation takes groups, so that it is consistent."""
        return self.data_source.state_dict(last_trained)

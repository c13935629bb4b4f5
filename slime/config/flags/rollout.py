"""Flags of generation, data, evaluation and reward."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.flags.spec import flag


@dataclass(kw_only=True)
class Rollout:
    """Rollout."""

    rollout_function_path: str = flag(
        "slime.rollout.sglang_rollout.generate_rollout",
        "fn(args, rollout_id, data_source, evaluation=bool), which makes one rollout",
    )
    rollout_temperature: float = flag(1.0, "sampling temperature; above 0")
    rollout_top_p: float = flag(1.0, "nucleus sampling")
    rollout_top_k: int = flag(-1, "sample among this many likeliest tokens; -1: all")
    rollout_max_context_len: int | None = flag(
        None,
        "longest prompt and response together; default: the model's context length where "
        "--rollout-max-response-len is not given",
    )
    rollout_max_prompt_len: int | None = flag(None, "longer prompts are left out of the data")
    rollout_max_response_len: int = flag(
        None, "longest response; default: what the context length leaves"
    )
    rollout_stop: list[str] | None = flag(None, "strings that end a response")
    rollout_stop_token_ids: list[int] | None = flag(None, "token ids that end a response")
    rollout_skip_special_tokens: bool = flag(
        False, "leave special tokens out of the response's text"
    )
    rollout_shuffle: bool = flag(False, "shuffle the prompts anew in every epoch")
    rollout_seed: int = flag(42, "seed of shuffling and sampling")
    over_sampling_batch_size: int = flag(
        None,
        "prompts taken at a time while the groups under way cannot fill the batch; once it is full the "
        "others are ended and go back to the data source. Fully asynchronous: groups under way. Default: "
        "--rollout-batch-size",
    )
    dynamic_sampling_filter_path: str | None = flag(
        None, "fn(args, samples) -> keep this group? Rejected groups are replaced by new ones"
    )
    partial_rollout: bool = flag(False, "keep responses cut off by an abort and finish them later")
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "do not train on the part of a response that older weights generated"
    )
    custom_generate_function_path: str | None = flag(
        None, "async fn(args, sample, sampling_params) -> Sample or list of them"
    )
    buffer_filter_path: str | None = flag(
        None, "fn(args, rollout_id, buffer, num_samples) -> groups taken out of the buffer"
    )
    rollout_sample_filter_path: str | None = flag(
        None, "fn(args, groups) that sets sample.remove_sample"
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "fn(args, all_groups, data_source), which sees rejected groups too"
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "fn(args, rollout_id, rollout_data), in the trainer after the advantages"
    )
    sglang_server_concurrency: int = flag(512, "requests in flight per engine")
    rollout_external: bool = flag(False, "use engines that already run")
    rollout_external_engine_addrs: list[str] | None = flag(None, "their addresses")
    max_weight_staleness: int | None = flag(
        None, "updates that a sample's weights may lie behind (asynchronous training)"
    )


@dataclass(kw_only=True)
class Data:
    """Data and batches."""

    num_rollout: int = flag(None, "rollouts of the run; or --num-epoch")
    num_epoch: int | None = flag(None, "passes over the data; or --num-rollout")
    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", "class that hands out prompts"
    )
    prompt_data: list[str] | None = flag(
        None, "jsonl or parquet: path, path@[0:100], path:weight=2, or reasoning-gym:<task>"
    )
    apply_chat_template: bool = flag(False, "render the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "further arguments of it, as JSON")
    input_key: str = flag("input", "key of the prompt in the data")
    label_key: str | None = flag(None, "key of the label")
    metadata_key: str = flag("metadata", "key of the metadata")
    tool_key: str = flag("tools", "key of the tools given to the chat template")
    start_rollout_id: int | None = flag(
        None, "first rollout; default: the one after the loaded checkpoint's, else 0"
    )
    rollout_batch_size: int = flag(None, "prompts per rollout")
    n_samples_per_prompt: int = flag(1, "responses per prompt, a group")
    global_batch_size: int = flag(
        None,
        "samples per optimizer step; rollout-batch-size x n-samples-per-prompt = "
        "global-batch-size x num-steps-per-rollout",
    )
    num_steps_per_rollout: int = flag(None, "optimizer steps per rollout")
    micro_batch_size: int = flag(1, "samples per forward pass, without --use-dynamic-batch-size")
    balance_data: bool = flag(
        False, "spread samples over ranks so that their token counts are equal"
    )
    use_dynamic_batch_size: bool = flag(
        False, "fill each forward pass up to --max-tokens-per-gpu; never changes the loss"
    )
    max_tokens_per_gpu: int | None = flag(
        None,
        "tokens per GPU and forward pass; with context parallelism the group shares that much each",
    )
    log_probs_max_tokens_per_gpu: int = flag(
        None, "the same for passes without gradients; default: --max-tokens-per-gpu"
    )


@dataclass(kw_only=True)
class Eval:
    """Evaluation."""

    eval_interval: int | None = flag(None, "rollouts between two evaluations")
    eval_prompt_data: list[str] | None = flag(None, "NAME PATH pairs")
    eval_config: str | None = flag(
        None, "YAML with defaults and datasets, for settings of their own"
    )
    skip_eval_before_train: bool = flag(False, "do not evaluate before the first rollout")
    eval_function_path: str = flag(
        None, "rollout function of evaluations; default: --rollout-function-path"
    )
    n_samples_per_eval_prompt: int = flag(1, "responses per prompt; pass@k is logged up to it")
    eval_temperature: float = flag(None, "default: --rollout-temperature; 0 is greedy")
    eval_top_p: float = flag(None, "default: --rollout-top-p")
    eval_top_k: int = flag(None, "default: --rollout-top-k")
    eval_max_response_len: int = flag(None, "default: --rollout-max-response-len")
    eval_input_key: str = flag(None, "default: --input-key")
    eval_label_key: str | None = flag(None, "default: --label-key")


@dataclass(kw_only=True)
class Reward:
    """Reward."""

    rm_type: str | None = flag(
        None,
        "built-in reward: deepscaler, dapo, math, f1, gpqa, ifbench, remote_rm, random, code or "
        "reasoning_gym; boxed_<type> applies it to the boxed text only",
    )
    allow_row_rm_types: list[str] = flag(
        [],
        "reward types, beside --rm-type, that a data row may choose in metadata['rm_type']; a row "
        "that asks for any other is refused",
    )
    reward_key: str | None = flag(None, "key of the number, where the reward is a dictionary")
    eval_reward_key: str | None = flag(None, "the same for evaluations; default: --reward-key")
    group_rm: bool = flag(False, "score a group at a time")
    rm_url: str | None = flag(None, "address that remote_rm posts to")
    allow_unsandboxed_code: bool = flag(
        False,
        "run programs of the model and graders without a sandbox, with limits of time and memory "
        "only",
    )
    custom_rm_path: str | None = flag(
        None, "fn(args, sample) -> reward, async or not; with --group-rm fn(args, samples) -> list"
    )
    custom_reward_post_process_path: str | None = flag(
        None, "fn(args, samples) -> (raw_rewards, rewards) in place of the normalisation by group"
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "fn(args, samples) -> dictionary of columns"
    )

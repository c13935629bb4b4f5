"""Flags of generation, data, evaluation and reward."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from slime.config.flags.spec import Condition, differs, equals, flag, is_set
from slime.config.reward_types import REWARD_TYPES, Grading

PLAIN_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
ASYNC_ROLLOUT = "slime.rollout.fully_async_rollout.generate_rollout"
DEFAULT_STALENESS = 1  # updates that fully asynchronous generation may run ahead
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
OPD_REWARD = "slime.rollout.on_policy_distillation.reward_func"
PLAIN_SOURCE = "slime.rollout.data_source.RolloutDataSource"
_OWN_ROLLOUT = differs("rollout_function_path", PLAIN_ROLLOUT)
_SFT = equals("rollout_function_path", SFT_ROLLOUT)
_eval_flag = partial(flag, needs="eval_interval")
WITHOUT_ENGINE = Condition(
    names=("rollout_function_path",),
    holds=lambda values: (
        values["rollout_function_path"]
        not in (PLAIN_ROLLOUT, ASYNC_ROLLOUT, f"{ASYNC_ROLLOUT}_fully_async")
    ),
    text="a --rollout-function-path that needs no engine",
)


@dataclass(kw_only=True)
class Rollout:
    """Rollout."""

    rollout_function_path: str = flag(
        PLAIN_ROLLOUT,
        "fn(args, rollout_id, data_source, evaluation=bool) that generates one rollout",
    )
    rollout_temperature: float = flag(
        1.0,
        "sampling temperature",
        above=0,
        hint="training needs samples, not the most likely token; --eval-temperature 0 makes evaluations "
        "greedy",
    )
    rollout_top_p: float = flag(
        1.0,
        "nucleus sampling: the smallest set of tokens with this probability; log-probs stay those of "
        "all tokens, so values below 1 bias importance ratios",
        above=0,
        max=1,
    )
    rollout_top_k: int = flag(
        -1,
        "sample from the k most likely tokens; -1: from all. Log-probs as with --rollout-top-p",
        min=1,
        special=-1,
    )
    rollout_max_context_len: int | None = flag(
        None,
        "maximum tokens of prompt and response together; default: the model's context length "
        "if --rollout-max-response-len is not given",
    )
    rollout_max_prompt_len: int | None = flag(
        None, "maximum tokens of a prompt; longer prompts are removed from the data", min=1
    )
    rollout_max_response_len: int = flag(
        None, "maximum tokens of a response; default: what the context length leaves", min=1
    )
    rollout_stop: list[str] | None = flag(None, "strings that end a response")
    rollout_stop_token_ids: list[int] | None = flag(None, "token ids that end a response")
    rollout_skip_special_tokens: bool = flag(
        False, "remove special tokens from the text of a response"
    )
    rollout_shuffle: bool = flag(False, "shuffle the prompts in every epoch")
    rollout_seed: int = flag(42, "random seed of shuffling and sampling")
    over_sampling_batch_size: int = flag(
        None,
        "prompts taken from the data source at a time, whenever kept and running groups together "
        "are fewer than --rollout-batch-size; once the batch is full, running groups are aborted "
        "and go back to the data source. Default: --rollout-batch-size. Fully asynchronous rollouts: maximum "
        "number of running groups; default: --rollout-batch-size x (--max-weight-staleness + 1)",
        unless=_SFT,
    )
    dynamic_sampling_filter_path: str | None = flag(
        None,
        "fn(args, samples) that decides whether to keep a group; rejected groups are replaced by "
        "new ones",
        unless=_SFT,
    )
    partial_rollout: bool = flag(
        False,
        "keep the responses of aborted groups and continue them in a later rollout",
        unless=_SFT,
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False,
        "do not train on the tokens of a response that older weights generated",
        needs=is_set("partial_rollout") | _OWN_ROLLOUT,
    )
    custom_generate_function_path: str | None = flag(
        None, "async fn(args, sample, sampling_params) -> Sample or list of samples"
    )
    buffer_filter_path: str | None = flag(
        None,
        "fn(args, rollout_id, buffer, num_samples) -> groups taken from the buffer",
        unless=equals("data_source_path", PLAIN_SOURCE, note="which has no buffer"),
    )
    rollout_sample_hook_path: str | None = flag(
        None,
        "fn(args, sample) -> None, Sample or list of samples, async or not: called once for each "
        "finished sample of training, with its reward and before the filters",
        unless=_SFT,
    )
    rollout_sample_filter_path: str | None = flag(
        None, "fn(args, groups) that sets sample.remove_sample", unless=_SFT
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "fn(args, all_groups, data_source), which also sees rejected groups", unless=_SFT
    )
    sglang_server_concurrency: int = flag(512, "maximum concurrent requests per engine", min=1)
    rollout_external: bool = flag(
        False, "use engines that are already running; --rollout-external-engine-addrs implies it"
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None, "addresses of engines that are already running, as HOST:PORT"
    )
    sglang_config: str | None = flag(
        None,
        "YAML file with the models that engines serve, which of them receive weights, and groups of "
        "engines with their GPUs and SGLang options (docs/engines.md)",
    )
    prefill_num_servers: int | None = flag(
        None,
        "engines that only prefill; the remaining ones only decode (SGLang's PD disaggregation)",
        min=1,
        excludes="sglang_config",
    )
    sglang_router_ip: str | None = flag(
        None,
        "address of a running sglang-router (port: --sglang-router-port) that the engines register with "
        "and that gets all requests; default: slime starts its own",
    )
    sglang_router_port: int | None = flag(
        None,
        "port of the router at --sglang-router-ip, or of the one that slime starts",
        min=1,
        max=65535,
    )
    rollout_buffer_url: str | None = flag(
        None,
        "address of a service with finished trajectories, for a rollout function that reads it",
        needs=_OWN_ROLLOUT,
    )
    rollout_data_transport: str | None = flag(
        None, "", ignored="rollouts reach the trainer through Ray's object store"
    )
    max_weight_staleness: int | None = flag(
        None,
        "weight updates that a token may be behind when it is trained on (asynchronous training); "
        "older tokens are masked, groups with a response of only such tokens are generated again",
        unless=_SFT,
    )


@dataclass(kw_only=True)
class Data:
    """Data."""

    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", "class that provides the prompts"
    )
    prompt_data: list[str] | None = flag(
        None,
        "jsonl or parquet: path, path@[0:100], path:weight=2, reasoning-gym:<task>, or a dataset of the Hugging "
        "Face Hub, such as openai/gsm8k",
    )
    apply_chat_template: bool = flag(False, "render the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag(
        {},
        "additional arguments of the chat template, as JSON",
        needs=is_set("apply_chat_template")
        | is_set("custom_generate_function_path")
        | _OWN_ROLLOUT,
    )
    input_key: str = flag("input", "key of the prompt in the data")
    label_key: str | None = flag(None, "key of the label in the data")
    metadata_key: str = flag("metadata", "key of the metadata in the data")
    tool_key: str = flag("tools", "key of the tools that are passed to the chat template")
    multimodal_keys: dict[str, Any] = flag(
        {},
        'train with images: {"image": KEY}, the key of a row\'s images. The prompt has one <image> per '
        "image, or messages with parts of type image, which may hold their image themselves",
    )
    limit_mm_data_per_request: dict[str, Any] = flag(
        {},
        'maximum number of images of one sample, {"image": 4}; default: no limit',
        needs="multimodal_keys",
    )
    allowed_local_media_path: str | None = flag(
        None,
        "folder from which rows may load images, besides the folder of their data file; / allows all files",
        needs="multimodal_keys",
    )
    rollout_batch_size: int = flag(
        None, "prompts per rollout", min=1, required="the number of prompts per rollout"
    )
    n_samples_per_prompt: int = flag(1, "responses per prompt; together they are a group", min=1)


@dataclass(kw_only=True)
class Eval:
    """Evaluation."""

    eval_interval: int | None = flag(
        None,
        "rollouts between two evaluations; another one follows the last rollout",
        min=1,
        unless=is_set("debug_train_only", note="which starts no engine"),
    )
    eval_prompt_data: list[str] | None = _eval_flag(None, "evaluation datasets, as NAME PATH pairs")
    eval_config: str | None = _eval_flag(
        None, "YAML file with evaluation datasets and settings for each of them"
    )
    skip_eval_before_train: bool = _eval_flag(False, "do not evaluate before the first rollout")
    eval_function_path: str = _eval_flag(
        None, "rollout function of evaluations; default: --rollout-function-path"
    )
    n_samples_per_eval_prompt: int = _eval_flag(
        1, "responses per prompt; pass@k is logged up to this k", min=1
    )
    eval_temperature: float = _eval_flag(
        None, "sampling temperature, 0 for greedy; default: --rollout-temperature", min=0
    )
    eval_top_p: float = _eval_flag(
        None, "nucleus sampling; default: --rollout-top-p", above=0, max=1
    )
    eval_top_k: int = _eval_flag(None, "default: --rollout-top-k", min=1, special=-1)
    eval_max_response_len: int = _eval_flag(
        None, "maximum tokens of a response; default: --rollout-max-response-len", min=1
    )
    eval_max_context_len: int | None = _eval_flag(
        None,
        "maximum tokens of prompt and response together; default: --rollout-max-context-len",
        min=2,
    )
    eval_max_prompt_len: int | None = _eval_flag(
        None, "maximum tokens of a prompt; longer prompts are removed from the data", min=1
    )
    eval_min_new_tokens: int | None = _eval_flag(None, "minimum tokens of a response", min=0)
    eval_tool_key: str | None = _eval_flag(None, "key of the tools; default: --tool-key")
    eval_input_key: str = _eval_flag(None, "key of the prompt; default: --input-key")
    eval_label_key: str | None = _eval_flag(None, "key of the label; default: --label-key")


@dataclass(kw_only=True)
class Reward:
    """Reward."""

    rm_type: str | None = flag(
        None,
        "built-in reward: "
        + ", ".join(REWARD_TYPES)
        + "; boxed_<type> grades the text inside \\boxed{} only",
    )
    allow_row_rm_types: list[str] = flag(
        [],
        "reward types, in addition to --rm-type, that a data row may choose in "
        "metadata['rm_type']; any other raises an error",
    )
    rm_grading: Grading = flag(
        "lenient",
        f"grading of --rm-type {', '.join(n for n, kind in REWARD_TYPES.items() if kind.strict)}: "
        "`strict` as published, to compare reward curves with other frameworks; `strict_box` also has "
        "dapo read the last \\boxed{}",
    )
    reward_key: str | None = flag(
        None, "key of the reward, if the reward function returns a dictionary"
    )
    eval_reward_key: str | None = _eval_flag(
        None, "the same for evaluations; default: --reward-key"
    )
    group_rm: bool = flag(
        False,
        "score all samples of a group in one call",
        needs=is_set("custom_rm_path", note="built-in rewards score one sample at a time"),
    )
    rm_url: str | None = flag(
        None,
        "address of the service that --rm-type remote_rm posts to, or of the teacher of "
        "--opd-type sglang",
    )
    allow_unsandboxed_code: bool = flag(
        False,
        "run programs that the model wrote, and graders, without a sandbox, limited only in "
        "time and memory",
    )
    custom_rm_path: str | None = flag(
        None,
        "fn(args, sample) -> reward, async or not; with --group-rm fn(args, samples) -> list of "
        "rewards",
    )
    reward_num_threads: int = flag(
        32,
        "concurrent calls of a --custom-rm-path that is not async, each in a thread",
        min=1,
    )
    custom_reward_post_process_path: str | None = flag(
        None,
        "fn(args, samples) -> (raw_rewards, rewards), which replaces the normalisation by group",
        unless=is_set("custom_convert_samples_to_train_data_path", note="which does that"),
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None,
        "fn(args, samples) -> dictionary of columns, which replaces the conversion to training "
        "data",
    )

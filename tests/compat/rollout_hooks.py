"""Hooks of the rollout side, written as for earlier versions: imports, signatures and forms of use.

Each appends what it saw to the file `args.hook_log`, a key of --custom-config-path.
"""

import json
import time

from slime.rollout.base_types import RolloutFnEvalOutput, call_rollout_fn
from slime.rollout.data_source import DataSource, RolloutDataSource
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.http_utils import get, post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample


def note(args, hook, **facts):
    with open(args.hook_log, "a") as file:
        file.write(json.dumps({"hook": hook, **facts}) + "\n")


class Calls(metaclass=SingletonMeta):
    def __init__(self):
        self.count = 0


async def generate(args, sample: Sample, sampling_params) -> Sample:
    """Two turns against the router, with the output of a tool between them."""
    state = GenerateState(args)
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    for turn in range(2):
        params = {**sampling_params, "max_new_tokens": 3}
        payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        async with state.semaphore:
            output = await post(f"{router}/generate", payload)
        meta = output["meta_info"]
        ids = [item[1] for item in meta["output_token_logprobs"]]
        log_probs = [item[0] for item in meta["output_token_logprobs"]]
        sample.append_response_tokens(
            args,
            tokens=ids,
            log_probs=log_probs,
            trainable=True,
            meta_info=meta,
            text=output["text"],
        )
        if state.aborted or meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        if turn == 0:
            started = time.time()
            tool = state.tokenizer("ok", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=tool, trainable=False, text="ok")
            sample.non_generation_time += time.time() - started
    Calls().count += 1
    if Calls().count == 1:
        info = await get(f"{router}/get_model_info")
        names = [
            type(load_tokenizer(args.hf_checkpoint)).__name__,
            load_processor(args.hf_checkpoint),
        ]
        same = load_function("tests.compat.rollout_hooks.generate") is generate
        note(
            args,
            "generate",
            model=info["model_path"],
            loaded=names,
            same=same,
            params=state.sampling_params,
        )
    return sample


async def reward_func(args, sample, **kwargs):
    trained = [
        t
        for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
        if m
    ]
    score = sum(token % 2 == 0 for token in trained) / len(trained)
    dapo = compute_score(f"{sample.response} Answer: 5", sample.label or "5")
    same = grade_answer_mathd(extract_answer(r"\boxed{0.5}") or "", r"\frac{1}{2}")
    return {"score": score, "acc": dapo["acc"] and same, "length": sample.effective_response_length}


def keep_group(args, samples, **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    args.groups_seen = getattr(args, "groups_seen", 0) + 1
    note(
        args, "filter", rewards=rewards, knob=getattr(args, "my_knob", None), seen=args.groups_seen
    )
    return DynamicFilterOutput(keep=True, reason=None)


def mark_samples(args, data):
    for group in data:
        group[0].remove_sample = True
    note(args, "sample_filter", groups=len(data))


def all_samples(args, all_samples, data_source):
    note(args, "all_samples", groups=len(all_samples), source=type(data_source).__name__)


def post_process_rewards(args, samples, **kwargs):
    raw = [sample.get_reward_value(args) for sample in samples]
    mean = sum(raw) / len(raw)
    note(args, "rewards", raw=raw)
    return raw, [reward - mean for reward in raw]


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    rollout_extra_metrics["rollout/my_tokens"] = sum(s.effective_response_length for s in samples)
    return False


def evaluate(args, rollout_id, data_source, evaluation=False):
    """An evaluation of two samples by `generate_and_rm`, as a dictionary per dataset."""
    group = data_source.get_samples(1)[0][:2]
    params = GenerateState(args).sampling_params
    samples = [run(generate_and_rm(args, group[0], params, evaluation=True))]
    samples += run(generate_and_rm_group(args, group[1:], params, evaluation=True))
    assert all(sample.reward["acc"] for sample in samples)
    result = {
        "rewards": [sample.get_reward_value(args) for sample in samples],
        "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }
    inner = call_rollout_fn(lambda *_, evaluation: {"own": result}, args, evaluation=True)
    return RolloutFnEvalOutput(data={"own": result, "again": inner.data["own"]}, metrics=None)


def log_eval(rollout_id, args, data, extra_metrics):
    note(args, "eval_log", rewards=data["own"]["rewards"], names=sorted(data))


class Numbers(DataSource):
    """Groups without a file."""

    def __init__(self, args):
        self.args, self.group, self.returned = args, 0, []

    def get_samples(self, num_samples):
        return [self.returned.pop(0) if self.returned else self._new() for _ in range(num_samples)]

    def _new(self):
        count = self.args.n_samples_per_prompt
        group = [
            Sample(prompt=f"{self.group}+1=", group_index=self.group, index=self.group * count + i)
            for i in range(count)
        ]
        self.group += 1
        return group

    def add_samples(self, samples):
        self.returned += samples

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass

    def __len__(self):
        return 1000


class Shortened(RolloutDataSource):
    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for sample in (sample for group in groups for sample in group):
            sample.metadata["from"] = "Shortened"
        return groups


async def group_reward(args, samples, **kwargs):
    note(args, "group_reward", count=len(samples), source=samples[0].metadata.get("from"))
    return [float(sample.tokens[-1] % 2) for sample in samples]


def convert(args, samples):
    note(args, "convert", samples=len(samples))
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.get_reward_value(args) for sample in samples],
        "raw_reward": [sample.get_reward_value(args) for sample in samples],
        "truncated": [int(s.status == Sample.Status.TRUNCATED) for s in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask or [1] * sample.response_length for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def from_buffer(args, rollout_id, data_source, evaluation=False):
    """A rollout function for --rollout-buffer-url, which it reads; the samples come from the engines."""
    assert args.rollout_buffer_url == "http://127.0.0.1:8889"
    generate = load_function("slime.rollout.sglang_rollout.generate_rollout")
    return call_rollout_fn(generate, args, rollout_id, data_source, evaluation=evaluation)

"""The rollout function against real engine processes: tokens and log-probs are the model's own."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.core.types import Status
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine_pool import EnginePool
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http import run
from tests.engines import TOKEN, engine_server
from tests.prompts import flat, rollout_args, sums
from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def engines(checkpoint):
    options = ("--enable-deterministic-inference", "--random-seed", "0")
    with engine_server(checkpoint, *options) as one, engine_server(checkpoint, *options) as two:
        yield [one.url, two.url]


@pytest.fixture
def pool(engines, use_pool):
    installed = EnginePool(engines, token=TOKEN)
    use_pool(installed)
    return installed


def make(tmp_path, checkpoint, **overrides):
    return rollout_args(
        tmp_path, sums(20), hf_checkpoint=str(checkpoint), rollout_temperature=0.7, **overrides
    )


def hf_log_probs(model, sample, temperature):
    """Log-probs of the response tokens by one plain forward pass."""
    tokens = torch.tensor([sample.tokens])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1].float() / temperature
    chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return chosen[-sample.response_length :]


def check_against_hf(checkpoint, samples):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for sample in samples:
        expected = hf_log_probs(model, sample, 0.7)
        gap = (torch.tensor(sample.rollout_log_probs) - expected).abs().max()
        assert gap < 1e-4, (sample.index, gap)


def test_log_probs_are_those_of_the_model(tmp_path, checkpoint, pool):
    args = make(tmp_path, checkpoint, rollout_batch_size=6, n_samples_per_prompt=4)
    samples = flat(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)))
    assert [s.index for s in samples] == list(range(24))
    for sample in samples:
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert (sample.status == Status.TRUNCATED) == (sample.tokens[-1] != 257)
        assert len(sample.weight_versions) == sample.response_length
        assert "<|eos|>" not in sample.response
    check_against_hf(checkpoint, samples)
    assert len({tuple(s.tokens) for s in samples}) > 20  # samples of a group differ


def test_stop_strings_stay_in_the_text_and_the_end_token_does_not(tmp_path, checkpoint, pool):
    stops = list("bciuf ,;")  # letters that are in the name of no special token
    args = make(
        tmp_path, checkpoint, rollout_batch_size=8, n_samples_per_prompt=8, rollout_stop=stops,
        rollout_max_response_len=400,
    )  # fmt: skip
    samples = flat(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)))
    ended = [s for s in samples if s.tokens[-1] == 257]
    stopped = [s for s in samples if s.status == Status.COMPLETED and s.tokens[-1] != 257]
    assert stopped and all(s.response[-1] in stops for s in stopped)
    assert all("<|eos|>" not in s.response for s in ended)


def test_deterministic_mode_does_not_depend_on_engines_or_concurrency(
    tmp_path, checkpoint, engines, use_pool
):
    def samples(urls, concurrency):
        use_pool(EnginePool(urls, token=TOKEN, concurrency=concurrency))
        args = make(tmp_path, checkpoint, rollout_batch_size=4, n_samples_per_prompt=4)
        args = args.replace(deterministic=True)
        output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
        return [(s.index, s.tokens, s.rollout_log_probs, s.reward) for s in flat(output)]

    alone = samples(engines[:1], 1)
    assert samples(engines, 3) == alone
    assert samples(engines[1:], 64) == alone


def test_surplus_is_aborted_and_the_engines_are_idle_again(tmp_path, checkpoint, pool):
    args = make(
        tmp_path, checkpoint, rollout_batch_size=2, over_sampling_batch_size=12,
        n_samples_per_prompt=4, rollout_max_response_len=400,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert len(output.samples) == 2 and len(source.buffer) == 10
    taken = sorted(g[0].group_index for g in [*output.samples, *source.buffer])
    assert taken == list(range(12))
    assert sum(pool.in_flight.values()) == 0
    start = time.monotonic()
    one = make(tmp_path, checkpoint, rollout_batch_size=1, n_samples_per_prompt=1)
    generate_rollout(one, 1, RolloutDataSourceWithBuffer(one))
    assert time.monotonic() - start < 60  # nothing left over that it would queue behind


def partial_responses(source):
    return {
        s.index: (list(s.tokens), list(s.rollout_log_probs))
        for group in source.buffer
        for s in group
        if s.status == Status.ABORTED and s.response_length
    }


def test_partial_responses_are_continued_with_the_right_log_probs(tmp_path, checkpoint, pool):
    args = make(
        tmp_path, checkpoint, rollout_batch_size=2, over_sampling_batch_size=12,
        n_samples_per_prompt=2, rollout_max_response_len=300,
    ).replace(partial_rollout=True)  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    partial: dict[int | None, tuple[list[int], list[float]]] = {}
    for rollout_id in range(10):  # while this process stalls, the engines may come to all ends
        generate_rollout(args, rollout_id, source)
        partial = partial_responses(source)
        if partial:
            break
    assert partial
    args = args.replace(over_sampling_batch_size=10, rollout_batch_size=10)
    samples = flat(generate_rollout(args, 10, source))
    continued = [s for s in samples if s.index in partial]
    assert continued
    for sample in continued:
        tokens, log_probs = partial[sample.index]
        assert sample.tokens[: len(tokens)] == tokens and len(sample.tokens) > len(tokens)
        assert sample.rollout_log_probs[: len(log_probs)] == log_probs
        assert sample.response_length <= 300
    check_against_hf(checkpoint, continued)


def test_an_abort_from_outside_does_not_reach_the_samples(tmp_path, checkpoint, pool):
    args = make(
        tmp_path, checkpoint, rollout_batch_size=4, n_samples_per_prompt=2,
        rollout_max_response_len=200,
    )  # fmt: skip
    stop = threading.Event()

    def disturb():
        for _ in range(3):
            if not stop.wait(0.15):
                run(pool.abort_all())

    disturber = threading.Thread(target=disturb)
    disturber.start()
    samples = flat(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)))
    stop.set()
    disturber.join()
    assert {s.status for s in samples} <= {Status.COMPLETED, Status.TRUNCATED}
    check_against_hf(checkpoint, samples)

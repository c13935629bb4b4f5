"""The interface of Sample that hooks of earlier versions use, and the files that they wrote."""

import argparse
import base64
import datetime
import json
import pickle

import numpy as np
import pytest
import torch

from slime.core.errors import ConfigError
from slime.core.types import Sample, Status
from slime.data.stored_samples import decode_groups, encode_groups, load_debug_samples
from tests.args import make_args
from tests.compat.test_runs import earlier_record


def reply(**changes):
    meta = {
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "finish_reason": {"type": "stop"},
        "weight_version": "3",
    }
    return {**meta, **changes}


def test_tokens_with_the_reply_of_an_engine():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(
        make_args(), tokens=[7, 8], log_probs=[-0.5, -0.25], meta_info=reply(), text="ab"
    )
    assert sample.tokens == [1, 2, 7, 8] and sample.response == "ab"
    assert sample.rollout_log_probs == [-0.5, -0.25] and sample.loss_mask == [1, 1]
    assert sample.weight_versions == [3, 3] and sample.status is Status.COMPLETED
    sample.append_response_tokens(make_args(), tokens=[5], trainable=False, text="!")
    assert sample.loss_mask == [1, 1, 0] and sample.response == "ab!"
    assert (sample.response_length, sample.effective_response_length) == (3, 2)


def test_tokens_and_log_probs_come_from_the_reply_if_not_given():
    sample = Sample(tokens=[1])
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    sample.append_response_tokens(
        meta_info=reply(weight_versions=spans, finish_reason={"type": "length"})
    )
    assert sample.tokens == [1, 7, 8] and sample.rollout_log_probs == [-0.5, -0.25]
    assert sample.weight_versions == [3, 4] and sample.status is Status.TRUNCATED


def test_experts_of_the_reply(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_experts_per_tok": 2}')
    chosen = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    meta = reply(routed_experts=base64.b64encode(chosen.tobytes()).decode())
    args = argparse.Namespace(use_rollout_routing_replay=True, hf_checkpoint=str(tmp_path))
    sample = Sample(tokens=[1])
    sample.append_response_tokens(args, meta_info=meta)
    np.testing.assert_array_equal(sample.rollout_routed_experts, chosen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1], "log_probs": [0.1, 0.2]}, "1 tokens but 2 log_probs"),
        ({"tokens": [1]}, "trainable tokens need the log-probs"),
        ({"text": "a"}, "needs tokens"),
        ({"tokens": [1, 2, 3], "meta_info": reply()}, "3 tokens but 2 log_probs"),
    ],
)
def test_columns_that_would_not_be_aligned(arguments, message):
    sample = Sample(tokens=[1])
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(None, **arguments)
    assert sample == Sample(tokens=[1])


def test_rewards_by_args():
    args = argparse.Namespace(reward_key="score")
    assert Sample(reward={"score": 2, "acc": 1}).get_reward_value(args) == 2.0
    assert Sample(reward=0.5).get_reward_value(args) == 0.5
    assert Sample(reward={"score": 2}).get_reward_value("score") == 2.0
    with pytest.raises(KeyError, match="--reward-key is None"):
        Sample(reward={"score": 2}).get_reward_value(make_args())


def test_records_with_further_keys():
    sample = Sample.from_dict(earlier_record(3))
    assert (
        sample.prefix_cache_info == {"cached_tokens": 3} and sample.multimodal_train_inputs is None
    )
    assert sample.clone().prefix_cache_info == {"cached_tokens": 3}
    assert Sample.from_dict(sample.to_dict()) == sample
    assert sample.to_dict()["spec_info"] == {"spec_accept_token_num": 0}


def test_keys_that_would_replace_a_method():
    record = {**earlier_record(0), "clone": 1, "get_reward_value": "x", "_private": 2}
    sample = Sample.from_dict(record)
    assert sample.clone().get_reward_value(None) == 0.0 and not hasattr(sample, "_private")


def test_attributes_of_hooks_survive_a_checkpoint():
    sample = Sample(group_index=0, index=1, prompt="a")
    sample.turns, sample.connection = [{"tool": "x"}], object()
    ((stored,),) = decode_groups(json.loads(json.dumps(encode_groups([[sample]]))))
    assert stored.turns == [{"tool": "x"}]
    assert not hasattr(stored, "connection")  # what is no data is made again by the hook


def test_debug_files_of_other_versions(tmp_path):
    torch.save({"samples": [earlier_record(i) for i in range(8)]}, tmp_path / "0.pt")
    groups = load_debug_samples(str(tmp_path / "{rollout_id}.pt"), 0)
    assert [[sample.index for sample in group] for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups[0][0].weight_versions == [1, 1] and groups[0][0].status is Status.COMPLETED


class Hostile:
    def __reduce__(self):
        return (print, ("this ran",))


def test_a_debug_file_that_would_run_code(tmp_path, capsys):
    torch.save({"samples": [{**earlier_record(0), "metadata": Hostile()}]}, tmp_path / "0.pt")
    with pytest.raises(ConfigError, match=r"--load-debug-rollout-data: .*could run code"):
        load_debug_samples(str(tmp_path / "0.pt"), 0)
    (tmp_path / "1.pt").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ConfigError, match="could run code"):
        load_debug_samples(str(tmp_path / "1.pt"), 0)
    assert "this ran" not in capsys.readouterr().out


def test_attributes_of_hooks_that_are_no_json_do_not_stop_a_checkpoint():
    sample = Sample(tokens=[1, 2])
    sample.seen_at, sample.turns = datetime.datetime(2026, 1, 1), [1, 2]
    stored = json.loads(json.dumps(encode_groups([[sample]])))
    assert decode_groups(stored)[0][0].turns == [1, 2]

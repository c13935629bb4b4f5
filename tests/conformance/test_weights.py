"""Weight updates by every transport, with the code trainers send them with, to both engines."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.core.errors import WeightMismatchError
from slime.core.types import EngineInfo, Probe
from slime.serving.servers import answers, check_probe, health_route
from slime.utils.sync_http import post_json
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.engine_client import LivenessProbe
from slime.weights.hf_folder import DiskTransport
from slime.weights.sglang_transport import SGLangTensorTransport
from slime.weights.sync import WeightSync
from slime.weights.transport import TensorTransport, WeightSyncError
from tests.conformance.calls import (
    GREEDY,
    Running,
    control_refusal,
    flush,
    generate,
)
from tests.conformance.conftest import LABEL, Subject
from tests.conformance.differences import skip_where_different
from tests.conformance.reference import check_greedy, greedy, log_probs
from tests.engines import ROOM, TOKEN, EngineServer, engine_server
from tests.waiting import wait_for

IDS = [10, 20, 30]
CPU = torch.device("cpu")


def transport(name: str, subject: Subject, folder: Path):
    if name == "disk":
        return DiskTransport(folder, subject.checkpoint)
    if name == "distributed":
        return DistributedTransport(host="127.0.0.1", backend="gloo")
    return (SGLangTensorTransport if subject.kind == "sglang" else TensorTransport)(CPU)


def buckets(checkpoint: Path, size: int = 5):
    tensors = list(load_file(checkpoint / "model.safetensors").items())
    return [tensors[start : start + size] for start in range(0, len(tensors), size)]


def restore(subject: Subject) -> None:
    """Back to the weights and the version every other test expects."""
    body = {"model_path": str(subject.checkpoint), "weight_version": LABEL}
    assert subject.server.post("/update_weights_from_disk", body)["success"]
    subject.server.post("/continue_generation")


@pytest.fixture
def updated(subject: Subject):
    yield subject
    restore(subject)


@pytest.mark.parametrize("name", ["tensor", "distributed", "disk"])
def test_every_transport_brings_new_weights_and_proves_it(
    updated, other_checkpoint, tmp_path, name
):
    subject = updated
    sync = WeightSync(transport(name, subject, tmp_path), token=TOKEN)
    for version, checkpoint in (
        (7, other_checkpoint),
        (8, subject.checkpoint),
        (9, other_checkpoint),
    ):
        prompt = list(range(60, 90))
        generate(subject, input_ids=prompt, sampling_params=GREEDY)  # leaves a prefix in the cache
        report = sync.update(buckets(checkpoint), [subject.info], version)
        assert report.num_buckets == len(buckets(checkpoint))
        reply = generate(subject, input_ids=prompt, sampling_params=GREEDY)
        assert reply["output_ids"] == greedy(checkpoint, prompt, 12)
        assert reply["meta_info"]["cached_tokens"] == 0
        assert reply["meta_info"]["weight_version"] == str(version)


@pytest.mark.parametrize("name", ["tensor", "distributed", "disk"])
def test_a_tensor_that_is_not_what_was_sent_stops_the_run(
    updated, other_checkpoint, tmp_path, name
):
    """The engine gets all but one tensor: it keeps the old one, and its sums say so."""
    subject = updated
    sync = WeightSync(transport(name, subject, tmp_path), token=TOKEN)
    missing = "model.layers.1.mlp.down_proj.weight"
    incomplete = [
        [(key, tensor) for key, tensor in bucket if key != missing]
        for bucket in buckets(other_checkpoint)
    ]
    if name == "disk":
        with pytest.raises(Exception, match=r"down_proj|missing|not"):
            sync.update(incomplete, [subject.info], 3)
        return
    with pytest.raises(WeightMismatchError, match="down_proj"):
        sync.update(incomplete, [subject.info], 3)


@pytest.mark.parametrize("place", [0, 1])
def test_an_engine_lost_inside_a_broadcast_leaves_the_other_working(
    updated, other_checkpoint, tmp_path, place
):
    """It answers while it is paused, and takes the same weights in a group with a new engine."""
    subject = updated
    sync = WeightSync(transport("distributed", subject, tmp_path), token=TOKEN)

    def with_engine(server: EngineServer) -> list[EngineInfo]:
        infos = [subject.info]
        infos.insert(place, EngineInfo(url=server.url))
        return infos

    with engine_server(subject.checkpoint, *ROOM) as victim:

        def until_it_dies():
            for number, bucket in enumerate(buckets(other_checkpoint)):
                if number == 2:
                    os.kill(victim.pid, signal.SIGKILL)
                yield bucket

        with pytest.raises(WeightSyncError, match="did not arrive"):
            sync.update(until_it_dies(), with_engine(victim), 5)
    assert answers(subject.server.url, 30, health_route(paused=True))
    with engine_server(subject.checkpoint, *ROOM) as fresh:
        sync.update(buckets(other_checkpoint), with_engine(fresh), 5)
        for url in (subject.server.url, fresh.url):
            body = {"input_ids": IDS, "sampling_params": GREEDY}
            reply = post_json(f"{url}/generate", body, timeout=240)
            assert reply["output_ids"] == greedy(other_checkpoint, IDS, 12)


@pytest.mark.parametrize("name", ["distributed", "disk"])
def test_an_engine_frozen_inside_an_update_is_noticed_and_can_be_updated_later(
    updated, other_checkpoint, tmp_path, name
):
    """As one that somebody else runs: it comes back paused, in the session of an update given up."""
    subject = updated
    sync = WeightSync(
        transport(name, subject, tmp_path),
        token=TOKEN,
        probe=LivenessProbe(interval_s=0.5, timeout_s=2),
    )

    def until_it_freezes():
        for number, bucket in enumerate(buckets(other_checkpoint)):
            if number == 2:
                os.kill(subject.server.pid, signal.SIGSTOP)
            yield bucket

    begun = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match="no longer answers"):
            sync.update(until_it_freezes(), [subject.info], 5)
        assert time.monotonic() - begun < 120
    finally:
        os.kill(subject.server.pid, signal.SIGCONT)
    wait_for(lambda: answers(subject.server.url, 30, health_route(paused=True)))
    patient = WeightSync(sync.transport, token=TOKEN)  # in the state that the first left
    patient.update(buckets(other_checkpoint), [subject.info], 6)
    reply = generate(subject, input_ids=IDS, sampling_params=GREEDY)
    assert reply["output_ids"] == greedy(other_checkpoint, IDS, 12)
    assert reply["meta_info"]["weight_version"] == "6"


def test_a_request_under_way_sees_two_whole_versions(updated, other_checkpoint, tmp_path):
    subject = updated
    sync = WeightSync(transport("distributed", subject, tmp_path), token=TOKEN)
    sync.update(
        buckets(subject.checkpoint), [subject.info], 3
    )  # the group forms: the next is quick
    with Running(subject, IDS, return_logprob=True) as running:
        sync.update(buckets(other_checkpoint), [subject.info], 4)
        running.wait_for_tokens(running.num_tokens + 50)
        running.abort()
        reply = running.result()
    first, second = reply["meta_info"]["weight_versions"]
    assert (first["version"], second["version"]) == ("3", "4")
    output, cut = reply["output_ids"], first["end"]
    assert first["start"] == 0 and cut == second["start"] and second["end"] == len(output)
    # Tokens after the update are those of the new weights alone, computed on the whole sequence.
    check_greedy(subject.checkpoint, IDS, output[:cut])
    expected = log_probs(other_checkpoint, IDS + output[: cut + 20])
    for place in range(cut + 1, min(cut + 20, len(output))):
        value, token, _ = reply["meta_info"]["output_token_logprobs"][place]
        assert abs(value - expected[len(IDS) + place - 1, token]) < 1e-4


def test_the_rules_of_a_session(subject):
    body = {"names": [], "dtypes": [], "shapes": [], "group_name": "none"}
    text = control_refusal(subject, "/update_weights_from_distributed", body)
    assert "begin_weight_update" in text
    assert subject.server.post("/begin_weight_update")["success"]
    assert "already open" in control_refusal(subject, "/begin_weight_update", {})
    assert subject.server.post("/end_weight_update")["success"]
    control_refusal(subject, "/end_weight_update", {})


def test_a_checkpoint_that_is_not_there_changes_nothing(subject):
    flush(subject)
    body = {"model_path": "/no/such/checkpoint", "weight_version": "99"}
    control_refusal(subject, "/update_weights_from_disk", body)
    reply = generate(subject, input_ids=IDS, sampling_params=GREEDY)
    assert reply["output_ids"] == greedy(subject.checkpoint, IDS, 12)
    assert reply["meta_info"]["weight_version"] == LABEL


def test_the_checksums_follow_the_weights(updated, other_checkpoint):
    subject = updated

    def sums() -> dict[str, str]:
        return subject.server.post("/weights_checker", {"action": "checksum"})["ranks"][0][
            "checksums"
        ]

    before = sums()
    assert sums() == before
    subject.server.post("/update_weights_from_disk", {"model_path": str(other_checkpoint)})
    after = sums()
    assert after.keys() == before.keys()
    changed = {name for name in after if after[name] != before[name]}
    assert "model.embed_tokens.weight" in changed and "model.norm.weight" not in changed


def test_a_probe_tells_right_weights_from_wrong_ones(subject, other_checkpoint):
    skip_where_different(subject, "token_ids_logprob")
    tokens = (5, 9, 100, 7, 33, 200, 64, 12, 90)

    def probe(checkpoint: Path) -> Probe:
        table = log_probs(checkpoint, list(tokens), 0.7)
        values = [float(table[place, token]) for place, token in enumerate(tokens[1:])]
        return Probe(
            tokens=tokens, log_probs=tuple(values), temperature=0.7, tolerance=0.002
        )  # fmt: skip

    check_probe(subject.info, probe(subject.checkpoint))
    with pytest.raises(WeightMismatchError, match=subject.info.url):
        check_probe(subject.info, probe(other_checkpoint))

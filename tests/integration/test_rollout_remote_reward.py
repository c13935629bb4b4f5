"""`--rm-type remote_rm` against services that fail in every way services do."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub.simple_rewards import REMOTE_CALLS, ask_service
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http import post, run
from tests.fake_service import SILENCE, FakeService
from tests.prompts import flat, rollout_args

SAMPLE = Sample(prompt="p", response="r", label="l")


def rollout(tmp_path, url, **flags):
    args = rollout_args(tmp_path, rm_type="remote_rm", rm_url=url, **flags)
    return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_a_service_that_fails_for_a_while_is_asked_again():
    with FakeService([503, 500, 200], {"score": 2.5}) as service:
        assert run(ask_service(SAMPLE, service.url)) == {"score": 2.5}
    assert service.bodies == [{"prompt": "p", "response": "r", "label": "l"}] * 3


def test_a_refusal_is_not_repeated():
    refused = pytest.raises(Exception, match="answered 400: no such field")
    with FakeService([400], {"error": "no such field"}) as service, refused:
        run(ask_service(SAMPLE, service.url))
    assert len(service.bodies) == 1


def test_with_group_rm_a_refused_sample_fails_alone(tmp_path, fake_engines):
    fake_engines()
    with FakeService([400, 200], 0.5) as service:
        samples = flat(rollout(tmp_path, service.url, group_rm=True))
    assert sorted(sample.status.value for sample in samples) == ["completed"] * 3 + ["failed"]
    assert {s.reward for s in samples if s.status == Status.COMPLETED} == {0.5}


def test_a_service_is_not_flooded():
    """Of 300 samples that end together, no more are sent at a time than it may have."""
    running, most = 0, 0

    async def score(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return web.json_response(1.0)

    async def ask_all() -> list[object]:
        app = web.Application()
        app.router.add_post("/score", score)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        try:
            return await asyncio.gather(*(ask_service(SAMPLE, url) for _ in range(300)))
        finally:
            await runner.cleanup()

    assert run(ask_all()) == [1.0] * 300
    assert 1 < most <= REMOTE_CALLS


def test_errors_end_at_the_deadline():
    with FakeService([500], "down") as service:
        start = time.monotonic()
        with pytest.raises(Exception, match="answered 500"):
            run(ask_service(SAMPLE, service.url, deadline_s=1.0))
        assert time.monotonic() - start < 60
    # It may be asked again until 0.25 s before the deadline; a stall costs attempts.
    assert 1 <= len(service.bodies) <= 3


def test_a_service_that_never_answers_is_named_with_the_time_it_had():
    silent = pytest.raises(TimeoutError, match=r"http://127.0.0.1:\d+/score gave no answer in 1 s")
    with FakeService([SILENCE], None) as service, silent:
        run(ask_service(SAMPLE, service.url, deadline_s=0.6))
    assert len(service.bodies) <= 1  # none if the service took all of the time to read it


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            b"<html>It works!</html>",
            "answered with something that is not JSON .*<html>It works!</html>",
        ),
        (b"", "--rm-type remote_rm returned None; expected a number or a dictionary"),
        (b"null", "--rm-type remote_rm returned None; expected a number or a dictionary"),
        (b"[1.0]", r"--rm-type remote_rm returned \[1.0\]; expected a number"),
        (b'"good"', "--rm-type remote_rm returned 'good'; expected a number"),
        (b"1e999", "--rm-type remote_rm returned inf|not JSON"),
        (b'{"score": null}', "'score' of the reward returned None; expected a number"),
        (b'{"points": 1}', r"set --reward-key to one of \['points'\], not score"),
    ],
)
def test_what_is_no_reward_stops_a_run_of_nothing_else(tmp_path, fake_engines, reply, message):
    fake_engines()
    with FakeService([200], reply) as service, pytest.raises(UserError, match=message):
        rollout(tmp_path, service.url, reward_key="score")


def test_one_bad_answer_fails_one_sample(tmp_path, fake_engines):
    fake_engines()
    with FakeService([400, 200], 1.5) as service:
        output = rollout(tmp_path, service.url)
    assert sorted(s.reward for s in flat(output)) == [0.0, 1.5, 1.5, 1.5]
    assert output.metrics["rollout/failed"] == 1 and output.metrics["rollout/reward_mean"] == 1.5


def test_a_request_that_waits_for_its_next_attempt_holds_no_slot():
    async def both() -> list[object]:
        slots = asyncio.Semaphore(1)
        return await asyncio.gather(*(post(service.url, name, slots=slots) for name in "ab"))

    with FakeService([500, 200], 1.0) as service:
        assert run(both()) == [1.0, 1.0]
    assert service.bodies == ["a", "b", "a"]


def test_labels_above_64_bits_are_sent_as_they_are():
    with FakeService([200], 1.0) as service:
        assert run(ask_service(Sample(prompt="p", response="r", label=1 << 70), service.url)) == 1.0
    assert service.bodies[0]["label"] == 1 << 70

"""Control routes called on an engine in this process, whose thread can be held between two commands."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import RequestError, SamplingParams
from slime.engine.server.control import load_lora_adapter, load_lora_adapter_from_tensors
from tests.adapters import make_adapter
from tests.engines import LocalEngine, local_engine
from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base") / "m", weight_scale=3.0)


@pytest.fixture
def local(base: Path):
    with local_engine(base, enable_lora=True, max_lora_rank=8) as local:
        yield local


def test_two_loads_of_a_new_adapter_do_not_change_it_under_a_request(
    local: LocalEngine, base: Path, tmp_path: Path
):
    """Both arrive before either has run, and a request of the first one starts between them."""
    engine, requests = local.engine, []
    folders = [make_adapter(base, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)

    def start_request() -> None:
        request = Request(
            rid="r",
            token_ids=[1, 2, 3],
            prompt_len=3,
            params=params,
            seed=0,
            adapter=engine.find_adapter("a"),
        )
        requests.append(request)
        engine.scheduler.add(request)

    async def load_both() -> None:
        hold, loads = threading.Event(), []
        engine.call(lambda: hold.wait(60))
        for version, folder in enumerate(folders):
            body = {"lora_name": "a", "lora_path": str(folder), "weight_version": version}
            loads.append(asyncio.create_task(load_lora_adapter(engine, body)))
            await asyncio.sleep(0)  # until its call is queued
            if version == 0:
                engine.call(start_request)
        hold.set()
        replies = await asyncio.wait_for(asyncio.gather(*loads), 60)
        assert [reply["success"] for reply in replies] == [True, True]

    asyncio.run(load_both())
    local.wait(requests)
    assert [span.version for span in requests[0].version_spans] == ["0"]
    assert engine.find_adapter("a").version == "1"


@pytest.mark.parametrize("load_format", [["slime_shm"], {"a": 1}, 7])
def test_a_load_format_that_is_no_string_is_refused(local: LocalEngine, load_format: object):
    body = {"lora_name": "a", "load_format": load_format}
    with pytest.raises(RequestError, match="`load_format` must be of type str"):
        asyncio.run(load_lora_adapter_from_tensors(local.engine, body))

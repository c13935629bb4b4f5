"""The weight sync against engines that fail in ways a real one does not."""

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime.core.errors import WeightMismatchError, WeightSyncError
from slime.core.types import EngineInfo
from slime.weights import ipc
from slime.weights.buckets import CastBucket
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.engine_client import LivenessProbe, transfer_timeout_s
from slime.weights.hf_folder import DiskTransport
from slime.weights.sync import WeightSync, serving_rank
from slime.weights.transport import TensorTransport, WeightTransport
from slime.weights.verify import difference
from tests.fakes import FakeEngine
from tests.ranks import run_ranks

TOKEN = "secret"
SHAPES = {"embed": (17, 8), "layer.w": (8, 8), "layer.b": (3,), "norm": (8,), "head": (17, 8)}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def buckets(tensors: dict[str, torch.Tensor], size: int = 2):
    items = list(tensors.items())
    for start in range(0, len(items), size):
        yield items[start : start + size]


@pytest.fixture
def engines():
    engines = [FakeEngine(weights(seed), token=TOKEN) for seed in (1, 2)]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
def no_segments_left():
    mine = f"slime_{os.getpid()}_*"  # other processes of this machine may have theirs
    before = {path.name for path in ipc.SHM_DIR.glob(mine)}
    yield
    assert {path.name for path in ipc.SHM_DIR.glob(mine)} <= before


def make_transport(kind: str, folder: Path) -> WeightTransport:
    if kind == "tensor":
        return TensorTransport(torch.device("cpu"))
    if kind == "distributed":
        return DistributedTransport(host="127.0.0.1", backend="gloo")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    return DiskTransport(folder / "weights", folder / "hf")


KINDS = ["tensor", "distributed", "disk"]


def tensor_sync(**options) -> WeightSync:
    return WeightSync(TensorTransport(torch.device("cpu")), token=TOKEN, **options)


def assert_holds(engine: FakeEngine, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(engine.weights[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_transport_delivers_again_and_again(engines, kind, tmp_path, no_segments_left):
    sync = WeightSync(make_transport(kind, tmp_path), token=TOKEN)
    for version in (3, 4):
        sent = weights(10 + version)
        report = sync.update(buckets(sent), [e.info for e in engines], version)
        for engine in engines:
            assert_holds(engine, sent)
            assert engine.version == str(version) and not engine.paused
            assert not engine.session_open
        assert report.nbytes == sum(tensor.nbytes for tensor in sent.values())
        assert (report.num_tensors, report.num_buckets, report.num_engines) == (5, 3, 2)
        assert 0 < report.checksum_seconds < report.seconds


BUCKETS = ["/update_weights_from_tensor"] * 3
LAST = ["/end_weight_update", "/flush_cache", "/model_info"]


def test_the_calls_of_one_update_come_in_order(engines):
    tensor_sync().update(buckets(weights(9)), [engines[0].info], 1)
    calls = engines[0].calls
    assert set(calls[:2]) == {"/pause_generation", "/begin_weight_update"}
    assert calls[2:5] == BUCKETS
    assert sorted(calls[5:9]) == sorted([*LAST, "/weights_checker"])
    assert calls[9:] == ["/continue_generation"]


def test_an_sglang_server_is_called_one_request_at_a_time(engines):
    sglang = replace(engines[0].info, kind="sglang")
    tensor_sync(verify=False).update(buckets(weights(9)), [sglang], 1)
    assert engines[0].calls == [
        "/pause_generation",
        "/begin_weight_update",
        *BUCKETS,
        *LAST,
        "/continue_generation",
    ]


@pytest.mark.parametrize("route", ["/pause_generation", "/end_weight_update", "/weights_checker"])
def test_one_of_several_calls_that_fails_is_named(engines, route):
    """The others are answered all the same, and the next update finds no session open."""
    engines[0].refuse[route] = ""
    sync = tensor_sync()
    with pytest.raises(WeightSyncError, match=f"{route}: status 400: .*was told to fail"):
        sync.update(buckets(weights(9)), [engines[0].info], 1)
    assert "/continue_generation" not in engines[0].calls
    assert engines[0].session_open == (route == "/end_weight_update")
    engines[0].refuse.clear()
    sync.update(buckets(weights(8)), [engines[0].info], 2)
    assert_holds(engines[0], weights(8))


def test_a_flush_that_is_refused_is_repeated(engines):
    answers = [(400, "Flush cache failed.\n"), (200, "Cache flushed.\n")]
    engines[0].flush_cache = lambda body: answers.pop(0)
    tensor_sync().update(buckets(weights(9)), [engines[0].info], 1)
    assert engines[0].calls.count("/flush_cache") == 2


def test_no_session_stays_open_if_the_first_bucket_cannot_be_built(engines):
    """The sessions were opened while it was built."""

    def broken():
        raise MemoryError("gathering failed")
        yield

    with pytest.raises(MemoryError):
        tensor_sync().update(broken(), [engines[0].info], 7)
    assert engines[0].calls.count("/end_weight_update") == 1 and not engines[0].session_open


def test_an_update_without_weights_is_an_error(engines):
    with pytest.raises(WeightSyncError, match="no weights to send"):
        tensor_sync().update([], [engines[0].info], 7)
    assert not engines[0].session_open


def test_servers_without_sessions_are_updated_too():
    engine = FakeEngine(weights(1), token=TOKEN, sessions=False)
    sent = weights(5)
    tensor_sync().update(buckets(sent), [engine.info], 1)
    assert_holds(engine, sent)
    assert "/end_weight_update" not in engine.calls
    engine.close()


def test_mixed_dtypes_arrive_bit_by_bit():
    sent = weights(5)
    sent = {name: t if name == "norm" else t.bfloat16() for name, t in sent.items()}
    engine = FakeEngine({k: torch.zeros_like(t) for k, t in sent.items()}, token=TOKEN)
    tensor_sync().update(buckets(sent), [engine.info], 1)
    assert_holds(engine, sent)
    engine.close()


@pytest.mark.parametrize("moved", [None, "layer.w"], ids=["all there", "one elsewhere"])
def test_buckets_built_in_shared_memory_arrive(moved, no_segments_left):
    """Two to a bucket, the larger ones last: buffers are reused and grow."""
    masters = dict(sorted(weights(5).items(), key=lambda item: item[1].numel()))
    held = {name: torch.zeros(tensor.shape).bfloat16() for name, tensor in masters.items()}
    engines = [FakeEngine({k: t.clone() for k, t in held.items()}, token=TOKEN) for _ in range(2)]
    engines[1].before_copy = lambda engine, data: time.sleep(0.05)  # nobody may write there yet
    transport = TensorTransport(torch.device("cpu"))
    sync = WeightSync(transport, token=TOKEN)

    def built():
        for part in buckets(masters):
            bucket = CastBucket([(name, tensor, torch.bfloat16) for name, tensor in part])
            transport.reclaim()
            cast = bucket.cast(transport.allocate(bucket.nbytes))
            assert len({tensor.untyped_storage().data_ptr() for _, tensor in cast}) == 1
            yield [(name, t.clone() if name == moved else t) for name, t in cast]

    for version in (1, 2):
        sync.update(built(), [engine.info for engine in engines], version)
        for engine in engines:
            assert_holds(engine, {name: t.bfloat16() for name, t in masters.items()})
        masters = {name: tensor + 1 for name, tensor in masters.items()}
    for engine in engines:
        engine.close()
    assert transport.allocate(64) is None, "outside of an update there is no buffer"


class Recording(TensorTransport):
    """Notes the buffers it gives and where the tensors of sent buckets lie."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls_at_allocate: list[int] = []
        self.engine: FakeEngine | None = None
        self.in_buffer: list[bool] = []
        self.sent: list[object] = []

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        buffer = super().allocate(nbytes)
        self.calls_at_allocate.append(len(self._calls()))
        self.given = buffer
        return buffer

    def _calls(self) -> list[str]:
        """Without those that may be under way meanwhile: the beginning of the update, buckets already sent."""
        beginning = ("/pause_generation", "/begin_weight_update")
        calls = [call for call in self.engine.calls if call not in beginning]
        sent = BUCKETS[: len(self.sent)]
        return calls[len(sent) :] if calls[: len(sent)] == sent[: len(calls)] else calls

    def send(self, bucket) -> None:
        self.sent.append(bucket)
        start, end = self.given.data_ptr(), self.given.data_ptr() + self.given.nbytes
        self.in_buffer += [start <= t.data_ptr() <= end - t.nbytes for _, t in bucket.tensors]
        super().send(bucket)


def test_a_bucket_to_cast_is_cast_into_the_buffer_that_is_sent(no_segments_left):
    masters = weights(5)
    held = {name: torch.zeros(tensor.shape).bfloat16() for name, tensor in masters.items()}
    transport = Recording()
    transport.engine = engine = FakeEngine(held, token=TOKEN)
    to_cast = [
        CastBucket([(name, tensor, torch.bfloat16) for name, tensor in part])
        for part in buckets(masters)
    ]
    WeightSync(transport, token=TOKEN).update(to_cast, [engine.info], 1)
    assert_holds(engine, {name: t.bfloat16() for name, t in masters.items()})
    assert transport.in_buffer == [True] * len(SHAPES)
    assert transport.calls_at_allocate == [0, 0, 0], "allocating sends nothing"
    engine.close()


def test_a_buffer_is_reused_only_when_every_engine_acknowledged_it(engines):
    """Engines copy late: what they copy is still the bucket they were told of."""
    transport = TensorTransport(torch.device("cpu"))
    for engine in engines:
        engine.before_copy = lambda engine, data: time.sleep(0.05)
    masters = {f"w{index}": torch.full((16,), float(index)) for index in range(8)}
    for engine in engines:
        engine.weights = {name: torch.zeros(16) for name in masters}
    WeightSync(transport, token=TOKEN).update(buckets(masters, 1), [e.info for e in engines], 1)
    for engine in engines:
        assert_holds(engine, masters)


def flip_a_byte(engine: FakeEngine, data: torch.Tensor) -> None:
    if data.numel() == 2 * 64:  # layer.b, norm, alone in the second buffer
        data[64 * 1 + 5] ^= 4  # in `norm`, which lies behind the 64-byte place of layer.b


def test_a_byte_changed_on_the_way_is_named(engines, no_segments_left):
    engines[1].before_copy = flip_a_byte
    with pytest.raises(WeightMismatchError, match=r"1 of 5 tensors differ \(norm\)") as raised:
        tensor_sync().update(buckets(weights(9)), [e.info for e in engines], 7)
    assert engines[1].url in str(raised.value) and engines[0].url not in str(raised.value)
    assert all(engine.paused for engine in engines), "nobody may generate with wrong weights"


def test_the_check_can_be_switched_off(engines):
    engines[1].before_copy = flip_a_byte
    tensor_sync(verify=False).update(buckets(weights(9)), [e.info for e in engines], 7)
    assert not engines[1].paused and "/weights_checker" not in engines[1].calls


def test_a_tensor_that_was_not_sent_is_named(engines):
    engines[0].weights["rotary"] = torch.ones(3)
    with pytest.raises(WeightMismatchError, match=r"not sent \(rotary\)"):
        tensor_sync().update(buckets(weights(9)), [engines[0].info], 7)


def test_a_wrong_version_is_an_error(engines):
    engines[0]._updated = lambda body: (200, {"success": True})
    with pytest.raises(WeightMismatchError, match=r"7 were sent, but .* reports 'default'"):
        tensor_sync().update(buckets(weights(9)), [engines[0].info], 7)


def update_an_engine_per_rank(rank: int) -> list[list[bool]]:
    """Rank 0 hosts both engines, which take half a second to pause; returns whether they were paused
    when each bucket arrived."""
    paused: list[list[bool]] = [[], []]
    infos: list = [None, None]
    if rank == 0:
        fakes = [FakeEngine(weights(seed), token=TOKEN) for seed in (1, 2)]
        for number, fake in enumerate(fakes):
            pause = fake.pause_generation
            fake.pause_generation = lambda body, pause=pause: (time.sleep(0.5), pause(body))[1]
            fake.before_copy = lambda fake, data, number=number: paused[number].append(fake.paused)
        infos = [
            replace(fake.info, device_ids=(device,))
            for fake, device in zip(fakes, "ab", strict=True)
        ]
    dist.broadcast_object_list(infos, src=0)
    sync = tensor_sync()
    sync._rank_devices = ["a", "b"]  # as on two GPUs
    sync.update(buckets(weights(9)), infos, 1)
    return paused


def test_no_rank_sends_before_rank_0_has_paused_all_engines():
    assert run_ranks(update_an_engine_per_rank, 2)[0] == [[True] * 3, [True] * 3]


@pytest.mark.parametrize("kind", KINDS)
def test_failure_in_the_middle_names_engine_and_bucket(engines, kind, tmp_path, no_segments_left):
    route = f"/update_weights_from_{kind}"
    in_bucket_1 = list(SHAPES)[2]
    engines[1].refuse[route] = "" if kind == "disk" else json.dumps(in_bucket_1)
    sync = WeightSync(make_transport(kind, tmp_path), token=TOKEN)
    started = time.monotonic()
    with pytest.raises(WeightSyncError) as raised:
        sync.update(buckets(weights(9)), [e.info for e in engines], 7)
    assert time.monotonic() - started < 50, "the error must not wait for a timeout of 60 s"
    text = str(raised.value)
    assert engines[1].url in text and "was told to fail" in text
    assert kind == "disk" or "bucket 1" in text
    for engine in engines:
        assert engine.paused and "/continue_generation" not in engine.calls
        assert not engine.session_open, "a later update must be able to start over"


@pytest.mark.parametrize("kind", ["tensor", "disk"])
def test_an_update_after_a_failed_one_succeeds(engines, tmp_path, kind):
    sync = WeightSync(make_transport(kind, tmp_path), token=TOKEN)
    engines[0].refuse[f"/update_weights_from_{kind}"] = ""
    with pytest.raises(WeightSyncError):
        sync.update(buckets(weights(9)), [e.info for e in engines], 7)
    engines[0].refuse.clear()
    sync.update(buckets(weights(10)), [e.info for e in engines], 8)
    for engine in engines:
        assert_holds(engine, weights(10))
        assert not engine.paused


def test_the_process_group_follows_the_engines(engines):
    sync = WeightSync(DistributedTransport(host="127.0.0.1", backend="gloo"), token=TOKEN)
    sync.update(buckets(weights(5)), [e.info for e in engines], 1)
    sync.update(buckets(weights(6)), [e.info for e in engines], 2)
    assert engines[0].calls.count("/init_weights_update_group") == 1
    engines[1].close()
    replacement = FakeEngine(weights(3), token=TOKEN)
    for version, members in ((3, [replacement]), (4, [engines[0], replacement])):
        sync.update(buckets(weights(version)), [e.info for e in members], version)
        for engine in members:
            assert_holds(engine, weights(version))
    replacement.close()


def test_an_iterator_that_raises_leaves_nothing_behind(engines, no_segments_left):
    def broken():
        yield from list(buckets(weights(9)))[:2]
        raise MemoryError("gathering failed")

    with pytest.raises(MemoryError):
        tensor_sync().update(broken(), [engines[0].info], 7)
    assert engines[0].paused and not engines[0].session_open


def test_an_engine_that_is_down_is_named(engines):
    engines[1].close()
    with pytest.raises(WeightSyncError, match=f"{engines[1].url}.*cannot connect"):
        tensor_sync().update(buckets(weights(9)), [e.info for e in engines], 7)
    assert engines[0].paused


@pytest.mark.parametrize("kind", ["tensor", "disk"])
def test_a_busy_engine_is_waited_for_and_a_frozen_one_is_not(engines, tmp_path, kind):
    transport = make_transport(kind, tmp_path)
    probe = LivenessProbe(interval_s=0.1, timeout_s=20)
    sync = WeightSync(transport, token=TOKEN, probe=probe)
    thaw, route = threading.Event(), f"update_weights_from_{kind}"
    update, model_info = getattr(engines[1], route), engines[1].model_info
    setattr(engines[1], route, lambda body: (thaw.wait(0.5), update(body))[1])
    sync.update(buckets(weights(9)), [e.info for e in engines], 7)
    assert_holds(engines[1], weights(9))
    setattr(engines[1], route, lambda body: (thaw.wait(60), update(body))[1])
    engines[1].model_info = lambda body: (thaw.wait(60), model_info(body))[1]
    sync = WeightSync(transport, token=TOKEN, probe=replace(probe, timeout_s=2))
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"{engines[1].url}.*no answer within 2 s"):
        sync.update(buckets(weights(9)), [e.info for e in engines], 8)
    assert time.monotonic() - started < 50
    assert not engines[0].session_open, "the other one can take the next update"
    thaw.set()


def test_a_session_that_was_left_open_is_ended_first(engines):
    engines[0].session_open = True
    tensor_sync().update(buckets(weights(9)), [engines[0].info], 7)
    assert_holds(engines[0], weights(9))


def test_what_moves_more_may_take_longer():
    assert transfer_timeout_s(0) == 60
    assert transfer_timeout_s(512 * 2**20) == 92


def test_a_wrong_token_is_an_error(engines):
    sync = WeightSync(TensorTransport(torch.device("cpu")), token="other")
    with pytest.raises(WeightSyncError, match="status 401"):
        sync.update(buckets(weights(9)), [engines[0].info], 7)


def test_a_name_sent_twice_is_an_error(engines):
    twice = [[("norm", torch.ones(8))], [("norm", torch.zeros(8))]]
    with pytest.raises(WeightSyncError, match="sent before"):
        tensor_sync().update(twice, [engines[0].info], 7)


def test_disk_folders_are_complete_and_old_ones_removed(engines, tmp_path):
    hf, folder = tmp_path / "hf", tmp_path / "weights"
    hf.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ):
        (hf / name).write_text("{}")
    (folder / "weights_0000001.tmp").mkdir(parents=True)  # of a run that was killed
    sync = WeightSync(DiskTransport(folder, hf), token=TOKEN)
    for version in (1, 2):
        sync.update(buckets(weights(version)), [engines[0].info], version)
    assert [path.name for path in folder.iterdir()] == ["weights_0000002"]
    names = sorted(path.name for path in (folder / "weights_0000002").iterdir())
    shards = [f"model-0000{number}.safetensors" for number in (1, 2, 3)]
    assert names == sorted(
        ["config.json", "tokenizer.json", "model.safetensors.index.json", *shards]
    )


def test_each_engine_is_served_by_a_rank_on_its_gpu():
    devices = ["gpu-a", "gpu-b"]
    assert serving_rank(EngineInfo(url="u", device_ids=("gpu-b",)), devices) == 1
    assert serving_rank(EngineInfo(url="u", device_ids=("gpu-b", "gpu-a")), devices) == 0
    assert serving_rank(EngineInfo(url="u"), ["cpu", "cpu"]) == 0
    with pytest.raises(WeightSyncError, match=r"u is on gpu-c.*--update-weight-transport"):
        serving_rank(EngineInfo(url="u", device_ids=("gpu-c",)), devices)


def test_difference_in_words():
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 2}) == ""
    text = difference({"a": 1, "b": 2, "c": 3}, {"a": 9, "b": 2, "d": 4})
    assert "1 of 3 tensors differ (a)" in text
    assert "missing in the engine (c)" in text and "not sent (d)" in text
    many = difference({str(n): n for n in range(10)}, {str(n): -1 for n in range(10)})
    assert "10 of 10 tensors differ (0, 1, 2, and 7 more)" in many

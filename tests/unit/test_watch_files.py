"""What a run writes for its page: the table of all samples, tokens of the kept ones, events, growing files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime.core.types import RolloutBatch, Sample, TrainedTokens
from slime.runlog.event_log import EventLog
from slime.runlog.jsonl import LineTail, append_lines
from slime.runlog.live.run_view import RunView
from slime.runlog.live.sample_detail import sample_detail
from slime.runlog.live.sample_query import samples_page
from slime.runlog.live.sample_store import SampleStore
from slime.runlog.sample_log import SampleLog, SampleRow, append_samples
from slime.runlog.sample_table import MAX_ROWS, read_header, read_table
from slime.runlog.token_log import (
    MAX_TOKENS,
    TokenLog,
    kept_positions,
    read_tokens,
    read_vocabulary,
    rollout_name,
    sample_tokens,
    trained_columns,
)
from slime.runlog.tracking import cut_back
from tests.synthetic_run import make_row


def make_rows(groups: int, size: int, **values: object) -> list[SampleRow]:
    return [make_row(n // size, n, **values) for n in range(groups * size)]


def make_sample(index: int, **values: object) -> Sample:
    fields = {
        "index": index,
        "group_index": 0,
        "prompt": "1+1=",
        "tokens": [5, 9, 5, 7, 6, 0],
        "response": "2",
        "response_length": 2,
        "loss_mask": [1, 1],
        "rollout_log_probs": [-0.7, -0.1],
        "weight_versions": [3, 4],
        "reward": 1.0,
        "status": Sample.Status.COMPLETED,
        **values,
    }
    return Sample(**fields)  # type: ignore[arg-type]


# ---- the table


def test_the_table_has_every_sample_and_the_place_of_the_kept_texts(tmp_path):
    rows = make_rows(6, 4)
    chosen = append_samples(tmp_path, 3, rows, limit=8)
    table = read_table(tmp_path)
    assert table["index"].tolist() == [row.index for row in rows]
    assert table["reward"].tolist() == [row.reward for row in rows]
    assert np.isnan(table["advantage"]).all() and set(table["rollout_id"]) == {3}
    assert np.flatnonzero(table["text"] >= 0).tolist() == chosen and len(chosen) == 8
    lines = (tmp_path / "samples.jsonl").read_bytes()
    for number in chosen:
        line = lines[table["text"][number] :].split(b"\n")[0]
        assert json.loads(line)["index"] == rows[number].index


def test_without_kept_texts_the_numbers_are_there(tmp_path):
    assert append_samples(tmp_path, 0, make_rows(2, 2), limit=0) == []
    assert append_samples(tmp_path, 0, []) == []  # an evaluation function that returns no samples
    assert read_table(tmp_path)["text"].tolist() == [-1] * 4


def test_the_header_describes_the_records(tmp_path):
    append_samples(tmp_path, 0, make_rows(1, 2))
    append_samples(tmp_path, 0, make_rows(1, 2, kind="eval/b"))
    append_samples(tmp_path, 1, make_rows(1, 2))
    header = json.loads((tmp_path / "samples.table.json").read_text())
    dtype = np.dtype([tuple(field) for field in header["dtype"]])
    by_header = np.fromfile(tmp_path / "samples.table", dtype)
    names = [header["datasets"][number] for number in by_header["dataset"]]
    assert names == ["train"] * 2 + ["eval/b"] * 2 + ["train"] * 2
    assert read_header(tmp_path) == header["datasets"]


def test_a_large_rollout_keeps_whole_groups_and_those_with_texts(tmp_path):
    rows = make_rows(1000, 4)
    chosen = append_samples(tmp_path, 0, rows)
    table = read_table(tmp_path)
    assert MAX_ROWS / 2 < len(table) <= MAX_ROWS + 4 * len(chosen)
    groups, sizes = np.unique(table["group"], return_counts=True)
    assert set(sizes) == {4}
    assert {rows[n].group_index for n in chosen} <= set(groups.tolist())


def test_a_record_that_was_cut_off_is_replaced(tmp_path):
    append_samples(tmp_path, 0, make_rows(1, 2))
    with (tmp_path / "samples.table").open("ab") as file:
        file.write(b"half")
    assert len(read_table(tmp_path)) == 2
    append_samples(tmp_path, 1, make_rows(1, 2))
    assert read_table(tmp_path)["rollout_id"].tolist() == [0, 0, 1, 1]


def test_cut_back_drops_repeated_rollouts_and_finds_the_texts_again(tmp_path):
    """Of an asynchronous run: rollout 2 was generated before the evaluation after rollout 1."""
    append_samples(tmp_path, 1, make_rows(2, 2))
    append_samples(tmp_path, 2, make_rows(2, 2, response="to be repeated"))
    append_samples(tmp_path, 1, make_rows(1, 2, kind="eval/a"))
    for kind in ("train", "eval"):
        append_lines(tmp_path / "metrics.jsonl", [{"rollout_id": 1, "kind": kind, "time": 0}])
    store = SampleStore(tmp_path)
    store.update()
    assert len(store.rows) == 10
    cut_back(tmp_path, 2)
    store.update()
    assert store.rows["rollout_id"].tolist() == [1] * 6
    for row in range(6):
        text = store.text(row)
        assert text is not None and text.index == store.rows["index"][row]
        assert text.kind == store.datasets[store.rows["dataset"][row]]


def test_a_run_without_a_table_is_read_from_its_texts(tmp_path):
    rows = make_rows(2, 2)
    append_samples(tmp_path, 0, rows)
    (tmp_path / "samples.table").unlink()
    store = SampleStore(tmp_path)
    store.update()
    assert store.rows["index"].tolist() == [0, 1, 2, 3]
    assert [store.text(n) for n in range(4)] == rows
    append_samples(tmp_path, 1, make_rows(1, 1))
    (tmp_path / "samples.table").unlink()
    store.update()
    assert store.rows["rollout_id"].tolist() == [0] * 4 + [1]


def test_branches_of_a_kept_trajectory_are_kept(tmp_path):
    rows = [make_row(n // 4, n, trajectory=n // 2) for n in range(40)]
    chosen = append_samples(tmp_path, 0, rows, limit=4)
    trajectories = [rows[n].trajectory for n in chosen]
    assert all(trajectories.count(t) == 2 for t in trajectories) and len(chosen) >= 4


# ---- tokens


@pytest.mark.parametrize(
    ("prompt", "response"), [(10, 20), (0, 5), (9000, 10), (10, 9000), (9000, 9000)]
)
def test_kept_positions_are_the_ends_of_a_long_sample(prompt, response):
    kept = kept_positions(prompt, response)
    assert len(kept) <= MAX_TOKENS and sorted(set(kept.tolist())) == kept.tolist()
    if prompt + response <= MAX_TOKENS:
        assert len(kept) == prompt + response
    assert kept[-1] == prompt + response - 1 and prompt in kept
    assert prompt == 0 or prompt - 1 in kept


def test_tokens_of_a_sample_come_back_with_every_column(tmp_path):
    log = TokenLog(tmp_path)
    words = {5: "1", 9: "+", 7: "=", 6: "2", 0: "<eos>"}
    tool = make_sample(8, tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 0, 1],
                       rollout_log_probs=[-0.5, 0.0, -0.25], weight_versions=[1, 1, 2])  # fmt: skip
    decode = lambda ids: [words.get(i, "?") for i in ids]  # noqa: E731
    log.write(rollout_name(12), [sample_tokens(make_sample(7)), sample_tokens(tool)], decode)
    first, second = (read_tokens(tmp_path, "rollout_0000012", index) for index in (7, 8))
    assert first is not None and second is not None
    assert first.position.tolist() == [0, 1, 2, 3, 4, 5]
    assert first.values["token_ids"].tolist() == [5, 9, 5, 7, 6, 0]
    assert first.values["weight_versions"].tolist() == [-1] * 4 + [3, 4]
    np.testing.assert_array_equal(
        first.values["rollout_log_probs"], np.array([np.nan] * 4 + [-0.7, -0.1], np.float32)
    )
    assert second.values["loss_mask"].tolist() == [0, 1, 0, 1]
    assert np.isnan(second.values["rollout_log_probs"]).tolist() == [True, False, True, False]
    assert read_vocabulary(tmp_path / "tokens")[9] == "+"
    assert read_tokens(tmp_path, "rollout_0000012", 9) is None


def test_the_trainers_columns_are_cut_to_the_same_positions(tmp_path):
    response = np.arange(9000, dtype=np.float32)
    row = TrainedTokens(sample_index=3, prompt_len=40, columns={"trainer_log_probs": response})
    (columns,) = trained_columns([row])
    expected = [p for p in kept_positions(40, 9000).tolist() if p >= 40]
    assert columns.position.tolist() == expected
    assert columns.values["trainer_log_probs"].tolist() == [p - 40 for p in expected]


def test_the_vocabulary_holds_each_id_once_also_after_a_resume(tmp_path):
    asked = []

    def decode(ids):
        asked.append(ids)
        return [str(i) for i in ids]

    TokenLog(tmp_path).write("rollout_0000000", [sample_tokens(make_sample(0))], decode)
    more = make_sample(1, tokens=[5, 9, 5, 7, 6, 11])
    TokenLog(tmp_path).write("rollout_0000001", [sample_tokens(more)], decode)
    assert asked == [[0, 5, 6, 7, 9], [11]]


def test_old_token_files_are_thinned_out(tmp_path):
    log = TokenLog(tmp_path, max_files=8)
    for rollout_id in range(40):
        log.write(rollout_name(rollout_id), [sample_tokens(make_sample(0))])
    kept = sorted(int(p.name[8:15]) for p in (tmp_path / "tokens").glob("*.safetensors"))
    assert len(kept) <= 8 and kept[-4:] == [36, 37, 38, 39] and kept[0] == 0


def test_a_batch_marks_the_rows_whose_tokens_are_kept(tmp_path):
    samples = [make_sample(n, group_index=n // 4, reward=float(n % 2)) for n in range(40)]
    batch = RolloutBatch(
        tokens=[s.tokens for s in samples],
        response_lens=[2] * 40,
        loss_masks=[[1, 1]] * 40,
        rewards=[s.reward for s in samples],
        raw_rewards=[s.reward for s in samples],
        truncated=[0] * 40,
        group_indices=[s.group_index for s in samples],
        sample_indices=[s.index for s in samples],
        trajectory_ids=[s.index for s in samples],
        rollout_log_probs=[s.rollout_log_probs for s in samples],
    )  # type: ignore[arg-type]
    log = SampleLog(tmp_path, limit=6, decode=lambda ids: [str(i) for i in ids])
    log.log_batch(5, samples, batch)
    assert batch.logged is not None and batch.logged.sum() == 6
    written = load_file(tmp_path / "tokens" / "rollout_0000005.safetensors")
    assert written["sample_index"].tolist() == np.flatnonzero(batch.logged).tolist()
    part = batch.select([39, 0])
    assert part.logged is not None and part.logged.tolist() == [batch.logged[39], batch.logged[0]]


def test_messages_components_and_errors_are_kept_as_text(tmp_path):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x" * 100_000},
    ]
    sample = make_sample(
        0, reward={"right": 1, "format": 0.5, "why": "text"}, metadata={"messages": messages}
    )
    failed = make_sample(
        1,
        status=Sample.Status.FAILED,
        metadata={"error": "ValueError: no", "error_stage": "reward", "error_traceback": "line 3"},
    )
    log = SampleLog(tmp_path, limit=8, decode=lambda ids: [str(i) for i in ids])
    log.log_scored(0, [sample, failed], [1.0, 0.0])
    store = SampleStore(tmp_path)
    store.update()
    first, second = store.text(0), store.text(1)
    assert first is not None and second is not None
    assert first.rewards == {"right": 1.0, "format": 0.5}
    assert first.messages is not None and first.messages[0]["content"] == "hi[image_url]"
    assert first.messages[1]["tool_calls"] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert len(first.messages[2]["content"]) < 10_000
    assert second.error == "reward: ValueError: no\nline 3" and second.reward is None


# ---- growing files


def test_a_tail_returns_whole_lines_once(tmp_path):
    path = tmp_path / "lines"
    tail = LineTail(path)
    assert tail.read() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert tail.read() == [(0, b"one\n"), (4, b"two\n")]
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert tail.read() == [(8, b"three\n")] and tail.read() == [] and tail.restarts == 0


def test_a_tail_begins_again_when_the_file_was_replaced_or_cut(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    tail = LineTail(path)
    tail.read()
    other = tmp_path / "other"
    other.write_bytes(b"new\nand longer\nthan before\n")
    other.replace(path)
    assert [line for _, line in tail.read()] == [b"new\n", b"and longer\n", b"than before\n"]
    path.write_bytes(b"cut\n")
    assert tail.read() == [(0, b"cut\n")] and tail.restarts == 2


def test_events_survive_a_folder_that_cannot_be_written(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    EventLog(blocked).event("note", "nobody reads this")  # no exception
    EventLog(tmp_path).event("engine", "x" * 10_000, version=3)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["version"] == 3 and len(line) < 3000


def test_samples_can_be_limited_to_one_of_several_prompt_files(tmp_path: Path):
    log = SampleLog(
        tmp_path, limit=2, decode=lambda ids: [str(i) for i in ids], datasets=["a", "b"]
    )
    names = ["a", "a", "b", "other", None]  # the last two are of a data source of the user's own
    samples = [
        make_sample(n, group_index=n, metadata={} if name is None else {"dataset": name})
        for n, name in enumerate(names)
    ]
    log.log_scored(0, samples, [None] * len(samples))
    log.log_scored(0, samples[:1], [None], "eval/a")
    store = SampleStore(tmp_path)
    store.update()
    assert store.names == ["train", "train/a", "train/b", "eval/a"]

    def found(dataset: str) -> list[int]:
        rows = samples_page(store, {"dataset": dataset, "sort": "index", "order": "up"})["rows"]
        return sorted(row["index"] for row in rows)

    assert found("train/a") == [0, 1] and found("train/b") == [2] and found("eval/a") == [0]
    assert found("train") == [0, 1, 2, 3, 4] and found("") == [0, 0, 1, 2, 3, 4]
    assert found("tra") == []
    view = RunView(tmp_path, "run")
    view.samples.update()
    kept = samples_page(store, {"dataset": "train", "kept": "1"})["rows"][0]
    detail = sample_detail(view, kept["dataset"], 0, kept["index"])
    assert detail is not None and detail["tokens"] is not None

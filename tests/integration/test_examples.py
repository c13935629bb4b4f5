"""The examples against a scripted engine: exact tokens, exact masks, tools that really ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slime.config.flags.parser import read_command_line
from slime.core.types import Status
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import samples_to_batch, split_batch
from tests.fake_engine import Reply
from tests.prompts import flat, rollout_args
from tests.tiny import EOS_ID, make_byte_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENIZER = make_byte_tokenizer()


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    for name in ("tool_agent", "search_agent", "multi_agent"):
        monkeypatch.syspath_prepend(str(EXAMPLES / name))
    yield
    for name in ("tool_agent", "search_agent", "multi_agent"):
        sys.modules.pop(name, None)


def parts_of(sample):
    """Runs of equal loss mask as text: [(1, "..."), (0, "..."), ...]."""
    response = sample.tokens[-sample.response_length :]
    parts: list[list] = []
    for token, mask in zip(response, sample.loss_mask, strict=True):
        if not parts or parts[-1][0] != mask:
            parts.append([mask, []])
        parts[-1][1].append(token)
    return [(mask, TOKENIZER.decode(tokens, skip_special_tokens=True)) for mask, tokens in parts]


def run(tmp_path, fake_engines, script, **flags):
    (engine,) = fake_engines(script)
    args = rollout_args(
        tmp_path,
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        rollout_max_response_len=300,
        **flags,
    )
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    return args, engine, output


def call(text):
    """A turn that a stop string ended."""
    return Reply(text=text, tokens=TOKENIZER.encode(text), matched=text[text.rindex("</") :])


def turns(*texts):
    """The n-th turn of a conversation gets the n-th text; where it stands shows by what is in it."""

    def script(request):
        done = sum(request.prompt.count(text) for text in set(texts[:-1]))
        text = texts[min(done, len(texts) - 1)]
        return Reply(text=text) if text == texts[-1] else call(text)

    return script


def test_tool_agent_masks_what_tools_said_and_keeps_every_token(tmp_path, fake_engines):
    script = turns(
        "let me see <calc>17*(3+4)</calc>",
        "and <python>print(sum(range(10)))</python>",
        r"so \boxed{119}",
    )
    rows = [{"input": "17*(3+4)=", "label": "119"}]
    _args, engine, output = run(
        tmp_path, fake_engines, script, rows=rows, rm_type="math",
        custom_generate_function_path="tool_agent.generate",
    )  # fmt: skip
    for sample in flat(output):
        assert parts_of(sample) == [
            (1, "let me see <calc>17*(3+4)</calc>"),
            (0, "\n<output>119</output>\n"),
            (1, "and <python>print(sum(range(10)))</python>"),
            (0, "\n<output>45</output>\n"),
            (1, r"so \boxed{119}"),
        ]
        assert sample.reward == 1.0 and sample.tokens[-1] == EOS_ID
        masked = [lp for lp, m in zip(sample.rollout_log_probs, sample.loss_mask) if not m]  # noqa: B905
        assert set(masked) == {0.0}
    # Token in, token out: every request's ids begin with the ids of the one before.
    last = max(engine.requests, key=lambda r: len(r.input_ids))
    for request in engine.requests:
        assert last.input_ids[: len(request.input_ids)] == request.input_ids
    assert engine.requests[0].sampling_params["stop"] == ["</calc>", "</python>"]


def test_tool_agent_ends_at_the_limits(tmp_path, fake_engines):
    loop = "<calc>1+1</calc>"
    args, engine, output = run(
        tmp_path, fake_engines, lambda r: call(loop),
        rows=[{"input": "x=", "label": "1"}], rm_type="math",
        custom_generate_function_path="tool_agent.generate",
    )  # fmt: skip
    assert {s.status for s in flat(output)} == {Status.TRUNCATED}
    assert len(engine.requests) == 2 * 5
    args = args.replace(rollout_max_response_len=30)
    output = generate_rollout(args, 1, RolloutDataSourceWithBuffer(args))
    assert all(s.response_length <= 30 and s.status == Status.TRUNCATED for s in flat(output))


@pytest.mark.parametrize(
    ("text", "value"),
    [("2*(3+4)", "14"), ("-7 // 2", "-4"), ("1/4", "0.25"), ("1/0", "error"), ("__import__('os')", "error"),
     ("2**9999999", "error"), ("(" * 5000, "error"), ("", "error")],
)  # fmt: skip
def test_the_calculator(text, value):
    import tool_agent

    assert tool_agent.calculate(text) == value


def test_search_agent_reads_the_corpus(tmp_path, fake_engines):
    script = turns("<search>designer of the bridge of Okel</search>", "<answer>Jon Baro</answer>")
    rows = [{"input": "Who designed the bridge of Okel?=", "label": "Jon Baro"}]
    _, _, output = run(
        tmp_path, fake_engines, script, rows=rows, custom_rm_path="search_agent.reward",
        custom_generate_function_path="search_agent.generate", rm_type=None,
    )  # fmt: skip
    for sample in flat(output):
        parts = parts_of(sample)
        assert [mask for mask, _ in parts] == [1, 0, 1]
        assert "The bridge of Okel was designed by Jon Baro." in parts[1][1]
        assert sample.reward == 1.0


def test_bm25_ranks_as_its_formula_says():
    import math

    import search_agent

    passages = ["a b", "a c c", "d"]
    mean = 2.0

    def naive(query, text):
        total, words = 0.0, text.split()
        for word in set(query.split()):
            n = sum(word in p.split() for p in passages)
            count = words.count(word)
            if not count:
                continue
            idf = math.log(1 + (3 - n + 0.5) / (n + 0.5))
            total += idf * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * len(words) / mean))
        return total

    index = search_agent.Corpus(passages)
    for query in ("a", "c", "a c", "d b", "zzz"):
        scores = {p: naive(query, p) for p in passages if naive(query, p) > 0}
        assert index.best(query, 3) == sorted(scores, key=lambda p: -scores[p])


def test_multi_agent_segments_share_an_execution_and_weigh_as_one(tmp_path, fake_engines):
    def script(request):
        if "Give the final answer." in request.prompt:
            return Reply(text=r"\boxed{4}")
        if "Name the mistakes" in request.prompt:
            return Reply(text="3 is wrong")
        return Reply(text=r"\boxed{3}")

    args, _, output = run(
        tmp_path, fake_engines, script, rows=[{"input": "2+2=", "label": "4"}], rm_type="math",
        custom_generate_function_path="multi_agent.generate",
    )  # fmt: skip
    (group,) = output.samples
    assert [s.rollout_id for s in group] == [0, 0, 0, 1, 1, 1]
    assert len({s.index for s in group}) == 6
    assert [s.reward for s in group] == [0.0, 1.0, 1.0] * 2
    assert [s.train_metadata["role"] for s in group[:3]] == ["solver", "critic", "reviser"]
    assert "3 is wrong" in group[2].prompt
    batch = samples_to_batch(args, list(group))
    (part,) = split_batch(args, batch, dp_size=1, cp_size=1)
    totals = [
        sum(w.sum() for w, r in zip(part.loss_weights, part.trajectory_ids, strict=False) if r == e)
        for e in (0, 1)
    ]
    assert totals == pytest.approx([0.5, 0.5])


# ---- examples/lora


def test_flags_of_lora_for_smollm2(tmp_path):
    """The script's own flags follow those of the run script, so the learning rate is the adapters'."""
    command = ["bash", str(EXAMPLES / "lora" / "addition.sh"), "--num-rollout", "3"]
    env = {**os.environ, "DRY_RUN": "1", "BASE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words = [word for word in done.stdout.splitlines() if word]
    given = read_command_line(words[words.index("--hf-checkpoint") :])
    assert (given["lora_rank"], given["lora_alpha"], given["lr"]) == (16, 32, 3e-4)
    assert given["num_rollout"] == 3 and given["colocate"] is True
    assert given["save_hf"] == f"{tmp_path}/smollm2-addition-lora/adapter"


def test_a_curve_is_drawn_from_metrics(tmp_path):
    rewards = {0: 0.0, 5: 0.5, 10: 1.0}
    lines = [{"rollout_id": n - 1, "eval/sorting/reward": r} for n, r in rewards.items()]
    lines.insert(1, {"rollout_id": 0, "train/loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, str(EXAMPLES / "lora" / "curve.py"), str(tmp_path / "c.svg")]
    done = subprocess.run(
        [*command, f"a < b={tmp_path}"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "a < b: 0 0.00, 5 0.50, 10 1.00\n", done.stderr
    svg = ElementTree.fromstring((tmp_path / "c.svg").read_text())
    (line,) = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert line.get("points") == "52.0,260.0 339.0,138.0 626.0,16.0"  # the corners, and half way
    assert "a < b" in [text.text for text in svg.findall("{http://www.w3.org/2000/svg}text")]

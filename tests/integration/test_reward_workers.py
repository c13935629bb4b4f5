"""Graders that evaluate what a model wrote: they run it nowhere, and in a sandbox without secrets."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from slime.config.reward_types import REWARD_TYPES
from slime.core.errors import UserError
from slime.core.types import Sample
from slime.rollout.hooks import check_hooks
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.workers import Workers
from slime.rollout.sandbox import check_sandbox
from slime.utils.http import run
from slime.utils.reasoning_tasks import HASH_SEED, MOST_ROWS, SEED, task_rows
from tests.args import make_args

# Tasks of reasoning-gym 0.1.25 that pass the answer to eval or to sympy.parse_expr.
EVALUATING = [
    "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24",
    "polynomial_multiplication", "simple_integration", "intermediate_integration",
]  # fmt: skip
LOOK = """
import os, socket

def load():
    def look(question):
        found = {"environment": sorted(os.environ), "uid": os.getuid()}
        try:
            socket.create_connection(("127.0.0.1", question["port"]), timeout=2)
            found["network"] = True
        except OSError:
            found["network"] = False
        found["files"] = [path for path in question["paths"] if os.path.exists(path)]
        return found
    return look
"""


@pytest.mark.parametrize("allowed", [False, True], ids=["sandboxed", "allow-unsandboxed-code"])
def test_answers_are_not_executed(tmp_path, allowed):
    """The attack: an answer that is a Python expression with a side effect, to every such task."""
    pytest.importorskip("reasoning_gym")
    target = tmp_path / "executed"
    args = make_args(rm_type="reasoning_gym", allow_unsandboxed_code=allowed or None)
    write = f"open({str(target)!r},'w').write('x')"
    answers = [
        f"[{write}]", f"__import__('os').system('touch {target}')", f"({write})+24",
        f"sympify(\"{write}\")", f"Symbol('x').__class__.__init__.__globals__['os'].mknod('{target}')",
    ]  # fmt: skip
    for task in EVALUATING:
        for answer in answers:
            metadata = {"reasoning_gym": {"task": task, "row": 0}}
            sample = Sample(response=f"<answer>{answer}</answer>", metadata=metadata)
            assert run(async_rm(args, sample)) < 1.0
            assert not target.exists(), task


DIRECT = """
import json, sys, reasoning_gym
tasks, seed, size = json.loads(sys.argv[1])
for task in tasks:
    data = reasoning_gym.create_dataset(task, seed=seed, size=size)
    right = str(data[2]["answer"])
    for answer in (right, right.upper(), "[1, 2]", "3*x**2 + sin(x)*exp(x) + C", "2*(3+4)", "no"):
        try: score = float(data.score_answer(answer, data[2]))
        except Exception: score = 0.0  # the task does not expect such text
        print(json.dumps([task, answer, score]))
"""


def test_scores_equal_those_of_reasoning_gym_itself():
    """Against its own functions in another process, on rows that slime made."""
    pytest.importorskip("reasoning_gym")
    args = make_args(rm_type="reasoning_gym")
    tasks = [*EVALUATING, "bitwise_arithmetic", "number_sorting", "basic_arithmetic", "chain_sum",
             "leg_counting", "prime_factorization", "letter_counting", "graph_color"]  # fmt: skip
    question = json.dumps([tasks, SEED, MOST_ROWS])
    direct = subprocess.run(
        [sys.executable, "-c", DIRECT, question],
        env=HASH_SEED, capture_output=True, text=True, check=True,
    )  # fmt: skip
    cases = [json.loads(line) for line in direct.stdout.splitlines()]
    samples = [
        Sample(
            response=f"<answer>{answer}</answer>",
            metadata={"reasoning_gym": {"task": task, "row": 2}},
        )
        for task, answer, _ in cases
    ]
    scores = run(batched_async_rm(args, samples))
    assert len(cases) == 6 * len(tasks) and {1.0} < {score for *_, score in cases}
    assert [(c[0], c[1], s) for c, s in zip(cases, scores, strict=True)] == [
        tuple(c) for c in cases
    ]


def test_no_number_is_no_answer():
    """The task scores by a distance, and min(1.0, exp(-nan)) is 1.0."""
    pytest.importorskip("reasoning_gym")
    place = {"reasoning_gym": {"task": "complex_arithmetic", "row": 0}}
    answers = ["nan", "NaN", "(nan+nanj)", "((3 - nan i))", "n a n", "nani", "-nan"]
    samples = [Sample(response=f"<answer>{a}</answer>", metadata=place) for a in answers]
    scores = run(batched_async_rm(make_args(rm_type="reasoning_gym"), samples))
    assert scores == [0.0] * len(answers)


def test_rows_are_the_same_in_every_process():
    """polynomial_multiplication goes through a set: its rows depend on the hash seed of a process."""
    pytest.importorskip("reasoning_gym")
    rows = task_rows("polynomial_multiplication", range(6), "--prompt-data")
    samples = [
        Sample(response=f"<answer>{answer}</answer>", metadata=metadata)
        for _, answer, metadata in rows
    ]
    args = make_args(prompt_data=["reasoning-gym:polynomial_multiplication@[0:6]"])
    assert run(batched_async_rm(args, samples)) == [1.0] * 6


def test_a_worker_sees_no_environment_network_or_files(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_TEST_SECRET", "x")
    script, secret = tmp_path / "look.py", tmp_path / "answers.jsonl"
    script.write_text(LOOK)
    secret.write_text("42")

    async def scenario():
        import asyncio

        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = Workers(str(script.with_suffix("")), time_limit_s=60.0, count=1)
        return await pool.ask({"port": port, "paths": [str(secret), "/etc/passwd", "/root/.ssh"]})

    found = run(scenario())
    assert "SLIME_TEST_SECRET" not in json.dumps(found["environment"])
    assert found["network"] is False and found["files"] == [] and found["uid"] != 0


@pytest.mark.parametrize("name", [n for n, kind in REWARD_TYPES.items() if kind.sandboxed])
def test_without_a_sandbox_a_type_that_needs_it_is_refused_at_the_start(
    name, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))  # no bubblewrap
    check_sandbox.cache_clear()
    for flags in ({"rm_type": name}, {"allow_row_rm_types": [name]}):
        with pytest.raises(UserError, match="bubblewrap"):
            check_hooks(make_args(**flags))
        check_hooks(make_args(**flags, allow_unsandboxed_code=True))
    check_hooks(make_args(rm_type="f1"))
    check_sandbox.cache_clear()


def test_one_answer_leaves_nothing_for_the_next(tmp_path):
    """Long answers that hang cost their time limit and nothing else: the next one is scored."""
    pytest.importorskip("reasoning_gym")
    args = make_args(rm_type="reasoning_gym")
    metadata = {"reasoning_gym": {"task": "puzzle24", "row": 0}}
    hang = Sample(response="<answer>9**9**9**9</answer>", metadata=metadata)
    assert run(async_rm(args, hang)) < 1.0
    place = {"reasoning_gym": {"task": "chain_sum", "row": 0}}
    data = pytest.importorskip("reasoning_gym").create_dataset(
        "chain_sum", seed=SEED, size=MOST_ROWS
    )
    right = Sample(response=f"<answer>{data[0]['answer']}</answer>", metadata=place)
    assert run(async_rm(args, right)) == 1.0

"""Agents written with the real `openai` client, recorded to the token."""

from __future__ import annotations

import asyncio
import http.client
import json

import pytest

openai = pytest.importorskip("openai")

from slime.core.errors import UserError  # noqa: E402
from slime.core.types import Status  # noqa: E402
from slime.rollout.agents.openai_endpoint import RecordingEndpoint, _endpoint  # noqa: E402
from slime.rollout.context import RolloutContext  # noqa: E402
from slime.rollout.data_source import RolloutDataSourceWithBuffer  # noqa: E402
from slime.rollout.engine_pool import EnginePool, EngineUnreachableError  # noqa: E402
from slime.rollout.sglang_rollout import generate_rollout  # noqa: E402
from slime.runlog.sample_log import sample_row  # noqa: E402
from tests import openai_agents  # noqa: E402
from tests.engines import engine_server  # noqa: E402
from tests.fake_engine import Reply  # noqa: E402
from tests.prompts import flat, make_tokenizer_folder, rollout_args  # noqa: E402
from tests.tiny import EOS_ID, make_byte_tokenizer, make_tiny_checkpoint  # noqa: E402

TOKENIZER = make_byte_tokenizer()
EOS = TOKENIZER.eos_token
# Thoughts are left out of past answers, as Qwen3's template does: rendering anew would change history.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}" + EOS + "\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
AGENTS = "tests.openai_agents"


@pytest.fixture
def run(tmp_path, fake_engines):
    make_tokenizer_folder(tmp_path / "model", TEMPLATE)
    openai_agents.seen.clear()

    def start(agent, script, pool=None, rows=None, **flags):
        (engine,) = fake_engines(script, **(pool or {}))
        values = {
            "rollout_batch_size": 1, "n_samples_per_prompt": 1, "rollout_max_response_len": 400,
            "custom_generate_function_path": f"{AGENTS}.{agent}", **flags,
        }  # fmt: skip
        rows = rows or [{"input": "2+3=", "label": "5"}]
        args = rollout_args(tmp_path, rows, **values)
        return engine, generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))

    return start


def parts_of(sample):
    response = sample.tokens[-sample.response_length :]
    parts: list[list] = []
    for token, mask in zip(response, sample.loss_mask, strict=True):
        if not parts or parts[-1][0] != mask:
            parts.append([mask, []])
        parts[-1][1].append(token)
    return [(mask, TOKENIZER.decode(tokens)) for mask, tokens in parts]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def test_an_agent_with_tools_becomes_one_sample_of_exact_tokens(run):
    def script(request):
        if "[tool]" in request.prompt:
            return Reply(text="It is 5.")
        return Reply(text=f"<think>add</think>I add.{CALL}")

    engine, output = run("with_tools", script)
    (sample,) = flat(output)
    assert TOKENIZER.decode(sample.tokens[: len(sample.tokens) - sample.response_length]) == (
        f"[user]2+3={EOS}\n[assistant]"
    )
    assert parts_of(sample) == [
        (1, f"<think>add</think>I add.{CALL}{EOS}"),  # the thought is still there
        (0, f"\n[tool]5{EOS}\n[assistant]"),
        (1, f"It is 5.{EOS}"),
    ]
    assert sample.tokens[-1] == EOS_ID and sample.status == Status.COMPLETED
    first, second = engine.requests
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    assert sample.tokens[: len(second.input_ids)] == second.input_ids
    # What the client saw.
    call, content = openai_agents.seen[0]
    assert call == ("add", {"a": 2, "b": 3}) and content == "<think>add</think>I add."
    assert sample.metadata["agent_result"] == "It is 5."
    sent = [lp for lp, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m]
    turns = [len(f"<think>add</think>I add.{CALL}") + 1, len("It is 5.") + 1]
    assert sent == [-0.5 - i / 100 for n in turns for i in range(n)]


def test_a_rendered_prompt_in_a_message_is_refused(run):
    """It would be templated twice, and nothing would be learned from such a prompt."""
    rows = [{"input": [{"role": "user", "content": "2+3="}], "label": "5"}]
    with pytest.raises(UserError, match="the template would be applied twice"):
        run("with_tools", lambda request: Reply(text="5"), rows=rows, apply_chat_template=True)


@pytest.mark.parametrize("rendered", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_the_messages_of_the_row_are_handed_to_the_agent(run, rendered, text):
    """The template is applied once, with and without the flag; what the agent appends stays out of the sample."""
    row = [{"role": "user", "content": "2+3="}]
    engine, output = run(
        "greedy",
        lambda request: Reply(text="5"),
        rows=[{"input": "2+3=" if text else row, "label": "5"}],
        apply_chat_template=rendered,
    )
    first, second = engine.requests
    assert TOKENIZER.decode(first.input_ids) == f"[user]2+3={EOS}\n[assistant]"
    assert TOKENIZER.decode(second.input_ids[len(first.input_ids) :]) == (
        f"5{EOS}\n[user]sure?{EOS}\n[assistant]"
    )
    (sample,) = flat(output)
    assert sample.messages == row
    assert len(sample.metadata["messages"]) == 4  # the conversation


def test_the_prompt_is_shown_as_the_model_saw_it(run):
    engine, output = run("with_tools", lambda request: Reply(text="5"))
    (sample,) = flat(output)
    row = sample_row(sample, 1.0, kind="train")
    assert row.prompt == TOKENIZER.decode(engine.requests[0].input_ids)
    assert row.prompt == f"[user]2+3={EOS}\n[assistant]" and sample.prompt == "2+3="


def test_a_client_that_edits_history_forks_a_segment(run):
    _, output = run(
        "edits_history", lambda r: Reply(text="a" if "[user]more" not in r.prompt else "b")
    )
    samples = flat(output)
    assert len(samples) == 2 and {s.rollout_id for s in samples} == {0}
    assert parts_of(samples[0]) == [(1, f"a{EOS}")]
    # The edited past is a prompt: nothing the model did not say is trained on.
    assert parts_of(samples[1]) == [(1, f"b{EOS}")]
    prompt = TOKENIZER.decode(samples[1].tokens[: -samples[1].response_length])
    assert prompt == f"[user]2+3={EOS}\n[assistant]EDITED{EOS}\n[user]more{EOS}\n[assistant]"


def test_going_back_shares_tokens_but_trains_on_them_once(run):
    def script(request):
        last = request.prompt.rsplit("[user]", 1)[1][0]
        return Reply(text={"2": "one", "x": "left", "y": "right"}[last])

    _, output = run("goes_back", script)
    left, right = flat(output)
    assert parts_of(left) == [
        (1, f"one{EOS}"),
        (0, f"\n[user]x{EOS}\n[assistant]"),
        (1, f"left{EOS}"),
    ]
    assert parts_of(right) == [(0, f"one{EOS}\n[user]y{EOS}\n[assistant]"), (1, f"right{EOS}")]


def test_streaming_async_agents_log_probs_and_stops(run):
    _, output = run("streams", lambda r: Reply(text="hello END rest"))
    (sample,) = flat(output)
    assert openai_agents.seen == [("hello ", len("hello END rest") + 1)]
    assert parts_of(sample) == [(1, f"hello END rest{EOS}")]


def test_the_length_of_the_run_bounds_a_conversation(run):
    _, output = run("talks_on", lambda r: Reply(text="abcdefgh"), rollout_max_response_len=60)
    (sample,) = flat(output)
    assert openai_agents.seen == ["context_length_exceeded"]
    assert sample.response_length <= 60 and sample.reward is not None


def test_an_agent_that_fails_marks_its_sample(run):
    with pytest.raises(Exception, match="the agent broke"):
        run("breaks", lambda r: Reply(text="a"))


def test_engines_that_are_gone_end_the_run_whatever_the_agent_makes_of_it(run):
    with pytest.raises(EngineUnreachableError, match=r"no engine answered for 0 s"):
        run("does_not_care", lambda r: Reply(drop=True), pool={"deadline_s": 0.3})
    assert "no engine answered" in str(openai_agents.seen[0])


def test_what_an_engine_refuses_is_returned_to_the_agent(run):
    with pytest.raises(UserError, match="answered 400"):
        run("two_questions", lambda r: Reply(status=400))


def test_an_abort_while_the_endpoint_starts_ends_one_waiter_only(tmp_path, use_pool):
    """The first to need it is cancelled half way: all others would wait for it forever."""
    args = rollout_args(tmp_path, rollout_max_context_len=77)

    async def scenario():
        first, second = (asyncio.ensure_future(_endpoint(args)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        endpoint = await asyncio.wait_for(second, 60)
        return endpoint.url, first.cancelled()

    use_pool(EnginePool([]))
    url, cancelled = asyncio.run(scenario())
    assert url.startswith("http://127.0.0.1:") and cancelled


def test_the_endpoint_in_front_of_the_embedded_engine(tmp_path, use_pool):
    """Log-probs of the record equal those the engine gives the same tokens."""
    folder = make_tiny_checkpoint(tmp_path / "model")
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    args = rollout_args(
        tmp_path, [{"input": "2+3=", "label": "5"}], rollout_batch_size=1, n_samples_per_prompt=2,
        custom_generate_function_path=f"{AGENTS}.two_questions", rollout_max_response_len=64,
    )  # fmt: skip
    with engine_server(folder) as server:
        use_pool(EnginePool([server.url]))
        samples = flat(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)))
        assert len(samples) == 2
        for sample in samples:
            body = {
                "input_ids": sample.tokens, "return_logprob": True, "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 1},
            }  # fmt: skip
            scored = server.post("/generate", body)["meta_info"]["input_token_logprobs"]
            again = [entry[0] for entry in scored][-sample.response_length :]
            for mine, other, mask in zip(
                sample.rollout_log_probs, again, sample.loss_mask, strict=True
            ):
                assert not mask or mine == pytest.approx(other, abs=1e-4)
            assert {0, 1} == set(sample.loss_mask)
    json.dumps(samples[0].metadata)  # goes into a checkpoint


def test_what_a_tool_returns_stays_text(run):
    """Every control token of the sample was written by the template or the model, not by the web page."""
    _, output = run("searching", lambda request: Reply(text="ok"))
    (sample,) = flat(output)
    page = sample.metadata["agent_result"]
    shown = TOKENIZER.decode(sample.tokens)
    assert (
        shown.count(page) == 2
    )  # two answers were followed by it, and its characters are all there
    messages, answers = 3, 3  # the template ends the messages, the model ends its answers
    assert sample.tokens.count(EOS_ID) == messages + answers
    assert shown.count(EOS) == sample.tokens.count(EOS_ID) + 2 * page.count(EOS)
    for name, error in zip(
        ("chat_template", "eos_token", "documents"), openai_agents.seen, strict=True
    ):
        assert f"must not have the key '{name}'" in error


def test_the_endpoint_refuses_web_pages(run):
    """The session's name is secret, but a web page can try what a browser lets it send."""
    run("two_questions", lambda request: Reply(text="ok"))
    url = next(iter(RolloutContext.current().shared(RecordingEndpoint, dict).values())).result().url
    port = int(url.rsplit(":", 1)[1])
    for headers, status in (
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({}, 404),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        given = {"Content-Type": "application/json", **headers}
        connection.request("POST", "/sessions/x/v1/chat/completions", b"{}", given)
        assert connection.getresponse().status == status
        connection.close()

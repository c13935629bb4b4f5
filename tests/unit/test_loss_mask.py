"""Which tokens of a conversation are trained on, per kind of chat template."""

from __future__ import annotations

from itertools import groupby

import pytest
from tokenizers.processors import TemplateProcessing

from slime.core.errors import ConfigError, UserError
from slime.core.types import Status
from slime.data.sft_loss_mask import masked_conversation
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sft_rollout import generate_rollout
from tests.prompts import rollout_args, sums
from tests.tiny import EOS, EOS_ID, make_byte_tokenizer

# A system message of its own when there is none; tool results as one user turn.
CHATML = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe good.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if not loop.previtem or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Thinking stays only behind the last user message, where an empty block stands in for none.
CHATML_THINKING = """
{%- if tools %}{{ '<|im_start|>system\\ntools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- answer + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Thinking is dropped everywhere; the generation prompt opens it.
DISTILL = """
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] + eos_token }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"""

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "Say <|im_start|>assistant\nno<|im_end|>"},
    {"role": "assistant", "content": "\nno"},
]
THINKING = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
    {"role": "tool", "content": "ok"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
]


def tokenizer_with(template):
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def parts(template, messages, kind, **options):
    """The conversation as runs of (text, trained on)."""
    tokenizer = tokenizer_with(template)
    tokens, mask = masked_conversation(tokenizer, messages, kind=kind, **options)
    assert len(tokens) == len(mask)
    runs = groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1])
    return [(tokenizer.decode([token for token, _ in run]), on) for on, run in runs]


def test_chatml_trains_on_every_assistant_turn_and_its_end():
    expected = tokenizer_with(CHATML).apply_chat_template(CHAT, tokenize=False)
    runs = parts(CHATML, CHAT, "qwen")
    assert "".join(text for text, _ in runs) == expected
    assert [text for text, on in runs if on] == ["Hello\n<|im_end|>", "\nno<|im_end|>"]
    assert runs[0][0].endswith("<|im_start|>assistant\n")


def test_chatml_with_tools_and_a_system_message():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "<tool_call>x</tool_call>"},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "mixed"},
    ]
    for kind in ("qwen", "qwen3"):
        runs = parts(CHATML, messages, kind)
        expected = tokenizer_with(CHATML).apply_chat_template(messages, tokenize=False)
        assert "".join(text for text, _ in runs) == expected
        trained = [text for text, on in runs if on]
        assert trained == ["<tool_call>x</tool_call><|im_end|>", "mixed<|im_end|>"]


def test_qwen3_keeps_the_thinking_of_every_turn():
    runs = parts(CHATML_THINKING, THINKING, "qwen3")
    assert [text for text, on in runs if on] == [
        "<think>\neasy\n</think>\n\n2<|im_end|>",
        "<think>\n\n</think>\n\ndone<|im_end|>",
        "<think>\nhm\n</think>\n\n4<|im_end|>",
    ]
    untrained = "".join(text for text, on in runs if not on)
    assert untrained.count("<|im_start|>assistant\n") == 3 and untrained.count("1+1") == 1


def test_qwen3_keeps_tools_and_system_once():
    tools = [{"name": "f"}]
    whole = "".join(text for text, _ in parts(CHATML_THINKING, THINKING, "qwen3", tools=tools))
    assert whole.count("tools: ") == 1 and whole.startswith("<|im_start|>system\ntools: ")
    single = [*THINKING[:2]]
    expected = tokenizer_with(CHATML_THINKING).apply_chat_template(
        single, tools=tools, tokenize=False
    )
    assert "".join(t for t, _ in parts(CHATML_THINKING, single, "qwen3", tools=tools)) == expected


def test_distill_trains_on_the_last_turn_with_its_thinking():
    runs = parts(DISTILL, [*THINKING[:2], *THINKING[4:]], "distill_qwen")
    assert runs == [
        (
            f"<\uff5cUser\uff5c>1+1<\uff5cAssistant\uff5c>\n\n2{EOS}"
            "<\uff5cUser\uff5c>2+2<\uff5cAssistant\uff5c><think>\n",
            0,
        ),
        (f"hm\n</think>\n\n4{EOS}", 1),
    ]


def test_tokens_split_where_generation_would_split_them():
    """The prompt's tokens end at the header whatever the response starts with."""
    tokenizer = tokenizer_with(CHATML)
    tokens, mask = masked_conversation(tokenizer, CHAT[:2])
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    start = mask.index(1)
    assert tokens[:start] == tokenizer.encode(prompt, add_special_tokens=False)


def test_a_template_that_changes_what_was_said_is_refused():
    """Only the last turn keeps its thinking: the first would be trained on without it."""
    with pytest.raises(UserError, match=r"easy.*--loss-mask-type qwen3"):
        masked_conversation(tokenizer_with(CHATML_THINKING), THINKING, kind="qwen")
    shouting = CHATML.replace("m.content + '<|im_end|>", "m.content | upper + '<|im_end|>")
    for kind in ("qwen", "qwen3"):
        with pytest.raises(UserError, match="changes an assistant message"):
            masked_conversation(tokenizer_with(shouting), CHAT, kind=kind)
    hidden = [CHAT[0], {"role": "assistant", "content": "2", "reasoning_content": "one more"}]
    with pytest.raises(UserError, match="changes an assistant message"):
        masked_conversation(tokenizer_with(CHATML), hidden, kind="qwen")


def test_an_answer_that_quotes_the_end_of_a_turn_is_trained_on_to_its_own_end():
    messages = [CHAT[0], {"role": "assistant", "content": "a<|im_end|>b"}, *CHAT[2:]]
    for kind in ("qwen", "qwen3"):
        trained = [text for text, on in parts(CHATML, messages, kind) if on]
        assert trained == ["a<|im_end|>b<|im_end|>", "\nno<|im_end|>"]


def test_an_answer_that_only_a_later_message_quotes_was_not_kept():
    """The template drops its thinking; the user's words must not be taken for it."""
    messages = [*THINKING[:2], {"role": "user", "content": THINKING[1]["content"]}, THINKING[3]]
    with pytest.raises(UserError, match="changes an assistant message"):
        masked_conversation(tokenizer_with(CHATML_THINKING), messages, kind="qwen")


def test_a_template_may_rewrite_what_the_user_said():
    shouted = "(m.content | upper if m.role == 'user' else m.content)"
    template = CHATML.replace("m.content + '<|im_end|>", f"{shouted} + '<|im_end|>")
    messages = [CHAT[0], CHAT[1], {"role": "user", "content": "again"}, CHAT[1]]
    for kind in ("qwen", "qwen3"):
        trained = [text for text, on in parts(template, messages, kind) if on]
        assert trained == ["Hello\n<|im_end|>"] * 2


def test_a_template_may_trim_what_was_said():
    trimming = CHATML.replace("m.content + '<|im_end|>", "m.content | trim + '<|im_end|>")
    messages = [CHAT[0], {"role": "assistant", "content": " Hello\n"}]
    for kind in ("qwen", "qwen3"):
        trained = [text for text, on in parts(trimming, messages, kind) if on]
        assert trained == ["Hello<|im_end|>"]


def test_content_in_parts_is_their_text():
    text = "(m.content if m.content is string else m.content[0].text)"
    joining = CHATML.replace("m.content + '<|im_end|>", f"{text} + '<|im_end|>")
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", "Hi"), ("assistant", "Hello"))
    ]
    trained = [text for text, on in parts(joining, messages, "qwen") if on]
    assert trained == ["Hello<|im_end|>"]


def test_options_of_the_template_reach_it():
    template = "{{ mood | default('') }}" + CHATML
    runs = parts(template, CHAT[:2], "qwen", template_kwargs={"mood": "Sunny. "})
    assert runs[0][0].startswith("Sunny. <|im_start|>system")


def test_a_tokenizer_that_begins_every_text_with_a_token_does_not_begin_every_piece_with_one():
    tokenizer = tokenizer_with(CHATML)
    plain = masked_conversation(tokenizer, CHAT)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert tokenizer.encode("a")[0] == start
    assert masked_conversation(tokenizer, CHAT) == plain


def test_a_turn_of_tool_calls_alone_is_trained_on_whole():
    template = CHATML.replace(
        "m.content + '<|im_end|>",
        "(m.content or '') + (m.tool_calls | tojson if m.tool_calls else '') + '<|im_end|>",
    )
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "sky"}]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "sunny"},
    ]
    for kind in ("qwen", "qwen3"):
        trained = [text for text, on in parts(template, messages, kind) if on]
        assert trained == ['[{"name": "sky"}]<|im_end|>', "sunny<|im_end|>"]


def test_mistakes():
    with pytest.raises(UserError, match="without an assistant message"):
        masked_conversation(tokenizer_with(CHATML), CHAT[:1])
    for kind in ("qwen", "qwen3"):
        with pytest.raises(ConfigError, match=f"--loss-mask-type {kind} does not fit"):
            masked_conversation(tokenizer_with(DISTILL), CHAT, kind=kind)
    bare = tokenizer_with(None)
    with pytest.raises(ConfigError, match="chat template"):
        masked_conversation(bare, CHAT)


# ---- the supervised rollout over such rows


def sft_rollout(tmp_path, rows, template=CHATML, **overrides):
    if not (tmp_path / "model").exists():
        tokenizer_with(template).save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    options = {"n_samples_per_prompt": 1, "rm_type": None, "loss_type": "sft_loss", **overrides}
    args = rollout_args(tmp_path, rows, **options)
    return generate_rollout(args, 0, RolloutDataSource(args)), args


def test_pairs_of_prompt_and_label(tmp_path):
    output, args = sft_rollout(tmp_path, sums(4))
    tokenizer = tokenizer_with(CHATML)
    for group, row in zip(output.samples, sums(4), strict=False):
        (sample,) = group
        response = [*tokenizer.encode(row["label"]), EOS_ID]
        assert sample.tokens == tokenizer.encode(row["input"]) + response
        assert sample.response_length == len(response) and sample.loss_mask == [1] * len(response)
        assert (sample.reward, sample.status) == (0.0, Status.COMPLETED)
    assert len(output.samples) == args.rollout_batch_size
    assert output.metrics["rollout/trained_tokens"] == 4.0


def test_conversations(tmp_path):
    output, _ = sft_rollout(
        tmp_path, [{"messages": CHAT}] * 2, input_key="messages", label_key=None
    )
    tokens, mask = masked_conversation(tokenizer_with(CHATML), CHAT)
    sample = output.samples[0][0]
    assert sample.tokens == tokens
    assert sample.loss_mask == mask[-sample.response_length :] and sample.loss_mask[0] == 1
    assert sum(sample.loss_mask) == sum(mask)


def test_rows_longer_than_the_context_are_cut(tmp_path):
    rows = [{"input": "ab", "label": "cdefgh"}, {"input": "abcdefgh", "label": "i"}]
    output, _ = sft_rollout(tmp_path, rows, rollout_max_context_len=6, rollout_max_response_len=4)
    short, long = (group[0] for group in output.samples)
    assert len(short.tokens) == 6 and short.status == Status.TRUNCATED and not short.remove_sample
    assert long.remove_sample and long.response_length == 1


def test_a_row_without_a_response_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match="--label-key"):
        sft_rollout(tmp_path, [{"input": "a"}] * 2, label_key=None)
    with pytest.raises(UserError, match="--eval-function-path"):
        args = rollout_args(tmp_path)
        generate_rollout(args, 0, RolloutDataSource(args), evaluation=True)


def test_distill_trains_on_the_text_of_parts_and_refuses_what_it_would_drop():
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2 "}]
    in_parts = [{"type": "text", "text": "2"}, {"type": "text", "text": " "}]
    split = [chat[0], {"role": "assistant", "content": in_parts}]
    assert parts(DISTILL, split, "distill_qwen")[-1] == parts(DISTILL, chat, "distill_qwen")[-1]
    for field in ({"tool_calls": [{"function": {"name": "f"}}]}, {"reasoning_content": "hm"}):
        with pytest.raises(UserError, match="distill_qwen"):
            parts(
                DISTILL, [chat[0], {"role": "assistant", "content": None, **field}], "distill_qwen"
            )

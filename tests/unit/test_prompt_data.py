"""Prompt files -> samples: keys, templates, slices, filter, and one clear message per mistake."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from slime.core.errors import ConfigError
from slime.data.prompt_data import DataFormat, DataSpec, load_prompts
from tests.prompts import sums, write_rows
from tests.tiny import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
CHATML = (
    "{% if tools %}tools:{{ tools | length }}|{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if style %}[{{ style }}]{% endif %}{% endif %}"
)


def chat_tokenizer():
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def test_plain_rows_become_samples_with_tokens_label_and_metadata(tmp_path):
    rows = [{"input": "1+1=", "label": "2", "metadata": {"level": 3}}, {"input": "é", "label": 7}]
    data = load_prompts(
        str(write_rows(tmp_path / "a.jsonl", rows)), DataFormat(label_key="label"), TOKENIZER
    )
    first, second = data.make_sample(0), data.make_sample(1)
    assert (first.prompt, first.label, first.metadata) == ("1+1=", "2", {"level": 3})
    assert first.tokens == TOKENIZER.encode("1+1=") and len(second.tokens) == len("é".encode())
    assert second.label == 7 and second.metadata == {}


def test_samples_of_a_row_share_nothing_that_can_change(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"input": "x", "metadata": {"a": 1}}])
    data = load_prompts(str(path), DataFormat(), TOKENIZER)
    one, two = data.make_sample(0), data.make_sample(0)
    one.tokens.append(5)
    one.metadata["a"] = 2
    assert two.tokens == TOKENIZER.encode("x") and two.metadata == {"a": 1}
    assert data.make_sample(0).tokens == TOKENIZER.encode("x")


def test_chat_template_renders_text_and_messages_with_tools_and_keywords(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    rows = [{"q": "hi"}, {"q": messages}, {"q": "hi", "fns": [{"name": "f"}, {"name": "g"}]}]
    data_format = DataFormat(
        input_key="q",
        tool_key="fns",
        apply_chat_template=True,
        chat_template_kwargs={"style": "brief"},
    )
    data = load_prompts(str(write_rows(tmp_path / "a.jsonl", rows)), data_format, chat_tokenizer())
    prompts = [data.make_sample(i).prompt for i in range(3)]
    assert prompts == [
        "<user>hi<assistant>[brief]",
        "<system>S<user>hi<assistant>[brief]",
        "tools:2|<user>hi<assistant>[brief]",
    ]
    assert data.make_sample(2).metadata["tools"] == [{"name": "f"}, {"name": "g"}]
    assert data.make_sample(0).tokens == TOKENIZER.encode(prompts[0])
    user = [{"role": "user", "content": "hi"}]
    assert [data.make_sample(i).messages for i in range(3)] == [user, messages, user]


def test_messages_without_a_template_stay_messages(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = write_rows(tmp_path / "a.jsonl", [{"input": messages}])
    sample = load_prompts(str(path), DataFormat(), TOKENIZER).make_sample(0)
    assert sample.prompt == messages == sample.messages and sample.tokens == []
    sample.messages.append({"role": "assistant", "content": "ho"})
    assert sample.prompt == messages


def test_parquet_gives_the_same_samples_as_jsonl(tmp_path):
    rows = [{**row, "metadata": {"n": i}} for i, row in enumerate(sums(5))]
    table = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), table)
    data_format = DataFormat(label_key="label")
    jsonl = load_prompts(str(write_rows(tmp_path / "a.jsonl", rows)), data_format, TOKENIZER)
    arrow = load_prompts(str(table), data_format, TOKENIZER)
    assert [arrow.make_sample(i) for i in range(5)] == [jsonl.make_sample(i) for i in range(5)]


@pytest.mark.parametrize("text", ["[2:5]", "[:3]", "[7:]", "[-2:]", "[:-4]"])
def test_slices_mean_what_they_mean_in_python(tmp_path, text):
    path = write_rows(tmp_path / "a.jsonl", sums(10))
    data = load_prompts(f"{path}@{text}", DataFormat(), TOKENIZER)
    bounds = [int(part) if part else None for part in text[1:-1].split(":")]
    expected = [row["input"] for row in sums(10)[slice(*bounds)]]
    assert [data.make_sample(i).prompt for i in range(len(data))] == expected


def test_a_slice_does_not_read_on(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", sums(3))
    with path.open("a") as file:
        file.write("broken\n")
    assert len(load_prompts(f"{path}@[0:3]", DataFormat(), TOKENIZER)) == 3


def test_spec_reads_path_slice_and_weight():
    spec = DataSpec.parse("/d/x.jsonl@[5:10]:weight=2.5")
    assert (spec.path, spec.rows, spec.weight) == ("/d/x.jsonl", slice(5, 10), 2.5)
    assert DataSpec.parse("/d/odd@name.jsonl").path == "/d/odd@name.jsonl"
    for wrong in ("x.jsonl@[a:b]", "x.jsonl@[1]", "x.jsonl:weight=0", "x.jsonl:weight=a", ""):
        with pytest.raises(ConfigError):
            DataSpec.parse(wrong)


def test_length_filter_counts_what_it_leaves_out(tmp_path, caplog):
    caplog.set_level("INFO", logger="slime.data.prompt_data")
    rows = [{"input": "x" * n} for n in (1, 5, 6, 3, 9)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    data = load_prompts(str(path), DataFormat(max_prompt_len=5), TOKENIZER)
    assert [len(data.make_sample(i).tokens) for i in range(len(data))] == [1, 5, 3]
    assert "removed 2 of 5 prompts that are longer than 5 tokens" in caplog.text


def message(text, data_format=None, tokenizer=TOKENIZER):
    with pytest.raises(ConfigError) as caught:
        load_prompts(str(text), data_format or DataFormat(), tokenizer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_file_and_folder(tmp_path):
    assert message(tmp_path / "none.jsonl").endswith(f"{tmp_path}/none.jsonl does not exist")
    assert "hf download openai/gsm8k --repo-type dataset" in message("openai/gsm8k")
    assert message("data/none.jsonl").endswith("data/none.jsonl does not exist")
    assert "is a folder" in message(tmp_path)
    (tmp_path / "a.csv").write_text("x")
    assert ".jsonl or .parquet" in message(tmp_path / "a.csv")


def test_malformed_line_is_named(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", sums(16))
    with path.open("a") as file:
        file.write('{"input": "broken\n')
    text = message(path)
    assert f"{path}:17" in text and "not valid JSON" in text
    path.write_text('\n{"input": "a"}\n[1, 2]\n')
    assert f"{path}:3" in message(path)


def test_missing_key_names_line_keys_and_flag(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"input": "a"}, {"question": "b", "answer": 1}])
    text = message(path)
    assert f"{path}:2" in text and "question, answer" in text and "--input-key" in text
    text = message(path, DataFormat(label_key="gold"))
    assert f"{path}:1" in text and "'gold'" in text and "--label-key" in text


def test_prompt_of_the_wrong_kind(tmp_path):
    for value, described in ((5, "int"), (None, "null"), ("", "empty"), ([], "empty")):
        text = message(write_rows(tmp_path / "a.jsonl", [{"input": value}]))
        assert described in text and "--input-key" in text


def test_label_that_the_reward_needs(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"input": "a", "label": None, "gold": 1}])
    needed = DataFormat(label_needed_by="--rm-type math")
    text = message(path, needed)
    assert "--rm-type math" in text and "--label-key" in text and "gold" in text
    needed = DataFormat(label_key="label", label_needed_by="--rm-type math")
    assert "'label' is empty" in message(path, needed)


def test_empty_dataset_and_everything_filtered(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    assert "is empty" in message(empty)
    path = write_rows(tmp_path / "a.jsonl", [{"input": "long prompt"}] * 3)
    assert "is empty" in message(f"{path}@[5:9]")
    text = message(path, DataFormat(max_prompt_len=3))
    assert "all 3 prompts" in text and "--rollout-max-prompt-len" in text


def test_chat_template_mistakes(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"input": [{"role": "user"}]}])
    bare = make_byte_tokenizer()
    bare.chat_template = None
    chat = DataFormat(apply_chat_template=True)
    assert "no chat template" in message(path, chat, bare)
    strict = make_byte_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    text = message(path, chat, strict)
    assert f"{path}:1" in text and "roles must alternate" in text
    text = message(path, DataFormat(max_prompt_len=9))
    assert "--apply-chat-template" in text


def test_broken_parquet_and_metadata(tmp_path):
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"PAR1 no")
    assert "not a readable parquet" in message(broken)
    path = write_rows(tmp_path / "a.jsonl", [{"input": "a", "metadata": [1]}])
    assert "--metadata-key" in message(path)


def test_a_byte_order_mark_and_windows_line_ends_are_read_over(tmp_path):
    rows = b'{"input": "a"}\r\n\r\n{"input": "b"}\r\n'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + rows)
    data = load_prompts(str(tmp_path / "a.jsonl"), DataFormat(), TOKENIZER)
    assert [sample.prompt for sample in data.samples] == ["a", "b"]


@pytest.mark.parametrize("tools", ["[{", '{"name": "f"}', 7])
def test_tools_that_are_no_list_are_named_with_their_line(tmp_path, tools):
    path = write_rows(tmp_path / "a.jsonl", [{"input": "a"}, {"input": "a", "tools": tools}])
    assert message(path).startswith(f"{path}:2: 'tools' must be a list of tools (--tool-key")


def test_integers_of_any_size_are_read_exactly(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"input": "2^89=", "label": 618970019642690137449562112}\n')
    data = load_prompts(str(file), DataFormat(label_key="label"), TOKENIZER)
    assert data.make_sample(0).label == 2**89


def test_a_list_of_strings_is_no_prompt_with_images(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"input": ["describe", "this"], "images": []}])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*list of messages"):
        load_prompts(str(file), DataFormat(image_key="images"), TOKENIZER)

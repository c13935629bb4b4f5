"""Turns public files of math problems into slime's rows: prompt (messages), label, metadata.

    python tools/prepare_data.py gsm8k train-00000-of-00001.parquet gsm8k.jsonl
    python tools/prepare_data.py dapo-math-17k dapo-math-17k.parquet dapo-math-17k.jsonl
    python tools/prepare_data.py aime-2024 aime_2024.parquet aime-2024.jsonl

Input is parquet or jsonl as it was published; train on the output with
`--prompt-data FILE --input-key prompt --label-key label --apply-chat-template` and the reward that the last
line of this tool names: it depends on what the prompts ask for, a box or a line "Answer: ...".
Equal prompts are kept once (DAPO's file repeats each a hundred times).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime.core.errors import ConfigError, UserError
from slime.data.prompt_data import read_rows
from slime.rollout.rm_hub.math_reward import last_boxed

Row = dict[str, Any]
BOXED = "Reason step by step, and put your final answer within \\boxed{}."
ANSWER_LINE = (
    'Reason step by step. The last line of your response must be "Answer: " and the answer.'
)
_REWARDS = {True: "--rm-type dapo --reward-key score", False: "--rm-type math"}


@dataclass(kw_only=True, frozen=True)
class Problem:
    messages: list[dict[str, str]]
    label: str
    metadata: dict[str, Any]

    def line(self) -> bytes:
        record = {"prompt": self.messages, "label": self.label, "metadata": self.metadata}
        return orjson.dumps(record) + b"\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("dataset", choices=sorted(DATASETS))
    parser.add_argument("input", help="the published .parquet or .jsonl file")
    parser.add_argument("output", help="the .jsonl file to write")
    parser.add_argument("--instruction", help="added to each question; default: by dataset")
    options = parser.parse_args(argv)
    try:
        made = prepare(options.dataset, options.input, options.output, options.instruction)
    except UserError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return error.exit_status
    print(f"{options.output}: {made.kept} rows, {made.repeated} repeated prompts skipped")
    print(f"reward: {made.reward}")
    return 0


@dataclass(kw_only=True)
class Made:
    kept: int = 0
    repeated: int = 0
    answer_lines: int = 0  # prompts that ask for a line "Answer: ..."

    @property
    def reward(self) -> str:
        if 0 < self.answer_lines < self.kept:
            return f"mixed: {self.answer_lines} of {self.kept} prompts ask for a line 'Answer: ...'"
        return _REWARDS[self.answer_lines > 0]


def prepare(name: str, source: str, target: str, instruction: str | None = None) -> Made:
    """Write the rows; the output appears whole or not at all."""
    seen: set[bytes] = set()
    made, temporary = Made(), Path(f"{target}.tmp")
    try:
        with temporary.open("wb") as file:
            for where, row in read_rows(source, "input"):
                problem = DATASETS[name](row, where, instruction)
                key = orjson.dumps(problem.messages)
                if key in seen:
                    made.repeated += 1
                    continue
                seen.add(key)
                made.kept += 1
                made.answer_lines += "answer:" in problem.messages[-1]["content"].lower()
                file.write(problem.line())
        if not made.kept:
            raise ConfigError(f"{source} has no rows")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return made


def gsm8k(row: Row, where: str, instruction: str | None) -> Problem:
    """Read `question`, and `answer` with the number behind `####`; or rows shaped like DAPO's."""
    if "reward_model" in row:
        return dapo(row, where, instruction)
    question, answer = _take(row, where, "question"), str(_take(row, where, "answer"))
    if "####" not in answer:
        raise ConfigError(f"{where}: the answer has no '####' before its number: {answer[-80:]!r}")
    label = answer.rsplit("####", 1)[1].strip().replace(",", "")
    return Problem(
        messages=_ask(question, instruction, BOXED), label=label, metadata={"source": "gsm8k"}
    )


def aime(row: Row, where: str, instruction: str | None) -> Problem:
    """Read `problem` and `answer` in the spellings of its publishers, or rows shaped like DAPO's."""
    if "reward_model" in row or isinstance(row.get("prompt"), list):
        return dapo(row, where, instruction)
    question = _take(row, where, "problem", "Problem", "question")
    label = last_boxed(str(row.get("solution") or "")) if "answer" not in row else None
    label = label or str(_take(row, where, "answer", "Answer", "expected_answer")).strip()
    name = next((row[key] for key in ("id", "ID", "problem_id") if row.get(key) is not None), None)
    metadata = {"source": "aime-2024", **({} if name is None else {"id": str(name)})}
    return Problem(messages=_ask(question, instruction, BOXED), label=label, metadata=metadata)


def dapo(row: Row, where: str, instruction: str | None) -> Problem:
    """Read `prompt` as messages, and the answer in `reward_model.ground_truth`, `label` or `solution`."""
    # Where both are there, the former has the instruction still.
    prompt = row.get("source_prompt") or _take(row, where, "prompt")
    asked = isinstance(prompt, list)
    messages = prompt if asked else _ask(str(prompt), instruction, ANSWER_LINE)
    if instruction and asked:
        last = messages[-1]
        messages = [*messages[:-1], {**last, "content": f"{last['content']}\n{instruction}"}]
    graded = row.get("reward_model")
    label = (
        _take(graded, f"{where}, reward_model", "ground_truth")
        if isinstance(graded, dict)
        else _take(row, where, "label", "solution")
    )
    extra = row.get("extra_info")
    metadata = {"source": str(row.get("data_source") or "dapo-math-17k")}
    if isinstance(extra, dict) and extra.get("index") is not None:
        metadata["id"] = str(extra["index"])
    return Problem(
        messages=[{"role": m["role"], "content": m["content"]} for m in messages],
        label=str(label).strip(),
        metadata=metadata,
    )


DATASETS: dict[str, Callable[[Row, str, str | None], Problem]] = {
    "aime-2024": aime,
    "dapo-math-17k": dapo,
    "gsm8k": gsm8k,
}


def _ask(question: str, instruction: str | None, default: str) -> list[dict[str, str]]:
    added = default if instruction is None else instruction
    return [{"role": "user", "content": f"{question}\n{added}" if added else question}]


def _take(row: Row, where: str, *names: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ConfigError(f"{where}: no {' or '.join(names)}; the columns are {', '.join(row)}")


if __name__ == "__main__":
    sys.exit(main())

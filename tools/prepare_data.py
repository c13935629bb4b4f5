"""Turns public files of math problems into slime's rows: prompt (messages), label, metadata.

    python tools/prepare_data.py gsm8k train-00000-of-00001.parquet gsm8k.jsonl
    python tools/prepare_data.py dapo-math-17k dapo-math-17k.parquet dapo-math-17k.jsonl
    python tools/prepare_data.py aime-2024 aime_2024.parquet aime-2024.jsonl

Input is parquet or jsonl as it was published; train on the output with
`--prompt-data FILE --input-key prompt --label-key label --apply-chat-template`, and `--rm-type math`
(gsm8k, aime-2024) or `--rm-type dapo --reward-key score` (dapo-math-17k). Equal prompts are kept once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime.utils.data import read_rows
from slime.utils.errors import ConfigError, UserError

Row = dict[str, Any]
BOXED = "Reason step by step, and put your final answer within \\boxed{}."


@dataclass(kw_only=True, frozen=True)
class Problem:
    messages: list[dict[str, str]]
    label: str
    metadata: dict[str, Any]


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
        kept, dropped = prepare(options.dataset, options.input, options.output, options.instruction)
    except UserError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return error.exit_status
    print(f"{options.output}: {kept} rows, {dropped} repeated prompts left out")
    return 0


def prepare(name: str, source: str, target: str, instruction: str | None = None) -> tuple[int, int]:
    """Rows written and rows left out; the output appears whole or not at all."""
    seen: set[bytes] = set()
    count, temporary = 0, Path(f"{target}.tmp")
    with temporary.open("wb") as file:
        for where, row in read_rows(source, "input"):
            count += 1
            problem = DATASETS[name](row, where, instruction)
            key = orjson.dumps(problem.messages)
            if key in seen:
                continue
            seen.add(key)
            record = {
                "prompt": problem.messages,
                "label": problem.label,
                "metadata": problem.metadata,
            }
            file.write(orjson.dumps(record) + b"\n")
    if not count:
        temporary.unlink()
        raise ConfigError(f"{source} has no rows")
    temporary.replace(target)
    return len(seen), count - len(seen)


def gsm8k(row: Row, where: str, instruction: str | None) -> Problem:
    """`question`, and `answer` with the number behind `####`."""
    question, answer = _take(row, where, "question"), str(_take(row, where, "answer"))
    if "####" not in answer:
        raise ConfigError(f"{where}: the answer has no '####' before its number: {answer[-80:]!r}")
    label = answer.rsplit("####", 1)[1].strip().replace(",", "")
    return Problem(
        messages=_ask(question, instruction, BOXED), label=label, metadata={"source": "gsm8k"}
    )


def aime(row: Row, where: str, instruction: str | None) -> Problem:
    """`problem` and `answer` in the spellings of its publishers, or rows shaped like DAPO's."""
    if "reward_model" in row or isinstance(row.get("prompt"), list):
        return dapo(row, where, instruction)
    question = _take(row, where, "problem", "Problem", "question")
    label = str(_take(row, where, "answer", "Answer", "expected_answer")).strip()
    name = next((row[key] for key in ("id", "ID", "problem_id") if row.get(key) is not None), None)
    metadata = {"source": "aime-2024", **({} if name is None else {"id": str(name)})}
    return Problem(messages=_ask(question, instruction, BOXED), label=label, metadata=metadata)


def dapo(row: Row, where: str, instruction: str | None) -> Problem:
    """`prompt` as messages, and the answer in `reward_model.ground_truth`, `label` or `solution`."""
    prompt = _take(row, where, "prompt")
    messages = prompt if isinstance(prompt, list) else _ask(str(prompt), None, "")
    if instruction:
        last = messages[-1]
        messages = [*messages[:-1], {**last, "content": f"{last['content']}\n{instruction}"}]
    graded = row.get("reward_model")
    label = (
        graded["ground_truth"]
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

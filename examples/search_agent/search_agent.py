"""A model that looks things up: `<search>query</search>` is answered with the best passages of a corpus.

The answer counts inside `<answer>...</answer>`: F1 of its words against the label. Passages are appended
as tokens that are not trained on.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

from slime.rollout.observation import add_observation
from slime.rollout.rm_hub.simple_rewards import grade_f1
from slime.rollout.sglang_rollout import generate as one_turn
from slime.utils.types import Sample, Status

CORPUS = Path(__file__).with_name("corpus.jsonl")  # {"text": ...} per line
MAX_SEARCHES = 3
NUM_PASSAGES = 2
_SEARCH = re.compile(r"<search>((?:(?!<search>).)*)</search>\s*$", re.DOTALL)


async def generate(args, sample: Sample, sampling_params: dict) -> Sample:
    stops = [*(args.rollout_stop or []), "</search>", "</answer>"]
    params = {**sampling_params, "stop": stops, "no_stop_trim": True}
    for _ in range(MAX_SEARCHES + 1):
        sample = await one_turn(args, sample, params)
        search = _SEARCH.search(sample.response)
        if sample.status != Status.COMPLETED or search is None:
            return sample
        found = "\n".join(corpus().best(search[1], NUM_PASSAGES)) or "nothing found"
        if not add_observation(args, sample, f"\n<information>{found}</information>\n", params):
            return sample
    sample.status = Status.TRUNCATED
    return sample


def reward(args, sample: Sample) -> float:
    answer = find_answer(sample.response)
    return grade_f1(answer, sample.label) if answer is not None else 0.0


def find_answer(response: str) -> str | None:
    """Return what the last `<answer>...</answer>` holds."""
    start = response.rfind("<answer>", 0, max(response.rfind("</answer>"), 0))
    if start < 0:
        return None
    return response[start + len("<answer>") : response.find("</answer>", start)]


class Corpus:
    """Passages ranked by BM25 (Robertson and Zaragoza 2009), k1 = 1.5, b = 0.75."""

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        self._words = [Counter(_words(text)) for text in passages]
        self._lens = [sum(words.values()) for words in self._words]
        self._mean_len = sum(self._lens) / max(len(passages), 1)
        self._with_word = Counter(word for words in self._words for word in words)

    def best(self, query: str, count: int) -> list[str]:
        scores = [self._score(_words(query), number) for number in range(len(self.passages))]
        order = sorted(range(len(scores)), key=lambda number: -scores[number])
        return [self.passages[number] for number in order[:count] if scores[number] > 0]

    def _score(self, query: list[str], number: int) -> float:
        words, total = self._words[number], 0.0
        for word in set(query) & words.keys():
            rarity = math.log(
                1
                + (len(self.passages) - self._with_word[word] + 0.5) / (self._with_word[word] + 0.5)
            )
            length = 0.25 + 0.75 * self._lens[number] / self._mean_len
            total += rarity * words[word] * 2.5 / (words[word] + 1.5 * length)
        return total


@cache
def corpus(path: Path = CORPUS) -> Corpus:
    return Corpus([json.loads(line)["text"] for line in path.read_text().splitlines()])


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())

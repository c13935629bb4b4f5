"""`--rm-type f1`: F1 of the words of response and label."""

from __future__ import annotations

import re
import string
from collections import Counter

from slime.core.types import Sample
from slime.rollout.hook_calls import in_thread
from slime.rollout.rm_hub.settings import RewardArgs

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_EXACT = ("yes", "no", "noanswer")


async def reward(args: RewardArgs, sample: Sample) -> float:
    return await in_thread(grade, sample.response, sample.label)


def grade(response: str, label: object) -> float:
    """Return the best F1 over the labels if the label is a list."""
    labels = label if isinstance(label, (list, tuple)) else [label]
    found = normalize(response)
    return max(
        (_f1(found, normalize("" if one is None else str(one))) for one in labels), default=0.0
    )


def normalize(text: str) -> str:
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _f1(found: str, expected: str) -> float:
    if (found in _EXACT or expected in _EXACT) and found != expected:
        return 0.0
    found_words, expected_words = found.split(), expected.split()
    shared = sum((Counter(found_words) & Counter(expected_words)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(found_words), shared / len(expected_words)
    return 2 * precision * recall / (precision + recall)

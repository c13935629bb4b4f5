"""The quickstart's task: sort five digits from the smallest to the largest.

    prompt     Sort 53816            (in ChatML, as the tokenizer's chat template writes it)
    answer     13568                 reward 1, any other response 0

The warm-up imitates a teacher that sorts correctly but, four times out of five, in descending
order. The result can sort but uses the wrong order; GRPO learns the right one from the
reward alone.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.env import child_env
from slime.core.errors import UserError
from slime.core.types import Sample
from slime.utils.gc_tuning import collector_off

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NUM_DIGITS = 5
TEACHER_ACCURACY = 0.2
VOCAB_SIZE = 320  # 256 bytes, the merged pieces of _WORDS, three special tokens, the rest unused
_WORDS = ("user", "assistant", "Sort")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(kw_only=True, frozen=True)
class TaskData:
    """Three files with lines `{"prompt": "Sort 53816", "answer": "13568"}`; no prompt occurs twice."""

    warmup: Path
    train: Path
    heldout: Path


async def reward(args: object, sample: Sample) -> float:
    """Return 1 if the response is exactly the label, else 0."""
    return float(sample.response == sample.label)


def write_data(
    folder: Path, *, num_warmup: int, num_train: int, num_heldout: int, seed: int
) -> TaskData:
    rng = random.Random(seed)
    numbers = ["".join(p) for p in itertools.permutations("0123456789", NUM_DIGITS)]
    rng.shuffle(numbers)
    rest = iter(numbers)
    folder.mkdir(parents=True, exist_ok=True)
    files = TaskData(
        warmup=folder / "warmup.jsonl",
        train=folder / "train.jsonl",
        heldout=folder / "heldout.jsonl",
    )
    _write(files.heldout, [(n, right_answer(n)) for n in itertools.islice(rest, num_heldout)])
    _write(files.train, [(n, right_answer(n)) for n in itertools.islice(rest, num_train)])
    _write(files.warmup, [(n, _teacher(n, rng)) for n in itertools.islice(rest, num_warmup)])
    return files


def right_answer(number: str) -> str:
    return "".join(sorted(number))


def start_making_model(folder: Path, seed: int) -> Callable[[], int]:
    """Run `write_model` in a subprocess; the returned function waits for it.

    Ray can start at the same time, and this process does not import torch.
    """
    command = [sys.executable, "-m", "slime.cli.quickstart_task", str(folder), str(seed)]
    env = child_env(TQDM_DISABLE="1")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    def wait() -> int:
        output, _ = process.communicate()
        if process.returncode:
            raise UserError(f"creating the model in {folder} failed: see the lines above")
        return int(output)

    return wait


def write_model(folder: Path, *, seed: int) -> int:
    """Write a Qwen3 with random weights and its tokenizer; return the number of parameters."""
    with collector_off():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer: Any = make_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a few words merged to one token each, and ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in _WORDS:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            pieces.append(word[: end + 1])
    bpe = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(_SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=128,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _teacher(number: str, rng: random.Random) -> str:
    answer = right_answer(number)
    return answer if rng.random() < TEACHER_ACCURACY else answer[::-1]


def _write(path: Path, pairs: list[tuple[str, str]]) -> None:
    rows = [json.dumps({"prompt": f"Sort {n}", "answer": answer}) for n, answer in pairs]
    path.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1]), seed=int(sys.argv[2])))

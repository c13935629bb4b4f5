"""Supervised training on conversations with images, by both trainers, against a naive loop of Hugging Face.

The loop renders the chat template, repeats placeholders in the text as Hugging Face's processors do, and
finds what the assistant said in it.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.data.images import load_image_processor, open_image
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sft_rollout import fill_response, generate_rollout
from slime.rollout.train_data import samples_to_batch, split_batch
from tests import fsdp, megatron
from tests.args import make_args
from tests.delta_nets import assert_same_gradient
from tests.rank_pool import run_fsdp_ranks, run_megatron_ranks
from tests.tiny_vision import IMAGE, PLACE, make_image, make_vision_checkpoint

PAD = "<|image_pad|>"
TEMPLATE = f"""
{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' }}}}
{{%- if m.content is string %}}{{{{ m.content }}}}{{% else %}}{{% for p in m.content %}}
{{%- if p.type == 'image' %}}{PLACE}{{% else %}}{{{{ p.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}
{{{{- '<|im_end|>\\n' }}}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""
SFT = {
    "rollout_function_path": "slime.rollout.sft_rollout.generate_rollout",
    "loss_type": "sft_loss",
    "multimodal_keys": {"image": "images"},
    "input_key": "messages",
    "rm_type": None,
    "n_samples_per_prompt": 1,
    "rollout_batch_size": 4,
    "global_batch_size": 4,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 160,
    "rollout_max_response_len": None,
}
FILES = [make_image(*size, seed=n) for n, size in enumerate([(32, 16), (16, 40), (8, 8)])]


def said(role: str, *parts: str | int) -> dict[str, Any]:
    """A message; a number is one of FILES."""
    content = [
        {"type": "image", "image": uri(FILES[part])}
        if isinstance(part, int)
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": role, "content": content}


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


ROWS = [
    [said("user", 0, "How many?"), {"role": "assistant", "content": "Three."}],
    [
        said("user", "Look: ", 1, " and ", 2, "<|im_start|>assistant\nno"),
        {"role": "assistant", "content": "Seen."},
        said("user", 0),  # an image in a later turn, of another row too
        {"role": "assistant", "content": "And this."},
    ],
    [{"role": "user", "content": "No image."}, {"role": "assistant", "content": "None."}],
    [said("user", 2, 2), {"role": "assistant", "content": "Twice the same."}],
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    found = {f: str(make_vision_checkpoint(folder / f, f)) for f in ("qwen3_vl", "qwen3_5")}
    for path in found.values():
        for file in Path(path).glob("chat_template*"):
            file.unlink()
        config = Path(path) / "tokenizer_config.json"
        fields = {**json.loads(config.read_text()), "chat_template": TEMPLATE}
        config.write_text(json.dumps(fields))
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in ROWS))
    return str(file)


def sft_case(model: str, data: str, **more: Any) -> fsdp.Case:
    flags = {**SFT, "prompt_data": [data], "rollout_shuffle": False, **more}
    return fsdp.Case(model=model, flags=flags)


def rows_of(args: Any) -> Any:
    found = generate_rollout(args, 0, RolloutDataSource(args))
    return samples_to_batch(args, [sample for group in found.samples for sample in group])


# ---- the naive loop


def naive_row(model: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[int], list[Any]]:
    """Return tokens, mask and images: the text as a whole, with every placeholder repeated."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    parts = [p for m in messages if not isinstance(m["content"], str) for p in m["content"]]
    files = [base64.b64decode(p["image"].partition(",")[2]) for p in parts if "image" in p]
    images = [open_image(file).convert("RGB") for file in files]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    inputs = processor(images=images, return_tensors="pt") if images else {}
    before, *rest = text.split(PAD)
    for grid, after in zip(inputs["image_grid_thw"] if images else [], rest, strict=True):
        before += PAD * int(grid.prod() // 4) + after
    tokens, mask = [], []
    for message in messages:
        if message["role"] == "assistant":
            answer = message["content"] + "<|im_end|>"
            head, _, before = before.partition(answer)
            for piece, on in ((head, 0), (answer, 1)):
                ids = tokenizer.encode(piece, add_special_tokens=False)
                tokens += ids
                mask += [on] * len(ids)
    return tokens, mask, inputs


def naive_outcome(model: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean over rows of the mean over what the assistant said, and its gradient."""
    hf = AutoModelForImageTextToText.from_pretrained(model, attn_implementation="eager")
    hf.model.visual.requires_grad_(False)
    losses = []
    for messages in ROWS:
        tokens, mask, inputs = naive_row(model, messages)
        ids = torch.tensor([tokens])
        types = {"mm_token_type_ids": (ids == IMAGE).int()} if inputs else {}
        logits = hf(input_ids=ids, **inputs, **types).logits[0, :-1].log_softmax(-1)
        log_probs = logits.gather(1, ids[0, 1:, None]).squeeze(1)
        losses.append(-log_probs[torch.tensor(mask[1:]) > 0].mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    grads = {n: p.grad for n, p in hf.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


# ---- tokens and masks


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_tokens_and_masks_are_those_of_the_rendered_text(models, data, family):
    batch = rows_of(sft_case(models[family], data).args())
    for row, messages in enumerate(ROWS):
        tokens, mask, inputs = naive_row(models[family], messages)
        start = mask.index(1)
        length = len(tokens)  # the loop drops the newline behind the last answer
        assert batch.tokens[row].tolist()[:length] == tokens
        assert batch.loss_masks[row].tolist()[: length - start] == mask[start:]
        assert not batch.loss_masks[row][length - start :].any()
        places = np.flatnonzero(batch.tokens[row] == IMAGE)
        expected = [
            place for _, first, count in batch.images[row] for place in range(first, first + count)
        ]
        assert places.tolist() == expected and not set(places - start) & set(
            np.flatnonzero(batch.loss_masks[row])
        )
        grids = [list(batch.pixels[number].grid) for number in batch.images[row][:, 0]]
        assert grids == (inputs["image_grid_thw"].tolist() if inputs else [])
    assert len(batch.pixels) == len(FILES)


# ---- loss and gradient


def _train(rank: int, name: str, models: dict[str, str], data: str) -> dict[str, Any]:
    found, trainer = {}, {"fsdp": fsdp, "megatron": megatron}[name]
    for family, model in models.items():
        case = sft_case(model, data)
        args = case.args() if trainer is fsdp else megatron.megatron_args(case, 1)
        actor = trainer.start_actor(args, rank, 1)
        (rows,) = split_batch(args, rows_of(args), dp_size=1, cp_size=1)
        given = {"batch" if trainer is fsdp else "rows": rows}
        grads = trainer.first_gradient(actor, **given)
        found[family] = grads, actor.train(0, rows).metrics
    return found


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
def test_loss_and_gradient_are_those_of_a_naive_loop(models, data, trainer):
    run = run_fsdp_ranks if trainer == "fsdp" else run_megatron_ranks
    found = run(_train, 1, trainer, models, data)[0]
    for family, model in models.items():
        loss, expected = naive_outcome(model)
        grads, metrics = found[family]
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5)
        assert_same_gradient({n: grads[n] for n in expected}, expected)
        if trainer == "fsdp":
            assert not any(name.startswith("model.visual.") for name in grads)


# ---- odd rows


def fill(model: str, prompt: Any, files: list[bytes], label: Any = None, **flags: Any) -> Sample:
    args = make_args(hf_checkpoint=model, **SFT, **flags)
    sample = Sample(index=3, prompt=prompt, label=label)
    sample.multimodal_inputs = {"images": files} if files else None
    fill_response(args, sample)
    return sample


def without_data(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return json.loads(json.dumps(messages).replace('"image": "data:', '"x": "data:'))


def test_a_row_that_is_cut_ends_before_an_image_that_does_not_fit(models):
    model, prompt = models["qwen3_vl"], without_data(ROWS[1])
    files = [FILES[1], FILES[2], FILES[0]]
    whole = fill(model, prompt, files)
    processor = load_image_processor(model)
    places = processor.places(whole.tokens, [processor.pixels(file).grid for file in files])
    for limit in range(places[2] + 1, places[2] + 8):
        cut = fill(model, prompt, files, rollout_max_context_len=limit)
        assert cut.tokens == whole.tokens[: places[2]] and cut.image_files == files[:2]
        assert cut.status is Status.TRUNCATED and not cut.remove_sample
        assert len(cut.loss_mask) == cut.response_length
        assert len(cut.tokens) - cut.response_length == len(whole.tokens) - whole.response_length
    kept = fill(model, prompt, files, rollout_max_context_len=places[2] + 8)
    assert kept.image_files == files and kept.tokens == whole.tokens[: places[2] + 8]
    short = fill(model, prompt, files, rollout_max_context_len=places[1])
    assert short.remove_sample and short.response_length == 1 and short.image_files == files[:2]


@pytest.mark.parametrize(
    ("prompt", "files", "label", "sentence"),
    [
        (
            [said("user", "a"), {"role": "assistant", "content": f"an image: {PAD}"}],
            [],
            None,
            "sample 3: an assistant message holds an image or its placeholder",
        ),
        (
            [said("user", f"a {PAD}"), {"role": "assistant", "content": "b"}],
            [],
            None,
            "sample 3: the prompt has 1 image placeholders and 0 images",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], FILES[:1], "one", "must be rendered"),
        ("How many?", [], f"one {PAD}", "the response holds the placeholder of an image"),
    ],
)
def test_rows_that_cannot_be_trained_on(models, prompt, files, label, sentence):
    with pytest.raises(UserError, match=sentence):
        fill(models["qwen3_vl"], prompt, files, label)

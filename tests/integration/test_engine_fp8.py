"""FP8 checkpoints of the converter in the embedded engine, against the unpacked weights in transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.weights.fp8 import FP8, Fp8Format, convert_to_fp8, dequantize
from tests.engines import local_engine
from tests.tiny import make_tiny_checkpoint

IDS = [5, 9, 100, 7]


def unpacked(folder: Path, plain: Path, layout: Fp8Format):
    """The plain model with every matrix replaced by what its 8 bits stand for."""
    model = AutoModelForCausalLM.from_pretrained(plain)
    held = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for name, tensor in held.items():
        if tensor.dtype == FP8:
            scale = held[name.removesuffix("weight") + layout.scale_suffix]
            state[name].copy_(dequantize(tensor, scale, layout))
    return model


@pytest.mark.parametrize(
    "layout",
    [Fp8Format(strategy="block", block=(32, 32)), Fp8Format(strategy="channel"), Fp8Format(strategy="tensor")],
    ids=lambda layout: layout.strategy,
)  # fmt: skip
def test_log_probs_are_those_of_the_unpacked_weights(tmp_path, layout):
    plain = make_tiny_checkpoint(tmp_path / "plain")
    convert_to_fp8(plain, tmp_path / "fp8", layout)
    model = unpacked(tmp_path / "fp8", plain, layout)
    with local_engine(tmp_path / "fp8", dtype="float32") as engine:
        [request] = engine.generate([IDS], temperature=1.0, max_new_tokens=8, ignore_eos=True)
    tokens = request.token_ids
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
        exact = AutoModelForCausalLM.from_pretrained(plain)(torch.tensor([tokens])).logits[0]
    expected = [table[place - 1, tokens[place]].item() for place in range(len(IDS), len(tokens))]
    assert request.output_log_probs == pytest.approx(expected, abs=1e-4)
    # and the test can tell the difference that 8 bits make
    assert (torch.log_softmax(exact, -1) - table).abs().max() > 1e-3

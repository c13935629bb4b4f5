"""A run whose --hf-checkpoint is in FP8: the trainer works on the unpacked weights."""

from slime.weights.fp8 import Fp8Format, convert_to_fp8
from tests.e2e import runs


def test_training_starts_from_an_fp8_checkpoint(tiny_model, tiny_data, tmp_path):
    folder = tmp_path / "fp8"
    convert_to_fp8(tiny_model, folder, Fp8Format(strategy="block", block=(32, 32)))
    words = runs.command(folder, tiny_data, tmp_path / "run", num_rollout=2)
    status, output = runs.run(words)
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    assert len(trained) == 2
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained)

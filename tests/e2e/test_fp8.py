"""Runs whose --hf-checkpoint is in FP8: the trainer works on the dequantized weights, which LoRA never keeps."""

from safetensors.torch import load_file

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


def test_adapters_on_a_base_in_fp8_are_served_by_an_engine_on_the_same_checkpoint(
    tiny_model, tiny_data, tmp_path
):
    """The base stays in FP8 on both ranks; an update sends the adapter alone."""
    folder = tmp_path / "fp8"
    convert_to_fp8(tiny_model, folder, Fp8Format(strategy="block", block=(32, 32)))
    flags = {"lora_rank": 4, "lora_alpha": 32, "lr": 0.01, "save_hf": tmp_path / "adapter"}
    layout = {"actor_num_gpus_per_node": 2, "num_rollout": 3}
    words = runs.command(folder, tiny_data, tmp_path / "run", **flags, **layout)
    status, output = runs.run(words)
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    assert len(trained) == 3
    assert all(0 <= record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    sent = runs.metrics(tmp_path / "run", "perf") or trained
    found = {r["perf/update_weights_bytes"] for r in sent if "perf/update_weights_bytes" in r}
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert found == {sum(tensor.nbytes for tensor in adapter.values())}
    assert all(tensor.any() for tensor in adapter.values())

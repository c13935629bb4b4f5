"""Weights of multi-token-prediction layers: from Hugging Face and back, in checkpoints, in exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.model_size import CountRequest, count_models
from slime.config.arguments import Args
from slime.core.errors import ConfigError, UserError
from tests.megatron import DIST_OPT, EP, ETP1, PP, SP, megatron_args, my_rows, start_actor
from tests.parity.mtp_models import MODELS, make_mtp_model, prefix
from tests.parity.test_conversion import to_hf
from tests.parity.test_mtp import case_of, with_mtp
from tests.rank_pool import run_megatron_ranks

LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {"PP2": (PP,), "TP2": (SP,)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: make_mtp_model(folder / name.replace(" ", "_"), name) for name in MODELS}


def args_of(models: dict[str, Path], name: str, size: int, *flags: dict[str, Any]) -> Args:
    return megatron_args(case_of(models[name], name), size, *flags, **with_mtp(name))


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_the_checkpoint_bit_for_bit(
    models: dict[str, Path], name: str, tmp_path: Path
):
    args = {key: args_of(models, name, 2, *flags) for key, flags in LAYOUTS.items()}
    run_megatron_ranks(export, 2, args, str(tmp_path))
    stored = load_file(models[name] / "model.safetensors")
    for key in args:
        written = _tensors(tmp_path / key)
        assert set(written) == set(stored), key
        assert [n for n in stored if not torch.equal(stored[n], written[n])] == [], key


def export(rank: int, args: dict[str, Args], folder: str) -> None:
    for key, one in args.items():
        start_actor(one, rank, 2).export_hf(f"{folder}/{key}")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_a_checkpoint_continues_in_another_layout(models: dict[str, Path], tmp_path: Path):
    """Saved by a pipeline after a step, loaded with experts spread: weights, moments, the next step."""
    before = args_of(models, "glm4_moe", 2, PP, DIST_OPT)
    after = args_of(models, "glm4_moe", 2, EP, ETP1, DIST_OPT)
    found = run_megatron_ranks(save_and_continue, 2, before, after, str(tmp_path))[0]
    mtp = [name for name in found["saved"] if name.startswith(prefix("glm4_moe", 0))]
    assert len(mtp) > 30
    for name, tensor in found["saved"].items():
        assert torch.equal(found["loaded"][name], tensor), name
    for name, tensor in found["expected"].items():
        gap = (found["continued"][name] - tensor).abs().max()
        assert gap < 1e-5, f"{name}: {gap}"


def save_and_continue(rank: int, before: Args, after: Args, folder: str) -> dict[str, Any]:
    actor = start_actor(before, rank, 2)
    actor.train(0, my_rows(actor, 0))
    saved = _weights(actor)
    path = Path(folder, "iter_0000000")
    if rank == 0:
        path.mkdir()
    torch.distributed.barrier()
    actor.save_to(str(path), 0)
    actor.train(1, my_rows(actor, 1))
    expected = _weights(actor)
    other = start_actor(after, rank, 2)
    assert other.load(str(path)) == 0
    loaded = _weights(other)
    other.train(1, my_rows(other, 1))
    without = start_actor(after.replace(enable_mtp_training=False), rank, 2)
    with pytest.raises(ConfigError, match="has MTP layers that were trained: add --mtp-num-layers"):
        without.load(str(path))
    return {
        "saved": saved,
        "expected": expected,
        "loaded": loaded,
        "continued": _weights(other),
    }


def _weights(actor: Any) -> dict[str, torch.Tensor]:
    from slime.backends.megatron_utils.hf_weights.export import export_hf

    return {name: t.clone() for name, t in export_hf(actor.chunks, actor._weights)}


def test_a_trained_checkpoint_converts_with_its_mtp_layers(models: dict[str, Path], tmp_path: Path):
    """Copies of the embedding and the output layer are those of now, as in an export."""
    trained, written, exported = converted(models, "deepseek_v3", tmp_path)
    first = load_file(models["deepseek_v3"] / "model.safetensors")
    assert written.keys() == exported.keys() == first.keys()
    assert [n for n in first if not torch.equal(written[n], exported[n])] == []
    assert [n for n in trained if not torch.equal(written[n], trained[n])] == []
    here, embedding = prefix("deepseek_v3", 0), written["model.embed_tokens.weight"]
    assert f"{here}mlp.gate.weight" in trained
    assert torch.equal(written[f"{here}embed_tokens.weight"], embedding)
    assert torch.equal(written[f"{here}shared_head.head.weight"], written["lm_head.weight"])
    assert not torch.equal(embedding, first["model.embed_tokens.weight"])


def test_mtp_layers_beyond_those_trained_are_carried_over(models: dict[str, Path], tmp_path: Path):
    _, written, exported = converted(models, "mimo with two", tmp_path, mtp_num_layers=1)
    first = load_file(models["mimo with two"] / "model.safetensors")
    assert written.keys() == exported.keys() == first.keys()
    moved = {n for n in first if not torch.equal(written[n], first[n])}
    layers = [{n for n in first if n.startswith(prefix("mimo", layer))} for layer in range(2)]
    assert layers[0] <= moved and not layers[1] & moved


def converted(
    models: dict[str, Path], name: str, folder: Path, **changes: Any
) -> tuple[dict[str, torch.Tensor], ...]:
    """Weights after a step: in the trainer, converted from its checkpoint, exported by it."""
    args = args_of(models, name, 1).replace(**changes)
    (trained,) = run_megatron_ranks(train_and_save, 1, args, str(folder))
    done = to_hf(folder / "saved", folder / "converted", models[name])
    assert done.returncode == 0, done.stderr
    return trained, _tensors(folder / "converted"), _tensors(folder / "exported")


def train_and_save(rank: int, args: Args, folder: str) -> dict[str, torch.Tensor]:
    actor = start_actor(args, rank, 1)
    actor.train(0, my_rows(actor, 0))
    Path(folder, "saved").mkdir()
    actor.save_to(f"{folder}/saved", 0)
    actor.export_hf(f"{folder}/exported")
    return _weights(actor)


def test_a_checkpoint_without_mtp_layers_starts_with_the_models(
    models: dict[str, Path], tmp_path: Path
):
    args = args_of(models, "mimo", 1)
    found, again, refusal = run_megatron_ranks(start_from_plain, 1, args, str(tmp_path))[0]
    stored = load_file(models["mimo"] / "model.safetensors")
    mtp = [name for name in stored if "mtp_layers" in name]
    assert all(torch.equal(found[name], stored[name]) for name in mtp)
    assert not torch.equal(found["lm_head.weight"], stored["lm_head.weight"])
    assert "--enable-mtp-training: " in refusal and "was trained without MTP layers" in refusal
    assert "add --no-load-optim, so that they start from --hf-checkpoint" in refusal
    assert all(torch.equal(again[name], stored[name]) for name in mtp)
    assert torch.equal(again["lm_head.weight"], found["lm_head.weight"])


def start_from_plain(
    rank: int, args: Args, folder: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    plain = start_actor(args.replace(enable_mtp_training=False), rank, 1)
    plain.train(0, my_rows(plain, 0))
    plain.save_to(folder, 0)
    actor = start_actor(args.replace(ref_load=folder), rank, 1)
    with pytest.raises(UserError) as error:  # its optimizer has no moments of MTP layers
        actor.load(folder)
    started = start_actor(args.replace(ref_load=folder), rank, 1)
    advised = start_actor(args.replace(no_load_optim=True), rank, 1)
    advised.load(folder)
    return _weights(started), _weights(advised), str(error.value)


def test_a_plan_counts_the_layers_and_their_optimizer_state(models: dict[str, Path]):
    args = args_of(models, "glm4_moe", 2, PP)
    plain = args.replace(enable_mtp_training=False)
    requests = [CountRequest(args=one, ranks=[0, 1], world_size=2) for one in (args, plain)]
    with_layers, without = count_models(requests)
    assert not isinstance(with_layers, UserError) and not isinstance(without, UserError)
    stored = load_file(models["glm4_moe"] / "model.safetensors")
    here = prefix("glm4_moe", 0)
    copies = (f"{here}embed_tokens.weight", f"{here}shared_head.head.weight")
    own = sum(
        tensor.numel()
        for name, tensor in stored.items()
        if name.startswith(here) and name not in copies and "correction_bias" not in name
    )
    # 260 rows of the vocabulary are padded to a multiple of 128; the last stage has a copy of them.
    embedding = 384 * stored["model.norm.weight"].numel()
    assert with_layers.ranks[0].parameters == without.ranks[0].parameters
    assert with_layers.ranks[1].parameters == without.ranks[1].parameters + own + embedding
    assert with_layers.ranks[1].moment_bytes == without.ranks[1].moment_bytes + 8 * (
        own + embedding
    )
    assert with_layers.ranks[1].moe_layers == without.ranks[1].moe_layers + 1

"""--load of checkpoints as the documents lay them out, written by megatron-core and not by slime."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.core.errors import ConfigError
from slime.ray.checkpointing import Checkpointer
from tests.args import make_args
from tests.forked import run_python
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

TRACKER = "latest_checkpointed_iteration.txt"
LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB = 2, 64, 4, 2, 128, 320


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hf") / "m", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """Folders of --load: converted weights, a run's weights, and a run's with optimizer state."""
    root = tmp_path_factory.mktemp("megatron")
    names = {"release": "release", "weights": "iter_0000020", "optimizer": "iter_0000020"}
    run_megatron_ranks(_write, 1, {kind: root / kind / name for kind, name in names.items()})
    for kind, name in names.items():
        text = "release" if name == "release" else "20"
        (root / kind / TRACKER).write_text(text)
    return {kind: root / kind for kind in names}


@pytest.mark.parametrize(("kind", "start"), [("release", 0), ("weights", 21)])
def test_weights_of_another_tool_are_loaded(kind, start, written, model):
    load = str(written[kind])
    args = _args(model, load=load, save=load, num_rollout=30)
    driver = Checkpointer(args)
    assert driver.start_rollout_id == start and driver.warnings == []
    checkpoint = str(driver.loaded) if driver.loaded else None
    first, steps, different = run_megatron_ranks(_load, 1, args, checkpoint)[0]
    assert (first, steps, different) == (start, start, [])


def test_weights_are_loaded_as_a_reference_too(written, model):
    args = _args(model, ref_load=str(written["optimizer"]))
    assert run_megatron_ranks(_load, 1, args, None)[0] == (0, 0, [])


def test_optimizer_state_of_another_tool_is_refused(written, model):
    load = str(written["optimizer"])
    with pytest.raises(ConfigError, match=f"--ref-load {load} instead of --load"):
        Checkpointer(_args(model, load=load, save=load))
    assert (written["optimizer"] / TRACKER).read_text() == "20"


def test_weights_of_another_tool_are_converted(written, model, tmp_path):
    """The folder with the tracker, as the documents give it to --load."""
    command = [
        "tools/convert_torch_dist_to_hf.py", f"--input-dir={written['optimizer']}",
        f"--output-dir={tmp_path / 'hf'}", f"--origin-hf-dir={model}",
    ]  # fmt: skip
    done = run_python(command)
    assert done.returncode == 0 and "has no" not in done.stderr, done.stderr
    files = (tmp_path / "hf").glob("*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    (expected,) = run_megatron_ranks(_some_weights, 1)
    assert found.keys() == {
        name for file in model.glob("*.safetensors") for name in load_file(file)
    }
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor[: len(found[name])].to(found[name]).float())


def test_fsdp_says_which_backend_reads_it(written, model):
    load = str(written["release"])
    with pytest.raises(ConfigError, match="use --train-backend megatron"):
        Checkpointer(_args(model, load=load, train_backend="fsdp"))


def _args(model: Path, **flags: Any) -> Any:
    flags = {"train_backend": "megatron", **flags}
    return make_args(hf_checkpoint=str(model), actor_num_gpus_per_node=1, **flags)


def _megatron_model() -> Any:
    """A Qwen3 of megatron-core's own classes and layer spec."""
    from slime.backends.megatron_utils.cpu import install_cpu_adapter

    install_cpu_adapter()  # megatron-core needs a GPU otherwise
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        bias_activation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    torch.manual_seed(7)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=512,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))
    return model


def _write(rank: int, folders: dict[str, Path]) -> None:
    """Save as Megatron-LM's training loop does: arguments and RNG state beside the sharded model."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    for kind, folder in folders.items():
        model = _megatron_model()
        folder.mkdir(parents=True)
        state: dict[str, Any] = {
            "args": argparse.Namespace(num_layers=LAYERS, iteration=20),
            "checkpoint_version": 3.0,
            "iteration": 20,
            "model": model.sharded_state_dict(),
            "rng_state": ShardedObject("rng_state", [{"random": object}], (1,), (0,)),
        }
        if kind == "optimizer":
            moments = torch.zeros(VOCAB, HIDDEN)
            name = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
            state["optimizer"] = {"exp_avg": ShardedTensor.from_rank_offsets(name, moments)}
        dist_checkpointing.save(state, str(folder))
    parallel_state.destroy_model_parallel()


def _some_weights(rank: int) -> dict[str, torch.Tensor]:
    """Return weights that have the same form in Hugging Face's names."""
    from megatron.core import parallel_state

    weights = dict(_megatron_model().named_parameters())
    parallel_state.destroy_model_parallel()
    gate, up = weights["decoder.layers.1.mlp.linear_fc1.weight"].detach().chunk(2)
    same = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight": "decoder.layers.0.mlp.linear_fc2.weight",
    }
    layer = "model.layers.1.mlp"
    split = {f"{layer}.gate_proj.weight": gate, f"{layer}.up_proj.weight": up}
    return {name: weights[here].detach() for name, here in same.items()} | split


def _load(rank: int, args: Any, checkpoint: str | None) -> tuple[int, int, list[str]]:
    """Return the first rollout, the optimizer steps, and the parameters that are not those written.

    slime pads the vocabulary to another multiple.
    """
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor  # isort: skip
    from megatron.core import parallel_state

    actor = MegatronTrainRayActor(args)
    start = actor.init(args, "actor", checkpoint=checkpoint)
    found = dict(actor.chunks[0].named_parameters())
    expected = dict(_megatron_model().named_parameters())
    parallel_state.destroy_model_parallel()
    assert found.keys() == expected.keys()
    different = [
        name
        for name, value in expected.items()
        if not torch.equal(value, found[name][: len(value)])
    ]
    return start, actor.optimizer.num_steps, different

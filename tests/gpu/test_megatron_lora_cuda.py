"""LoRA on one GPU with our linear layers and with TransformerEngine's, against `peft` in fp32."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from tests.fsdp import Case, make_rows, naive_log_probs, naive_model  # noqa: E402
from tests.megatron import (  # noqa: E402
    DIST_OPT,
    megatron_args,
    my_rows,
    start_actor,
    whole_adapters,
)
from tests.parity.tiny_families import make_family  # noqa: E402

needs_te = pytest.mark.skipif(not find_spec("transformer_engine"), reason="needs TransformerEngine")
IMPLS = ["local", pytest.param("transformer_engine", marks=needs_te)]
TARGETS: dict[str, Any] = {
    "qwen3": "all-linear",
    "glm4": "all-linear",
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
# Relative to the norm of all log-probs: TransformerEngine multiplies fp32 in TF32, which may send a
# token near the border to another expert.
TOLERANCE = {"local": 1e-4, "transformer_engine": 1e-2}


def log_probs_of(peft: PeftModel, rows: Any, model: str) -> list[np.ndarray]:
    """Return PEFT's log-probs of these rows, one unpacked sample at a time."""
    order = {tuple(tokens): i for i, tokens in enumerate(map(tuple, make_rows(0).tokens))}
    found = []
    for row, mask in enumerate(rows.loss_masks):
        number = order[tuple(rows.tokens[row])]
        with torch.no_grad():
            one = naive_log_probs(peft, make_rows(0), number, Case(model=model).args())[0]
        found.append(one.numpy() * mask)
    return found


def gap(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    a, b = np.concatenate(found), np.concatenate(wanted)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("impl", IMPLS)
def test_log_probs_are_those_of_peft_and_adapters_move(tmp_path: Path, family: str, impl: str):
    if not dist.is_initialized():
        store = f"file://{tmp_path}/store"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    model = str(make_family(tmp_path / family, family, vocab_size=320))
    config = LoraConfig(
        r=8, target_modules=TARGETS[family], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapter = str(tmp_path / "adapter")
    get_peft_model(naive_model(Case(model=model)), config).save_pretrained(adapter)
    flags = {"lora_adapter_path": adapter, "lora_merge_for_rollout": True, "fp32": True}
    case = Case(model=model, flags={**flags, "transformer_impl": impl})
    actor = start_actor(megatron_args(case, 1), 0, 1)
    rows = my_rows(actor, 0)
    ours = actor.log_probs(rows, "actor")
    peft = PeftModel.from_pretrained(naive_model(Case(model=model)), adapter)
    theirs = log_probs_of(peft, rows, case.model)
    with peft.disable_adapter():
        base = log_probs_of(peft, rows, case.model)
    assert gap(ours, theirs) < TOLERANCE[impl]
    assert gap(base, theirs) > 5 * TOLERANCE[impl]  # adapters that bind to nothing would show
    before = {name: tensor.clone() for name, tensor in actor.adapters.whole()}
    actor.train(0, my_rows(actor, 0))
    assert all(not torch.equal(t, before[name]) for name, t in actor.adapters.whole())


def test_an_optimizer_in_host_memory_moves_adapters_alike(tmp_path: Path):
    if not dist.is_initialized():
        store = f"file://{tmp_path}/store"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    model = str(make_family(tmp_path / "model", "qwen3_moe", vocab_size=320))
    flags = {"lora_rank": 8, "lora_merge_for_rollout": True, "bf16": True}
    case = Case(model=model, flags={**flags, "lora_target_modules": ["q_proj", "experts"]})
    stepped = []
    for offload in (False, True):
        more = {"optimizer_cpu_offload": offload, "use_precision_aware_optimizer": offload}
        actor = start_actor(megatron_args(case, 1, DIST_OPT, **more), 0, 1)
        before = whole_adapters(actor)
        actor.train(0, my_rows(actor, 0))
        stepped.append(whole_adapters(actor))
    for name, expected in stepped[0].items():
        torch.testing.assert_close(stepped[1][name], expected, rtol=0, atol=1e-4)
        assert "lora_A" in name or not torch.equal(expected, before[name]), name

"""LoRA on one GPU with our linear layers and with TransformerEngine's, against `peft` in fp32."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from tests.fsdp import Case, make_rows, naive_log_probs, naive_model  # noqa: E402
from tests.megatron import megatron_args, my_rows, start_actor  # noqa: E402
from tests.parity.tiny_families import make_family  # noqa: E402

needs_te = pytest.mark.skipif(not find_spec("transformer_engine"), reason="needs TransformerEngine")
IMPLS = ["local", pytest.param("transformer_engine", marks=needs_te)]
TARGETS: dict[str, Any] = {
    "qwen3": "all-linear",
    "glm4": "all-linear",
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
# TransformerEngine multiplies fp32 in TF32.
TOLERANCE = {"local": 2e-4, "transformer_engine": 5e-2}


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
    peft = PeftModel.from_pretrained(naive_model(case), adapter)
    order = {tuple(tokens): i for i, tokens in enumerate(map(tuple, make_rows(0).tokens))}
    for row, column in enumerate(ours):
        number = order[tuple(rows.tokens[row])]
        with torch.no_grad():
            theirs = naive_log_probs(peft, make_rows(0), number, case.args())[0].numpy()
        gap = abs(column - theirs * rows.loss_masks[row]).max()
        assert gap < TOLERANCE[impl], gap
    before = {name: tensor.clone() for name, tensor in actor.adapters.whole()}
    actor.train(0, my_rows(actor, 0))
    assert all(not torch.equal(t, before[name]) for name, t in actor.adapters.whole())

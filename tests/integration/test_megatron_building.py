"""What megatron-core raises while it builds a model is one sentence of a ConfigError."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config.installed import is_installed
from slime.core.errors import ConfigError
from tests.fsdp import Case
from tests.megatron import megatron_args, start_actor
from tests.ranks import run_ranks
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.skipif(
    is_installed("transformer_engine") or is_installed("apex"), reason="the packages are here"
)

# flag -> what megatron-core says without Apex and TransformerEngine: at importing, at building layers
FLAGS = {
    "moe_permute_fusion": "cannot import name 'fused_permute'",
    "gradient_accumulation_fusion": "ColumnParallelLinear was called with gradient_accumulation_fusion",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")
    return run_ranks(_build, 1, str(model))[0]


def _build(rank: int, model: str) -> dict[str, str]:
    """Build with flags that are refused or dropped before, on a machine without the packages."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.backends.megatron_utils.model_config import refusals_of_megatron

    said = {}
    args = megatron_args(Case(model=model), 1).replace(gradient_accumulation_fusion=True)
    with pytest.raises(ConfigError) as error:
        start_actor(args, rank, 1)
    said["gradient_accumulation_fusion"] = str(error.value)
    with pytest.raises(ConfigError) as error, refusals_of_megatron():
        TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            num_moe_experts=2,
            moe_permute_fusion=True,
        )
    said["moe_permute_fusion"] = str(error.value)
    return said


@pytest.mark.parametrize("flag", FLAGS)
def test_a_refusal_is_one_sentence(said, flag):
    assert said[flag].startswith("megatron-core refuses the model or its layout: ")
    assert FLAGS[flag] in said[flag]
    assert "\n" not in said[flag] and "Traceback" not in said[flag]


def test_an_assertion_without_a_text_names_its_place():
    from slime.backends.megatron_utils.model_config import refusals_of_megatron

    with pytest.raises(ConfigError, match=Path(__file__).name), refusals_of_megatron():
        raise AssertionError

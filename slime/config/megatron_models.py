"""Model types of Hugging Face that the Megatron backend trains; readable without megatron."""

from __future__ import annotations

from slime.core.errors import ConfigError

TRAINED = (
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mimo",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
LATENT = ("deepseek_v3",)  # multi-head latent attention
_ROPES = ("default", "linear", "llama3", "yarn")
_MISSING = {
    "qwen3_vl": "its vision tower and positions in images are missing",
    "qwen3_vl_moe": "its vision tower and positions in images are missing",
    "qwen3_next": "its gated delta net layers and gated attention are missing",
}


def check_model_type(model_type: str) -> None:
    if model_type in TRAINED:
        return
    why = _MISSING.get(model_type, f"it trains {', '.join(TRAINED)}")
    raise ConfigError(
        f"--train-backend megatron does not train models of type {model_type}: {why}. Use "
        "--train-backend fsdp"
    )


def check_rope(model_type: str, rope_type: str) -> None:
    """Raise ConfigError if the Megatron backend does not have the RoPE scaling of config.json."""
    known = ("default", "yarn") if model_type in LATENT else _ROPES
    if rope_type not in known:
        raise ConfigError(
            f"config.json of --hf-checkpoint has rope_type {rope_type}: --train-backend megatron trains "
            f"{model_type} with {', '.join(known[:-1])} or {known[-1]}. Use --train-backend fsdp"
        )

"""What a row of the table of wrong configurations consists of."""

from __future__ import annotations

from dataclasses import dataclass

_DENSE = {  # Qwen3-4B
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
_EXPERTS = {  # GLM-4.5-355B-A32B
    "model_type": "glm4_moe",
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "n_routed_experts": 160,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
_DELTA_NETS = {  # Qwen3.5-9B
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "vocab_size": 248320,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
}
MODELS = {"Qwen3-4B": _DENSE, "GLM-4.5": _EXPERTS, "Qwen3.5-9B": _DELTA_NETS}


@dataclass(kw_only=True, frozen=True)
class Machine:
    """The machine that starts train.py: its GPUs, and whether it belongs to a Ray cluster."""

    words: str
    gpus: int
    cluster: bool = False


ONE_NODE = Machine(words="one machine, 8 GPUs", gpus=8)
CLUSTER = Machine(words="a cluster, 8 GPUs per node", gpus=8, cluster=True)
LAPTOP = Machine(words="a machine without a GPU", gpus=0)


@dataclass(kw_only=True, frozen=True)
class Wrong:
    """`flags` are refused and `right` is accepted in their place; both on top of a valid run."""

    what: str
    flags: str
    right: str
    machine: Machine = ONE_NODE
    model: str = "Qwen3-4B"


GLM = "--actor-num-nodes 8 --colocate"
TP8 = "--tensor-model-parallel-size 8 --sequence-parallel"
SGLANG = "--rollout-engine sglang"

"""Published command lines as runs on a laptop: the same flags, with only what a laptop lacks replaced.

Replaced are sizes of the model, files, GPUs and parallel sizes, batch sizes, lengths, the engine, addresses, FP8
(TransformerEngine needs a GPU), and a reward that a random model can earn. Every other word stays.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from slime.backends.megatron_utils.architecture import architecture
from slime.backends.megatron_utils.model_config import model_flags, read_config
from tests.compat.command_lines import COMMON, FILES
from tests.e2e.test_sft import conversation
from tests.parity.model_facts import MODELS
from tests.parity.mtp_models import MIMO, NEXTN
from tests.parity.test_model_scripts import model_args
from tests.unit.test_loss_mask import CHATML, tokenizer_with

NUM_ROLLOUT = 2
NUM_LAYERS = 2
_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 328, "pad_token_id": 256, "eos_token_id": 257,
    "bos_token_id": None, "dtype": "float32", "layer_types": None, "max_window_layers": 2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
# Flags of MODEL_ARGS that hold a size.
_SIZE_FLAGS = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size num_experts
moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim
qk_pos_emb_head_dim v_head_dim moe_router_num_groups moe_router_group_topk
"""
_HERE = {
    "--num-rollout": NUM_ROLLOUT,
    "--rollout-batch-size": 4,
    "--n-samples-per-prompt": 4,
    "--global-batch-size": 16,
    "--rollout-max-response-len": 8,
    "--max-tokens-per-gpu": 512,
    "--rollout-engine": "slime",
    "--data-pad-size-multiplier": 16,
}
_PARALLEL = ("--tensor-model-parallel-size", "--expert-model-parallel-size")


def tiny_model(folder: Path, name: str, *, seed: int = 0) -> Path:
    """Write a random model with the published config of `name`, in which only sizes are smaller."""
    published = MODELS[name]()
    mimo = published.model_type == "mimo"  # transformers has no class for it: it is a Qwen2
    fields = published.to_dict()
    fields.pop("mlp_layer_types", None)
    mtp = published.model_type in ("mimo", "glm4_moe_lite")  # the last layer becomes the MTP layer
    sizes = {**_sizes(fields), "num_hidden_layers": NUM_LAYERS + mtp}
    config = type(published)(**{**fields, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config) if mimo else AutoModelForCausalLM.from_config(config)
    model.float().save_pretrained(folder)
    if mtp:
        _last_layer_to_mtp(folder, mimo=mimo)
    if name.startswith("kimi"):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "kimi_k2"}))
    tokenizer_with(CHATML).save_pretrained(folder)
    return folder


def _sizes(fields: dict) -> dict:
    sizes = {key: value for key, value in _SIZES.items() if key in fields}
    experts = next((key for key in ("num_experts", "n_routed_experts") if key in fields), None)
    if experts:
        sizes |= {experts: 8, **{key: v for key, v in _EXPERTS.items() if key in fields}}
    if (fields.get("n_group") or 1) > 1:
        sizes |= {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    if "kv_lora_rank" in fields:
        sizes |= _LATENT | ({"q_lora_rank": 24} if fields["q_lora_rank"] else {})
    return sizes


def _last_layer_to_mtp(folder: Path, *, mimo: bool) -> None:
    file, path = folder / "model.safetensors", folder / "config.json"
    config = json.loads(path.read_text())
    here = "model.mtp_layers.0." if mimo else f"model.layers.{NUM_LAYERS}."
    stored = load_file(file)
    tensors = {n.replace(f"model.layers.{NUM_LAYERS}.", here): t for n, t in stored.items()}
    hidden = config["hidden_size"]
    for part, name in (MIMO if mimo else NEXTN).items():
        shape = (hidden, 2 * hidden) if part == "proj" else (hidden,)
        tensors[f"{here}{name}.weight"] = torch.full(shape, 1.0 / len(shape) ** 4)
    if not mimo:  # copies of what the layer shares with the others
        tensors[f"{here}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        tensors[f"{here}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    config["num_hidden_layers"] = NUM_LAYERS
    for key in ("layer_types", "mlp_layer_types"):
        config.pop(key, None)
    kind = ["MiMoForCausalLM"] if mimo else config["architectures"]
    path.write_text(json.dumps({**config, "architectures": kind}))


def write_files(folder: Path) -> None:
    """Write prompts, conversations and the files that flags name."""
    prompts = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    chats = [{"input": conversation(number)} for number in range(20)]
    for name, rows in (("DATA", prompts), ("CHATS", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in FILES.items():
        text = text.replace("DATA", str(folder / "DATA.jsonl")).replace(
            "num_gpus: 8", "num_gpus: 1"
        )
        (folder / name).write_text(text)


def start_of(
    folder: Path, run_dir: Path, row: tuple[str, str, list[str]], server: str
) -> tuple[str, list[str]]:
    """Return the script and the words after it; `folder` holds the files and the model's folder."""
    name, model, flags = row
    flags = _drop(_in_folder(flags, run_dir.parent), "--fp8-format", "--fp8-recipe")
    words = [*_own_args(folder / model, model), *COMMON.split(), *flags]
    parallel = [int(words[i + 1]) for i, word in enumerate(words) if word in _PARALLEL]
    gpus = min(2, max(parallel, default=1))
    here = {
        **_HERE,
        **dict.fromkeys(_PARALLEL, 2),
        "--actor-num-gpus-per-node": gpus,
        "--rm-url": server,
        "--rollout-external-engine-addrs": server,
    }
    files = {word: str(folder / word) for word in FILES} | {
        "DATA": str(folder / ("CHATS.jsonl" if "sft_loss" in flags else "DATA.jsonl")),
        "MODEL": str(folder / model),
        "my.generate": "tests.compat.rollout_hooks.from_buffer",
    }
    words = [files.get(word, word) for word in _with_values(words, here)]
    return _script(name, words, gpus, folder, run_dir, model)


def _script(
    name: str, words: list[str], gpus: int, folder: Path, run_dir: Path, model: str
) -> tuple[str, list[str]]:
    asynchronous = "async" in name
    if "--rollout-external-engine-addrs" in words:
        words.remove("--colocate")
        words = _drop(words, "--rollout-engine")
    elif asynchronous or "--debug-rollout-only" in words:
        words.remove("--colocate")
        words += ["--rollout-num-gpus", str(gpus)]
    if "sft_loss" in words:
        words = _without(
            _with_values(words, {"--n-samples-per-prompt": 1, "--global-batch-size": 4})
        )
    elif "--rm-url" not in words:  # the teacher's log-probs are enough
        words = _with_reward(words)
    words += ["--hf-checkpoint", str(folder / model), "--run-dir", str(run_dir)]
    return "train_async.py" if asynchronous else "train.py", words


def _own_args(folder: Path, model: str) -> list[str]:
    """MODEL_ARGS of scripts/models with the sizes of the tiny model."""
    tiny = model_flags(architecture(read_config(folder)))
    sizes = {
        "--" + n.replace("_", "-"): tiny[n] for n in _SIZE_FLAGS.split() if tiny.get(n) is not None
    }
    return _with_values(model_args(model), {**sizes, "--moe-layer-freq": "[0]*1+[1]*1"})


def _with_values(words: list[str], values: dict) -> list[str]:
    """Put another value behind the flags that are there."""
    before = ["", *words[:-1]]
    return [str(values.get(flag, word)) for flag, word in zip(before, words, strict=True)]


def _with_reward(words: list[str]) -> list[str]:
    where = words.index("--rm-type")
    return [
        *words[:where], "--custom-rm-path", "tests.e2e.rewards.dense", *words[where + 2 :]
    ]  # fmt: skip


def _without(words: list[str]) -> list[str]:
    """Remove what a conversation has no place for: labels, rewards, a prompt to render."""
    words.remove("--apply-chat-template")
    return _drop(words, "--label-key", "--rm-type")


def _drop(words: list[str], *flags: str) -> list[str]:
    """Remove flags with their one value."""
    before = ["", *words[:-1]]
    pairs = zip(before, words, strict=True)
    return [word for flag, word in pairs if not {flag, word} & set(flags)]


def _in_folder(words: list[str], folder: Path) -> list[str]:
    """Move files of /tmp into the folder of the test."""
    return [f"{folder}/{w.removeprefix('/tmp/')}" if w.startswith("/tmp/") else w for w in words]

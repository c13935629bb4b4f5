"""Names by which --freeze-params-name-list and --only-train-params-name-list address parameters.

A pattern is searched in the Hugging Face name of a parameter and in Megatron's names of the same parameter,
with either trainer: `embed_tokens` and `embedding` freeze the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from slime.config.checks.model_types import in_tower
from slime.core.errors import ConfigError

if TYPE_CHECKING:
    from slime.config.arguments import Args

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SHOWN = 6  # names in a message

# Hugging Face name inside a layer -> names inside a layer of Megatron. Experts have two: in megatron-core's
# own layers, and in TransformerEngine's, which group them.
_IN_LAYER = [
    (r"(input|post_self_attn|post_mlp)_layernorm\.weight", (r"\1_layernorm.weight",)),
    (r"post_attention_layernorm\.weight", ("pre_mlp_layernorm.weight",)),
    (r"self_attn\.[qkv]_proj\.(\w+)", (r"self_attention.linear_qkv.\1",)),
    (r"self_attn\.q_proj\.weight", ("self_attention.linear_q_proj.weight",)),
    (r"self_attn\.([qk])_norm\.weight", (r"self_attention.\1_layernorm.weight",)),
    (r"self_attn\.o_proj\.(\w+)", (r"self_attention.linear_proj.\1",)),
    (r"self_attn\.sinks", ("self_attention.core_attention.softmax_offset",)),
    (r"self_attn\.q_a_proj\.weight", ("self_attention.linear_q_down_proj.weight",)),
    (r"self_attn\.q_b_proj\.weight", ("self_attention.linear_q_up_proj.weight",)),
    (r"self_attn\.kv_a_proj_with_mqa\.weight", ("self_attention.linear_kv_down_proj.weight",)),
    (r"self_attn\.kv_b_proj\.weight", ("self_attention.linear_kv_up_proj.weight",)),
    (r"self_attn\.(q|kv)_a_layernorm\.weight", (r"self_attention.\1_layernorm.weight",)),
    (r"linear_attn\.in_proj_\w+\.weight", ("self_attention.in_proj.weight",)),
    (r"linear_attn\.norm\.weight", ("self_attention.out_norm.weight",)),
    (r"linear_attn\.(conv1d\.weight|out_proj\.weight|A_log|dt_bias)", (r"self_attention.\1",)),
    (r"mlp\.(?:gate|router)\.(weight|bias)", (r"mlp.router.\1",)),
    (r"mlp\.gate\.e_score_correction_bias", ("mlp.router.expert_bias",)),
    (r"mlp\.(shared_experts\.)?(?:gate|up|gate_up)_proj\.(\w+)", (r"mlp.\1linear_fc1.\2",)),
    (r"mlp\.(shared_experts\.)?down_proj\.(\w+)", (r"mlp.\1linear_fc2.\2",)),
    (r"mlp\.shared_expert\.(?:gate|up)_proj\.weight", ("mlp.shared_experts.linear_fc1.weight",)),
    (r"mlp\.shared_expert\.down_proj\.weight", ("mlp.shared_experts.linear_fc2.weight",)),
    (r"mlp\.shared_expert_gate\.weight", ("mlp.shared_experts.gate_weight",)),
    (
        r"mlp\.experts\.(\d+)\.(?:gate|up)_proj\.weight",
        (r"mlp.experts.local_experts.\1.linear_fc1.weight", r"mlp.experts.linear_fc1.weight\1"),
    ),
    (
        r"mlp\.experts\.(\d+)\.down_proj\.weight",
        (r"mlp.experts.local_experts.\1.linear_fc2.weight", r"mlp.experts.linear_fc2.weight\1"),
    ),
    # All experts of a layer in one tensor.
    (r"mlp\.experts\.gate_up_proj", ("mlp.experts.linear_fc1.weight",)),
    (r"mlp\.experts\.down_proj", ("mlp.experts.linear_fc2.weight",)),
    (r"mlp\.experts\.gate_up_proj_bias", ("mlp.experts.linear_fc1.bias",)),
    (r"mlp\.experts\.down_proj_bias", ("mlp.experts.linear_fc2.bias",)),
]
_ENDS = {
    _EMBEDDING: "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    _HEAD: "output_layer.weight",
}


def names_of(hf_name: str, *, tied: bool = False) -> list[str]:
    """Return all names of a parameter; with `tied` embeddings those of the output layer are the embedding's."""
    names = [hf_name, *_megatron_names(hf_name), *_stacked_names(hf_name), *_expert_names(hf_name)]
    if tied and _text_name(hf_name) == _EMBEDDING:
        names += [_HEAD, *_megatron_names(_HEAD)]
    return names


def _text_name(hf_name: str) -> str:
    """Return the name that a parameter of the text model has outside of a vision-language model."""
    return hf_name.replace("language_model.", "")


def _megatron_names(hf_name: str) -> list[str]:
    if (end := _ENDS.get(_text_name(hf_name))) is not None:
        return [end]
    layer = re.search(r"\blayers\.(\d+)\.(.+)", hf_name)
    if layer is None:
        return []
    found = []
    for pattern, templates in _IN_LAYER:
        match = re.fullmatch(pattern, layer[2])
        found += [match.expand(template) for template in templates] if match else []
    return [f"decoder.layers.{layer[1]}.{name}" for name in found]


def _stacked_names(hf_name: str) -> list[str]:
    """Return the name of the tensor that holds this weight of all experts in the FSDP trainer."""
    found = re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight", hf_name)
    if found is None:
        return []
    return [f"{found[1]}.{'down_proj' if found[2] == 'down' else 'gate_up_proj'}"]


def _expert_names(hf_name: str) -> list[str]:
    """Return the names that a checkpoint has for the first expert of a tensor of all experts."""
    found = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", hf_name)
    if found is None:
        return []
    parts = ("gate", "up") if found[2] == "gate_up" else ("down",)
    return [f"{found[1]}.0.{part}_proj.weight" for part in parts]


@dataclass(frozen=True, kw_only=True)
class Freezing:
    """The two flags: regular expressions of what is trained, and of what is not."""

    only: tuple[str, ...] | None  # --only-train-params-name-list
    frozen: tuple[str, ...]  # --freeze-params-name-list

    @classmethod
    def of(cls, args: Args) -> Freezing:
        only, frozen = args.only_train_params_name_list, args.freeze_params_name_list
        return cls(only=None if only is None else tuple(only), frozen=tuple(frozen or ()))

    @property
    def is_set(self) -> bool:
        return self.only is not None or bool(self.frozen)

    def is_trained(self, names: Iterable[str]) -> bool:
        """Return whether a parameter with these names is trained."""
        names = list(names)
        wanted = self.only is None or any(_matches(pattern, names) for pattern in self.only)
        return wanted and not any(_matches(pattern, names) for pattern in self.frozen)

    def check(self, hf_names: list[str]) -> None:
        """Raise ConfigError for a pattern that matches none of all parameters of a model."""
        tied = _HEAD not in hf_names
        names = [name for hf_name in hf_names for name in names_of(hf_name, tied=tied)]
        flags = (
            ("--only-train-params-name-list", self.only or ()),
            ("--freeze-params-name-list", self.frozen),
        )
        for flag, patterns in flags:
            for pattern in patterns:
                if not _matches(pattern, names):
                    raise ConfigError(
                        f"{flag} {pattern} matches no parameter of the model: {_examples(hf_names)}"
                    )

    def trained(self, hf_names: list[str]) -> list[str]:
        """Return the parameters to train of all parameters of a model; they cannot be none."""
        if not self.is_set:
            return hf_names
        self.check(hf_names)
        tied = _HEAD not in hf_names
        kept = [name for name in hf_names if self.is_trained(names_of(name, tied=tied))]
        return kept or refuse_nothing_trained(hf_names)

    def check_fused(self, hf_names: list[str], backend: str) -> None:
        """Raise ConfigError if only a part of one of the trainer's parameters would be trained."""
        fused_names = _megatron_names if backend == "megatron" else _stacked_names
        parts: dict[str, dict[str, bool]] = {}
        tied = _HEAD not in hf_names
        for hf_name in hf_names:
            names = names_of(hf_name, tied=tied)
            for fused in fused_names(hf_name):
                parts.setdefault(fused, {})[hf_name] = self.is_trained(names)
        for fused, trained in parts.items():
            if len(set(trained.values())) > 1:
                moved = next(name for name, is_trained in trained.items() if is_trained)
                fixed = next(name for name, is_trained in trained.items() if not is_trained)
                raise ConfigError(
                    f"--only-train-params-name-list and --freeze-params-name-list train {moved} and "
                    f"not {fixed}, which are one parameter with --train-backend {backend} ({fused}): name all "
                    "of its parts"
                )


def without_frozen_tower(args: Args, names: list[str]) -> list[str]:
    """Return the parameters without those of a vision tower, unless --no-freeze-vision-tower trains it."""
    trained = args.multimodal_keys and not args.freeze_vision_tower
    return names if trained else [name for name in names if not in_tower(name)]


def check_freezing(args: Args, hf_names: list[str]) -> None:
    """Raise ConfigError if the flags do not fit a checkpoint with these tensors."""
    freezing = Freezing.of(args)
    if freezing.is_set and hf_names:
        freezing.trained(hf_names)
        freezing.check_fused(hf_names, args.train_backend)


def refuse_nothing_trained(hf_names: list[str]) -> NoReturn:
    raise ConfigError(
        "--only-train-params-name-list and --freeze-params-name-list leave no parameter to train: "
        f"{_examples(hf_names)}"
    )


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for name in names)


def _examples(hf_names: list[str]) -> str:
    """Return a few names, spread over the first layer and what surrounds the layers."""
    few = [name for name in hf_names if "layers." not in name or "layers.0." in name] or hf_names
    step = max(len(few) // _SHOWN, 1)
    shown = [f"{name} (or {'/'.join(_megatron_names(name))})" for name in few[::step][:_SHOWN]]
    return "names are, for example, " + ", ".join(shown).replace(" (or )", "")

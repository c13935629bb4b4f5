"""What LoRA adapters are: the `--lora-*` flags, PEFT's adapter_config.json, and the modules they name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.checks.file_checks import is_dense, num_experts, read_hf_config
from slime.config.flags.draft import Draft
from slime.config.flags.spec import option_of
from slime.config.peft_files import (
    ALL_LINEAR,
    CONFIG_FILE,
    DOWN,
    EXPERTS,
    LORA_A,
    LORA_B,
    adapter_modules,
    adapter_shapes,
    ends_of,
    expert_parameters,
    expert_shapes,
    flat_name,
    is_experts,
    is_peft_experts,
    linear_modules,
    lora_scaling,
    matches,
    matches_experts,
    names_experts,
    nested_name,
    peft_modules,
    peft_settings,
    peft_shapes,
    read_adapter_config,
    refuse_fused,
    refuse_gate,
)
from slime.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from slime.config.arguments import Args

ADAPTER = "slime"  # the name by which engines serve the adapter of a run
_HEAD = "lm_head"
_HALVES = ("gate_proj", "up_proj")  # of the experts' gate_up_proj
_SHOWN = 12  # names in a message


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters of a model: y = W x + scaling * B A x for every target module.

    Rank 16 and alpha 32 have the scaling 32 / 16 = 2; with rsLoRA it is 32 / sqrt(16) = 8. With
    `experts_shared_outer` the experts of a layer have one A of gate_up_proj and one B of down_proj.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    use_rslora: bool = False
    experts_shared_outer: bool = False

    @property
    def scaling(self) -> float:
        return lora_scaling(self.rank, self.alpha, self.use_rslora)

    @classmethod
    def of(cls, args: Args) -> LoraConfig | None:
        """Return the adapters that a run trains; None without LoRA."""
        if not args.lora_rank:
            return None
        return cls(
            rank=args.lora_rank,
            alpha=args.lora_alpha,
            dropout=args.lora_dropout,
            target_modules=tuple(args.lora_target_modules),
            use_rslora=args.lora_use_rslora,
            experts_shared_outer=args.lora_experts_shared_outer,
        )

    @classmethod
    def read(cls, folder: str | Path, flag: str = "--lora-adapter-path") -> LoraConfig:
        """Read adapter_config.json; raise ConfigError for kinds of adapters that are not honoured."""
        try:
            given = read_adapter_config(folder)
            peft_settings(given)  # before the tensors are looked at
            modules = adapter_modules(Path(folder), flag, flat=False)
            held = peft_settings(given, modules)
        except ConfigError as error:
            known = str(error).startswith(flag)
            raise ConfigError(str(error) if known else f"{flag}: {error}") from None
        targets = held.targets
        if targets is None or any("language_model." in name for name in targets):
            targets = tuple(flat_name(m) for m in modules if not is_peft_experts(m))
        return cls(
            rank=held.rank,
            alpha=float(held.alpha),
            dropout=held.dropout,
            use_rslora=held.use_rslora,
            target_modules=(*targets, *held.parameters),
        )

    def to_peft(self, base: str, modules: Iterable[str]) -> dict[str, Any]:
        """Return adapter_config.json for the adapters of these modules, by their names in PEFT's files."""
        modules = list(modules)
        others = [name for name in modules if not is_peft_experts(name)]
        parameters = expert_parameters(modules, self.target_modules)
        alpha = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.use_rslora,
            "target_modules": _shortened(self.target_modules, others),
            **({"target_parameters": parameters} if parameters else {}),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
        }

    def tensor_shapes(
        self, modules: Iterable[str], shapes: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        """Return the tensors of PEFT's file for these modules of a checkpoint with these tensors."""
        wanted, experts = {}, expert_shapes(shapes)
        for module, name in peft_modules(modules).items():
            shape = experts[module] if is_experts(module) else shapes[f"{module}.weight"]
            wanted[name + LORA_A], wanted[name + LORA_B] = peft_shapes(shape, self.rank)
        return wanted

    def targets(self, linear: Iterable[str], experts: Iterable[str] = ()) -> list[str]:
        """Return which of a model's linear modules have adapters; raise ConfigError for unknown names.

        A target is a module's name or the end of one, as in PEFT: q_proj, or self_attn.q_proj.
        `experts` are the parameters with all experts of a layer: mlp.experts.gate_up_proj. Those that
        have adapters are returned after the modules. `all-linear` does not include them.
        """
        linear, experts = list(linear), list(experts)
        for target in self.target_modules:
            self._refuse_unknown(target, linear, experts)
        every = ALL_LINEAR in self.target_modules
        named = [t for t in self.target_modules if t != ALL_LINEAR]
        return [
            *(
                n
                for n in linear
                if (every and not matches(n, _HEAD)) or any(matches(n, t) for t in named)
            ),
            *(n for n in experts if any(matches_experts(n, target) for target in named)),
        ]

    def _refuse_unknown(self, target: str, linear: list[str], experts: list[str]) -> None:
        if target == ALL_LINEAR:
            return
        chosen = any(matches_experts(name, target) for name in experts)
        found = [name for name in linear if matches(name, target)]
        if experts and target in _HALVES:
            raise ConfigError(
                f"--lora-target-modules {target}: the experts of this model hold gate and up in one "
                f"parameter: name gate_up_proj, or {EXPERTS} for all of an expert"
            )
        if not found and not chosen:
            ends = _ends([*linear, *experts]) + ([EXPERTS] if experts else [])
            raise ConfigError(
                f"--lora-target-modules {target} is no linear module of the model, which has "
                f"{', '.join(ends)}; or use {ALL_LINEAR}"
            )
        if any(matches(name, _HEAD) for name in found):
            raise ConfigError(
                f"--lora-target-modules {target}: the LM head cannot have an adapter, since log-probs "
                "are computed from its weight: remove it"
            )
        if chosen and self.dropout:
            raise ConfigError(
                f"--lora-dropout {self.dropout} with --lora-target-modules {target}: PEFT has no dropout "
                "for adapters of experts: remove one of them"
            )


def served_adapter(args: Args) -> str | None:
    """Return the name by which engines serve the adapter of a run; None if they hold merged weights."""
    return ADAPTER if args.lora_rank and not args.lora_merge_for_rollout else None


def served_modules(args: Args, shapes: dict[str, list[int]]) -> list[str]:
    """Return the ends of the names of the modules that have adapters, as SGLang's option names them."""
    config = LoraConfig.of(args)
    assert config is not None, "called with --lora-rank only"
    return sorted(ends_of(config.targets(*linear_modules(shapes))))


# ---- checks before anything starts


def adapted_experts(draft: Draft) -> list[str]:
    """Return the targets of --lora-target-modules that name experts; none without LoRA.

    Dense models have a down_proj too, and GLM-4's a gate_up_proj.
    """
    if not draft["lora_rank"]:
        return []
    config = read_hf_config(draft)
    sparse, dense = num_experts(config) is not None, is_dense(config)
    named = [t for t in draft["lora_target_modules"] if names_experts(t) or (t == DOWN and sparse)]
    return [target for target in named if EXPERTS in target or not dense]


def derive_lora(draft: Draft) -> None:
    """Take rank, alpha and modules from --lora-adapter-path; flags that contradict it are refused."""
    _derive_from_folder(draft)
    if not draft["lora_rank"] or draft["lora_merge_for_rollout"] or draft["rollout_external"]:
        return
    if draft["rollout_num_gpus"]:
        draft.derive_if_unset("sglang_enable_lora", True)
        draft.derive_if_unset("sglang_max_lora_rank", draft["lora_rank"])
        if draft["rollout_engine"] == "slime":  # which computes A of all slots for every token
            draft.derive_if_unset("sglang_max_loras_per_batch", 1)
        if adapted_experts(draft):
            draft.derive_if_unset("sglang_lora_target_modules", ["all", EXPERTS])
        if draft["rollout_engine"] == "sglang" and draft["offload_rollout"]:
            # SGLang drops released weights, and updates send the adapter alone.
            draft.derive("sglang_enable_weights_cpu_backup", True)


def _derive_from_folder(draft: Draft) -> None:
    path = draft["lora_adapter_path"]
    if path is None or not draft.need_file(path, "--lora-adapter-path"):
        return
    held = LoraConfig.read(path)
    values = {
        "lora_rank": held.rank,
        "lora_alpha": held.alpha,
        "lora_use_rslora": held.use_rslora,
        "lora_target_modules": list(held.target_modules),
    }
    for name, value in values.items():
        if draft.given(name) and draft[name] != value:
            option = option_of(name)
            raise ConfigError(
                f"{option} {_text(draft[name])} disagrees with {CONFIG_FILE} of --lora-adapter-path, which "
                f"has {_text(value)}: remove {option}"
            )
        draft.derive(name, value)
    if not draft.given("lora_dropout"):
        draft.derive("lora_dropout", held.dropout)


def check_lora(draft: Draft) -> None:
    """Refuse combinations of LoRA with other flags that could not be honoured."""
    if not draft["lora_rank"]:
        return
    targets = draft["lora_target_modules"]
    others = [t for t in targets if t != ALL_LINEAR and not names_experts(t)]
    if ALL_LINEAR in targets and others:
        raise ConfigError(
            f"--lora-target-modules {' '.join(targets)}: {ALL_LINEAR} includes the others: remove them"
        )
    if draft["lora_dropout"] and draft["deterministic"]:
        raise ConfigError(
            f"--lora-dropout {draft['lora_dropout']} makes the trainer's log-probs random and "
            "--sglang-enable-deterministic-inference needs them equal to the engine's: remove one"
        )
    for name, why in _NOT_WITH_LORA.items():
        if draft[name]:
            raise ConfigError(f"{option_of(name)} with --lora-rank: {why}: remove one of them")
    if draft["critic_load"] and not draft["load"]:
        raise ConfigError(
            "--critic-load with --lora-rank: a new critic starts from the base with adapters of its own: "
            "remove it"
        )
    obstacle = None if draft["lora_merge_for_rollout"] else _serving_obstacle(draft)
    if draft["rollout_num_gpus"] and obstacle is not None:
        raise ConfigError(
            f"--lora-rank: {obstacle}: send merged weights with --lora-merge-for-rollout"
        )


def _serving_obstacle(draft: Draft) -> str | None:
    """Return why the adapter alone cannot be sent to the engines, or None."""
    if draft["ref_load"] and draft["rollout_engine"] == "sglang":
        return "SGLang loads the base from --hf-checkpoint and cannot receive that of --ref-load beside an adapter"
    if not draft["sglang_enable_lora"] and not draft["rollout_external"]:
        return "--no-sglang-enable-lora starts engines that serve no adapters"
    embedded = draft["rollout_engine"] != "sglang" and not draft["rollout_external"]
    if adapted_experts(draft) and not embedded:
        return "only embedded engines that the run starts serve adapters of experts"
    if draft["sglang_enable_dp_attention"]:
        return "SGLang loads no adapters with --sglang-enable-dp-attention"
    rank = draft["sglang_max_lora_rank"]
    if rank is not None and rank < draft["lora_rank"]:
        return f"--sglang-max-lora-rank {rank} is smaller"
    return None


def check_lora_files(args: Args, shapes: dict[str, list[int]]) -> None:
    """Check the names and shapes of adapters against the tensors of --hf-checkpoint."""
    config = LoraConfig.of(args)
    assert config is not None, "called with --lora-rank only"
    linear, experts = linear_modules(shapes)
    targets = config.targets(linear, experts)
    if args.train_backend == "megatron":
        refuse_gate(config.target_modules, targets)
        refuse_fused(config.target_modules, [name for name in targets if name in shapes])
    if args.lora_adapter_path is None:
        return
    held = adapter_shapes(Path(args.lora_adapter_path))
    refuse_other_base(held, config.tensor_shapes(targets, shapes), args.lora_adapter_path)


def refuse_other_base(
    held: dict[str, list[int]],
    wanted: dict[str, list[int]],
    path: str,
    flag: str = "--hf-checkpoint",
) -> None:
    """Raise if names or shapes of an adapter's tensors do not match the base model."""
    differing = sorted(n for n in held.keys() | wanted.keys() if held.get(n) != wanted.get(n))
    if differing:
        name = differing[0]
        raise UserError(
            f"{path} holds the adapter of another base than {flag}: {name} is "
            f"{held.get(name, 'absent')} there and should be {wanted.get(name, 'absent')}"
        )


def check_lora_resume(args: Args, checkpoint: Path) -> None:
    """Refuse to resume with other adapters than those of the checkpoint."""
    facts = checkpoint / "trainer.json"
    if not facts.exists():
        return
    try:
        saved = json.loads(facts.read_text()).get("lora")
    except ValueError:
        return  # the trainer's reader reports that the file is damaged
    refuse_other_adapters(saved, LoraConfig.of(args), str(checkpoint))


def refuse_other_adapters(
    saved: dict[str, Any] | None, config: LoraConfig | None, path: str
) -> None:
    """Raise if a checkpoint's adapters differ from the run's in rank, scaling or sharing."""
    if saved is None and config is None:
        return
    if saved is None or config is None:
        saved_with = "without" if saved is None else f"with --lora-rank {saved['rank']}"
        here = "has none" if config is None else f"has --lora-rank {config.rank}"
        raise UserError(f"{path} was saved {saved_with} adapters, this run {here}: they must agree")
    for name in ("rank", "alpha", "use_rslora", "experts_shared_outer"):
        value = saved.get(name, False)
        if value != getattr(config, name):
            option = option_of(f"lora_{name}")
            raise UserError(
                f"{path} was saved with {option} {value}, this run has {getattr(config, name)}: "
                f"use {option} {value}"
            )


_NOT_WITH_LORA = {
    "ref_update_interval": "the reference model is the base with its adapters off",
    "only_train_params_name_list": "only adapters are trained, see --lora-target-modules",
    "enable_mtp_training": "multi-token-prediction layers have no adapters",
    "freeze_params_name_list": "only adapters are trained, see --lora-target-modules",
}


def _ends(names: list[str]) -> list[str]:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return [*ends[:_SHOWN], *(["..."] if len(ends) > _SHOWN else [])]


def _shortened(targets: tuple[str, ...], modules: Iterable[str]) -> list[str]:
    """Return the names that PEFT and engines match: `all-linear` becomes the ends of the modules."""
    modules = list(modules)
    if ALL_LINEAR in targets:
        return sorted(ends_of(modules))
    named = {name for target in targets for name in (target, nested_name(target))}
    return sorted(t for t in named if any(matches(name, t) for name in modules))


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)

"""Options of the embedded engine under SGLang's names, parsed into one frozen record (imports no torch)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from slime.config.flags.engine_options import HARMLESS
from slime.config.flags.spec import option_of
from slime.core.errors import ConfigError

MOST_DRAFT_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The options of one engine process; sizes that are None are chosen when the model is loaded."""

    model_path: str
    tokenizer_path: str | None = None  # default: model_path
    skip_tokenizer_init: bool = False  # token ids only, no text in or out
    trust_remote_code: bool = False
    load_format: str = "auto"  # "dummy": random weights for the config
    dtype: str = "auto"
    device: str | None = None
    served_model_name: str | None = None
    weight_version: str = "default"
    context_length: int | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    port_file: str | None = None
    api_key: str | None = field(default=None, repr=False)  # required by every route
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    chunked_prefill_size: int | None = None
    page_size: int = 16
    disable_radix_cache: bool = False
    enable_deterministic_inference: bool = False
    enable_return_routed_experts: bool = False
    speculative_algorithm: str | None = None  # None or "NGRAM"
    speculative_num_draft_tokens: int | None = None
    random_seed: int | None = None
    enable_lora: bool = False  # adapters can be loaded later; the options below imply it
    lora_paths: tuple[tuple[str, str], ...] = ()  # (name, PEFT folder)
    max_lora_rank: int | None = None
    max_loras_per_batch: int = 8  # adapter slots: how many adapters can be loaded at once
    lora_target_modules: tuple[str, ...] = ()  # empty: every linear layer that takes adapters
    log_level: str = "info"

    @property
    def serves_lora(self) -> bool:
        sizes = self.max_lora_rank is not None or bool(self.lora_target_modules)
        return self.enable_lora or sizes or bool(self.lora_paths)

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{option_of(name)} must be at least 1, not {value}")
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < 1:
            raise ConfigError(
                f"--chunked-prefill-size must be at least 1, not {self.chunked_prefill_size}; "
                "remove it for the default"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(
                f"--max-total-tokens {self.max_total_tokens} is less than one page of "
                f"{self.page_size} tokens; raise it or lower --page-size"
            )
        fraction = self.mem_fraction_static
        if fraction is not None and not 0 < fraction < 1:
            raise ConfigError(f"--mem-fraction-static must be between 0 and 1, not {fraction}")
        if self.speculative_algorithm not in (None, "NGRAM"):
            raise ConfigError(
                f"--speculative-algorithm {self.speculative_algorithm}: this engine only supports "
                "prompt lookup; use NGRAM"
            )
        window = self.speculative_num_draft_tokens
        if window is not None and not 2 <= window <= MOST_DRAFT_TOKENS:
            raise ConfigError(
                f"--speculative-num-draft-tokens must be between 2 and {MOST_DRAFT_TOKENS} (the newest "
                f"token is one of them), not {window}"
            )
        self._check_lora()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")

    def _check_lora(self) -> None:
        names = [name for name, _ in self.lora_paths]
        if len(set(names)) < len(names):
            raise ConfigError("--lora-path: two adapters have the same name")
        if len(names) > self.max_loras_per_batch:
            raise ConfigError(
                f"--lora-path: {len(names)} adapters and --max-loras-per-batch "
                f"{self.max_loras_per_batch}; raise it"
            )


def parse_engine_args(argv: list[str] | None = None) -> EngineArgs:
    """Parse a command line; raise ConfigError if it is invalid."""
    parser = _Parser(prog="slime engine", description=__doc__, allow_abbrev=False)
    for group, options in _OPTIONS.items():
        section = parser.add_argument_group(group)
        for name, settings in options.items():
            names = _SPELLINGS.get(name, (option_of(name),))
            section.add_argument(*names, dest=name, **settings)
    section = parser.add_argument_group(
        "options of SGLang that are accepted and have no effect here"
    )
    for name in sorted(HARMLESS):
        section.add_argument(option_of(name), nargs="*", metavar="VALUE")
    given = vars(parser.parse_args(argv))
    for name, convert in (("lora_paths", _lora_paths), ("lora_target_modules", tuple)):
        if given[name] is not None:
            given[name] = convert(given[name])
    if given.pop("tp_size") not in (None, 1):
        raise ConfigError("--tp-size: the embedded engine runs on one device; remove it")
    return EngineArgs(
        **{name: v for name, v in given.items() if v is not None and name not in HARMLESS}
    )


def _lora_paths(given: list[str]) -> tuple[tuple[str, str], ...]:
    """Parse NAME=FOLDER; without NAME the folder is the name, as in SGLang."""
    pairs = [part.split("=", 1) if "=" in part else [part, part] for part in given]
    if not all(name and folder for name, folder in pairs):
        raise ConfigError("--lora-path: write NAME=FOLDER")
    return tuple((name, folder) for name, folder in pairs)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"slime engine: {message}; `slime engine --help` lists the options")


_AT_LEAST_ONE = (
    *("context_length", "max_running_requests", "max_total_tokens", "page_size"),
    *("max_lora_rank", "max_loras_per_batch"),
)
_SPELLINGS = {"lora_paths": ("--lora-path", "--lora-paths")}
_SWITCH = {"action": "store_true", "default": None}
_DTYPES = ["auto", "half", "float16", "bfloat16", "float", "float32"]

_OPTIONS: dict[str, dict[str, dict]] = {
    "model": {
        "model_path": {"required": True, "help": "folder of a Hugging Face causal language model"},
        "tokenizer_path": {"help": "folder of the tokenizer; default: the model's"},
        "skip_tokenizer_init": {**_SWITCH, "help": "accept and return token ids only"},
        "trust_remote_code": {**_SWITCH, "help": "run Python code found in the model folder"},
        "load_format": {"choices": ["auto", "dummy"], "help": "dummy: random weights"},
        "dtype": {
            "choices": _DTYPES,
            "help": "auto: the checkpoint's; float32 becomes bfloat16 on CUDA",
        },
        "tp_size": {"type": int, "help": "1 is the only supported size"},
        "device": {"choices": ["cpu", "cuda"], "help": "default: cuda if available"},
        "context_length": {"type": int, "help": "default: the model's"},
        "served_model_name": {"help": "name shown by /v1/models; default: the path"},
        "weight_version": {"help": "version of the weights in model_path"},
    },
    "server": {
        "host": {"help": "address to bind to; default 127.0.0.1"},
        "port": {"type": int, "help": "0: any free port"},
        "port_file": {"help": 'file to write {"port": ..., "pid": ...} to once it listens'},
        "api_key": {
            "help": "key that every route but /health needs; the variable SLIME_ENGINE_TOKEN does the "
            "same and, unlike a command line, cannot be read by other users"
        },
        "log_level": {"choices": ["debug", "info", "warning", "error"]},
    },
    "scheduling and memory": {
        "max_running_requests": {"type": int, "help": "maximum number of concurrent requests"},
        "max_total_tokens": {"type": int, "help": "tokens in the KV cache"},
        "mem_fraction_static": {
            "type": float,
            "help": "fraction of GPU memory for weights and KV cache",
        },
        "chunked_prefill_size": {"type": int, "help": "maximum prompt tokens in one forward"},
        "page_size": {"type": int, "help": "tokens in a page of the KV cache"},
        "disable_radix_cache": {**_SWITCH, "help": "do not reuse the KV cache of common prefixes"},
        "enable_return_routed_experts": {
            **_SWITCH,
            "help": "let requests ask for the experts of their tokens; runs on the plain path, slower",
        },
        "enable_deterministic_inference": {
            **_SWITCH,
            "help": "a request's output does not depend on what else is running, bit for bit",
        },
        "speculative_algorithm": {
            "type": str.upper,
            "help": "NGRAM: draft by prompt lookup; same output, fewer steps",
        },
        "speculative_num_draft_tokens": {
            "type": int,
            "help": "tokens per request and forward: the newest token and its draft; default 12",
        },
        "random_seed": {"type": int, "help": "seed for requests without `sampling_seed`"},
    },
    "LoRA adapters": {
        "enable_lora": {**_SWITCH, "help": "allow loading adapters; implied by the options below"},
        "lora_paths": {
            "nargs": "+",
            "metavar": "NAME=FOLDER",
            "help": "adapters to load at startup: folders in PEFT's format",
        },
        "max_lora_rank": {
            "type": int,
            "help": "largest adapter rank; default: that of --lora-path, or 64",
        },
        "max_loras_per_batch": {
            "type": int,
            "help": "adapters loaded at once, each in a slot of device memory; default 8",
        },
        "lora_target_modules": {
            "nargs": "+",
            "metavar": "NAME",
            "help": "linear layers that take adapters, such as q_proj; default: all but `experts`",
        },
    },
}

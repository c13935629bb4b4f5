"""Rules about the engines: SGLang servers, the embedded engine, and external engines."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from slime.config.checks.file_checks import (
    foreign_quantization,
    num_experts,
    read_hf_config,
    read_quantization,
)
from slime.config.checks.model_types import has_linear_attention
from slime.config.engine_groups import group_drafts, named
from slime.config.flags.draft import Draft
from slime.config.flags.engine_options import (
    check_owned,
    embedded_support,
    known_version,
    sglang_argv,
)
from slime.config.flags.registry import all_flags
from slime.config.installed import SGLangInstall, find_sglang, has_package
from slime.core.errors import ConfigError
from slime.utils.addresses import port_of

_ROUTER_OWNED = {
    "router_api_key": "remove it: every run generates its own key",
    "router_worker_urls": "remove it: slime registers its engines",
    "router_host": "set SLIME_HOST_IP to the address other nodes reach this one at",
    "router_port": "use --sglang-router-port",
}
_DRAFTLESS = ("NGRAM",)  # algorithms without a draft model


def check_engine(draft: Draft) -> None:
    check_external(draft)
    _check_router(draft)
    if not draft["engine_models"]:
        _check_one(draft, updated=True)
    for where, model, view in group_drafts(draft):
        with named(where):
            _check_one(view, updated=model.update_weights)


def _check_one(draft: Draft, *, updated: bool) -> None:
    """Check the options of one kind of engine; `updated`: whether it receives weights."""
    _check_disaggregation(draft)
    if draft["rollout_engine"] == "sglang":
        check_sglang(draft)
        if updated:
            _check_fp8(draft)
    if draft["rollout_engine"] != "slime":
        return
    for flag in draft.given_flags():
        if flag.family == "router":
            raise ConfigError(f"{flag.option}: the embedded engine has no router: remove it")
        value = draft[flag.name]
        off = value is False and not flag.default
        if flag.family != "sglang" or off or value == flag.default:
            continue
        if embedded_support(flag.name.removeprefix("sglang_")) == "refused":
            raise ConfigError(
                f"{flag.option} is not supported by the embedded engine: remove it, or use "
                "--rollout-engine sglang"
            )
    _check_embedded_model(draft)
    algorithm = draft["sglang_speculative_algorithm"]
    if algorithm and algorithm.upper() != "NGRAM":
        raise ConfigError(
            f"--sglang-speculative-algorithm {algorithm}: the embedded engine speculates by prompt "
            "lookup only: use NGRAM, or use --rollout-engine sglang"
        )
    if draft["rollout_num_gpus_per_engine"] > 1:
        raise ConfigError(
            f"--rollout-num-gpus-per-engine {draft['rollout_num_gpus_per_engine']}: the embedded engine "
            "has no tensor parallelism: use 1, or --rollout-engine sglang"
        )


def _check_embedded_model(draft: Draft) -> None:
    """Refuse options that the embedded engine would refuse for this model at its start."""
    config, algorithm = read_hf_config(draft), draft["sglang_speculative_algorithm"]
    if algorithm and has_linear_attention(config.get("model_type")):
        raise ConfigError(
            f"--sglang-speculative-algorithm {algorithm}: models of type {config['model_type']} have "
            "recurrent layers, whose states the embedded engine cannot roll back when a draft token is "
            "rejected: remove it"
        )


def _check_disaggregation(draft: Draft) -> None:
    """Check engines that only prefill or only decode."""
    role = draft["sglang_disaggregation_mode"]
    if role not in ("prefill", "decode"):
        return
    if not draft["engine_models"]:
        raise ConfigError(
            f"--sglang-disaggregation-mode {role} would leave no engine for the other half: use "
            "--prefill-num-servers, or worker_type in the file of --sglang-config"
        )
    if draft["rollout_engine"] != "sglang":
        raise ConfigError("the embedded engine has no disaggregation: use --rollout-engine sglang")
    if draft["sglang_disaggregation_transfer_backend"] == "fake":
        raise ConfigError(
            "--sglang-disaggregation-transfer-backend fake transfers no KV cache: use mooncake or nixl"
        )


def _check_router(draft: Draft) -> None:
    """Check --sglang-router-ip and --sglang-router-port."""
    ip, port = draft["sglang_router_ip"], draft["sglang_router_port"]
    given = "--sglang-router-ip" if ip else "--sglang-router-port"
    if not ip and not port:
        return
    if draft["rollout_engine"] != "sglang":
        raise ConfigError(f"{given}: the embedded engine has no router: remove it")
    if ip and not port:
        raise ConfigError("--sglang-router-ip needs --sglang-router-port, the router's port")
    if ip and len(draft["engine_models"]) > 1:
        raise ConfigError(
            "--sglang-router-ip is one router, and each model of --sglang-config needs its own: remove it"
        )
    if draft["rollout_external"] and not ip:
        raise ConfigError(
            "--sglang-router-port: slime starts no router for --rollout-external: remove it, or name a "
            "running one with --sglang-router-ip"
        )
    for flag in draft.given_flags() if ip else ():
        if flag.family == "router":
            draft.warn(
                f"{flag.option} has no effect with --sglang-router-ip: that router keeps its own options"
            )


def check_sglang(draft: Draft) -> None:
    for flag in draft.given_flags():
        if flag.family == "sglang":
            check_owned(flag.name)
        if flag.name in _ROUTER_OWNED:
            raise ConfigError(f"{flag.option} is set by slime: {_ROUTER_OWNED[flag.name]}")
    _check_sizes(draft)
    _warn_unused_router(draft)
    _check_model(draft)
    _warn_about_draft_model(draft)


def check_external(draft: Draft) -> None:
    """Check the flags of --rollout-external."""
    addresses = draft["rollout_external_engine_addrs"]
    if draft["rollout_external"] and not addresses:
        raise ConfigError(
            "--rollout-external needs the engines: give --rollout-external-engine-addrs HOST:PORT ..."
        )
    if addresses and not draft["rollout_external"]:
        raise ConfigError(
            "--no-rollout-external and --rollout-external-engine-addrs are mutually exclusive: remove one"
        )
    if not addresses:
        return
    _check_addresses(addresses)
    if draft["colocate"]:
        raise ConfigError("--colocate is for engines that slime starts: remove it")
    if draft["update_weight_transport"] == "tensor":
        raise ConfigError(
            "--update-weight-transport tensor shares memory with engines of this run: use disk or "
            "distributed with --rollout-external"
        )
    for flag in draft.given_flags():
        if flag.family in ("sglang", "router") and flag.name != "sglang_dtype":
            raise ConfigError(
                f"{flag.option} configures engines that slime starts; give it to the servers at "
                "--rollout-external-engine-addrs themselves"
            )


def _check_addresses(addresses: list[str]) -> None:
    option, seen = "--rollout-external-engine-addrs", set()
    for address in addresses:
        place = _host_and_port(address)
        if place is None:
            raise ConfigError(f"{option} {address}: write HOST:PORT, such as 10.0.0.1:30000")
        if place in seen:
            raise ConfigError(f"{option}: {address} is given twice: name every engine once")
        seen.add(place)


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Return host and port; None if the address is malformed."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        port = port_of(parts)
    except ValueError:
        return None
    odd = any(letter.isspace() for letter in address)
    if odd or parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return parts.hostname, port


def sglang_values(draft: Draft) -> dict[str, Any]:
    """Return the values of --sglang-* that are set, by SGLang's own names."""
    flags = all_flags()
    return {
        name.removeprefix("sglang_"): draft[name]
        for name in draft.origins
        if name in flags and flags[name].family == "sglang" and draft[name] is not None
    }


def _check_sizes(draft: Draft) -> None:
    per_engine, per_node = draft["rollout_num_gpus_per_engine"], draft["num_gpus_per_node"]
    if per_engine > per_node and per_engine % per_node:
        raise ConfigError(
            f"--rollout-num-gpus-per-engine {per_engine} does not fill whole nodes of "
            f"--num-gpus-per-node {per_node}: choose a multiple of it"
        )
    ranks, owner = per_engine, "an engine (--rollout-num-gpus-per-engine)"
    for name in ("pp_size", "dp_size", "ep_size", "attn_dp_size", "moe_dense_tp_size"):
        size = draft[f"sglang_{name}"]
        if size is not None and (size < 1 or ranks % size):
            option = all_flags()[f"sglang_{name}"].option
            raise ConfigError(
                f"{option} {size} does not divide the {ranks} GPU{'s' * (ranks > 1)} of {owner}: choose one "
                "that does"
            )
        if name == "pp_size" and size is not None:  # the other sizes are inside a stage
            ranks //= size
            owner = (
                f"a stage (--rollout-num-gpus-per-engine {per_engine} / --sglang-pp-size {size})"
            )
    dp_size = draft["sglang_dp_size"]
    if dp_size is not None and dp_size > 1 and not draft["sglang_enable_dp_attention"]:
        raise ConfigError(
            f"--sglang-dp-size {dp_size} would put {dp_size} copies of the model into one engine: add "
            "--sglang-enable-dp-attention, or start more engines with --rollout-num-gpus"
        )


def _warn_unused_router(draft: Draft) -> None:
    if draft["rollout_num_gpus"] // draft["rollout_num_gpus_per_engine"] > 1:
        return
    for flag in draft.given_flags():
        if flag.family == "router" or flag.name == "sglang_router_port":
            draft.warn(f"{flag.option} has no effect with one engine, which needs no router")


def _check_model(draft: Draft) -> None:
    """Check what SGLang would report only while or after it loads the weights."""
    fraction = draft["sglang_mem_fraction_static"]
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            f"--sglang-mem-fraction-static must be between 0 and 1, not {fraction}: 0.7 is a good start "
            "with --colocate"
        )
    config = read_hf_config(draft)
    heads = config.get("num_attention_heads") or draft["num_attention_heads"]
    copies = draft["sglang_dp_size"] or 1 if draft["sglang_enable_dp_attention"] else 1
    ranks = draft["rollout_num_gpus_per_engine"] // (draft["sglang_pp_size"] or 1) // copies
    if heads and heads % ranks:
        raise ConfigError(
            f"the {heads} attention heads of the model cannot be spread over the {ranks} tensor ranks of "
            "an engine: choose --rollout-num-gpus-per-engine, or --sglang-dp-size, so that they divide"
        )
    experts, ep = num_experts(config) or draft["num_experts"], draft["sglang_ep_size"] or 1
    spare = draft["sglang_ep_num_redundant_experts"] or 0
    if experts and (experts + spare) % ep:
        raise ConfigError(
            f"--sglang-ep-size {ep} does not divide the {experts + spare} experts of the model: choose "
            "one that does"
        )


def _check_fp8(draft: Draft) -> None:
    """Refuse FP8 that is not block-wise: SGLang transposes it after loading and cannot update it."""
    declared = read_quantization(draft)
    method = declared.get("quant_method")
    if method not in ("fp8", "compressed-tensors") or declared.get("weight_block_size"):
        return
    if foreign_quantization(declared):  # refused for every engine
        return
    if not draft["debug_rollout_only"]:
        raise ConfigError(
            f"--hf-checkpoint {draft['hf_checkpoint']}: SGLang can update block-wise FP8 only, and "
            "this has one scale per channel or tensor: convert it with tools/convert_hf_to_fp8.py "
            "--strategy block, or use --rollout-engine slime"
        )


def _warn_about_draft_model(draft: Draft) -> None:
    algorithm = draft["sglang_speculative_algorithm"]
    if not algorithm or algorithm.upper() in _DRAFTLESS:
        return
    path = draft["sglang_speculative_draft_model_path"]
    if draft["enable_mtp_training"] and not path and draft["update_weight_transport"] == "tensor":
        return  # SGLang loads the tensors of such an update into its draft model too
    what = f"the draft model {path}" if path else "the model's own draft layers"
    draft.warn(
        f"--sglang-speculative-algorithm {algorithm}: {what} keep(s) the initial weights; responses stay "
        "exact, but fewer draft tokens are accepted the further the policy moves"
    )


def check_installed(draft: Draft) -> None:
    """Check that SGLang is installed. Runs last, so that wrong flags are reported on any machine."""
    if draft["rollout_engine"] != "sglang" or draft["rollout_external"]:
        return
    install = find_sglang()
    if install is None:
        draft.lacking(
            "--rollout-engine sglang needs the package sglang: install it, name the interpreter of an "
            "environment that has it in SLIME_SGLANG_PYTHON, or use --rollout-engine slime"
        )
        return
    views = [view for _, _, view in group_drafts(draft)] or [draft]
    for view in views:
        sglang_argv(sglang_values(view), install.version)
        _check_transfer_package(view, install)
    if known_version(install.version) != install.version:
        draft.warn(
            f"SGLang {install.version} is installed; its options are spelled as those of "
            f"{known_version(install.version)}, the nearest version slime was checked with; `slime doctor "
            "--sglang` lists what differs"
        )


# transfer backend of SGLang -> the package it imports
_TRANSFER_PACKAGES = {
    "mooncake": "mooncake",
    "mooncake_tcp": "mooncake",
    "nixl": "nixl",
    "mori": "mori",
}


def _check_transfer_package(draft: Draft, install: SGLangInstall) -> None:
    """Check the package that moves the KV cache from prefill to decode, and the router that pairs them."""
    if draft["sglang_disaggregation_mode"] not in ("prefill", "decode"):
        return
    backend = draft["sglang_disaggregation_transfer_backend"] or "mooncake"
    for package in (_TRANSFER_PACKAGES.get(backend), "sglang_router"):
        if package is not None and not has_package(install.python, package):
            draft.lacking(
                f"{draft['sglang_disaggregation_mode']} engines with "
                f"--sglang-disaggregation-transfer-backend {backend} need the package {package}, which "
                f"{install.python} does not have: install it, or use regular engines"
            )

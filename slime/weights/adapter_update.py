"""One version of a LoRA adapter, and the comparison of what was sent with what engines report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch

from slime.config.lora import ADAPTER, LoraConfig
from slime.config.peft_files import LORA_A, PEFT_PREFIX
from slime.core.errors import WeightMismatchError, WeightSyncError
from slime.weights.buckets import Bucket, HFTensors, NamedTensor
from slime.weights.checksum import format_checksum, joined_checksum, shapes_digest
from slime.weights.engine_client import EngineClient

_SHOWN = 3  # names in a message


@dataclass(frozen=True, kw_only=True)
class SentAdapter:
    """What an engine must report: the modules, a digest of names and shapes, and the checksum of all bits."""

    modules: list[str]
    digest: str
    checksum: str


@dataclass(frozen=True)
class AdapterUpdate:
    """One version of an adapter: whole tensors by Hugging Face name, sent in the engines' `dtype`.

    `sources` may gather from all ranks while it is iterated over, and may yield other dtypes.
    """

    lora: LoraConfig
    base: str
    sources: HFTensors
    dtype: torch.dtype
    name: str = ADAPTER

    @cached_property
    def gathered(self) -> list[NamedTensor]:
        """The tensors in order of name, not cast yet; a collective call if `sources` gathers."""
        return sorted(self.sources, key=itemgetter(0))

    @cached_property
    def tensors(self) -> list[NamedTensor]:
        return [(name, tensor.detach().to(self.dtype)) for name, tensor in self.gathered]

    @cached_property
    def nbytes(self) -> int:
        return self.dtype.itemsize * sum(tensor.numel() for _, tensor in self.gathered)

    @cached_property
    def modules(self) -> list[str]:
        return [name.removesuffix(LORA_A) for name, _ in self.gathered if name.endswith(LORA_A)]

    @cached_property
    def bucket(self) -> Bucket:
        return Bucket(index=0, tensors=[(PEFT_PREFIX + n, t) for n, t in self.tensors])

    @property
    def peft_config(self) -> dict[str, Any]:
        return self.lora.to_peft(self.base, self.modules)

    @property
    def digest(self) -> str:
        return shapes_digest((PEFT_PREFIX + name, t.shape) for name, t in self.gathered)

    def sent(self) -> SentAdapter:
        """Compute the checksum of all tensors under the names that engines use."""
        checksum = format_checksum(joined_checksum(self.bucket.tensors))
        return SentAdapter(modules=self.modules, digest=self.digest, checksum=checksum)


def check_adapters(
    engines: list[EngineClient], replies: list[Any], sent: SentAdapter, version: int
) -> None:
    """Raise unless every engine has bound every module and holds the bits that were sent."""
    refused = [
        f"engine {engine.url}: {reply}"
        for engine, reply in zip(engines, replies, strict=True)
        if not (isinstance(reply, dict) and reply.get("success") is True)
    ]
    if refused:
        raise WeightSyncError(f"adapter {version} was refused. {'; '.join(refused)}")
    wrong = [
        f"engine {engine.url}: {problem}"
        for engine, reply in zip(engines, replies, strict=True)
        if (problem := _difference(sent, reply, version))
    ]
    if wrong:
        raise WeightMismatchError(f"adapter {version} did not arrive intact. {'; '.join(wrong)}")


def _difference(sent: SentAdapter, reply: dict[str, Any], version: int) -> str:
    """Describe how a reply differs; only replies to a whole adapter list its modules by name."""
    if "bound_modules" in reply:
        modules, bound = set(sent.modules), set(reply["bound_modules"])
        if modules != bound:
            return (
                f"{len(bound & modules)} of {len(modules)} modules are bound"
                f"{_named('unbound', modules - bound)}{_named('not sent', bound - modules)}"
            )
    if reply.get("num_modules") != len(sent.modules):
        return f"{reply.get('num_modules')} modules are bound, {len(sent.modules)} were sent"
    if reply.get("bound_digest") != sent.digest:
        return f"names or shapes differ: digest {reply.get('bound_digest')}, sent was {sent.digest}"
    if reply.get("checksum") != sent.checksum:
        return f"checksum {reply.get('checksum')}, sent was {sent.checksum}"
    held = reply.get("weight_version")
    return "" if held == str(version) else f"it reports version {held}"


def _named(what: str, names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"; {what}: {', '.join(found[:_SHOWN])}{more}" if found else ""

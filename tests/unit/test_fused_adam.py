"""What a checkpoint holds of FusedAdam's state, with plain tensors in place of TransformerEngine's kernels."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.adam import (
    fused_state,
    main_param,
    remainder,
    set_fused_state,
)


class Adam:
    """FusedAdam's state by its own rules: 16-bit remainders, fp16 with a scale per tensor."""

    def __init__(self, *, remainders: bool, moments: torch.dtype = torch.float32) -> None:
        self.store_param_remainders = remainders
        self.moments = moments
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)
        self.scales: dict[str, torch.Tensor] = {}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.set_scaled_state(param, name, torch.zeros(param.shape))
        start = torch.zeros(param.shape, dtype=torch.int16)
        self.state[param]["master_param"] = start if store_param_remainders else param.float()

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        stored = self.state[param][name]
        if stored.dtype == torch.float16:
            return stored.float() * self.scales[name]
        return stored if stored.dtype == torch.int16 else stored.float()

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        whole = name == "master_param" and self.store_param_remainders
        assert value.dtype == (torch.int16 if whole else torch.float32)
        if name != "master_param" and self.moments == torch.float16:
            self.scales[name] = value.abs().max() / (torch.finfo(torch.float16).max / 2)
            value = torch.where(self.scales[name] > 0, value / self.scales[name], 0.0)
        self.state[param][name] = value.to(self.moments) if name != "master_param" else value


def split_as_the_kernel_does(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high half, incremented where the low half is negative as int16: halves are rounded up."""
    low, high = main.view(torch.int16).view(-1, 2).unbind(1)  # little endian
    return torch.where(low < 0, high + 1, high).view(torch.bfloat16), low.clone()


def numbers() -> torch.Tensor:
    random = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    bits = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F80FFFF, 0x3FFFFFFF, 0, -0x80000000]
    special = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    return torch.cat([random, special, -special, random * 1e-30])


def test_main_parameters_are_what_the_kernel_split():
    main = numbers()
    param, rest = split_as_the_kernel_does(main)
    assert torch.equal(main_param(param, rest).view(torch.int32), main.view(torch.int32))
    assert torch.equal(remainder(param, main), rest)


def test_main_parameters_of_another_optimizer_are_at_most_one_bit_off():
    """It rounds halves to even, and FusedAdam's 16 bits cannot say that one was rounded down."""
    main = numbers()
    param = main.bfloat16()
    found = main_param(param, remainder(param, main))
    halves = main.view(torch.int32) & 0xFFFF == 0x8000
    off = (found.view(torch.int32) - main.view(torch.int32)).abs()
    assert off.max() == 1 and not off[~halves].any()


@pytest.mark.parametrize("remainders", [True, False])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.float16])
def test_state_goes_to_a_checkpoint_and_back(remainders: bool, moments: torch.dtype):
    main = numbers()
    param, rest = split_as_the_kernel_does(main)
    adam = Adam(remainders=remainders, moments=moments)
    adam.state[param]["master_param"] = rest if remainders else main
    moving = {"exp_avg": torch.randn(main.shape), "exp_avg_sq": torch.rand(main.shape)}
    for name, value in moving.items():
        adam.set_scaled_state(param, name, value)
    saved = {name: value.clone() for name, value in fused_state(adam, param).items()}
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert torch.equal(saved["param"].view(torch.int32), main.view(torch.int32))

    other: Any = Adam(remainders=remainders, moments=moments)
    set_fused_state(other, param, saved)
    assert other.state[param].keys() == adam.state[param].keys()
    for name, value in adam.state[param].items():
        assert torch.equal(other.state[param][name], value), name


def test_state_that_was_never_updated_is_the_parameter_and_zeros():
    param = numbers().bfloat16()
    state = fused_state(Adam(remainders=True), param)
    assert torch.equal(state["param"], param.float())
    assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()


def test_a_parameter_in_fp32_is_its_own_main_parameter():
    param = numbers()
    adam = Adam(remainders=True)
    adam.store_param_remainders = False
    adam.initialize_state(param, False)
    adam.state[param]["master_param"] = torch.zeros_like(param)  # FusedAdam does not update it
    assert torch.equal(fused_state(adam, param)["param"], param)
    set_fused_state(adam, param, {"param": param * 2})
    assert torch.equal(param, numbers() * 2)

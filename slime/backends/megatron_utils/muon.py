"""megatron-core's Muon without the package emerging-optimizers, which on PyPI needs a newer Python.

megatron-core selects the parameters, chains Muon with Adam and, for dist_muon, shards them over the
data-parallel ranks. The optimizer itself, with all --muon-* flags, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, muon
from megatron.core.optimizer.optimizer import ChainedOptimizer

from slime.backends.megatron_utils.parallel import all_gather
from slime.backends.optim import QUINTIC, blend_momentum, muon_scale, orthogonalize

SPLIT_ROWS = "muon_rows"  # on a fused weight: rows of each kind, of a group of heads or of all
# Set on parameters by megatron-core's `muon`, and by layers whose rows it does not know.
_MARKS = ("is_qkv", "expert_tp", SPLIT_ROWS)


class TensorParallelMuon(torch.optim.Optimizer):
    """Drop-in replacement for megatron-core's class of the same name."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum_beta: float,
        use_nesterov: bool,
        weight_decay: float,
        split_qkv: bool,
        is_qkv_fn: Callable[[torch.Tensor], bool],
        qkv_split_shapes: list[int],
        fp32_matmul_prec: str,
        num_ns_steps: int,
        scale_mode: str,
        extra_scale_factor: float,
        pg_collection: Any,
        mode: str,
    ) -> None:
        self._groups, self._mode = pg_collection, mode
        self._precision, self._num_steps = fp32_matmul_prec, num_ns_steps
        self._scale_mode, self._extra_scale = scale_mode, extra_scale_factor
        self._qkv_shapes = qkv_split_shapes
        self._is_split = lambda p: split_qkv and (is_qkv_fn(p) or hasattr(p, SPLIT_ROWS))
        defaults = {"momentum_beta": momentum_beta, "use_nesterov": use_nesterov}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[param], param.grad
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum, beta = state["momentum_buffer"], group["momentum_beta"]
        update = blend_momentum(grad, momentum, beta, nesterov=group["use_nesterov"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        with _matmul_precision(self._precision):
            update = self._split_qkv(param, update)
        param.add_(update, alpha=-group["lr"])

    def _split_qkv(self, param: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Orthogonalize Q, K and V, whose rows are interleaved by query group, separately.

        The same holds for the gates of gated attention and for the projections of a gated delta net.
        """
        if not self._is_split(param):
            return self._scaled(param, update)
        columns, shapes = update.shape[1], getattr(param, SPLIT_ROWS, self._qkv_shapes)
        heads = update.view(-1, sum(shapes), columns)
        parts = [part.reshape(-1, columns) for part in heads.split(shapes, dim=1)]
        done = [self._scaled(param, part).view(len(heads), -1, columns) for part in parts]
        return torch.cat(done, dim=1).view_as(update)

    def _scaled(self, param: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        group = self._groups.expt_tp if getattr(param, "expert_tp", False) else self._groups.tp
        cut = getattr(param, "partition_dim", -1)
        whole = self._mode == "blockwise" or cut not in (0, 1) or group.size() == 1
        rows, columns = matrix.shape
        if whole:
            done = self._orthogonal(matrix)
        else:
            rows, columns = (
                n * (group.size() if d == cut else 1) for d, n in enumerate((rows, columns))
            )
            done = self._across_ranks(matrix, group, cut)
        return done * (muon_scale(rows, columns, self._scale_mode) * self._extra_scale)

    def _across_ranks(
        self, matrix: torch.Tensor, group: dist.ProcessGroup, cut: int
    ) -> torch.Tensor:
        if self._mode == "distributed":
            return self._orthogonal(matrix, (group, cut))
        whole = self._orthogonal(torch.cat(all_gather(matrix, group), dim=cut))
        return whole.chunk(group.size(), dim=cut)[group.rank()]

    def _orthogonal(
        self, matrix: torch.Tensor, cut: tuple[dist.ProcessGroup, int] | None = None
    ) -> torch.Tensor:
        dtype = torch.bfloat16 if self._precision == "medium" else torch.float32
        done = orthogonalize(
            matrix, steps=self._num_steps, coefficients=QUINTIC, dtype=dtype, cut=cut
        )
        return done.float()


def make_muon(
    config: OptimizerConfig, chunks: list[Any], *, gloo_groups: bool, spread: bool
) -> ChainedOptimizer:
    """Return Muon for hidden matrices and Adam for the rest; `spread` shards it over DP."""
    muon.TensorParallelMuon = TensorParallelMuon
    muon.HAVE_EMERGING_OPTIMIZERS = True
    chain: Any = muon.get_megatron_muon_optimizer(
        config,
        chunks,
        use_gloo_process_groups=gloo_groups,
        layer_wise_distributed_optimizer=spread,
    )
    for optimizer in chain.chained_optimizers:
        _mark_masters(optimizer)
    return chain


def _mark_masters(optimizer: Any) -> None:
    """Copy megatron-core's marks from bf16 parameters to their fp32 copies, which lack them."""
    halves = getattr(optimizer, "float16_groups", ())
    for params, masters in zip(
        halves, getattr(optimizer, "fp32_from_float16_groups", ()), strict=True
    ):
        for param, master in zip(params, masters, strict=True):
            for mark in _MARKS:
                if hasattr(param, mark):
                    setattr(master, mark, getattr(param, mark))


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

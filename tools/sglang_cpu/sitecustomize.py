"""Stand-ins that let SGLang run on a machine without a GPU; read by Python at start-up.

`torchvision` and `sgl_kernel` exist for CUDA only. SGLang imports them at the top of modules but calls
nothing in them on the torch-native CPU path, so an import that yields inert objects is enough. What
models in FP8 and models with gated delta nets call is written in torch below. Nothing is compiled by
torch: the first request with three-dimensional RoPE would wait for the C++ compiler, a minute and more.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

STAND_INS = {"torchvision", "sgl_kernel"}


class Inert:
    """Any attribute of it is inert too; as a decorator it leaves the function alone."""

    def __init__(self, name):
        self.__dict__["_name"] = name

    def __getattr__(self, key):
        if key.startswith("__") and key.endswith("__"):
            raise AttributeError(key)
        return Inert(f"{self._name}.{key}")

    def __call__(self, *args, **kwargs):
        bare = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if bare and not isinstance(args[0], Inert) else self

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return self

    __ror__ = __getitem__ = __or__


class InertModule(types.ModuleType):
    def __getattr__(self, key):
        if key.startswith("__") and key.endswith("__"):
            raise AttributeError(key)
        return Inert(f"{self.__name__}.{key}")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in STAND_INS:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec):
        return InertModule(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        module.__dict__["__version__"] = "0.0.0"


class PatchFinder(importlib.abc.MetaPathFinder):
    """Patches modules of SGLang right after they are executed."""

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module):
                original(module)
                PATCHES[name](module)

            spec.loader.exec_module = exec_module
        return spec


def compile_nothing(module):
    module.disable = True


def pin_nothing(module):
    """Leave host memory unpinned: pinning would ask the CUDA driver."""
    module._cuda_host_register = lambda *args, **kwargs: None


def pin_no_tensors(module):
    """Leave tensors of adapters in plain host memory, for the same reason."""
    import torch

    def unpinned(make):
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    torch.Tensor.pin_memory = lambda self, device=None: self
    for name in ("tensor", "zeros", "empty", "full"):
        setattr(torch, name, unpinned(getattr(torch, name)))


def multiply_in_torch(module):
    """Replace the FP8 matmuls, which SGLang implements for AMX, by dequantised ones in fp32."""
    import torch

    def by_block(x, weight, scales, block, bias, dtype, is_vnni):
        spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        wide = weight.float() * spread[: weight.shape[0], : weight.shape[1]]
        return torch.nn.functional.linear(x.float(), wide, _wide(bias)).to(dtype)

    def by_tensor(x, weight, scale, bias, dtype, is_vnni):
        wide = weight.float() * scale.float().reshape(-1, 1)
        return torch.nn.functional.linear(x.float(), wide, _wide(bias)).to(dtype)

    ops: Any = torch.ops.sgl_kernel
    ops.fp8_scaled_mm_cpu = by_block
    ops.fp8_per_tensor_scaled_mm_cpu = by_tensor
    module._is_cpu = False  # weights are kept as for a GPU: those for AMX cannot be updated
    module.use_intel_amx_backend = lambda layer: hasattr(layer, "weight")
    take_float32(module.Fp8Config)


def multiply_channels_in_torch(module):
    """Do the same for the layout of compressed-tensors, whose kernels exist for GPUs only."""
    import torch

    def linear(input, weight, weight_scale, bias=None, **kwargs):
        wide = weight.t().float() * weight_scale.float().reshape(-1, 1)
        return torch.nn.functional.linear(input.float(), wide, _wide(bias)).to(input.dtype)

    module.apply_fp8_linear = linear


def allow_channels(module):
    """Accept scales per channel without asking a GPU how new it is."""
    config = module.CompressedTensorsConfig
    config._check_scheme_supported = lambda self, min_capability, error=True: True
    take_float32(config)


def take_float32(config):
    """Accept float32 too, so that results can be compared closely."""
    import torch

    every = [torch.float32, torch.bfloat16, torch.float16]
    config.get_supported_act_dtypes = classmethod(lambda cls: every)


def _wide(bias):
    return None if bias is None else bias.float()


def define_delta_rule(module):
    """Define the gated delta rule, which SGLang's CPU build has for AMX, token by token.

    A state is [slots, value heads, value dim, key dim]; q, k and v are [1, T, heads, dim].
    """
    import torch

    def unit(x):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    def scan(q, k, v, decay, beta, states, slots, starts):
        repeats, out = v.shape[2] // q.shape[2], torch.empty_like(v)
        q, k = (unit(x[0].float()).repeat_interleave(repeats, 1) for x in (q, k))
        for slot, first, last in zip(slots.tolist(), starts, starts[1:], strict=False):
            state = states[slot].float()
            for t in range(first, last):
                state = state * decay[t].exp()[:, None, None]
                error = (v[0, t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
                state = state + torch.einsum("hv,hk->hvk", error, k[t])
                out[0, t] = torch.einsum("hvk,hk->hv", state, q[t]) * q.shape[-1] ** -0.5
            states[slot] = state
        return out

    def gates(A_log, a, b, dt_bias):
        decay = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
        return decay[None], b.float().sigmoid()[None]

    def chunk(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **_):
        rows = (g[0], beta[0], initial_state, initial_state_indices)
        return scan(q, k, v, *rows, cu_seqlens.tolist()), None, None

    def update(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, **_):
        (decay, beta), starts = gates(A_log, a, b, dt_bias), list(range(q.shape[1] + 1))
        return scan(q, k, v, decay[0], beta[0], initial_state_source, initial_state_indices, starts)

    ops: Any = torch.ops.sgl_kernel
    ops.fused_gdn_gating_cpu, ops.chunk_gated_delta_rule_cpu = gates, chunk
    ops.fused_sigmoid_gating_delta_rule_update_cpu = update


def use_delta_rule(module):
    import torch

    module.chunk_gated_delta_rule = torch.ops.sgl_kernel.chunk_gated_delta_rule_cpu


def convolve_in_torch(module):
    """Replace the causal convolution before the delta rule; its state is [slots, channels, window]."""
    import torch

    def convolve(x, weight, bias, states, slot, continues):
        """Return the convolution of x [channels, T] after the window of its slot."""
        window = states[slot] if continues else torch.zeros_like(states[slot])
        whole = torch.cat([window.to(x.dtype), x], dim=1)
        states[slot] = whole[:, -window.shape[1] :].to(states.dtype)
        kept = whole[:, window.shape[1] - weight.shape[1] + 1 :]
        options = {"bias": bias, "groups": len(weight)}
        out = torch.nn.functional.conv1d(kept[None], weight[:, None], **options)[0]
        return torch.nn.functional.silu(out)

    def prefill(x, weight, bias, conv_states, has_initial_state, cache_indices, **options):
        starts, outs = options["query_start_loc"].tolist(), []
        for number, slot in enumerate(cache_indices.tolist()):
            part = x[:, starts[number] : starts[number + 1]]
            before = bool(has_initial_state[number])
            outs.append(convolve(part, weight, bias, conv_states, slot, before))
        return torch.cat(outs, dim=1)

    def decode(x, conv_states, weight, bias, activation, conv_state_indices):
        slots = conv_state_indices.tolist()
        rows = (
            convolve(row[:, None], weight, bias, conv_states, slot, True)
            for row, slot in zip(x, slots, strict=False)
        )
        return torch.cat([row.t() for row in rows])

    module.causal_conv1d_fn, module.causal_conv1d_update = prefill, decode


def norm_in_torch(module):
    """Replace the gated norm after the delta rule, which is a Triton kernel."""
    import torch

    def forward(self, x, gate):
        assert self.activation in ("swish", "silu")
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return normed * torch.nn.functional.silu(gate.reshape(x.shape))

    for name in ("FusedRMSNormGated", "RMSNorm"):  # Qwen3-Next's and Qwen3.5's
        if hasattr(module, name):
            getattr(module, name).forward = forward


def gate_in_torch(module):
    """Replace the gates of shared experts and of attention, which are Triton kernels."""

    def add_shared(hidden, gate, shared, output):
        output += (hidden @ gate).sigmoid()[:, None] * shared

    module.fused_gate_sigmoid_mul_add = add_shared
    module.fused_sigmoid_mul = lambda x, gate: x * gate.reshape(x.shape).sigmoid()


def define_gated_attention(module):
    """Define what `qwen3_5` looks up in SGLang's CPU build when it is imported.

    The processor of every Qwen-VL model imports `qwen3_5` too.
    """
    import torch

    def norm(x, weight, eps, head_dim):
        x = x.contiguous().reshape(-1, head_dim)  # callers take views of the result
        return torch.nn.functional.rms_norm(x.float(), (head_dim,), 1 + weight.float(), eps).to(x)

    def norm_qk(q, k, q_weight, k_weight, eps, head_dim):
        return norm(q, q_weight, eps, head_dim), norm(k, k_weight, eps, head_dim)

    def norm_qk_with_gate(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
        """Split [T, heads * (query, gate)] as well."""
        q, gate = q_gate.reshape(-1, num_heads, 2, head_dim).unbind(2)
        gate = gate.contiguous().reshape(-1, head_dim)
        return *norm_qk(q, k, q_weight, k_weight, eps, head_dim), gate

    def split(qkvz, ba, num_k_heads, num_v_heads, k_dim, v_dim):
        """Split [T, all q, k, v, z] and [T, all b, a]."""
        widths = [(2 * num_k_heads * k_dim + num_v_heads * v_dim), num_v_heads * v_dim]
        (qkv, z), (b, a) = qkvz.split(widths, -1), ba.chunk(2, -1)
        z = z.reshape(-1, num_v_heads, v_dim)
        return qkv.contiguous(), z, b.contiguous(), a.contiguous()

    ops: Any = torch.ops.sgl_kernel
    ops.fused_sigmoid_mul_cpu = lambda x, gate: x.mul_(gate.reshape(x.shape).sigmoid())
    ops.fused_qk_gemma_rmsnorm_cpu = norm_qk
    ops.fused_qk_gemma_rmsnorm_with_gate_cpu = norm_qk_with_gate
    ops.fused_qkvzba_split_reshape_cat_contiguous_cpu = split


_FP8 = "sglang.srt.layers.quantization"
_LINEAR = "sglang.srt.layers.attention.linear"
PATCHES = {
    "torch._dynamo.config": compile_nothing,
    "sglang.srt.mem_cache.pool_host.common": pin_nothing,
    "sglang.srt.lora.lora_manager": pin_no_tensors,
    f"{_LINEAR}.kernels.kernel_backend": define_delta_rule,
    f"{_LINEAR}.kernels.gdn_triton": use_delta_rule,
    f"{_LINEAR}.gdn_backend": convolve_in_torch,
    "sglang.kernels.ops.attention.fla.fused_norm_gate": norm_in_torch,
    "sglang.kernels.ops.attention.fla.layernorm_gated": norm_in_torch,
    "sglang.kernels.ops.elementwise.elementwise": gate_in_torch,
    "sglang.srt.models.utils": define_gated_attention,  # which qwen3_5 imports first
    f"{_FP8}.fp8": multiply_in_torch,
    f"{_FP8}.compressed_tensors.compressed_tensors": allow_channels,
    f"{_FP8}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8": multiply_channels_in_torch,
}
sys.meta_path[:0] = [PatchFinder(), StandIns()]

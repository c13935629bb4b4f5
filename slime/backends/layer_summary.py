"""Summarize in one line which layers of a Megatron model TransformerEngine and slime implement."""

from __future__ import annotations

_ATTENTION = {"fused": "fused attention (cuDNN)", "unfused": "unfused attention"}
_PACKED = "packed attention"
_SCAN = "gated delta nets"


def layer_summary(
    *,
    te: bool,
    attention: str,
    experts: bool,
    post_norms: bool,
    fp8: tuple[str, str | None] | None = None,
    te_flash: bool = False,
    delta_nets: bool = False,
) -> str:
    """Return the implementation of each kind of layer; `attention` is --attention-backend.

    Example: "TransformerEngine: linear layers, norms, grouped experts; slime: packed attention, log-probs".
    """
    scan = [_SCAN] if delta_nets else []
    if not te:
        with_experts = ", grouped experts" if experts else ""
        return (
            f"megatron-core: linear layers; slime: norms{with_experts}, {', '.join([_PACKED, *scan])}, log-probs; "
            "TransformerEngine is not used"
        )
    te_layers = ["linear layers", "norms"] + (["grouped experts"] if experts else [])
    own_layers = [*scan, "log-probs"]
    if te_flash:
        te_layers.append("attention (flash-attn)")
    elif attention in _ATTENTION:
        te_layers.append(_ATTENTION[attention])
    else:
        own_layers.insert(0, _PACKED)
    if post_norms:
        own_layers.append("norms behind attention and MLP")
    precision = ""
    if fp8 is not None:
        precision = f"; linear layers in FP8 ({fp8[0]}, {fp8[1] or 'delayed'})"
    return f"TransformerEngine: {', '.join(te_layers)}; slime: {', '.join(own_layers)}{precision}"

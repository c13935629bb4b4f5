"""megatron-core's latent attention where TransformerEngine is missing."""

from __future__ import annotations

from megatron.core.transformer import multi_latent_attention


def mend_latent_attention() -> None:
    """Version 0.16.1 takes its own stand-ins for TransformerEngine's classes, which are no classes."""
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False

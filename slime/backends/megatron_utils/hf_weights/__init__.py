"""Hugging Face weights <-> megatron-core parameters: one declarative map per family, both ways.

reader.py         names, shapes and slices of tensors in a Hugging Face folder; FP8 and MXFP4 too
mappings.py       how Hugging Face tensors form a Megatron tensor (fused QKV, gate and up, padded vocabulary),
                  and how that is sharded
sections.py       the same for gated delta nets and gated attention
rules.py          Rule: Megatron name, Hugging Face names, mapping; WeightMap: the rules of a model
layer_rules.py    rules of layers that several model types share: names of attention, MLP and experts
families.py       the rules of each model type
adapters.py       the rules of LoRA adapters, derived from those of the base weights
local_weights.py  the weights that this rank holds, and loading them
export.py         full Hugging Face tensors, gathered one after another over all ranks
"""

"""Hugging Face weights <-> megatron-core parameters: one declarative map per family, both ways.

reader.py         names, shapes and slices of tensors in a Hugging Face folder; FP8 and MXFP4 too
mappings.py       how Hugging Face tensors form a Megatron tensor, and how that is sharded
rules.py          Rule: Megatron name, Hugging Face names, mapping; WeightMap: the rules of a model
families.py       the rules of each model type
local_weights.py  the weights that this rank holds, and loading them
export.py         full Hugging Face tensors, gathered one after another over all ranks
"""

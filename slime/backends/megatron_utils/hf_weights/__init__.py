"""Hugging Face weights <-> megatron-core parameters: one declarative map per family, both ways.

reader.py    names, shapes and slices of tensors in a Hugging Face folder (quantized.py: FP8, MXFP4)
mappings.py  how Hugging Face tensors form a Megatron tensor, and how that is sharded
rules.py     Rule: Megatron name, Hugging Face names, mapping; WeightMap: the rules of a model
blocks.py    the rules that families share
families.py  the rules of each model type; those of two are in gpt_oss.py and deepseek_v3.py
local.py     the weights that this rank holds
load.py      load the model chunks of this rank
export.py    full Hugging Face tensors, gathered one after another over all ranks
"""

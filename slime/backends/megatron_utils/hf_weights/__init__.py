"""Hugging Face weights <-> megatron-core parameters: one declarative map per family, both ways.

reader.py    names, shapes and parts of tensors in a Hugging Face folder
mappings.py  how Hugging Face tensors make up a Megatron tensor, and how that one is cut
rules.py     Rule: Megatron name, Hugging Face names, mapping; Family: the rules of a model type
families.py  which family a config belongs to; the families' own files stand beside it
load.py      fill the model chunks of this rank
export.py    whole Hugging Face tensors, gathered one after another over all ranks
"""

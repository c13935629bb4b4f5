"""Hugging Face weights <-> megatron-core parameters: one declarative map per family, both ways.

reader.py    names, shapes and parts of tensors in a Hugging Face folder
mappings.py  how Hugging Face tensors make up a Megatron tensor, and how that one is cut
rules.py     Rule: Megatron name, Hugging Face names, mapping; Family: the rules of a model type
families.py  the families; rules with mappings of their own are in gpt_oss.py and deepseek_v3.py
load.py      fill the model chunks of this rank
export.py    whole Hugging Face tensors, gathered one after another over all ranks
"""

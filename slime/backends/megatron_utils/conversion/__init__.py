"""Hugging Face folders <-> torch_dist checkpoints.

arguments.py      the flags of a conversion
split.py          how a model is spread over the ranks of a conversion
to_torch_dist.py  Hugging Face -> torch_dist, on one rank or several
to_hf.py          torch_dist -> Hugging Face, tensor by tensor
stored.py         whole Megatron tensors out of a checkpoint, one at a time
"""

"""Hugging Face folders <-> torch_dist checkpoints.

arguments.py      the flags of a conversion, and how the model is split over its ranks
process.py        process group and progress display
to_torch_dist.py  Hugging Face -> torch_dist, on one rank or several
to_hf.py          torch_dist -> Hugging Face, tensor by tensor
"""

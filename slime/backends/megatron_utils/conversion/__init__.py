"""Convert between Hugging Face folders and torch_dist checkpoints.

arguments.py      the flags of a conversion, and how the model is sharded over its ranks
process.py        process group and progress display
to_torch_dist.py  Hugging Face to torch_dist, on one rank or several
to_hf.py          torch_dist to Hugging Face, tensor by tensor
"""

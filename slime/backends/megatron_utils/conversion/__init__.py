"""Convert between Hugging Face folders and torch_dist checkpoints.

setup.py          flags, sharding over the ranks, process group, progress display
to_torch_dist.py  Hugging Face to torch_dist, on one rank or several
to_hf.py          torch_dist to Hugging Face, tensor by tensor
"""

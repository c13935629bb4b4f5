"""slime: reinforcement learning of language models, one loop from a laptop to a cluster."""

__version__ = "0.1.0"

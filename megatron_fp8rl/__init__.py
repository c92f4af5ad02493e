"""FP8 reinforcement learning for dense and mixture-of-experts language models."""

__version__ = "0.1.0"

"""Convert checkpoints between Hugging Face and Megatron, quantize, inspect, compare and verify them.

``python -m checkpoint_tools COMMAND ...``; each command is also a module of this package.
"""

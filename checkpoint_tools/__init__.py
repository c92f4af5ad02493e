"""Tools for checkpoints: convert between Hugging Face and Megatron, quantize, look inside, compare, prove.

``python -m checkpoint_tools COMMAND ...``; every command is also a function of the module of its name.
"""

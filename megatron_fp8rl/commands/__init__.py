"""One file for each command of ``python -m megatron_fp8rl``."""

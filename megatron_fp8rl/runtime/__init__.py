"""Processes and memory of a run: stop requests, shared GPUs, the garbage collector."""

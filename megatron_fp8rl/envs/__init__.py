"""Environments: generate problems and score completions."""

"""Environments make problems and score completions."""

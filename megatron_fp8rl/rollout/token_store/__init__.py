"""Processes that keep what engines have sampled, for the ranks that train it."""

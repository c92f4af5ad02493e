"""Advantages, losses and train/rollout mismatch correction: pure functions, no process groups."""

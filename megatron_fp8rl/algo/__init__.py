"""Advantages, losses and the correction of the train/rollout mismatch. Pure tensor functions without process groups."""

"""The error of an unusable checkpoint, which the library raises as well."""

from megatron_fp8rl.data.checkpoint_error import CheckpointError

__all__ = ["CheckpointError"]

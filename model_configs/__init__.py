"""Runs, one file per model family: functions that return a RunConfig.

The command line names a run by its function (``tiny_qwen3_moe``, or ``package.module:function`` for one of your own)
and overrides single fields. Variants are made with ``dataclasses.replace``.
"""

from model_configs.tiny import tiny_qwen3, tiny_qwen3_moe

__all__ = ["tiny_qwen3", "tiny_qwen3_moe"]

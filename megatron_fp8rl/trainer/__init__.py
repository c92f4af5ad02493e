"""The trainer: the only folder that knows Megatron-Core. Every rank of the training job runs it.

Importing the package makes Megatron-Core run on CPUs when there is no GPU; that must happen before Megatron-Core itself
is imported anywhere.
"""

from megatron_fp8rl.trainer.compat import megatron_on_cpu

megatron_on_cpu.install()

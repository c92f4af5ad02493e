"""The trainer: the only folder that knows Megatron-Core. Every rank of the training job runs it."""

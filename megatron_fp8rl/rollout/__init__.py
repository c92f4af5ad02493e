"""vLLM rollout engines: how they start, how they are asked, and how scored groups reach the training loop."""

"""Decide whether a step computes old log-probabilities in a forward pass before its updates."""

from megatron_fp8rl.config import RunConfig


def old_are_rollout(cfg: RunConfig) -> bool:
    """Whether the engine's log-probabilities are the old ones, bit for bit: exact, and no token is stale."""
    return cfg.precision.exact is True and cfg.sampling.max_staleness == 0


def needs_old_pass(cfg: RunConfig) -> bool:
    """Whether old log-probabilities need a forward pass before the updates: not for a step's only update, whose forward
    pass computes them. Recorded experts are compared or replaced in that pass, ``correction_quantile`` reads all tokens
    before the update, and a user's loss may read ``old_logprobs_T``. With :func:`old_are_rollout` none of these needs
    it."""
    if old_are_rollout(cfg):
        return False
    has_experts = cfg.model.is_moe and (cfg.engine.record_routed_experts or cfg.sampling.replay is not None)
    has_quantile = cfg.algo.correction_quantile is not None
    return cfg.algo.updates_per_step > 1 or has_experts or has_quantile or ":" in cfg.algo.loss

"""The first operation whose bits differ between trainer and engine; an exact run adds it to its error.

In: the policy, the fleet and the sequence that differs most, before an update. Out: a sentence with the first layer and
operation that differ, or why they could not be compared. Runs on trainer rank 0 while the engines are idle.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_fp8rl.config import EngineConfig
from megatron_fp8rl.diagnose.engine_probe import record_prefill
from megatron_fp8rl.diagnose.operations import Difference, compare, first_different
from megatron_fp8rl.diagnose.trainer_probe import TrainerProbe
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import Sample


def explain(policy: Policy, fleet: Fleet | None, samples: Sequence[Sample], name: str) -> str:
    """Collective: one sentence about the first operation that differs for the sample of this name. Rank 0 has the fleet
    and the samples. Never raises."""
    sentence = ""
    if fleet is not None:
        sentence = _compare(policy, fleet, next(sample.token_ids for sample in samples if sample.name == name))
    return policy.parallel.broadcast_object(sentence)


def _compare(policy: Policy, fleet: Fleet, token_ids: Sequence[int]) -> str:
    cfg = policy.cfg
    if reason := _obstacle(cfg.engine):
        return f"Its operations were not compared: {reason}."
    path = Path(cfg.run_dir).resolve() / "explain_mismatch.safetensors"
    tokens = list(token_ids[:-1])  # the engine adds one
    try:
        probe = TrainerProbe(policy.chunks, cfg, policy.parallel)
        trainer = probe.record(tokens)
        engine = fleet.sync(record_prefill(fleet.clients[0], tokens, path), cfg.engine.request_s)
        rows = compare(engine, trainer, probe.replay(engine), cfg.model)
    except Exception as error:  # the mismatch is the error to report
        return f"Its operations could not be compared: {type(error).__name__}: {error}."
    finally:
        path.unlink(missing_ok=True)
    return _sentence(first_different(rows), len(tokens))


def _obstacle(engine: EngineConfig) -> str:
    if engine.placement == "remote":
        return "engine.placement = remote, and a probe writes a file on the engine's host"
    if engine.sleep_level:
        return f"the engines sleep (engine.sleep_level = {engine.sleep_level})"
    return ""


def _sentence(first: Difference | None, num_tokens: int) -> str:
    prefill = f"The engine's prefill of its {num_tokens} tokens"
    if first is None:
        return f"{prefill} agrees with the trainer at every operation: the engine decodes with other kernels"
    isolated = "differs, too" if first.isolated_max else "agrees"
    return (
        f"{prefill} differs first at {first.name}, by up to {first.total_max:.3g}; on the engine's inputs that "
        f"operation of the trainer {isolated}"
    )

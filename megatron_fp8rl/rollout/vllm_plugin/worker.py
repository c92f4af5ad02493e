"""RPC methods of an engine worker: report its weights and kernels, and change what no vLLM request changes.

Runs in every engine worker: vLLM mixes :class:`WorkerExtension` into its worker class (``worker_extension_cls``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fp8rl.rollout.vllm_plugin.kernel_weights import first_of_kinds
from megatron_fp8rl.rollout.vllm_plugin.kernels_in_use import kernels_in_use
from megatron_fp8rl.rollout.vllm_plugin.kv_cache import set_kv_scales
from megatron_fp8rl.rollout.vllm_plugin.patches import allow_new_update
from megatron_fp8rl.rollout.vllm_plugin.probe import Probe


class WorkerExtension(Probe):
    """Methods that vLLM adds to its worker; each is a target of ``collective_rpc``."""

    def abandon_update(self) -> None:
        """Abandon an update in progress after another replica or the trainer failed in it. Harmless without one."""
        self.weight_transfer_engine.abandon()
        allow_new_update(self)

    def stage_weights(self, version: int, attempt: int) -> None:
        """Begin to receive a publication in spare memory; the engine goes on sampling."""
        self.weight_transfer_engine.stage(version, attempt)

    def staging(self) -> dict[str, bool]:
        """{"staged": whether everything has arrived in spare memory}; vLLM's server turns a bare bool into a string.
        Raises what went wrong on the way."""
        return {"staged": self.weight_transfer_engine.is_staged()}

    def proof_layers(self) -> dict[str, list[int]]:
        """{"layers": those that a first publication sends to vLLM's loaders: one of each kind that this worker has}."""
        return {"layers": sorted(first_of_kinds(self.model_runner.model))}

    def weight_digests(self, names: bool = True) -> dict[str, Any]:
        """{"rank": of this worker in its replica, "version": of the weights, "combined": one digest of all weights,
        "digests": {Hugging Face name: digest}}; the last is omitted without ``names``.

        ``version`` is None unless the last update completed; "load_s" is the time of receiving and writing its weights.
        """
        engine = self.weight_transfer_engine
        digests = engine.digests()
        report = {
            "rank": engine.engine_rank,
            "version": engine.version,
            "combined": digests.combined,
            "load_s": engine.load_s,
        }
        return report | ({"digests": dict(digests)} if names else {})

    def kernels_in_use(self) -> dict[str, list[str]]:
        """This worker's kernels by role: :mod:`megatron_fp8rl.rollout.vllm_plugin.kernels_in_use`."""
        return kernels_in_use(self.model_runner.model)

    def set_kv_scales(self, scales: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Set the FP8 KV cache's (query, key, value) scales of every layer, while the engine is paused.

        Returns {"rank": of this worker in its replica, "scales": {layer: what its kernels now read}}. Layers are
        strings, as JSON requires. Raises what :func:`megatron_fp8rl.rollout.vllm_plugin.kv_cache.set_kv_scales` raises.
        """
        held = set_kv_scales(self.model_runner.model, {int(layer): row for layer, row in scales.items()})
        return {
            "rank": self.weight_transfer_engine.engine_rank,
            "scales": {str(layer): row for layer, row in held.items()},
        }

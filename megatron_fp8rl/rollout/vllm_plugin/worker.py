"""RPC methods of an engine worker for weights, kernels and KV scales.

vLLM mixes :class:`WorkerExtension` into its worker class (``worker_extension_cls``).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fp8rl.rollout.vllm_plugin.kernel_weights import first_layers_by_kind
from megatron_fp8rl.rollout.vllm_plugin.kernels_in_use import kernels_in_use
from megatron_fp8rl.rollout.vllm_plugin.kv_cache import set_kv_scales
from megatron_fp8rl.rollout.vllm_plugin.patches import allow_new_update
from megatron_fp8rl.rollout.vllm_plugin.patches_adapters import adapter_request, digests_of_adapter
from megatron_fp8rl.rollout.vllm_plugin.probe import Probe
from megatron_fp8rl.weight_sync.digest import combine


class WorkerExtension(Probe):
    """Methods that vLLM adds to its worker; each is a target of ``collective_rpc``."""

    def abandon_update(self) -> None:
        """Cancel an update in progress, after another replica or the trainer failed; do nothing without one."""
        self.weight_transfer_engine.abandon()
        allow_new_update(self)

    def stage_weights(self, version: int, attempt: int) -> None:
        self.weight_transfer_engine.stage(version, attempt)

    def staging(self) -> dict[str, bool]:
        """Return {"staged": whether all weights are in spare memory}: vLLM's server turns a bare bool into a string.
        Raises the error of the receiving thread."""
        return {"staged": self.weight_transfer_engine.is_staged()}

    def proof_layers(self) -> dict[str, list[int]]:
        """Return {"layers": one of each kind in this worker}, which a first publication sends to vLLM's loaders."""
        return {"layers": sorted(first_layers_by_kind(self.model_runner.model))}

    def weight_digests(self, names: bool = True) -> dict[str, Any]:
        """Return {"rank": rank in the replica, "version", "combined": one digest of all weights, "load_s", "digests"}.

        "digests" is {Hugging Face name: digest}, only with ``names``. "version" is None unless the last update
        completed; "load_s" is its time to receive and write weights.
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

    def load_adapter(self, path: str, version: int) -> dict[str, Any]:
        """Load an adapter in place of the last one. Return a report like that of :meth:`weight_digests`, of the tensors
        from which the adapter is computed, padded to vLLM's rank."""
        started = time.perf_counter()
        manager = self.model_runner.lora_manager
        manager.add_adapter(adapter_request(version, path))
        load_s = time.perf_counter() - started
        digests = digests_of_adapter(manager)
        self.weight_transfer_engine.version = version
        report = {"rank": self.weight_transfer_engine.engine_rank, "version": version, "load_s": load_s}
        return report | {"combined": combine(digests), "digests": digests}

    def kernels_in_use(self) -> dict[str, list[str]]:
        return kernels_in_use(self.model_runner.model)

    def set_kv_scales(self, scales: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Set the FP8 KV cache's (query, key, value) scales of every layer, while the engine is paused.

        Returns {"rank": rank in the replica, "scales": {layer: scales that its kernels now read}}, with layers as
        strings for JSON. Raises like :func:`megatron_fp8rl.rollout.vllm_plugin.kv_cache.set_kv_scales`.
        """
        in_use = set_kv_scales(self.model_runner.model, {int(layer): row for layer, row in scales.items()})
        return {
            "rank": self.weight_transfer_engine.engine_rank,
            "scales": {str(layer): row for layer, row in in_use.items()},
        }

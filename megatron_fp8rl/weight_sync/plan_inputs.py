"""The inputs of the plan as JSON, which trainer ranks send to engine workers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_fp8rl.config import (
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    WeightSyncConfig,
)
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.names.registry import layer_of, weights
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.weight_sync.plan import Plan, plan
from megatron_fp8rl.weight_sync.schedule import SendSchedule, plan_schedule


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The inputs of a plan. Equal inputs give equal plans in trainer ranks and engine workers."""

    model: ModelConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    engine: EngineConfig
    weight_sync: WeightSyncConfig

    @classmethod
    def of(cls, cfg: RunConfig) -> PlanInputs:
        return cls(**{field.name: getattr(cfg, field.name) for field in dataclasses.fields(cls)})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PlanInputs:
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_python(content)

    @functools.cached_property
    def plan(self) -> Plan:
        whole = plan(
            self.model,
            LayerTable.build(self.model, self.precision),
            TrainerLayout.from_config(self.parallel),
            EngineLayout.from_config(self.engine),
        )
        copies = {name for weight in weights(self.model).values() for name in weight.copies}
        # An engine has one embedding and one head, whatever a checkpoint stores for a multi-token prediction layer.
        return replace(whole, transfers=tuple(t for t in whole.transfers if t.name not in copies)) if copies else whole

    def slices(self) -> SendSchedule:
        """Schedule all slices that engine ranks keep."""
        return plan_schedule(self.plan, self.model, bucket_bytes=self.weight_sync.bucket_bytes)

    def whole(self, layers: Collection[int]) -> SendSchedule:
        """Schedule whole tensors for vLLM's loaders: those of ``layers``, and all outside layers."""
        wanted = {None, *layers}
        chosen = tuple(t for t in self.plan.transfers if layer_of(t.name) in wanted)
        part = replace(self.plan, transfers=chosen)
        return plan_schedule(part, self.model, bucket_bytes=self.weight_sync.bucket_bytes, whole=True)

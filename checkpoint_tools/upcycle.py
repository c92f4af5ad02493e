"""Dense Hugging Face checkpoint -> a mixture of experts that starts from its feed-forward layers.

In:  a folder of the families llama, mistral or qwen3, in BF16, FP16, FP32 or block FP8.
Out: a folder of the family mixtral or qwen3_moe. Every expert is the dense feed-forward layer. A random part of its
     features is drawn anew (drop-upcycling), so that experts differ and can specialize. The router is random and small.
     Without new features the function is that of the source: the weights of a token's experts add up to 1.
Runs on: worker processes, without GPU, Megatron-Core or vLLM.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from checkpoint_tools import derived
from checkpoint_tools.derived import DerivedOptions, check_logits, compare_logits
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.hub_digests import check_hub_digests
from checkpoint_tools.report import report_conversion
from checkpoint_tools.workers import require_at_least
from megatron_fp8rl.config import ModelConfig, RouterConfig
from megatron_fp8rl.names import blocks, registry

_FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
_EXPERT = re.compile(r"(model\.layers\.\d+)\.(mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_ROUTER = re.compile(r"model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.gate\.weight")


@dataclass(frozen=True, kw_only=True)
class Options(DerivedOptions):
    experts: int = 8
    """Number of experts in each layer."""
    top_k: int = 2
    """Experts of a token."""
    fraction: float = 0.05
    """Part of the features of each expert's feed-forward layer that is drawn anew, from 0 to 1."""
    router_std: float = 0.02
    """Standard deviation of the router's weights."""
    seed: int = 0
    """Of the router and of the features drawn anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("experts", self.experts, 2)
        require_at_least("top_k", self.top_k, 1)
        if self.top_k > self.experts:
            raise ValueError(f"--top_k {self.top_k}: there are only {self.experts} experts")
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"--fraction {self.fraction}: expected a number from 0 to 1")
        if not 0 < self.router_std < 1:
            raise ValueError(f"--router_std {self.router_std}: expected a number above 0 and below 1")


def upcycled(model: ModelConfig, num_experts: int, experts_per_token: int) -> ModelConfig:
    """The mixture of experts of a dense model. Raises ValueError if its family or a part of it has none."""
    if model.family not in _FAMILIES:
        kind = "has experts already" if model.is_moe else "no family of experts has all its parts"
        raise ValueError(f"family {model.family}: {kind}; upcycled are {', '.join(_FAMILIES)}")
    family = _FAMILIES[model.family]
    return replace(
        model,
        family=family,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        moe_ffn_hidden_size=model.ffn_hidden_size,
        ffn_hidden_size=0 if family == "mixtral" else model.ffn_hidden_size,
        router=RouterConfig(score="softmax", normalize=True),
    )


@dataclass
class Upcycling:
    """Recipe: the tensors of the mixture of experts."""

    source: HfFolder
    model: ModelConfig
    fraction: float
    router_std: float
    seed: int

    def dtype(self, name: str) -> torch.dtype:
        dense = self._dense_name(name)
        return self.source.dtype("model.embed_tokens.weight" if dense is None else dense)

    def rows(self, name: str, first: int, end: int, dtype: torch.dtype) -> Tensor:
        dense = self._dense_name(name)
        if dense is None:
            shape = registry.hf_tensors(self.model)[name]
            weights = torch.randn(shape, generator=self._generator(name), dtype=torch.float64)
            return (self.router_std * weights[first:end]).to(self.dtype(name)).to(dtype)
        expert = _EXPERT.fullmatch(name)
        rows = self.source.rows(dense, first, end)
        if expert is None:
            return rows.to(dtype)
        return self._with_new_features(name, expert, dense, rows, first).to(dtype)

    def _dense_name(self, name: str) -> str | None:
        """Return the name of the source's tensor for a tensor of the mixture; None for a router."""
        if match := _EXPERT.fullmatch(name):
            projection = dict(zip(blocks.EXPERT_PROJECTIONS[match[2]], blocks.EXPERT_PROJECTIONS["mlp"]))[match[4]]
            return f"{match[1]}.mlp.{projection}.weight"
        return None if _ROUTER.fullmatch(name) else name

    def _generator(self, *names: str) -> torch.Generator:
        digest = hashlib.sha256("/".join((str(self.seed), *names)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def _with_new_features(self, name: str, expert: re.Match, dense: str, rows: Tensor, first: int) -> Tensor:
        """``rows`` of a dense matrix, in which the weights of this expert's new features are drawn anew: normal, with
        mean and standard deviation of the weights that they replace."""
        size = self.model.moe_ffn_hidden_size
        count = round(self.fraction * size)
        if not count:
            return rows
        # The same features in gate, up and down projection.
        features = torch.randperm(size, generator=self._generator(expert[1], expert[3]))[:count].sort().values
        matrix = self.source.whole(dense).double()
        is_down = expert[4] == blocks.EXPERT_PROJECTIONS[expert[2]][-1]
        old = matrix[:, features] if is_down else matrix[features]
        new = torch.randn(old.shape, generator=self._generator(name), dtype=torch.float64) * old.std() + old.mean()
        new = new.to(rows.dtype)
        rows = rows.clone()
        if is_down:
            rows[:, features] = new[first : first + len(rows)]
            return rows
        inside = (features >= first) & (features < first + len(rows))
        rows[features[inside] - first] = new[inside]
        return rows


def run(options: Options) -> int:
    """Upcycle and print a report; returns 0."""
    source = HfFolder.open(options.source)
    try:
        model = upcycled(source.model, options.experts, options.top_k)
    except ValueError as error:
        raise CheckpointError(source.path, str(error)) from error
    recipe = Upcycling(source, model, options.fraction, options.router_std, options.seed)
    inputs = {
        "command": "upcycle",
        "fraction": options.fraction,
        "router_std": options.router_std,
        "seed": options.seed,
    }
    with report_conversion(options.source, options.target) as report:
        report.add_source(source, check_hub_digests(source.files, options))
        features = round(options.fraction * model.moe_ffn_hidden_size)
        report.notes.append(
            f"{source.model.family} -> {model.family}: {options.experts} experts, {options.top_k} per token; "
            f"{features} of {model.moe_ffn_hidden_size} features of each expert are new"
        )
        derived.write(recipe, options, inputs, report, lambda: _check(recipe, options))
    return 0


def _check(recipe: Upcycling, options: Options) -> str:
    text, same = check_logits(replace(recipe, fraction=0.0), options, "with --fraction 0 ")
    if same is None:
        return text
    text += " without new features"
    if options.fraction:
        changed = compare_logits(recipe, options.logits)
        assert changed is not None
        text += f", {changed.difference:.1e} with them"
    return f"{text} (standard deviation {same.spread:.2f})"

"""Which change of one or two fields would mend a configuration.

In: a configuration and what is wrong with it. Out: words for the command line, found by trying: every candidate is
judged by the same checks as the configuration itself, so that a command that is printed is known to help. Pure.
"""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from megatron_fp8rl import config as config_module
from megatron_fp8rl.config import RunConfig, Violation
from megatron_fp8rl.precision.hardware import Generation
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.preflight.finding import Change

_MAX_DEGREE = 64


def apply(cfg: RunConfig, change: Change) -> RunConfig:
    """``cfg`` with the fields of ``change`` set."""
    for path, value in change:
        section, _, field = path.rpartition(".")
        if section:
            value = dataclasses.replace(getattr(cfg, section), **{field: value})
        cfg = dataclasses.replace(cfg, **{section or field: value})
    return cfg


def words(overrides: Sequence[str], change: Change) -> str:
    """``overrides`` and ``change`` as they are typed; a field that is set again loses its old value."""
    fields = {path for path, _ in change}
    kept: list[str] = []
    is_old = False  # the words that follow are values of a field that is set again
    for word in overrides:
        if word.startswith("--"):
            is_old = word[2:].partition("=")[0].replace("-", "_") in fields
        if not is_old:
            kept.append(word)
    new = [word for path, value in change for word in (f"--{path}", *(map(str, value) if isinstance(value, tuple) else [str(value)]))]
    return shlex.join([*kept, *new])


def mend(cfg: RunConfig, violation: Violation, accelerator: Generation) -> Change:
    """A new value of the violation's field that leaves the fewest violations, and not this one; empty when none does.

    Among equals, values that the remedy names come first, then those nearest to the present one.
    """
    path = violation.field.removeprefix("--")
    fewest, best = len(rules.check(cfg, accelerator=accelerator)), ()
    named = violation.remedy.replace(",", " ").replace(".", " ").split()
    for value in sorted(_candidates(cfg, path), key=lambda v: named.index(v) if v in named else len(named)):
        change = ((path, value),)
        after = rules.check(apply(cfg, change), accelerator=accelerator)
        if len(after) < fewest and violation.field not in {v.field for v in after}:
            fewest, best = len(after), change
    return best


def mend_all(cfg: RunConfig, accelerator: Generation) -> Change:
    """Changes after which no violation is left that one field can mend; each step takes away as many as it can."""
    changes: dict[str, Any] = {}
    while violations := rules.check(cfg, accelerator=accelerator):
        steps = [change for violation in violations if (change := mend(cfg, violation, accelerator))]
        if not steps:
            break

        def cost(change: Change, now: RunConfig = cfg) -> tuple[int, bool]:
            left = len(rules.check(apply(now, change), accelerator=accelerator))
            return left, change[0][0] == "parallel.world_size"  # rather another degree than another number of GPUs

        step = min(steps, key=cost)
        cfg = apply(cfg, step)
        changes |= dict(step)
    return tuple(changes.items())


def _candidates(cfg: RunConfig, path: str) -> Iterator[Any]:
    """Values to try for a field, by its type; nothing for texts, folders and nested parts."""
    if path.count(".") > 1:
        return
    value = attrgetter(path)(cfg)
    section, _, field = path.rpartition(".")
    owner = type(getattr(cfg, section)) if section else RunConfig
    kind = typing.get_type_hints(owner, vars(config_module))[field]
    if typing.get_origin(kind) is typing.Literal:
        yield from (choice for choice in typing.get_args(kind) if choice != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        degrees = (n for n in range(1, _MAX_DEGREE + 1) if n != value)
        # The nearest degree, and of two the smaller: it asks for fewer GPUs and tiles more often.
        yield from sorted(degrees, key=lambda n: (abs(n - value), n))


def shrink_trainer(cfg: RunConfig, fits: Callable[[RunConfig], bool]) -> Change:
    """What makes a trainer rank need less memory: the cheapest change that ``fits``; empty when none does."""
    chunk: Change = (("optim.logprob_chunk_tokens", 1024),) if cfg.optim.logprob_chunk_tokens > 1024 else ()
    more = {"none": ("selective", "full"), "selective": ("full",), "full": ()}[cfg.optim.recompute]
    cheap: list[Change] = [chunk] if chunk else []
    for recompute in more:
        change = (("optim.recompute", recompute),)
        cheap += [change, chunk + change] if chunk else [change]
    changes = [*cheap, *_more_ranks(cfg)]
    most_frugal = cheap[-1] if cheap else ()
    changes += [more + most_frugal for more in _more_ranks(cfg) if most_frugal]
    return next((change for change in changes if fits(apply(cfg, change))), ())


def _more_ranks(cfg: RunConfig) -> Iterator[Change]:
    """Layouts of more ranks, fewest first: the same layout with a larger expert, tensor or data-parallel degree."""
    parallel = cfg.parallel
    for factor in (2, 4, 8, 16, 32):
        world = ("parallel.world_size", parallel.world_size * factor)
        if cfg.model.is_moe:
            yield (world, ("parallel.expert", parallel.expert * factor))
        else:
            yield (world,)
            yield (world, ("parallel.tensor", parallel.tensor * factor))


def shrink_engine(cfg: RunConfig, fits: Callable[[RunConfig], bool]) -> Change:
    """What makes an engine worker need less memory: the cheapest change that ``fits``; empty when none does."""
    changes: list[Change] = []
    if cfg.rollout.kv_cache_bytes is not None:
        changes.append((("rollout.kv_cache_bytes", None),))
    if cfg.rollout.gpu_memory_utilization < 0.9:
        changes.append((("rollout.gpu_memory_utilization", 0.9),))
    changes += [(("rollout.tensor", n),) for n in range(cfg.rollout.tensor + 1, _MAX_DEGREE + 1)]
    if cfg.precision.rollout == "bf16":
        changes.append((("precision.rollout", "blockwise"), ("precision.trainer", "blockwise")))
    return next((change for change in changes if fits(apply(cfg, change))), ())


def take_turns(cfg: RunConfig, fits: Callable[[RunConfig], bool]) -> Change:
    """What lets trainer and engines share GPUs: the change of the fewest fields that ``fits``; empty when none does."""
    sleep = ("rollout.sleep_level", 1 if cfg.model.mla is not None else 2)
    offload = ("optim.offload", ("params", "gradients", "optimizer"))
    missing: Change = tuple(
        change for change, is_set in ((sleep, cfg.rollout.sleep_level), (offload, cfg.optim.offload)) if not is_set
    )
    smaller = [(("rollout.gpu_memory_utilization", share),) for share in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)]
    smaller = [change for change in smaller if change[0][1] < cfg.rollout.gpu_memory_utilization]
    changes = [*((change,) for change in missing), missing, *smaller, *(missing + change for change in smaller)]
    return next((change for change in changes if change and fits(apply(cfg, change))), ())

"""Load functions that the configuration names: a function of the library or ``module:function``.

:func:`errors` checks ``algo.loss`` and ``algo.advantage`` before a run is queued, if torch is installed there.
:func:`load_loss` and :func:`load_advantage` check them again on every rank at the start of the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.config import AlgoConfig, Violation

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fp8rl.types import LossInputs

type AdvantageFn = Callable[[Sequence[float]], Sequence[float]]
type LossFn = Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]
_Field = Literal["loss", "advantage"]
_MODULES = {"loss": "megatron_fp8rl.algo.losses", "advantage": "megatron_fp8rl.algo.advantages"}


class Call(NamedTuple):
    """A call of a user's function."""

    number: int  # of its own in this process
    field: str
    name: str


running_call: Call | None = None  # in the trainer's thread; read by runtime/watch.py
_numbers = count()


class FunctionError(ValueError):
    """A named function or class that cannot be imported or called, or that returns an invalid result."""


def load_function(name: str, module: str = "") -> Any:
    """The function or class ``module:name``; a name without a colon belongs to ``module``. Raises FunctionError if the
    import fails or the module has no such name (with near matches)."""
    module, _, attribute = name.rpartition(":") if ":" in name else (module, "", name)
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise FunctionError(f"cannot import {module!r}: {type(error).__name__}: {error}") from error
    if not hasattr(imported, attribute):
        raise FunctionError(f"{module} has no {attribute!r}{near_matches(attribute, dir(imported))}")
    return getattr(imported, attribute)


def errors(algo: AlgoConfig) -> list[Violation]:
    """Errors in the names and options of loss and advantage function; empty where torch is not installed."""
    violations: list[Violation] = []
    for field in ("loss", "advantage"):
        is_default = getattr(algo, field) == getattr(AlgoConfig, field) and not getattr(algo, f"{field}_options")
        if is_default or importlib.util.find_spec("torch") is None:  # defaults are valid, and importing torch is slow
            continue
        try:
            _load(field, algo)
        except FunctionError as error:
            violations.append(error.args[0])
    return violations


def may_lack_lower_clip(algo: AlgoConfig) -> bool:
    """Whether the loss accepts ``algo.clip_low`` = 1; unknown where torch is not installed, and then True."""
    if ":" in algo.loss or importlib.util.find_spec("torch") is None:
        return True
    return hasattr(importlib.import_module(_MODULES["loss"]).__dict__.get(algo.loss), "may_lack_lower_clip")


def load_loss(algo: AlgoConfig) -> LossFn:
    """The loss of a configuration, ``inputs -> (loss, metrics)``, with its options bound.

    Raises FunctionError for an unknown function or wrong options. A user's loss also raises it when it returns anything
    but a scalar with a gradient and a dict of scalars.
    """
    function = _load("loss", algo)
    return _with_checked_result(function, algo) if ":" in algo.loss else function


def load_advantage(algo: AlgoConfig) -> AdvantageFn:
    """The advantage function of a configuration, ``rewards -> advantages``. Raises FunctionError."""
    return _load("advantage", algo)


def _load(field: _Field, algo: AlgoConfig) -> Callable[..., Any]:
    name, options = getattr(algo, field), getattr(algo, f"{field}_options")
    try:
        function = load_function(name, _MODULES[field])
    except FunctionError as error:
        remedy = f"Set a function of {_MODULES[field]}, or module:function of a module on the Python path"
        raise FunctionError(Violation(f"--algo.{field}", name, str(error), remedy)) from error
    try:
        signature = inspect.signature(function)
        signature.bind("inputs", **options)
    except TypeError as error:
        problem = f"{name} cannot be called with these options: {error}"
        remedy = f"Match its signature: {inspect.signature(function) if callable(function) else 'it is not a function'}"
        raise FunctionError(Violation(f"--algo.{field}_options", options, problem, remedy)) from error
    bound = partial(function, **options)
    return _noted(bound, f"algo.{field}", name) if ":" in name else bound


def _noted(function: Callable[..., Any], field: str, name: str) -> Callable[..., Any]:
    """Note in :data:`running_call` that a user's function runs."""

    def noted(*args: Any) -> Any:
        global running_call
        running_call = Call(next(_numbers), field, name)
        try:
            return function(*args)
        finally:
            running_call = None

    return noted


def _with_checked_result(function: LossFn, algo: AlgoConfig) -> LossFn:
    """Check what a user's loss returns. Policy.update detects NaNs, because it can name sequences."""
    import torch

    def is_scalar(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()

    @wraps(function)
    def checked(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        result = function(inputs)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not is_scalar(loss) or not loss.requires_grad:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            kind += " without a gradient" if is_scalar(loss) else ""
            problem, remedy = f"its loss is {kind}", "Return a scalar that depends on inputs.trainer_logprobs_T"
        elif not isinstance(metrics, dict) or not all(map(is_scalar, metrics.values())):
            problem = f"its metrics are {metrics!r:.200}"
            remedy = "Return (loss, metrics), with a dict of scalar tensors by names such as loss/own_ratio/mean"
        else:
            return loss, metrics
        raise FunctionError(Violation("--algo.loss", algo.loss, problem, remedy))

    return checked

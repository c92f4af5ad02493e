"""Resolves ``algo.loss`` and ``algo.advantage``: a library function or ``module:function``.

:func:`mistakes` checks name, signature and options against the module's source without importing it, so that a login
node without torch can reject a run before it is queued. :func:`load_loss` and :func:`load_advantage` import the
function, check it again and bind its options; they run on every rank at the start of a run.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_fp8rl.config import AlgoConfig, RunConfig, Violation

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fp8rl.types import Microbatch, TrainBatch

AdvantageFn = Callable[[Sequence[float]], Sequence[float]]
type LossFn = Callable[[Microbatch, Tensor, Tensor, TrainBatch], tuple[Tensor, dict[str, Tensor]]]


class NamedFunctionError(ValueError):
    """A function that does not exist, has the wrong signature, or returns an invalid result."""


@dataclass(frozen=True, kw_only=True)
class _Door:
    """One configuration field that names a function."""

    field: str
    module: str  # its functions can be named without the module
    positional: tuple[str, ...]
    keywords: tuple[str, ...]  # keyword arguments that the library passes

    @property
    def call(self) -> str:
        return ", ".join([*self.positional, *(["*", *self.keywords] if self.keywords else []), "**options"])

    def spec(self, algo: AlgoConfig) -> tuple[str, str, Mapping[str, Any]]:
        """(module, function, options) of a configuration."""
        value = getattr(algo, self.field)
        module, _, name = value.rpartition(":") if ":" in value else (self.module, "", value)
        return module, name, getattr(algo, f"{self.field}_options")

    def violation(self, algo: AlgoConfig, problem: str, remedy: str) -> Violation:
        return Violation(f"--algo.{self.field}", getattr(algo, self.field), problem, remedy)


_LOSS = _Door(
    field="loss",
    module="megatron_fp8rl.algo.losses",
    positional=("mb", "trainer_logprobs_T", "entropy_T", "batch"),
    keywords=("cfg", "max_completion_tokens"),
)
_ADVANTAGE = _Door(field="advantage", module="megatron_fp8rl.algo.advantages", positional=("rewards",), keywords=())


def mistakes(algo: AlgoConfig) -> list[Violation]:
    """Mistakes in the two functions and their options, found from source alone, without importing them."""
    found: list[Violation] = []
    for door in (_LOSS, _ADVANTAGE):
        module, name, _ = door.spec(algo)
        try:
            declared = _declaration(module, name)
        except LookupError as error:
            found.append(door.violation(algo, str(error), _remedy(door)))
            continue
        if declared is not None:
            found += _call_violations(door, algo, declared)
    return found


def load_loss(algo: AlgoConfig, max_completion_tokens: int) -> LossFn:
    """The loss of a configuration, as ``(mb, trainer_logprobs_T, entropy_T, batch) -> (loss, metrics)``.

    Raises:
        NamedFunctionError: unknown function, wrong signature or wrong options; also raised by the returned function if
            its result is not a scalar with a gradient and a dict of scalars.
    """
    function = partial(_load(_LOSS, algo), cfg=algo, max_completion_tokens=max_completion_tokens)
    return _checked(function, algo) if ":" in algo.loss else function


def load_advantage(algo: AlgoConfig) -> AdvantageFn:
    """The advantage function of a configuration, ``rewards -> advantages``. Raises NamedFunctionError."""
    return _load(_ADVANTAGE, algo)


def _load(door: _Door, algo: AlgoConfig) -> Callable[..., Any]:
    module_name, name, options = door.spec(algo)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise NamedFunctionError(str(door.violation(algo, f"cannot be imported: {error}", _remedy(door)))) from error
    function = getattr(module, name, None)
    if not callable(function):
        problem = f"{module_name} has no function {name!r}{_near(name, vars(module))}"
        raise NamedFunctionError(str(door.violation(algo, problem, _remedy(door))))
    if found := _call_violations(door, algo, inspect.signature(function)):
        raise NamedFunctionError("; ".join(map(str, found)))
    return partial(function, **options)


def _call_violations(door: _Door, algo: AlgoConfig, signature: inspect.Signature) -> list[Violation]:
    """Violations if a function with this signature cannot be called with the configured options."""
    options = door.spec(algo)[2]
    parameters = signature.parameters.values()
    named = {
        p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in (*door.keywords, *door.positional)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    found = []
    for option, value in options.items():
        field = f"--algo.{door.field}_options.{option}"
        if option not in named and (not takes_any or option in door.keywords):
            known = ", ".join(named) or "none"
            problem = f"is not an option of {getattr(algo, door.field)}{_near(option, named)}"
            found.append(Violation(field, value, problem, f"Its options: {known}"))
        elif option in named and not _fits(value, kind := _kind(named[option].annotation)):
            remedy = f"Set a value of {inspect.formatannotation(kind)}"
            found.append(Violation(field, value, "has the wrong type", remedy))
    given = dict.fromkeys((*door.keywords, *(option for option in options if option in named)))
    try:
        signature.bind(*door.positional, **given)
    except TypeError as error:
        remedy = f"Declare it as f({door.call}); an option without a default goes into algo.{door.field}_options"
        found.append(door.violation(algo, f"cannot be called: {error}", remedy))
    return found


def _declaration(module: str, name: str) -> inspect.Signature | None:
    """Signature of a function from its module's source; None if the source is inconclusive. Raises LookupError."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:  # raised by a parent package
        raise LookupError(f"there is no module {module!r} ({error})") from error
    if spec is None:
        raise LookupError(f"there is no module {module!r} on the Python path")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return _declared(module, name, Path(spec.origin).read_text(encoding="utf-8"))


@cache
def _declared(module: str, name: str, source: str) -> inspect.Signature | None:
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name in functions and not functions[name].decorator_list:
        return _signature(functions[name])
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bound |= {node.asname or node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    if not {name, "*"} & {*functions, *bound}:
        public = [function for function in functions if not function.startswith("_")]
        raise LookupError(f"{module} has no function {name!r}{_near(name, public)} (it has {', '.join(public)})")
    return None


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    """Signature of a function definition, with annotations as strings and None for every default."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg) and argument.annotation is not None:
            argument.annotation = ast.copy_location(ast.Constant(ast.unparse(argument.annotation)), argument)
    node.args.defaults = [ast.copy_location(ast.Constant(None), node) for _ in node.args.defaults]
    node.args.kw_defaults = [value and ast.copy_location(ast.Constant(None), node) for value in node.args.kw_defaults]
    node.body, node.returns = [ast.copy_location(ast.Pass(), node)], None
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), "<declaration>", "exec", dont_inherit=True), scope)
    return inspect.signature(scope[node.name])


def _kind(annotation: Any) -> Any:
    """The type of an annotation; Any if it cannot be resolved from the annotation alone."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, {"Any": Any, "Literal": Literal, "Optional": typing.Optional, "Union": typing.Union})
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value matches a type, for types of plain values; an int is also a valid float."""
    if kind is None or kind is types.NoneType:
        return value is None
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(kind))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def _checked(function: LossFn, algo: AlgoConfig) -> LossFn:
    """Wrap a user-defined loss to validate its results. Policy.update detects NaNs, because it can name sequences."""
    import torch

    def is_scalar(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()

    @wraps(function)
    def checked(*arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        result = function(*arguments)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not is_scalar(loss) or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            what += " without a gradient" if is_scalar(loss) else ""
            problem, remedy = f"its loss is {what}", "Return a scalar that depends on trainer_logprobs_T"
        elif not isinstance(metrics, dict) or not all(is_scalar(value) for value in metrics.values()):
            problem = f"its metrics are {metrics!r:.200}"
            remedy = "Return (loss, metrics), with a dict of scalar tensors by names such as loss/own_ratio/mean"
        else:
            return loss, metrics
        raise NamedFunctionError(str(_LOSS.violation(algo, problem, remedy)))

    return checked


def _remedy(door: _Door) -> str:
    return f"Name a function of {door.module} or module:function, if Python can import the module"


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def needs_old_pass(cfg: RunConfig) -> bool:
    """Whether old log-probabilities need a forward pass of their own before the updates.

    A step of one update has them from that update's forward pass, which the loss then takes as both old and trainer.
    Recorded experts are compared, or replaced, in a pass of its own; a loss of the user's may read ``old_logprobs_T``.
    """
    has_experts = cfg.model.is_moe and (cfg.rollout.record_routed_experts or cfg.rollout.replay is not None)
    return cfg.algo.updates_per_step > 1 or has_experts or ":" in cfg.algo.loss

"""The function that plays sessions: ``FILE.py:function`` or ``module:function``, and its options.

:func:`problem` reads the source without running it, so it works on a login node. :func:`load` runs the module, in an
agent worker. Both apply the same checks.
"""

import ast
import copy
import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from megatron_fp8rl.algo.load_function import FunctionError, load_function
from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.envs.rewards import functions
from megatron_fp8rl.envs.rewards.functions import RewardError

SIGNATURE = "async def rollout(session, row)"
_REMEDY = "Name FILE.py:function, or module:function of a module on the Python path"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list, tuple),
    "tuple": (list, tuple),
    "dict": (dict,),
    "None": (type(None),),
}


class AgentSpecError(ValueError):
    """An agent that cannot be loaded; the message names the agent and the remedy."""


class Problem(NamedTuple):
    """Why an agent cannot play, or a class cannot make problems."""

    field: Literal["agent", "agent_options", "rewards", "dataset"]
    text: str
    remedy: str


def problem(spec: str, options: Mapping[str, Any], *, has_scores: bool) -> Problem | None:
    """A reason why the agent cannot play, found without running its module; None if there is none.

    Args:
        has_scores: Whether the source scores the last answer of an agent that returns no reward.
    """
    try:
        bindings, name = _bindings(spec)
    except AgentSpecError as error:
        return Problem("agent", str(error), _REMEDY)
    bound = dict(bindings)
    if name not in bound:
        return _missing(spec, bound)
    node = bound[name]
    if isinstance(node, ast.ClassDef):
        return _class_problem(name)
    is_plain = isinstance(node, _DEFINITIONS) and not node.decorator_list
    if not is_plain or sum(key == name for key, _ in bindings) > 1:
        return None  # known only after the module has run
    if (wrong := function_problem(_stub(node), options)) is not None:
        return wrong
    if not has_scores and not _may_reward(node):
        text = f"{name} never returns a reward, and nothing else scores its sessions"
        return Problem("rewards", text, "Return a reward from the agent, or name a reward of the source (--reward)")
    return None


def class_problem(spec: str) -> Problem | None:
    """A reason why ``module:Class`` does not exist, found without running the module; None if there is none."""
    if ":" not in spec or ".py:" in spec:
        return Problem("dataset", "is not env:module:Class", "Name a module, whose folder is on the Python path")
    try:
        bindings, name = _bindings(spec)
    except AgentSpecError as error:
        return Problem("dataset", str(error), "Name module:Class of a module on the Python path")
    return None if name in dict(bindings) else _missing(spec, dict(bindings), ast.ClassDef)


def load(spec: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The agent with its options, as ``agent(session, row)``. Raises AgentSpecError."""
    try:
        function = functions.named(spec) if ".py:" in spec else load_function(spec)
    except (FunctionError, RewardError) as error:
        raise AgentSpecError(f"the agent {spec} cannot be loaded: {error}") from error
    except SystemExit as error:
        raise AgentSpecError(f"the agent {spec} cannot be loaded: its module called sys.exit({error.code})") from error
    if (wrong := function_problem(function, options)) is not None:
        raise AgentSpecError(f"the agent {spec}: {wrong.text}. {wrong.remedy}")
    agent = functools.partial(function, **options)
    if check := getattr(function, "check_options", None):  # of agents of this library
        try:
            check(**options)
        except Exception as error:
            raise AgentSpecError(f"the agent {spec}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    return agent


def function_problem(function: Any, options: Mapping[str, Any]) -> Problem | None:
    """A reason why a function cannot play sessions with these options; None if it can."""
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isclass(function):
        return _class_problem(name)
    if not callable(function):
        return Problem("agent", f"it is of type {type(function).__name__}, not a function", f"Write {SIGNATURE}")
    if any(map(inspect.isasyncgenfunction, _layers(function))):
        return Problem("agent", f"{name} is an async generator", "Return the reward instead of yielding it")
    if not any(map(inspect.iscoroutinefunction, _layers(function))):
        return Problem("agent", f"{name} is not async", f"Write {SIGNATURE}, and await what the session does")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return _signature_problem(name, signature, options)


def _class_problem(name: str) -> Problem:
    remedy = f"Write {SIGNATURE}, or name an instance whose __call__ is async, such as rollout = {name}()"
    return Problem("agent", f"{name} is a class", remedy)


def _layers(function: Any) -> Iterator[Any]:
    """The function below partial objects, the function that a decorator wraps, and ``__call__`` of an instance."""
    while isinstance(function, functools.partial):
        function = function.func
    yield function
    yield inspect.unwrap(function)
    yield type(function).__call__


def _signature_problem(name: str, signature: inspect.Signature, options: Mapping[str, Any]) -> Problem | None:
    """A reason why ``name(session, row, **options)`` cannot be called; None if it can."""
    parameters = signature.parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = {key: p for key, p in keywords.items() if key not in positional[:2]}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        text = f"{name}{signature} does not take a session and a row"
        return Problem("agent", text, f"Write {SIGNATURE}, with options after them")
    known = f"its options are {', '.join(accepted)}" if accepted else "it has no options"
    for option, value in options.items():
        if option in positional[:2]:
            text = f"{option} is the session or the row of {name}, which the run passes"
            return Problem("agent_options", text, f"Leave it out; {known}")
        if option not in accepted and not takes_any:
            hint = near_matches(option, accepted).rstrip("?")
            return Problem("agent_options", f"{name} has no option {option!r}{hint}", known[0].upper() + known[1:])
        declared = accepted[option].annotation if option in accepted else inspect.Parameter.empty
        if not _is_of_type(value, declared):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            remedy = "A number in two pairs of quotes is text: '\"3\"'" if is_number else "Give a value of that type"
            text = f"{option} is {value!r}, and {name} declares {_text(declared)}"
            return Problem("agent_options", text, remedy)
    missing = [key for key, p in accepted.items() if p.default is p.empty and key not in options]
    if missing:
        text = f"{name} needs the option {missing[0]!r}"
        return Problem("agent_options", text, f"Set it by --agent_options.{missing[0]} VALUE")
    return None


def _text(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _is_of_type(value: Any, annotation: Any) -> bool:
    """Whether the value has the declared type; True if the declaration is more than names of simple types."""
    text = _text(annotation)
    while "[" in text and (shorter := re.sub(r"\[[^\[\]]*\]", "", text)) != text:
        text = shorter
    names = [part.strip() for part in text.split("|")]
    if not all(name in _TYPES for name in names):
        return True
    if isinstance(value, bool):
        return "bool" in names
    return any(isinstance(value, _TYPES[name]) for name in names if name != "bool")


def _missing(spec: str, bound: Mapping[str, ast.AST], *kinds: type[ast.AST]) -> Problem | None:
    """The problem of a name that a module does not bind; None if the module may bind it when it runs."""
    if not bound or "*" in bound or "__getattr__" in bound:
        return None
    module, _, name = spec.rpartition(":")
    names = [key for key, node in bound.items() if isinstance(node, kinds or _DEFINITIONS)]
    noun, nouns = ("class", "classes") if kinds else ("function", "functions")
    hint = near_matches(name, names).rstrip("?") or f"; its {nouns} are {', '.join(names) or 'none'}"
    text = f"{module} has no {noun} {name!r}{hint}"
    return Problem("dataset" if kinds else "agent", text, "Name one that it has")


def _bindings(spec: str) -> tuple[list[tuple[str, ast.AST]], str]:
    """(names that the module binds at its top level, with their nodes; the name in ``spec``). No names are known if the
    module has no Python source, or may be installed on other nodes only.

    Raises AgentSpecError if there is no such file or module, or its syntax is wrong.
    """
    module, colon, name = spec.rpartition(":")
    if not colon or not module or not name:
        raise AgentSpecError("names no function" if spec.endswith(".py") else "is not FILE.py:function")
    try:
        if ".py:" in spec:
            return list(_bound(functions.tree_of(spec).body)), name
        try:
            found = importlib.util.find_spec(module)
        except Exception as error:  # of a parent package, which is imported
            if not _has_packages():
                return [], name
            raise AgentSpecError(f"cannot import {module!r}: {type(error).__name__}: {error}") from error
        if found is None and _has_packages():
            raise AgentSpecError(f"there is no module {module!r}")
        is_python = found is not None and found.has_location and (found.origin or "").endswith(".py")
        return list(_bound(functions.tree_of(f"{found.origin}:{name}").body)) if is_python else [], name
    except RewardError as error:
        raise AgentSpecError(str(error).rstrip("?")) from error


def _has_packages() -> bool:
    """Whether this machine has the packages of a run. A login node may lack them, and modules of the user, too."""
    return importlib.util.find_spec("torch") is not None


def _bound(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """(name, node) of everything that a module binds at its top level, in branches too."""
    for node in statements:
        if isinstance(node, (*_DEFINITIONS, ast.ClassDef)):
            yield node.name, node
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], node) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                stored = (part for part in ast.walk(child) if isinstance(part, ast.Name))
                yield from ((part.id, node) for part in stored if isinstance(part.ctx, ast.Store))
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from _bound(child.body)
            elif isinstance(child, ast.stmt):
                yield from _bound([child])


def _stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
    """A function of the same kind and signature, which does nothing. Defaults and annotations are not evaluated."""
    is_generator = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in _own_nodes(node))
    stub = copy.copy(node)
    stub.args = copy.deepcopy(node.args)
    stub.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    stub.args.kw_defaults = [None if default is None else ast.Constant(None) for default in node.args.kw_defaults]
    stub.body = [ast.Expr(ast.Yield()) if is_generator else ast.Pass()]
    stub.type_params = []
    module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), stub], [])
    names: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(module), "<agent>", "exec"), names)
    return names[node.name]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes below a function, without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, (*_DEFINITIONS, ast.Lambda)):
            yield from _own_nodes(child)


def _may_reward(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the function may return a reward or call ``session.reward``. True if it passes the session on."""
    returned = (part.value for part in _own_nodes(node) if isinstance(part, ast.Return))
    if any(value is not None and not (isinstance(value, ast.Constant) and value.value is None) for value in returned):
        return True
    arguments = [*node.args.posonlyargs, *node.args.args]
    session = arguments[0].arg if arguments else ""
    uses = sum(isinstance(part, ast.Name) and part.id == session for part in ast.walk(node))
    attributes = [
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == session
    ]
    return len(attributes) < uses or "reward" in attributes

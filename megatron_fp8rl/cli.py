"""The command line: ``python -m megatron_fp8rl COMMAND [CONFIG] [--field value ...]``.

In: the arguments and the functions of ``model_configs/``. Out: an :class:`Invocation` with a checked ``RunConfig``, or
a message with every mistake and exit status 2. Imports no heavy package, so help responds at once. ``--dry-run`` prints
the configuration; for a command with data, it also reads the data and scores a few answers, which takes seconds.

CONFIG is ``module:function`` or the name of a function in ``model_configs/`` that takes no arguments and is annotated
to return a ``RunConfig``. Every configuration field is an option (``--parallel.tensor 2``).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import itertools
import json
import os
import pkgutil
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from megatron_fp8rl.config import ConfigError, RunConfig
from megatron_fp8rl.config_source import as_function
from megatron_fp8rl.data import run_folder
from megatron_fp8rl.observe.other_packages import VERBOSE_VARIABLE, pytorch_level
from megatron_fp8rl.preflight import data_check, findings, rules

_PROGRAM = "python -m megatron_fp8rl"
_CONFIGS_PACKAGE = "model_configs"
# The fields that ``--help`` shows: what most runs set.
COMMON_FIELDS = """
    num_steps seed output_dir
    model.hf_path
    parallel.world_size parallel.tensor parallel.pipeline parallel.context parallel.expert
    precision.trainer precision.rollout precision.exact
    optim.lr optim.warmup_steps optim.weight_decay optim.recompute optim.offload
    engine.num_replicas engine.tensor engine.placement engine.sleep_level engine.gpu_memory_utilization
    engine.kv_cache_dtype sampling.prompts_per_step sampling.completions_per_prompt sampling.max_prompt_tokens
    sampling.max_completion_tokens sampling.temperature sampling.max_staleness optim.max_tokens_per_microbatch
    session.max_turns session.max_tokens
    algo.loss algo.clip_high algo.kl_coef algo.correction
    data.tokenizer scoring.num_workers warm_start.steps
    checkpoint.every_steps observe.eval_every observe.eval_prompts observe.wandb_project
""".split()


_AGENT_OPTIONS = "agent_options"
_SET_HELP = """\
  --PATH.KEY VALUE           a value inside a dictionary, such as --data.environments.0.options.KEY VALUE
  --agent_options.KEY VALUE  an option of the agent: JSON, True, False, None or text; several values are a list
  --set PATH=JSON            a value of a dictionary, or a whole dictionary"""


class UsageError(ValueError):
    """Invalid arguments. The message names the argument and what is accepted."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand."""

    name: str
    summary: str  # one line of help
    run: Callable[[Invocation], int]  # returns the exit status
    default_config: str | None = None  # used if CONFIG is omitted; None: CONFIG is required
    takes_config: bool = True  # False: only the command's options; positional arguments set them in order
    options: type | None = None  # frozen dataclass of the command's options, all with defaults
    checks_config: bool = False  # True: the command checks the configuration itself
    reads_data: bool = False  # True: a dry run also shows rows, prompts and rewards
    # For a dry run: checks the options and returns the configuration whose data are shown. Raises ConfigError.
    data_of: Callable[[Invocation], RunConfig] | None = None
    # In place of CONFIG: (options, function that applies overrides) -> (configuration, lines that explain it).
    configure: Callable[[Any, Callable[[RunConfig], RunConfig]], tuple[RunConfig, list[str]]] | None = None


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """The parsed command line."""

    command: str
    config_name: str | None = None  # CONFIG, or the command's default
    cfg: RunConfig | None = None  # None if the command takes no configuration
    options: Any = None  # an instance of Command.options
    overrides: tuple[str, ...] = ()  # arguments that override fields of CONFIG
    dry_run: bool = False


def main(commands: Sequence[Command], argv: Sequence[str] | None = None) -> int:
    """Parse, check and run one command; return the exit status. Usage errors go to stderr, with status 2."""
    by_name = {command.name: command for command in commands}
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--verbose" in arguments:
        arguments = [word for word in arguments if word != "--verbose"]
        os.environ[VERBOSE_VARIABLE] = "1"
    os.environ.update(pytorch_level())  # before any command imports PyTorch
    try:
        invocation = parse(arguments, by_name)
        _refuse_repeated_lists(arguments, invocation)
    except (UsageError, ConfigError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    command = by_name[invocation.command]
    return _dry_run(command, invocation) if invocation.dry_run else command.run(invocation)


def _refuse_repeated_lists(arguments: Sequence[str], invocation: Invocation) -> None:
    """Raise UsageError for a list that is typed twice: the last would replace the others."""
    names = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        for known in (invocation.options, invocation.cfg):
            with contextlib.suppress(AttributeError):
                if isinstance(attrgetter(name[2:].replace("-", "_"))(known), tuple):
                    raise UsageError(f"{name} is typed twice, and is a list; write all its values behind one {name}")


def _dry_run(command: Command, invocation: Invocation) -> int:
    """Print the configuration, and what the command reads before it starts; exit status 2 if data cannot be used, or if
    the run could not resume in its folder.

    Rows, prompts and rewards are comments of a Python function, or lines on stderr beside JSON. Warnings and errors are
    also on stderr.
    """
    cfg, is_function = invocation.cfg, invocation.config_name is None
    try:
        source = cfg if command.data_of is None else command.data_of(invocation)
    except ConfigError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    with_gpus = bool(getattr(invocation.options, "gpus", None))  # perhaps those of another machine
    lines, problems = data_check.describe(source, with_gpus=with_gpus) if command.reads_data else ([], [])
    if is_function and lines:
        print("\n".join(f"# {line}" for text in lines for line in text.splitlines()))
    elif lines:
        print("\n".join(lines), file=sys.stderr)
    print(as_function(cfg) if is_function else to_json(cfg))
    for problem in problems:
        print(data_check.shown(problem, sys.stderr), file=sys.stderr)
    if errors := run_folder.resume_violations(cfg) if command.reads_data and command.data_of is None else []:
        print(f"{_PROGRAM}: {ConfigError(errors)}", file=sys.stderr)
    return 2 if errors or any(problem.severity == "error" for problem in problems) else 0


def parse(argv: Sequence[str], commands: Mapping[str, Command]) -> Invocation:
    """Parse arguments into a checked :class:`Invocation`.

    Raises UsageError for an unknown command or configuration, and ConfigError with all violations. Help and an unknown
    or ill-typed option print their message and raise SystemExit.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(overview(commands))
        raise SystemExit(0 if argv else 2)
    name, rest = argv[0], list(argv[1:])
    if name not in commands:
        raise UsageError(f"unknown command {name!r}{_near(name, commands)}. Commands: {', '.join(commands)}")
    command = commands[name]
    if not command.takes_config:
        names = [field.name for field in dataclasses.fields(command.options)] if command.options else []
        values = list(itertools.takewhile(lambda word: not word.startswith("-"), rest))[: len(names)]  # positional
        rest = [word for pair in zip(names, values, strict=False) for word in (f"--{pair[0]}", pair[1])] + rest[
            len(values) :
        ]
        return Invocation(command=name, cfg=None, options=_parse_args(command, None, rest)[1])
    dry_run = not {"--dry-run", "--dry_run"}.isdisjoint(rest)
    rest = [arg for arg in rest if arg not in ("--dry-run", "--dry_run")]
    if command.configure is not None and (not rest or rest[0].startswith("-")):
        return _configured(command, rest, dry_run)
    if rest and not rest[0].startswith("-"):
        target = rest.pop(0)
    elif rest in (["-h"], ["--help"]) and command.default_config is None:
        print(overview(commands))
        raise SystemExit(0)
    elif command.default_config is not None:
        target = command.default_config
    else:
        raise UsageError(f"{name} needs a CONFIG. {_known_configs()}")
    cfg, options, overrides = _parse_args(command, load_config(target), rest, target)
    if command.configure is not None and options != command.options():
        typed = [f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default]
        raise UsageError(f"--{typed[0]} makes a configuration, and {target} is one: leave one of them out")
    violations = [] if command.checks_config else rules.check(cfg)
    if violations:
        raise ConfigError(violations)
    return Invocation(command=name, config_name=target, cfg=cfg, options=options, overrides=overrides, dry_run=dry_run)


def _configured(command: Command, rest: list[str], dry_run: bool) -> Invocation:
    """The invocation of a command that makes its configuration from its options."""
    program = f"{_PROGRAM} {command.name}"
    if "-h" in rest or "--help" in rest:
        _tyro({"options": command.options()}, rest, program, command.summary)
    parsed, args = _tyro({"options": command.options()}, rest, program, command.summary, return_unknown_args=True)
    cfg, notes = command.configure(parsed.options, overriding(args))
    if violations := rules.check(cfg):
        raise ConfigError(violations)
    print("\n".join(f"# {line}" if dry_run else line for text in notes for line in text.splitlines()))
    return Invocation(command=command.name, cfg=cfg, options=parsed.options, overrides=tuple(args), dry_run=dry_run)


def parse_overrides(cfg: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Apply ``--field value`` arguments to a configuration without checking it. Unknown options raise SystemExit."""
    return _parse_args(Command(name="", summary="", run=lambda _: 0), cfg, list(overrides))[0]


def overriding(overrides: Sequence[str]) -> Callable[[RunConfig], RunConfig]:
    """:func:`parse_overrides` for many configurations; parses, which takes 0.5 s, only for the first."""
    parsed: RunConfig | None = None

    def override(cfg: RunConfig) -> RunConfig:
        nonlocal parsed
        started, args = _apply_set(cfg, overrides)
        paths = [arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")]
        if parsed is None or any(path.count(".") > 1 for path in paths):
            parsed = parse_overrides(cfg, overrides)
            return parsed
        return findings.apply(started, [(path, attrgetter(path)(parsed)) for path in paths])

    return override


def load_config(target: str) -> RunConfig:
    """Call the function named by ``module:function`` or by a bare function name in ``model_configs/``, or read the
    configuration of a run's folder.

    Raises UsageError, with near matches, if there is no such function or it returns no RunConfig.
    """
    if ":" in target:
        module_name, function_name = target.split(":", 1)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UsageError(f"configuration {target!r}: {error}. {_known_configs()}") from error
        function = getattr(module, function_name, None)
        if function is None:
            raise UsageError(
                f"configuration {target!r}: {module_name} has no {function_name!r}"
                f"{_near(function_name, _functions(module))}"
            )
    else:
        functions = config_functions()
        if target not in functions:
            if Path(target).is_dir():
                return _config_of_run(Path(target))
            raise UsageError(f"unknown configuration {target!r}{_near(target, functions)}. {_known_configs()}")
        function = functions[target]
    cfg = function()
    if not isinstance(cfg, RunConfig):
        raise UsageError(f"configuration {target!r} returned {type(cfg).__name__}; it must return a RunConfig")
    return cfg


def _config_of_run(folder: Path) -> RunConfig:
    from pydantic import TypeAdapter, ValidationError

    file, remedy = folder / "config.json", "Name the folder of a run of this release"
    try:
        text = file.read_text(encoding="utf-8")
        cfg = TypeAdapter(RunConfig).validate_json(text)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}. {remedy}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}. {remedy}") from error
    if unknown := next(_unknown(json.loads(text), dataclasses.asdict(cfg)), None):
        raise UsageError(f"{file}: {unknown} is no field of a configuration. {remedy}")
    return cfg


def _unknown(read: Mapping[str, Any], known: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Dotted names that ``read`` has and ``known`` lacks."""
    for name, value in read.items():
        if name not in known:
            yield f"{at}{name}"
        elif isinstance(value, dict) and isinstance(known[name], dict):
            yield from _unknown(value, known[name], f"{at}{name}.")


def config_functions() -> dict[str, Callable[[], RunConfig]]:
    """The configurations of ``model_configs/`` by name. Raises UsageError if two files use the same name."""
    try:
        package = importlib.import_module(_CONFIGS_PACKAGE)
    except ModuleNotFoundError:  # installed, and started as ``python -m megatron_fp8rl``
        package = importlib.import_module(f"megatron_fp8rl_programs.{_CONFIGS_PACKAGE}")
    functions: dict[str, Callable[[], RunConfig]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        for name, function in _functions(importlib.import_module(f"{_CONFIGS_PACKAGE}.{info.name}")).items():
            if name in functions:
                modules = f"{functions[name].__module__} and {function.__module__}"
                raise UsageError(f"two configurations are named {name!r}, in {modules}; rename one of them")
            functions[name] = function
    return dict(sorted(functions.items()))


def overview(commands: Mapping[str, Command]) -> str:
    """The help text: commands and available configurations."""
    width = max(map(len, commands)) + 2
    lines = [f"usage: {_PROGRAM} COMMAND [CONFIG] [--dry-run] [--field value ...]", "", "commands:"]
    lines += [f"  {command.name:<{width}}{command.summary}" for command in commands.values()]
    if functions := config_functions():
        width = max(map(len, functions)) + 2
        lines += ["", "configurations:"]
        for name, function in functions.items():
            lines.append(f"  {name:<{width}}{(inspect.getdoc(function) or '').partition(chr(10))[0]}")
    with_config = next((command.name for command in commands.values() if command.takes_config), "rl")
    example = next(iter(functions), "CONFIG")
    lines += [
        "",
        f"{_PROGRAM} {with_config} {example} --help    lists the fields that most runs set; --help-all lists all",
        f"{_PROGRAM} {with_config} {example} --dry-run prints the configuration, rows, prompts and rewards",
        "--verbose shows the warnings of other packages, which are otherwise in logs/packages.rank<i>.txt of the run",
        "CONFIG may also be module:function for a function of your own that returns a RunConfig.",
    ]
    return "\n".join(lines)


def to_json(cfg: RunConfig) -> str:
    """The resolved configuration as indented JSON."""
    return json.dumps(dataclasses.asdict(cfg), indent=2)


def _parse_args(
    command: Command, cfg: RunConfig | None, args: list[str], target: str = ""
) -> tuple[RunConfig | None, Any, tuple[str, ...]]:
    """(configuration with overrides, the command's options, the override arguments)."""
    options = {} if command.options is None else {"options": command.options()}
    program = f"{_PROGRAM} {command.name} {target}".rstrip()
    if cfg is None:
        parsed = _tyro(options, args, program, command.summary)
        return None, getattr(parsed, "options", None), ()
    if not {"-h", "--help", "--help-all"}.isdisjoint(args):
        text = help_all(cfg) if "--help-all" in args else common_help(cfg)
        print(f"usage: {program} [--field value ...]: {command.summary}\n\n{text}\n")
        if options:
            _tyro(options, ["--help"], program, "options of the command")  # exits
        raise SystemExit(0)
    parsed_options = None
    if options:
        # Two passes, so that the configuration's arguments can be passed on to the runs of a study.
        parsed, args = _tyro(options, args, program, command.summary, return_unknown_args=True)
        parsed_options = parsed.options
    cfg, rest = _apply_set(cfg, args)
    return _tyro({"cfg": cfg}, rest, program, command.summary).cfg, parsed_options, tuple(args)


def _tyro(defaults: dict[str, Any], args: Sequence[str], program: str, summary: str, **how: Any) -> Any:
    """Parse arguments into copies of the given dataclass instances; their fields are top-level options."""
    import tyro  # takes 0.2 s

    # `--x True` for a field, so that an override can also disable it; a plain `--x` for an option of a command.
    flags = {"cfg": tyro.conf.FlagConversionOff, "options": tyro.conf.FlagCreatePairsOff}
    fields = [
        (name, Annotated[type(value), tyro.conf.arg(name=""), flags[name]], dataclasses.field(default=value))
        for name, value in defaults.items()
    ]
    return tyro.cli(
        dataclasses.make_dataclass("Arguments", fields, frozen=True, kw_only=True),
        prog=program,
        description=summary,
        args=list(args),
        use_underscores=True,  # options are spelled like the fields that they set
        config=(tyro.conf.AvoidSubcommands,),  # optional parts of a model that are None have no options
        **how,
    )


def _apply_set(cfg: RunConfig, args: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Apply and remove each ``--set path=JSON`` for a dictionary field or a value inside it; JSON or text.

    ``--PATH.KEY VALUE`` below a dictionary field means the same, and several values are a list. ``--agent_options.KEY``
    sets the option of every source that has an agent.

    Raises UsageError for a path outside dictionaries.
    """
    rest, queue = [], list(args)
    while queue:
        arg = queue.pop(0)
        name, equals, text = arg.partition("=")
        if name == "--set":
            path, equals, text = (text or (queue.pop(0) if queue else "")).partition("=")
            if not equals:
                raise UsageError(f"--set {path}: needs PATH=VALUE, such as --set algo.loss_options.dual_clip=3")
            cfg = _with_value(cfg, path.split("."), _value(text), path)
            continue
        paths = _entries(cfg, name)
        if not paths:
            rest.append(arg)
            continue
        texts = [text] if equals else []
        while not equals and queue and not queue[0].startswith("--"):
            texts.append(queue.pop(0))
        is_whole = "." not in name
        values = [_value(text) for text in texts]
        if is_whole and not (len(values) == 1 and isinstance(values[0], dict)):
            raise UsageError(f"{name} needs a JSON object; set one option by {name}.NAME VALUE")
        if not texts:
            raise UsageError(f"{name} needs a value, such as {name} True")
        for path in paths:
            keys = path.split(".")
            cfg = _with_value(cfg, keys, values[0] if is_whole else _entry_value(cfg, keys, texts), path)
    return cfg, rest


def _entries(cfg: RunConfig, name: str) -> list[str]:
    """The dotted paths that an option sets if it names entries of dictionaries; otherwise empty."""
    if not name.startswith("--"):
        return []
    first, dot, rest = name[2:].partition(".")
    if first.replace("-", "_") == _AGENT_OPTIONS:
        sources = [*enumerate(cfg.data.environments)]
        chosen = [index for index, source in sources if source.agent] or [index for index, _ in sources]
        return [f"data.environments.{index}.{_AGENT_OPTIONS}{dot}{rest}" for index in chosen]
    node, keys = cfg, name[2:].split(".")
    for index, key in enumerate(keys):
        if isinstance(node, dict):
            return [".".join(keys)]
        keys[index] = field = key.replace("-", "_")
        if isinstance(node, tuple) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        elif dataclasses.is_dataclass(node) and hasattr(node, field):
            node = getattr(node, field)
        else:
            return []
    return []


def _entry_value(cfg: RunConfig, keys: Sequence[str], texts: Sequence[str]) -> Any:
    """The value of a dictionary's entry. A text stays a text, and a list a list, if the entry has such a value."""
    node: Any = cfg
    for key in keys:
        is_list = isinstance(node, tuple | list)
        node = node.get(key) if isinstance(node, dict) else node[int(key)] if is_list else getattr(node, key, None)
    if len(texts) > 1:
        return [_value(text) for text in texts]
    if isinstance(node, str):
        return texts[0]
    value = _value(texts[0])
    return [value] if isinstance(node, tuple | list) and not isinstance(value, list) else value


def _value(text: str) -> Any:
    """A value that was typed: JSON, otherwise a Python literal such as True or .5, otherwise the text itself."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.loads(json.dumps(ast.literal_eval(text)))
    return text


def _with_value(node: Any, keys: list[str], value: Any, path: str) -> Any:
    """A copy of ``node``, a dataclass, tuple or dictionary, with ``value`` at the dictionary entry below ``keys``."""
    key, rest = keys[0], keys[1:]
    if isinstance(node, dict):
        return {**node, key: _with_value(node.get(key, {}), rest, value, path) if rest else value}
    if rest and isinstance(node, tuple) and key.isdecimal() and int(key) < len(node):
        index = int(key)
        return (*node[:index], _with_value(node[index], rest, value, path), *node[index + 1 :])
    if not rest and isinstance(value, dict) and isinstance(getattr(node, key, None), dict):
        return dataclasses.replace(node, **{key: value})
    if rest and dataclasses.is_dataclass(node) and hasattr(node, key):
        return dataclasses.replace(node, **{key: _with_value(getattr(node, key), rest, value, path)})
    remedy = "it sets values inside dictionaries, such as data.environments.0.options.KEY; other fields are options"
    raise UsageError(f"--set {path}: {key!r} is not an entry of a dictionary; {remedy}: --{path} VALUE")


def common_help(cfg: RunConfig) -> str:
    """The fields that most runs set, with their values in ``cfg`` and their meaning."""
    rows = {path: row for path, _, row in _rows(cfg)}
    return "\n".join(["common fields (--help-all lists all):", *(rows[path] for path in COMMON_FIELDS), _SET_HELP])


def help_all(cfg: RunConfig) -> str:
    """All fields by section. The architecture of the model is last, because it comes from the Hugging Face folder."""
    sections: dict[str, list[str]] = {}
    for path, owner, row in _rows(cfg):
        section = path.rpartition(".")[0]
        if section.startswith("model") and path not in ("model.hf_path", "model.random"):
            section = "architecture of the model, from config.json of the Hugging Face folder"
        elif section and section not in sections:
            sections[section] = [" ".join((inspect.getdoc(owner) or "").split())]
        sections.setdefault(section, []).append(row)
    ordered = sorted(sections.items(), key=lambda section: section[0].startswith("architecture"))
    texts = ["\n".join([f"{name or 'run'}:", *rows]) for name, rows in ordered]
    return "\n\n".join([*texts, _SET_HELP])


def _rows(node: Any, prefix: str = "") -> Iterator[tuple[str, type, str]]:
    """(path, class, line of help) of every field below ``node``: option, value, choices and comment."""
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        path, value = prefix + field.name, getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from _rows(value, f"{path}.")
        elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
            for index, item in enumerate(value):
                yield from _rows(item, f"{path}.{index}.")
        else:
            choices = " | ".join(map(str, _choices(hints[field.name])))
            text = "; ".join(filter(None, (choices, _comments(type(node)).get(field.name))))
            yield path, type(node), f"  {f'--{path} {value}':<54} {text}".rstrip()


def _choices(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return tuple(choice for part in typing.get_args(hint) for choice in _choices(part))


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """The comment behind each field of a configuration class, else the comment above it."""
    comments, above = {}, ""
    for line in inspect.getsource(cls).splitlines():
        code, _, comment = line.strip().partition("# ")
        if name := re.match(r"(\w+): ", code):
            comments[name[1]] = comment or above
        above = "" if code else f"{above} {comment}".lstrip()
    return comments


def _functions(module: ModuleType) -> dict[str, Callable[[], RunConfig]]:
    """Public functions defined in the module that return a RunConfig and need no argument."""
    functions = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        signature = inspect.signature(function)
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needs = [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in optional]
        is_public = function.__module__ == module.__name__ and not name.startswith("_")
        returns_config = signature.return_annotation in (RunConfig, "RunConfig", "config.RunConfig")
        if is_public and returns_config and not needs:
            functions[name] = function
    return functions


def _near(name: str, known: Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(matches)}?)" if matches else ""


def _known_configs() -> str:
    functions = config_functions()
    known = f"Configurations: {', '.join(functions)}" if functions else f"No configurations in {_CONFIGS_PACKAGE}/"
    return f"{known}; or module:function, if Python can import the module."

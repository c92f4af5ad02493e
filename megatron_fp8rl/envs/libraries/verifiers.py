"""Tasksets of the ``verifiers`` library (0.4): its data, environments, tools and rewards.

``taskset`` is the name of a taskset, or the path of a Python file with a taskset. The library's classes run as in its
evaluations; agents call the session's OpenAI endpoint. Roles that the environment declares untrainable are not trained.
The chat loop is verifiers_chat.py, unless ``env_options`` name a harness. Needs the extra ``verifiers``.
"""

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_fp8rl.envs.agent_session import ASIDE, AgentError, AgentSession
from megatron_fp8rl.envs.environment import Problem
from megatron_fp8rl.types import Prompt

MOST_TASKS = 100_000  # of an infinite taskset
_CHAT = "megatron_fp8rl_chat"  # the library finds harnesses as modules without a dot
_KEY = "MEGATRON_FP8RL_KEY"  # environment variable of the key, which identifies no session

_open = contextlib.AsyncExitStack()  # servers, which end with the process
_serving: dict[str, asyncio.Future[Any]] = {}  # environments of this process, by their configuration


class Tasks:
    """The tasks of a taskset as problems; one eighth of them is held out. Episodes score themselves."""

    def __init__(self, *, taskset: str, options: Mapping[str, Any] | None = None) -> None:
        self._tasks = _tasks(taskset, _as_json(options))

    def make_problem(self, index: int) -> Problem:
        number = index % len(self._tasks)
        data = self._tasks[number].data
        messages = [] if not data.system_prompt else [{"role": "system", "content": data.system_prompt}]
        question = data.prompt_text or f"task {number}"
        messages.append({"role": "user", "content": question})
        answer = str(getattr(data, "answer", "") or "")
        return Problem(question=question, answer=answer, metadata={"task": number}, messages=tuple(messages))

    def score(self, prompt: Prompt, completion_text: str) -> float:
        raise AgentError("a task of verifiers is scored by its episode; set the agent of this source")


async def rollout(
    session: AgentSession,
    row: Mapping[str, Any],
    *,
    taskset: str,
    options: Mapping[str, Any] | None = None,
    env: str = "",
    env_options: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """One episode of ``taskset`` in the environment ``env``, by default one agent. The reward is the sum over its
    trainable traces; their named rewards are its parts."""
    vf = await asyncio.to_thread(importlib.import_module, "verifiers.v1")  # takes seconds
    from verifiers.v1.env import RunSlot
    from verifiers.v1.types import SamplingConfig

    environment = await _environment(taskset, _as_json(options), env, _as_json(env_options))
    # The library keeps one client open for all sessions; each request names its session.
    client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=_KEY)
    context = vf.ModelContext(model="policy", client=client, sampling=SamplingConfig(user=session.api_key))
    slot = RunSlot(_tasks(taskset, _as_json(options))[row["task"]])
    episode = await environment.run_slot(slot, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise AgentError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    named = [item for trace in episode.traces for item in trace.rewards.items()]
    parts = {name: float(reward.score) for name, reward in named if reward is not None}
    return {**parts, "reward": float(sum(trace.reward for trace in episode.traces))}


def _as_json(options: Mapping[str, Any] | None) -> str:
    """Options as text, which a cache can keep."""
    return json.dumps(options or {}, sort_keys=True)


@functools.lru_cache(maxsize=8)
def _tasks(taskset: str, options: str) -> list[Any]:
    _make_importable(taskset)
    from itertools import islice

    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    config = taskset_config_type(_name(taskset))(id=_name(taskset), **json.loads(options))
    tasks = list(islice(iter(load_taskset(config)), MOST_TASKS))
    if not tasks:
        raise ValueError(f"verifiers:{taskset} has no tasks")
    return tasks


async def _environment(taskset: str, options: str, env: str, env_options: str) -> Any:
    """The environment, with its servers running, once in this process. A session that ends while it waits does not end
    the start, because other sessions wait too."""
    key = f"{taskset} {options} {env} {env_options}"
    if key not in _serving:
        _serving[key] = started = asyncio.ensure_future(_start(taskset, options, env, env_options))

        def forget_failure(_: asyncio.Future[Any]) -> None:
            if started.cancelled() or started.exception() is not None:
                del _serving[key]  # the next session tries again

        started.add_done_callback(forget_failure)
    return await asyncio.shield(_serving[key])


async def _start(taskset: str, options: str, env: str, env_options: str) -> Any:
    from verifiers.v1.utils.loaders import load_environment

    config, roles = await asyncio.to_thread(_config, taskset, options, env, env_options)
    environment = load_environment(config)
    _separate_untrained_roles(environment, roles)
    await _open.enter_async_context(environment.serving())
    return environment


def _config(taskset: str, options: str, env: str, env_options: str) -> tuple[Any, list[str]]:
    """(configuration of the environment, names of its agents)."""
    _make_importable(taskset)
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    name = _name(taskset)
    declared = env_config_type(name, env).model_fields
    os.environ[_KEY] = "each request has the session's key"
    sys.modules[_CHAT] = importlib.import_module("megatron_fp8rl.envs.libraries.verifiers_chat")
    local, rest = {"harness": {"id": _CHAT}, "runtime": {"type": "subprocess"}}, json.loads(env_options)
    roles = {role: local | rest.pop(role, {}) for role, field in declared.items() if field.annotation is AgentConfig}
    return resolve_env_config({"id": env, "taskset": {"id": name, **json.loads(options)}, **roles, **rest}), [*roles]


def _check_options(
    *,
    taskset: str,
    options: Mapping[str, Any] | None = None,
    env: str = "",
    env_options: Mapping[str, Any] | None = None,
) -> None:
    """Raise an error of the library if it has no such taskset or environment, or its fields are wrong."""
    _config(taskset, _as_json(options), env, _as_json(env_options))


rollout.check_options = _check_options


def _separate_untrained_roles(environment: Any, roles: Sequence[str]) -> None:
    """Give untrainable roles, such as users and judges, a side conversation of the session."""
    setup = environment.setup

    async def with_keys(agents: Any) -> None:
        await setup(agents)
        for agent in (getattr(agents, role) for role in roles):
            if not agent.trainable and getattr(agent.ctx.client, "api_key_var", "") == _KEY:
                beside = f"{agent.ctx.sampling.user}{ASIDE}1"
                agent.ctx = replace(agent.ctx, sampling=agent.ctx.sampling.model_copy(update={"user": beside}))

    environment.setup = with_keys


def _name(taskset: str) -> str:
    return Path(taskset).stem if taskset.endswith(".py") else taskset


def _make_importable(taskset: str) -> None:
    """Put the folder of a file on the Python path. Raises ValueError if the library cannot import the file from it, or
    is not installed."""
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError("the package verifiers is not installed: `make install EXTRAS=verifiers`")
    if not taskset.endswith(".py"):
        return
    path = Path(taskset).absolute()
    if not path.is_file():
        raise ValueError(f"the file {path} of the taskset does not exist")
    name = path.stem.replace("-", "_").lower()
    if name != path.stem:
        raise ValueError(f"the library looks for {name}.py instead of {path.name}: rename the file")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        known = os.environ.get("PYTHONPATH")  # for the servers of its tools, which are processes
        os.environ["PYTHONPATH"] = folder if known is None else f"{folder}{os.pathsep}{known}"
    found = importlib.util.find_spec(f"verifiers.v1.tasksets.{name}") or importlib.util.find_spec(name)
    if found is None or found.origin is None or not os.path.exists(found.origin) or not path.samefile(found.origin):
        raise ValueError(f"{name} is also the name of another module, which Python imports: rename {path}")

"""The reward ``model``: the score of a conversation from a reward model.

The score is the model's single output before activation, times ``scale``. vLLM serves the model: this run starts a
server for ``folder`` (``rollout/reward_server.py``), or an external server runs at ``url``.
"""

import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_fp8rl.config import EnvironmentConfig, RewardConfig
from megatron_fp8rl.envs.rewards.extraction import after_reasoning, is_unfinished
from megatron_fp8rl.net import auth
from megatron_fp8rl.net.endpoint import Endpoint
from megatron_fp8rl.types import Prompt

SERVERS = "MEGATRON_FP8RL_REWARD_SERVERS"  # environment variable: folder with the endpoint files of this run's servers
_WAIT_S = 0.5
_PARTS = {  # of a model's folder -> names of files, of which one is there
    "weights": ("*.safetensors", "*.bin"),
    "tokenizer": ("tokenizer.json", "vocab.json", "*.model", "*.tiktoken"),
}


def model(
    *,
    folder: str = "",
    url: str = "",
    name: str = "",
    key_env: str = "",
    precision: Literal["bf16", "fp8"] = "bf16",
    gpus: str = "",
    memory_share: float = 0.85,
    max_tokens: int | None = None,
    reasoning: bool = False,
    scale: float = 1.0,
    deadline_s: float = 20.0,
) -> Callable[[Prompt, str], float]:
    """Score with the model in ``folder`` (Hugging Face, one label) or at ``url``, such as ``http://host:8000``.

    Args:
        precision: with ``folder``; "fp8" lets vLLM quantize the model.
        gpus: with ``folder``; default: the first GPU that neither trainer nor engines use.
        memory_share: with ``folder``; fraction of GPU memory for the server.
        max_tokens: with ``folder``; longest conversation.
        name: with ``url``; model name at the server.
        key_env: with ``url``; environment variable with the API key. Raises ValueError if it is not set.
        reasoning: also send the text before ``</think>``.
        deadline_s: limit for an answer, including a server restart.
    """
    if key_env and not os.environ.get(key_env):
        raise ValueError(f"key_env = {key_env!r}: this environment variable is not set where completions are scored")

    def score(prompt: Prompt, completion: str) -> float:
        answer = "" if is_unfinished(prompt.text, completion) else after_reasoning(completion).lstrip()
        answer = completion if reasoning else answer
        question = prompt.messages or ({"role": "user", "content": prompt.text},)
        messages = [*question, {"role": "assistant", "content": answer}]
        body: dict[str, Any] = {"messages": messages, "add_generation_prompt": False, "use_activation": False}
        if name:
            body["model"] = name

        def target() -> tuple[str, str]:
            if url:
                return url, os.environ.get(key_env, "") if key_env else ""
            endpoint = Endpoint.read(endpoint_file(folder, precision))
            if endpoint is None:
                raise ConnectionError(f"the server of {folder} has no endpoint file; is it starting?")
            return endpoint.url, endpoint.token

        return scale * _output(_request(target, body, deadline_s), url or folder)

    return score


def problem(options: Mapping[str, Any]) -> str:
    """Why the options are invalid, checked without a server; empty if they are valid."""
    folder, url = options.get("folder", ""), options.get("url", "")
    if bool(folder) == bool(url):
        return "the reward 'model' needs one of the options folder and url"
    if options.get("precision", "bf16") not in ("bf16", "fp8"):
        return f"precision = {options['precision']!r} of the reward 'model' is neither bf16 nor fp8"
    if not folder:
        return ""
    path = Path(folder).expanduser()
    try:
        config = json.loads(path.joinpath("config.json").read_text())
        if not isinstance(config, dict):
            raise TypeError("it is not a JSON object")
    except (OSError, ValueError, TypeError) as error:
        return f"folder = {folder!r} of the reward 'model' has no readable config.json ({error})"
    if lacking := [part for part, names in _PARTS.items() if not any(any(path.glob(name)) for name in names)]:
        return f"folder = {folder!r} of the reward 'model' has no {' and no '.join(lacking)}; copy the whole model"
    names = config.get("architectures") or []
    num_labels = len(config.get("id2label") or {0: "", 1: ""}) if "num_labels" not in config else config["num_labels"]
    if not any("Classification" in name or "Reward" in name for name in names):
        return f"{folder} is a {', '.join(names) or 'model without architectures'} and gives no score"
    return "" if num_labels == 1 else f"{folder} has {num_labels} labels; a reward model has one"


def served(environments: Mapping[str, EnvironmentConfig] | tuple[EnvironmentConfig, ...]) -> list[RewardConfig]:
    """Rewards whose models this run serves, without duplicates of model and precision."""
    configs = environments.values() if isinstance(environments, Mapping) else environments
    rewards = [reward for cfg in configs for reward in cfg.rewards if is_served(reward)]
    return list({(r.options["folder"], r.options.get("precision", "bf16")): r for r in rewards}.values())


def is_served(reward: RewardConfig) -> bool:
    """Whether this run serves the reward's model."""
    return reward.function == "model" and bool(reward.options.get("folder"))


def servers_of(run_dir: str) -> str:
    """The value of :data:`SERVERS` for a run."""
    return str(Path(run_dir, "reward_models").resolve())


def endpoint_file(folder: str, precision: str) -> Path:
    """Endpoint file of a model's server, in the folder :data:`SERVERS`."""
    path = Path(folder).expanduser().resolve()
    digest = hashlib.blake2b(f"{path}/{precision}".encode(), digest_size=4).hexdigest()
    return Path(os.environ.get(SERVERS, ".")) / f"{path.name}-{precision}-{digest}.json"


def _request(target: Callable[[], tuple[str, str]], body: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    end = time.monotonic() + deadline_s
    while True:
        where = ""
        try:
            where, token = target()
            headers = {"Content-Type": "application/json", **auth.headers(token)}
            request = urllib.request.Request(f"{where.rstrip('/')}/classify", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=max(0.1, end - time.monotonic())) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{where}: HTTP {error.code}: {error.read(300).decode(errors='replace')}") from None
        except OSError as error:
            if time.monotonic() + _WAIT_S > end:
                raise ValueError(f"{where}: {type(error).__name__}: {error}") from None
        time.sleep(_WAIT_S)


def _output(answer: dict[str, Any], where: str) -> float:
    try:
        values = answer["data"][0]["probs"]
    except (LookupError, TypeError):
        raise ValueError(f"{where} did not answer as a model that classifies: {str(answer)[:200]}") from None
    if len(values) != 1:
        raise ValueError(f"{where} gave {len(values)} numbers; a reward model gives one")
    return float(values[0])

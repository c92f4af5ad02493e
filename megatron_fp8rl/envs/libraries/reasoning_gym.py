"""reasoning-gym environments: about a hundred problem generators with exact scorers.

A problem is a pure function of its index (except in knight_swap, which iterates over a set). Scoring regenerates the
problem in the worker process, so that the scorer gets an entry with Python types instead of a JSON copy.
"""

import dataclasses
import functools
import json
import random
import re
import warnings
from collections.abc import Mapping
from typing import Any

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.envs.environment import EnvironmentSpecError, Problem
from megatron_fp8rl.envs.rewards.extraction import after_reasoning, is_unfinished
from megatron_fp8rl.types import Prompt

with warnings.catch_warnings():
    # reasoning-gym 0.1 imports cellpylib 2.4, which compares strings with "is"; Python 3.12 warns when compiling it.
    # Remove once a release of either package fixes this.
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CACHED_PROBLEMS = 4096  # completions of one prompt are scored consecutively


class ReasoningGymEnvironment:
    """One reasoning-gym generator with its options.

    ``options`` are the fields of the generator's configuration, except ``size``; ``seed`` (default 0) selects the set
    of problems. Generators with a fixed list of problems wrap around at its end.

    Raises:
        EnvironmentSpecError: unknown generator or option, with near matches, or values that the generator rejects.
    """

    def __init__(self, dataset: str, options: Mapping[str, Any]):
        if dataset not in DATASETS:
            raise EnvironmentSpecError(
                f"reasoning-gym has no generator {dataset!r}{near_matches(dataset, DATASETS)}; name your own "
                "environment 'module:Class'"
            )
        known = {field.name for field in dataclasses.fields(DATASETS[dataset][1])} - {"size"}
        for name in options:
            if name not in known:
                raise EnvironmentSpecError(
                    f"generator {dataset!r} has no option {name!r}{near_matches(name, known)} "
                    f"(options: {', '.join(sorted(known))})"
                )
        try:
            self._dataset = reasoning_gym.create_dataset(dataset, **{"seed": 0, **options})
        except (AssertionError, TypeError, ValueError) as error:
            raise EnvironmentSpecError(f"generator {dataset!r} refuses options {dict(options)}: {error}") from error
        self._entry = functools.lru_cache(maxsize=_CACHED_PROBLEMS)(self._make_entry)

    def make_problem(self, index: int) -> Problem:
        entry = self._entry(index)
        metadata = json.loads(json.dumps(entry.get("metadata", {}), default=str))
        metadata |= {"question": entry["question"], "problem_index": index}
        return Problem(question=entry["question"], answer=entry["answer"] or "", metadata=metadata)

    def score(self, prompt: Prompt, completion_text: str) -> float:
        if is_unfinished(prompt.text, completion_text):
            return 0.0
        entry = self._entry(prompt.metadata["problem_index"])
        if entry["question"] != prompt.metadata["question"] or (entry["answer"] or "") != prompt.answer:
            # Some generators iterate over sets, whose order differs between processes.
            question, answer = prompt.metadata["question"], prompt.answer or None
            entry = {"question": question, "answer": answer, "metadata": prompt.metadata}
        return float(self._dataset.score_answer(answer=extract_answer(completion_text), entry=entry))

    def _make_entry(self, index: int) -> dict[str, Any]:
        # Some generators (list_functions) also use Python's global random state.
        state = random.getstate()
        random.seed(index)
        try:
            return self._dataset[index]
        except IndexError:
            return self._dataset[index % len(self._dataset)]
        finally:
            random.setstate(state)


def extract_answer(completion_text: str) -> str:
    """Extract the answer: the last ``<answer>`` element, else all text after the reasoning, stripped."""
    text = after_reasoning(completion_text)
    tagged = _ANSWER_TAG.findall(text)
    return (tagged[-1] if tagged else text).strip()

"""Reward functions as users write them, and as they should not."""

import asyncio
import os
import time


def length_share(prompt, completion, limit=10):
    return min(1.0, len(completion) / limit)


def everything(prompt, completion, **row):
    return {
        "has_answer": float(row["answer"] in completion),
        "level": float(row["level"]),
        "plus": float("+" in prompt),
    }


async def later(completion, answer):
    await asyncio.sleep(0.01)
    return float(completion == answer)


def in_batches(prompts, completions, **columns):
    return [float(len(c)) for c in completions]


def of_a_batch(prompts, completions, answer, wait_s=0.0):
    time.sleep(wait_s)
    if "stop" in completions:
        os._exit(3)
    return [
        {"right": float(completion == right), "calls": float(len(completions))}
        for completion, right in zip(completions, answer, strict=True)
    ]


def too_few(completions):
    return [1.0]


def weighted(completion):
    return {"reward": 0.25, "style": 1.0}


def says_what_is_right(completion, answer, kind="bool"):
    right, form = completion == answer, completion.islower()
    return {
        "right": float(right),
        "form": float(form),
        "is_right": {"bool": right, "float": float(right), "two": 2}[kind],
    }


def threshold(completion, answer):
    value = 0.8 * (answer in completion) + 0.2 * completion.islower()
    return {"reward": value, "is_right": value >= 0.8}


def only_right(completion):
    return {"is_right": True}


def half(completion):
    return 0.5


def nothing(completion):
    return None


def surroundings(completion):
    if completion == "die":
        os._exit(3)
    readable = [path for path in ("/home", "/etc/passwd", "/var", "/run") if os.path.exists(path)]
    return {"readable": float(len(readable)), "variables": float("SECRET" in os.environ)}

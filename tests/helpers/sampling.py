"""Completions from the first engine of a fleet."""

from dataclasses import replace


def sample_prompts(fleet, prompts: list[list[int]], **sampling) -> list:
    """A completion of 16 tokens for each prompt; seeds 7, 8, ..."""
    client = fleet.clients[0]
    options = replace(client.sampling, max_tokens=16, stop_token_ids=(), **sampling)

    async def all_prompts() -> list:
        return [(await client.generate(prompt, 1, 7 + i, sampling=options))[0] for i, prompt in enumerate(prompts)]

    return fleet.sync(all_prompts(), 60.0)

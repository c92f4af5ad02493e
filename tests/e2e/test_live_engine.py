"""A real vLLM engine: tokens in and out, seeds, log-probabilities, stops, pauses and failures."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_weights import Reference, publish, random_weights, recorded
from transformers import AutoTokenizer

from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import choose
from megatron_fp8rl.rollout.client import EngineClient
from megatron_fp8rl.rollout.errors import EngineDeadlineError, EngineError
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.types import Completion
from tests.tolerances import ENGINE_LOGPROB_MAX, ENGINE_LOGPROB_MEAN, ROUTER_LOGIT_MAX, ROUTER_LOGIT_MEAN

PROMPT = list(range(20, 44))


@pytest.fixture(scope="module")
def weights(fleet: Fleet) -> dict[str, torch.Tensor]:
    return random_weights(fleet.cfg, seed=1)


@pytest.fixture
def client(fleet: Fleet, weights: dict[str, torch.Tensor]) -> EngineClient:
    """The engine, with ``weights`` as policy 1."""
    if fleet.clients[0].version != 1:
        publish(fleet, weights, 1)
    return fleet.clients[0]


def generate(fleet: Fleet, prompt: list[int], num_completions: int, seed: int, **sampling) -> list[Completion]:
    client = fleet.clients[0]
    how = replace(client.sampling, **({"stop_token_ids": ()} | sampling))
    return fleet.sync(client.generate(prompt, num_completions, seed, sampling=how), 120.0)


def let_it_sample(fleet: Fleet) -> None:
    """Return when earlier requests are being sampled."""
    generate(fleet, PROMPT[:3], 1, seed=0, max_tokens=4)


def assert_same_as_reference(fleet, weights, completion: Completion, temperature: float, start: int = 0) -> None:
    tokens = [*PROMPT, *completion.token_ids]
    reference = Reference(fleet.cfg, weights)
    expected = reference.logprobs(tokens, temperature, recorded(completion))[len(PROMPT) - 1 :]
    actual = torch.tensor(completion.rollout_logprobs)
    difference = (actual - expected[: len(actual)])[start:].abs()
    assert difference.mean() < ENGINE_LOGPROB_MEAN
    assert difference.max() < ENGINE_LOGPROB_MAX


def test_the_engine_says_that_it_computes_with_the_kernels_that_were_chosen(fleet):
    in_use = fleet.kernels()
    assert in_use == {
        "linears": ["EmulatedFp8LinearMethod"],
        "experts": ["EmulatedFp8MoEMethod (CPU)", "ReadableMoEMethod (CPU)"],  # layer 0; layer 1, in BF16
        "attention": ["CPU_ATTN"],
    }
    chosen = choose(fleet.cfg, Hardware("cpu"))
    assert chosen.engine.linears == chosen.engine.experts == "emulated" and chosen.disagreements(in_use) == []
    linears, experts = choose(fleet.cfg, Hardware("hopper")).disagreements(in_use)  # the choice of another machine
    assert linears == (
        "precision.kernels.engine_linears: DeepGEMM was chosen for the engine's FP8 linears, but the engine uses "
        "EmulatedFp8LinearMethod"
    )
    assert experts == (
        "precision.kernels.engine_experts: Triton was chosen for the engine's experts, but the engine uses "
        "EmulatedFp8MoEMethod (CPU), ReadableMoEMethod (CPU)"
    )


def test_tokens_in_tokens_out(fleet, client):
    completions = generate(fleet, PROMPT, 3, seed=7, max_tokens=16)
    assert [len(c.token_ids) for c in completions] == [16, 16, 16]
    assert len({c.token_ids for c in completions}) == 3
    for completion in completions:
        assert completion.finish_reason == "length"
        assert len(completion.rollout_logprobs) == 16
        assert completion.version_spans == ((0, 1),)
        assert (completion.min_version, completion.max_version) == (1, 1)
        assert recorded(completion).shape == (len(PROMPT) + 15, 2, 2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(fleet, client, weights, temperature):
    (completion,) = generate(fleet, PROMPT, 1, seed=3, max_tokens=24, temperature=temperature)
    assert_same_as_reference(fleet, weights, completion, temperature)


def test_logprobs_of_a_prompt_are_those_of_the_model_too(fleet, client, weights):
    (completion,) = generate(fleet, PROMPT, 1, seed=3, max_tokens=24)
    tokens = [*PROMPT, *completion.token_ids]
    found = fleet.sync(client.prompt_logprobs(tokens), 120.0)
    assert len(found) == len(tokens) - 1
    again = replace(completion, rollout_logprobs=tuple(found[len(PROMPT) - 1 :]))
    assert_same_as_reference(fleet, weights, again, 1.0)
    expected = Reference(fleet.cfg, weights).logprobs(tokens, 1.0, recorded(completion))
    # What precedes the completion as well, but for tokens that choose other experts.
    assert (torch.tensor(found) - expected).abs().mean() < ENGINE_LOGPROB_MEAN


def test_routed_experts_are_those_of_the_model(fleet, client, weights):
    (completion,) = generate(fleet, PROMPT, 1, seed=3, max_tokens=24)
    reference = Reference(fleet.cfg, weights)
    reference.logprobs([*PROMPT, *completion.token_ids], 1.0, recorded(completion))
    for layer, logits in enumerate(reference.router_logits):
        own = logits.float().gather(-1, reference.own_experts[layer])
        chosen = logits.float().gather(-1, torch.from_numpy(completion.routed_experts[:, layer].astype("int64")))
        # Near ties may go either way; an expert that the model would not have chosen costs about 1.
        lost = own.amin(-1) - chosen.amin(-1)
        assert lost.mean() < ROUTER_LOGIT_MEAN and lost.max() < ROUTER_LOGIT_MAX


def test_a_completion_depends_on_its_seed_and_on_nothing_else(fleet, client):
    alone = generate(fleet, PROMPT, 1, seed=1001, max_tokens=32)[0]

    async def crowd() -> list[list[Completion]]:
        how = replace(client.sampling, stop_token_ids=(), max_tokens=32)
        others = [client.generate(PROMPT[: 3 + i % 17], 4, 50 * i, sampling=how) for i in range(20)]
        return await asyncio.gather(*others, client.generate(PROMPT, 4, 1000, sampling=how))

    among_others = fleet.sync(crowd(), 120.0)[-1][1]
    assert among_others.token_ids == alone.token_ids
    assert among_others.rollout_logprobs == alone.rollout_logprobs


def test_greedy_sampling_ignores_the_seed(fleet, client):
    first, second = (generate(fleet, PROMPT, 1, seed=s, max_tokens=8, temperature=0.0)[0] for s in (1, 2))
    assert first.token_ids == second.token_ids


def test_stop_token_ends_a_completion_and_is_part_of_it(fleet, client):
    free = generate(fleet, PROMPT, 1, seed=5, max_tokens=64)[0]
    stop = free.token_ids[10]
    stopped = generate(fleet, PROMPT, 1, seed=5, max_tokens=64, stop_token_ids=(stop,))[0]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_stop_string_ends_a_completion(fleet, client):
    free = generate(fleet, PROMPT, 1, seed=6, max_tokens=64)[0]
    stop = free.text[5:7]
    stopped = generate(fleet, PROMPT, 1, seed=6, max_tokens=64, stop_strings=(stop,))[0]
    assert stopped.finish_reason == "stop"
    assert stop in stopped.text
    assert free.token_ids[: len(stopped.token_ids)] == stopped.token_ids
    assert len(stopped.token_ids) < 64


def test_a_text_leaves_out_only_end_and_padding_tokens_and_stops_at_special_ones(fleet, client):
    free = generate(fleet, PROMPT, 8, seed=8, max_tokens=200)
    tokenizer = AutoTokenizer.from_pretrained(fleet._hf_dir)
    for completion in free:
        shown = [token for token in completion.token_ids if token not in (0, 2)]  # <pad> and <eos>
        assert completion.text == tokenizer.decode(shown)
    marked = next(completion for completion in free if "<bos>" in completion.text)
    stopped = generate(fleet, PROMPT, 1, seed=8 + free.index(marked), max_tokens=200, stop_strings=("<bos>",))[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", marked.text.partition("<bos>")[0] + "<bos>")


def test_an_update_in_the_middle_shows_in_the_spans(fleet, client, weights):
    """Log-probabilities before the pause are of the old weights, later ones of the new weights."""
    new_weights = random_weights(fleet.cfg, seed=2)
    how = replace(client.sampling, stop_token_ids=(), max_tokens=400)
    published = threading.Event()

    async def until_published() -> list[Completion]:
        found: list[Completion] = []
        while not published.is_set():  # one is under way at every moment, however fast the engine is
            found += await client.generate(PROMPT, 2, 11 + len(found), sampling=how)
        return found

    running = fleet.submit(until_published())
    let_it_sample(fleet)
    publish(fleet, new_weights, 2)
    published.set()
    completions = running.result(timeout=240.0)
    assert all(len(completion.token_ids) == 400 for completion in completions)
    updated = [completion for completion in completions if (completion.min_version, completion.max_version) == (1, 2)]
    assert updated
    for completion in updated:
        assert recorded(completion).shape == (len(PROMPT) + 399, 2, 2)
        first, (boundary, version) = completion.version_spans
        assert first == (0, 1) and version == 2 and 0 < boundary < 400
        before = replace(
            completion,
            token_ids=completion.token_ids[:boundary],
            rollout_logprobs=completion.rollout_logprobs[:boundary],
            routed_experts=completion.routed_experts[: len(PROMPT) + boundary - 1],
        )
        assert_same_as_reference(fleet, weights, before, 1.0)
        experts = completion.routed_experts.astype(np.int64)
        experts[: len(PROMPT) + boundary - 1] = -1  # recorded under the old weights, recomputed under the new
        after = replace(completion, routed_experts=experts)
        assert_same_as_reference(fleet, new_weights, after, 1.0, start=boundary)


def test_requests_wait_while_the_engine_is_paused(fleet, client):
    fleet.sync(client.pause("keep"), 120.0)
    how = replace(client.sampling, stop_token_ids=(), max_tokens=4)
    waiting = fleet.submit(client.generate(PROMPT, 1, 1, sampling=how))
    fleet.sync(asyncio.sleep(0.5), 60.0)
    assert not waiting.done()
    client.version = 5
    fleet.sync(client.resume(), 120.0)
    assert waiting.result(timeout=120.0)[0].version_spans == ((0, 5),)
    client.version = 1


@pytest.mark.parametrize(("mode", "reason"), [("wait", "length"), ("abort", "abort")])
def test_pause_modes_end_running_completions(fleet, client, mode, reason):
    how = replace(client.sampling, stop_token_ids=(), max_tokens=300)
    running = fleet.submit(client.generate(PROMPT, 2, 21, sampling=how))
    let_it_sample(fleet)
    fleet.sync(client.pause(mode), 60.0)
    completions = running.result(timeout=60.0)
    assert {c.finish_reason for c in completions} == {reason}
    assert all((len(c.token_ids) == 300) == (mode == "wait") for c in completions)
    fleet.sync(client.resume(), 120.0)


def test_a_passed_deadline_names_replica_call_and_seconds(fleet, client):
    impatient = EngineClient(
        client.replica,
        sampling=replace(client.sampling, stop_token_ids=()),
        decode=str,
        request_deadline_s=0.05,
        update_deadline_s=1.0,
    )
    with pytest.raises(EngineDeadlineError, match=r"rollout-0 did not answer within 0.05 s, during /fp8rl/generate"):
        fleet.sync(impatient.generate(PROMPT, 8, 1), 120.0)
    fleet.sync(impatient.close(), 60.0)


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        (list(range(20, 90)) * 10, {}, r"status 400: .*length 700.*maximum model length of 576"),
        (PROMPT, {"temperature": -1.0}, r"status 400: .*temperature"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_reason(fleet, client, prompt, sampling, reason):
    with pytest.raises(EngineError, match=f"(?s)rollout-0 failed .*{reason}.*during /fp8rl/generate"):
        generate(fleet, prompt, 1, seed=1, **({"max_tokens": 2} | sampling))
    assert len(generate(fleet, PROMPT, 1, seed=1, max_tokens=2)[0].token_ids) == 2


def test_a_refusal_carries_the_engine_s_reason(fleet, client):
    with pytest.raises(EngineError, match=r"rollout-0 failed .*no_such_method"):
        fleet.sync(client.collective_rpc("no_such_method"), 60.0)
    assert len(generate(fleet, PROMPT, 1, seed=1, max_tokens=2)[0].token_ids) == 2

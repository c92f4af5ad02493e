"""Our scheduler beside vLLM's own: the same steps, the same tokens, but in few messages."""

import random
import zlib
from collections import defaultdict, deque
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_fp8rl import upstream
from megatron_fp8rl.data.model_dir import write_model_dir
from model_configs import tiny

pytestmark = pytest.mark.skipif(
    not upstream.applies("DecodeScheduler", "BufferingScheduler"),
    reason="engines use vLLM's scheduler with this version",
)

BLOCK, STOP, MAX_MODEL_LEN, BUFFERED_TOKENS = 4, 7, 96, 32


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """vLLM's configuration of a GPU's engine, as far as a scheduler reads it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    model = write_model_dir(tiny.tiny_qwen3(), tmp_path_factory.mktemp("scheduler") / "model")
    result = EngineArgs(
        model=str(model),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        dtype="bfloat16",
        skip_tokenizer_init=True,
    ).create_engine_config()
    result.scheduler_config.async_scheduling = True
    init_none_hash(sha256)
    return result


@pytest.fixture(autouse=True)
def second_runner(monkeypatch, config):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # which the configuration refuses on a CPU


def make(config, kind, num_blocks):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from megatron_fp8rl.rollout.vllm_plugin.patches_scheduler import BufferingAsyncScheduler, DecodeScheduler

    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return {"vllm": AsyncScheduler, "holding": BufferingAsyncScheduler, "ours": DecodeScheduler}[kind](
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )


def request(name, prompt, max_tokens, **sampling):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    defaults = {"logprobs": 0, "stop_token_ids": [STOP], "output_kind": RequestOutputKind.FINAL_ONLY}
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **(defaults | sampling)),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


class Runner:
    """Samples a token that depends on the request and its position alone, as a model with seeds does."""

    def __init__(self, stops_one_in, kept=False):
        self.lengths = {}  # tokens known when a request was started, or started again
        self.stops_one_in, self.kept = stops_one_in, kept

    def token(self, name, position):
        drawn = zlib.crc32(f"{name} {position}".encode())
        return STOP if self.stops_one_in and drawn % self.stops_one_in == 0 else 100 + drawn % 1000

    def columns(self, tokens, ends):
        """Ids, and with ``kept`` a vocabulary of 2000 and up to six words for each, padded as in one step."""
        if not self.kept:
            return tokens[:, None]
        rows = np.zeros((len(tokens), 3 + max(end % 7 for end in ends)), np.int32)
        rows[:, 0], rows[:, 1], rows[:, 2] = tokens, 2000, [end % 7 for end in ends]
        for row, end in zip(rows, ends, strict=True):
            row[3 : 3 + end % 7] = np.arange(end % 7) + end
        return rows

    def run(self, step):
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        computed = dict(zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.num_computed_tokens))
        for new in step.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self.lengths[new.req_id] = len(new.prefill_token_ids)
        names = list(step.num_scheduled_tokens)
        ends = [computed[name] + step.num_scheduled_tokens[name] for name in names]
        tokens = [
            [self.token(name, end)] if end >= self.lengths[name] else [] for name, end in zip(names, ends, strict=True)
        ]
        rows = [-0.001 * end for end in ends]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(
                self.columns(np.array([sum(t) for t in tokens], np.int32), ends),
                np.array(rows, np.float32)[:, None],
                np.array([end % 5 for end in ends], np.int32),
            ),
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def drive(scheduler, requests, *, arrivals, aborts=(), stops_one_in=0, kept=False, max_steps=2000):
    """Run two steps at a time, as the engine core does. The steps, and for each request its messages joined."""
    from vllm.v1.request import RequestStatus

    runner, steps, messages, queue = Runner(stops_one_in, kept), [], defaultdict(list), deque()
    waiting, aborts = deque(zip(arrivals, requests, strict=True)), dict(aborts)
    for number in range(max_steps):
        while waiting and waiting[0][0] <= number:
            scheduler.add_request(waiting.popleft()[1])
        if name := aborts.pop(number, None):
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        step = scheduler.schedule()
        steps.append(
            {
                "tokens": dict(step.num_scheduled_tokens),
                "cached": asdict(step.scheduled_cached_reqs),
                "new": [(r.req_id, r.block_ids, r.num_computed_tokens) for r in step.scheduled_new_reqs],
                "finished": set(step.finished_req_ids),
                "preempted": set(step.preempted_req_ids or ()),
                "common": step.num_common_prefix_blocks,
            }
        )
        if step.total_num_scheduled_tokens:
            queue.appendleft((step, runner.run(step)))
        if len(queue) == 2 or not step.total_num_scheduled_tokens:
            if not queue and not waiting:
                return steps, messages
            if queue:
                for outputs in scheduler.update_from_output(*queue.pop()).values():
                    for output in outputs.outputs:
                        messages[output.request_id].append(output)
    raise AssertionError(f"not finished after {max_steps} steps")


def joined(messages):
    """All that a server learns of a request."""
    logprobs = [message.new_logprobs for message in messages if message.new_logprobs is not None]
    return {
        "tokens": [token for message in messages for token in message.new_token_ids],
        "logprobs": np.concatenate([row.logprobs for row in logprobs]).tolist() if logprobs else [],
        "names": [without_padding(row) for rows in logprobs for row in rows.logprob_token_ids.tolist()],
        "ranks": np.concatenate([row.sampled_token_ranks for row in logprobs]).tolist() if logprobs else [],
        "end": (messages[-1].finish_reason, messages[-1].stop_reason),
        "cached": [m.prefill_stats.num_cached_tokens for m in messages if m.prefill_stats is not None],
    }


def without_padding(row):
    """The id of a token, and, if there are kept entries, the vocabulary's size and as many words as it has."""
    return row[: 3 + row[2]] if len(row) > 1 else row


CASES = {
    "all at once": {},
    "one after the other": {"spread": 40},
    "stops at random": {"stops_one_in": 30, "spread": 20},
    "too little memory": {"num_blocks": 60, "spread": 10},
    "too little memory, and stops": {"num_blocks": 60, "stops_one_in": 25},
    "common prompts": {"common": 12, "spread": 60},
    "aborts": {"aborts": True, "spread": 10, "stops_one_in": 40},
    "up to the model's length": {"max_tokens": 90},
    "no log-probabilities": {"sampling": {"logprobs": None}},
    "kept entries": {"num_blocks": 60, "stops_one_in": 25, "kept": True},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_and_completions_are_vllms(config, case):
    options = {"spread": 0, "common": 0, "max_tokens": 40, "num_blocks": 4000, "stops_one_in": 0, "kept": False}
    options |= CASES[case]
    actual = {}
    for kind in ("vllm", "holding", "ours"):
        rng = random.Random(case)
        requests = [
            request(
                f"r{i}",
                [*range(options["common"]), *(rng.randrange(50, 90) for _ in range(rng.randrange(1, 30)))][:89],
                rng.randrange(1, options["max_tokens"] + 1),
                **options.get("sampling", {}),
            )
            for i in range(24)
        ]
        for item in requests:
            item.max_tokens = min(item.max_tokens, MAX_MODEL_LEN - item.num_prompt_tokens)
        arrivals = sorted(rng.randrange(options["spread"] + 1) for _ in requests)
        aborts = {rng.randrange(5, 60): f"r{i}" for i in range(0, 24, 3)} if options.get("aborts") else {}
        actual[kind] = drive(
            make(config, kind, options["num_blocks"]),
            requests,
            arrivals=arrivals,
            aborts=aborts,
            stops_one_in=options["stops_one_in"],
            kept=options["kept"],
        )
    (theirs, their_messages) = actual["vllm"]
    assert len(theirs) > 30
    ended = {name for name, messages in their_messages.items() if messages[-1].finish_reason is not None}
    for ours, our_messages in (actual["holding"], actual["ours"]):
        for number, (expected, step) in enumerate(zip(theirs, ours, strict=True)):
            assert step == expected, f"step {number}"
        assert set(our_messages) == ended and len(ended) >= 16
        for name in ended:
            assert joined(our_messages[name]) == joined(their_messages[name]), name
            assert len(our_messages[name]) <= 1 + MAX_MODEL_LEN // BUFFERED_TOKENS
    if case == "too little memory":
        assert any(step["preempted"] for step in theirs)


def test_the_short_path_is_taken(config, monkeypatch):
    """Otherwise the comparison above compares vLLM with itself."""
    from vllm.v1.core.sched.scheduler import Scheduler

    calls = defaultdict(int)
    for method in ("schedule", "update_from_output"):
        plain = getattr(Scheduler, method)

        def counted(self, *args, plain=plain, method=method):
            calls[method] += 1
            return plain(self, *args)

        monkeypatch.setattr(Scheduler, method, counted)
    requests = [request(f"r{i}", [50 + i, 60, 70], 60) for i in range(16)]
    steps, _ = drive(make(config, "ours", 4000), requests, arrivals=[0] * 16)
    assert len(steps) > 60 and calls["schedule"] < 6 and calls["update_from_output"] < 6


@pytest.mark.parametrize(
    "sampling",
    [{"stop": ["end"], "detokenize": True}, {"logprobs": 2}, {"prompt_logprobs": 0}, {"output_kind": "DELTA"}],
    ids=str,
)
def test_a_request_whose_server_needs_every_token_gets_every_token(config, sampling):
    from vllm.sampling_params import RequestOutputKind

    if "output_kind" in sampling:
        sampling = {"output_kind": RequestOutputKind[sampling["output_kind"]]}
    _, messages = drive(make(config, "ours", 4000), [request("r", [50, 60, 70], 12, **sampling)], arrivals=[0])
    assert [len(message.new_token_ids) for message in messages["r"]] == [1] * 12


def test_a_pause_returns_the_tokens_so_far(config):
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.request import RequestStatus

    scheduler, runner, sent = make(config, "ours", 4000), Runner(0), []
    core = SimpleNamespace(scheduler=scheduler, output_queue=SimpleNamespace(put_nowait=sent.append))
    core._send_abort_outputs_to_client = lambda names, client: core._send_finish_outputs_to_client(
        names, client, FinishReason.ABORT
    )
    core._send_finish_outputs_to_client = lambda *args: EngineCoreProc._send_finish_outputs_to_client(core, *args)
    scheduler.add_request(request("r", [50, 60, 70], 60))
    previous = None
    for _ in range(10):
        step = scheduler.schedule()
        if previous is not None:
            scheduler.update_from_output(previous, runner.run(previous))
        previous = step
    ended = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    EngineCoreProc._send_abort_outputs(core, ended)
    ((_, message),) = sent
    (output,) = message.outputs
    assert output.new_token_ids == [runner.token("r", position) for position in range(3, 12)]
    assert output.finish_reason == FinishReason.ABORT
    assert (
        output.new_logprobs.logprobs[:, 0].tolist() == np.array([-0.001 * p for p in range(3, 12)], np.float32).tolist()
    )
    assert not scheduler.buffers and not scheduler.ended
    assert scheduler.update_from_output(previous, runner.run(previous)) == {}

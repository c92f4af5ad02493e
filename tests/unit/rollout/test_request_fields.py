"""The request surface of the official client: each field is done as asked, or rejected with status 400 by name."""

import asyncio
import contextlib
import json
import re
import typing
from pathlib import Path

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from megatron_fp8rl.config import SessionConfig
from megatron_fp8rl.data.conversation import ChatFormat
from megatron_fp8rl.data.tokenizer import decode
from megatron_fp8rl.rollout.agents import request_fields
from megatron_fp8rl.rollout.agents.gateway import Gateway
from megatron_fp8rl.rollout.agents.request_fields import FIELDS, RequestError, check_request
from megatron_fp8rl.rollout.agents.session import Session
from megatron_fp8rl.rollout.agents.tool_calls import ToolCalls
from megatron_fp8rl.rollout.errors import EngineDeadError, EngineDeadlineError, EngineError, RequestLostError
from tests.helpers.chat_templates import format_of
from tests.helpers.samples import make_completion

ROOT = Path(__file__).resolve().parents[3]
QWEN = format_of("qwen3")
ASK = [{"role": "user", "content": "What is 2+3?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
# A value of the type that OpenAI and vLLM document, other than the neutral one.
OTHERS = {
    "add_generation_prompt": False,
    "add_special_tokens": {"chat": True, "completions": False},
    "allowed_token_ids": [1, 2],
    "audio": {"format": "wav", "voice": "alloy"},
    "bad_words": ["no"],
    "best_of": 2,
    "cache_salt": "salt",
    "chat_template": "{{ messages }}",
    "continue_final_message": True,
    "documents": [{"title": "a", "text": "b"}],
    "ec_transfer_params": {"a": 1},
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "f", "parameters": {}}],
    "guided_choice": ["a", "b"],
    "guided_decoding_backend": "xgrammar",
    "guided_grammar": "root ::= 'a'",
    "guided_json": {"type": "object"},
    "guided_regex": "[0-9]+",
    "guided_whitespace_pattern": " ",
    "ignore_eos": True,
    "include_reasoning": False,
    "kv_transfer_params": {"a": 1},
    "length_penalty": 2.0,
    "logit_bias": {"5": 100},
    "logprob_token_ids": [1],
    "media_io_kwargs": {"image": {}},
    "min_tokens": 3,
    "mm_processor_kwargs": {"a": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "n": 2,
    "prediction": {"type": "content", "content": "5"},
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt_embeds": "AAAA",
    "prompt_logprobs": 1,
    "repetition_detection": {"max_pattern_size": 4},
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "return_assistant_tokens_mask": True,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "stop_token_ids": [2],
    "store": True,
    "structured_outputs": {"regex": "a"},
    "suffix": "end",
    "thinking_token_budget": 10,
    "top_logprobs": 3,
    "truncate_prompt_tokens": 3,
    "truncation_side": "left",
    "use_beam_search": True,
    "verbosity": "low",
    "vllm_xargs": {"a": 1},
    "web_search_options": {},
}


class Endpoint:
    """A gateway with one session, whose policy samples ``answer``; remembers the sampled prompts as text."""

    def __init__(self, answer: str = "5", *, chat: ChatFormat = QWEN, parser: str = "", fails: Exception | None = None):
        self.answer, self.chat, self.fails = answer, chat, fails
        self.prompts: list[str] = []
        self.sampling: list[dict] = []
        self.seeds: list[int] = []
        self.gateway = Gateway("policy", ToolCalls(parser, chat.tokenizer))
        limits = {"token_budget": 2000, "max_completion_tokens": 100}
        self.session = Session("s", SessionConfig(), chat, self._sample, 0, **limits)

    async def _sample(self, token_ids, seed, session, **sampling):
        self.prompts.append(self.chat.tokenizer.decode(token_ids))
        self.sampling.append(sampling)
        self.seeds.append(seed)
        if self.fails is not None:
            raise self.fails
        (end,) = self.chat.stop_ids
        ids = (*self.chat.tokenizer.encode(self.answer, add_special_tokens=False), end)
        return make_completion(ids, [-0.5] * len(ids), text=decode(self.chat.tokenizer, ids[:-1]))

    def asked(self, ask):
        """The result of ``ask(client)`` with the official client, or the error that it raises."""

        async def run():
            await self.gateway.start()
            key = self.gateway.open_session(self.session)
            try:
                async with AsyncOpenAI(base_url=self.gateway.url, api_key=key, max_retries=0) as client:
                    return await ask(client)
            except openai.APIStatusError as error:
                return error
            finally:
                await self.gateway.close()

        return asyncio.run(run())

    def chatted(self, **fields):
        return self.asked(lambda client: client.chat.completions.create(**{"model": "m", "messages": ASK, **fields}))

    def completed(self, **fields):
        return self.asked(lambda client: client.completions.create(**{"model": "m", "prompt": "2+3=", **fields}))

    def posted(self, path: str, content: bytes) -> tuple[int, dict, dict]:
        """(status, error, headers) of a request that the official client cannot send."""

        async def run(client):
            headers = {"authorization": f"Bearer {client.api_key}"}
            async with aiohttp.ClientSession() as http:
                async with http.post(f"{self.gateway.url}{path}", data=content, headers=headers) as answer:
                    body = await answer.json()
                    return answer.status, body.get("error"), dict(answer.headers)

        return self.asked(run)


def names_of(*types) -> set[str]:
    return {name for kind in types for name in typing.get_type_hints(kind)}


def test_every_field_of_the_client_and_of_vllm_is_in_the_table():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    chat = names_of(chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming)
    text = names_of(text_params.CompletionCreateParamsNonStreaming, text_params.CompletionCreateParamsStreaming)
    assert {"messages", "web_search_options"} <= chat and {"prompt", "best_of"} <= text
    assert chat | set(ChatCompletionRequest.model_fields) <= set(FIELDS["chat"])
    assert text | set(CompletionRequest.model_fields) <= set(FIELDS["completions"])


def test_the_page_lists_every_field():
    page = (ROOT / "docs" / "agents.md").read_text()
    remedy = "run: python -m megatron_fp8rl.rollout.agents.request_fields, and copy its tables to docs/agents.md"
    assert request_fields.markdown() in page, remedy
    for name in {name for fields in FIELDS.values() for name in fields}:
        assert f"`{name}`" in request_fields.markdown(), name


@pytest.mark.parametrize("surface", ["chat", "completions"])
def test_a_field_that_is_not_done_is_rejected_by_name_unless_neutral(surface):
    base = {"messages": ASK} if surface == "chat" else {"prompt": "2+3="}
    for name, field in FIELDS[surface].items():
        if field.neutral is None:
            continue
        other = OTHERS[name]
        other = other[surface] if isinstance(other, dict) and surface in other else other
        with pytest.raises(RequestError, match=rf"^{name} = .*leave it out") as caught:
            check_request({**base, name: other}, surface)
        assert caught.value.field == name
        for value in (None, *field.neutral):
            assert check_request({**base, name: value}, surface)["messages" if surface == "chat" else "prompt"]


def test_the_neutral_values_are_the_defaults_of_vllm():
    """Otherwise a client that writes a default out would be rejected, or asks for something else than this endpoint."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    other_defaults = {"skip_special_tokens", "return_tokens_as_token_ids", "add_special_tokens"}  # the page names them
    for surface, request in (("chat", ChatCompletionRequest), ("completions", CompletionRequest)):
        for name, model_field in request.model_fields.items():
            field = FIELDS[surface][name]
            default = model_field.get_default(call_default_factory=True)
            if field.neutral is not None and name not in other_defaults:
                assert default is None or default in field.neutral, (surface, name, default)


@pytest.mark.parametrize("name", ["n", "logit_bias", "response_format", "top_logprobs", "modalities", "store"])
def test_the_client_gets_400_with_the_name_of_the_field(name):
    endpoint = Endpoint()
    error = endpoint.chatted(**{name: OTHERS[name]})
    assert isinstance(error, openai.BadRequestError) and error.param == name and name in str(error)
    assert endpoint.prompts == [], "it is rejected before anything is sampled"


@pytest.mark.parametrize("name", ["guided_json", "allowed_token_ids", "min_tokens", "structured_outputs", "vllm_xargs"])
def test_extra_fields_of_vllm_get_400_too(name):
    for endpoint_of in ("chatted", "completed"):
        error = getattr(Endpoint(), endpoint_of)(extra_body={name: OTHERS[name]})
        assert isinstance(error, openai.BadRequestError) and error.param == name


def test_an_unknown_field_is_named_with_a_similar_one():
    error = Endpoint().chatted(extra_body={"max_token": 5})
    assert isinstance(error, openai.BadRequestError) and "did you mean max_tokens?" in str(error)
    assert "leave it out" in str(Endpoint().chatted(extra_body={"ebnf": None}))


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
WRONG = {
    "image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"content\[0\]\.type = .image_url"),
    "audio": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, AUDIO]}]}, "input_audio"),
    "refusal": ({"messages": [*ASK, {"role": "assistant", "refusal": "no"}, *ASK]}, "refusal"),
    "function_call": ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "function_call"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\] is not a message"),
    "no role": ({"messages": [{"content": "a"}]}, "has no role"),
    "no messages": ({"messages": []}, "not a list of messages"),
    "tool of no function": ({"tools": [{"type": "function"}]}, r"tools\[0\] has no function"),
    "custom tool": ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, r"tools\[0\]\.type"),
    "parameters": ({"tools": [{"type": "function", "function": {"name": "a", "parameters": "b"}}]}, "parameters"),
    "call": ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "function has no name"),
    "required": ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    "named tool": ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    "empty stop": ({"stop": [""]}, r"stop\[0\]"),
    "stop": ({"stop": 5}, "stop = 5"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens = 0"),
    "text as number": ({"max_tokens": "9"}, "max_tokens = .*9"),
    "fraction": ({"max_completion_tokens": 2.5}, "max_completion_tokens = 2.5"),
    "truth as number": ({"max_tokens": True}, "max_tokens = true"),
    "temperature": ({"temperature": -1}, "temperature = -1"),
    "temperature as text": ({"temperature": "hot"}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p = 0"),
    "seed": ({"seed": 1 << 70}, "seed"),
    "stream": ({"extra_body": {"stream": "yes"}}, "stream"),
    "stream options": ({"stream_options": {"include_usage": True}}, "stream = true"),
    "template argument": ({"extra_body": {"chat_template_kwargs": {"thinking_mode": 1}}}, "thinking_mode"),
    "template variable": ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "messages"),
    "effort": ({"reasoning_effort": "high"}, "reasoning_effort"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_gets_400_and_is_named(case):
    fields, pattern = WRONG[case]
    endpoint = Endpoint()
    error = endpoint.chatted(**fields)
    assert isinstance(error, openai.BadRequestError), error
    assert re.search(pattern, error.body["message"]) and error.response.headers["x-should-retry"] == "false"
    assert endpoint.prompts == []


@pytest.mark.parametrize("prompt", [[-1], [10**9], [2**40], [], "", [1.5], ["a", "b"], [[1], [2]], [[-1]], [True], 5])
def test_a_wrong_prompt_gets_400(prompt):
    endpoint = Endpoint()
    error = endpoint.completed(prompt=prompt)
    assert isinstance(error, openai.BadRequestError) and "prompt" in error.body["message"]
    assert endpoint.prompts == []


def test_the_first_token_after_the_vocabulary_is_rejected():
    size = len(QWEN.tokenizer)
    assert isinstance(Endpoint().completed(prompt=[size]), openai.BadRequestError)
    assert Endpoint().completed(prompt=[size - 1]).choices[0].text == "5"


def nested(depth: int) -> str:
    return '{"messages": [{"role": "user", "content": "a"}], "metadata": {"a": ' + "[" * depth + "]" * depth + "}}"


BODIES = {
    "deep": (nested(200).encode(), "metadata is nested deeper"),
    "very deep": (nested(100_000).encode(), "nested too deeply"),
    "surrogate": (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "messages[0].content has"),
    "surrogate in a key": (rb'{"messages": [{"role": "user", "content": "a", "\udfff": 1}]}', "a key of messages[0]"),
    "surrogate in a name": (rb'{"\ud800": 1}', "the name of a field"),
    "surrogate in stop": (rb'{"messages": [{"role": "user", "content": "a"}], "stop": ["\ud83d"]}', "stop[0] has"),
    "no JSON": (b"{", "no JSON"),
    "no UTF-8": (b'{"messages": "\xff\xfe"}', "no JSON"),
    "list": (b"[]", "not a JSON object"),
    "empty": (b"", "no JSON"),
    "NaN": (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "temperature"),
    "infinite": (b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "temperature"),
    "long number": (b'{"messages": ' + b"9" * 5000 + b"}", "no JSON"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_cannot_be_read_gets_400(case, caplog, capfd):
    content, message = BODIES[case]
    status, error, headers = Endpoint().posted("/chat/completions", content)
    assert status == 400 and message in error["message"] and headers["x-should-retry"] == "false"
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


def test_an_unknown_path_gets_404_and_names_those_that_exist():
    status, error, _ = Endpoint().posted("/responses", b"{}")
    assert status == 404 and "POST /v1/responses" in error["message"] and "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize(
    ("error", "status", "may_pass"),
    [
        (RequestLostError("the request has cost two rollout replicas"), 400, False),
        (EngineError("refused", status=400), 400, False),
        (EngineError("failed", status=500), 500, False),
        (EngineError("was aborted"), 503, True),
        (EngineDeadlineError("did not answer"), 503, True),
        (EngineDeadError("no rollout replica is left"), 503, False),
        (ZeroDivisionError("a bug"), 500, False),
    ],
)
def test_only_what_may_pass_is_retried(error, status, may_pass, caplog, capfd):
    endpoint = Endpoint(
        fails=type(error)(f"{error}; see a.log, which ends with\n  Traceback") if status != 400 else error
    )
    if isinstance(error, EngineError):
        endpoint.fails.status = error.status
    answered = endpoint.chatted()
    assert answered.status_code == status and "Traceback" not in str(answered)
    assert answered.response.headers["x-should-retry"] == str(may_pass).lower()
    assert ("retry-after" in answered.response.headers) == may_pass
    assert "Traceback (most" not in caplog.text + "".join(capfd.readouterr())


def test_a_session_at_its_limit_gets_400_and_too_many_requests_get_429():
    error = Endpoint().chatted(messages=[{"role": "user", "content": "7" * 3000}])
    assert isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded"
    endpoint = Endpoint()
    endpoint.session._num_open = 64
    error = endpoint.chatted()
    assert isinstance(error, openai.RateLimitError) and error.response.headers["retry-after"] == "1"
    assert error.response.headers["x-should-retry"] == "true"


# ---- fields that are done as asked


def test_replaced_fields_and_fields_without_effect_are_accepted():
    fields = {"temperature": 0.3, "top_p": 0.9, "seed": 7, "user": "someone", "metadata": {"a": "b"}}
    fields |= {"service_tier": "auto", "safety_identifier": "a", "prompt_cache_key": "b", "store": False, "n": 1}
    answer = Endpoint().chatted(**fields, extra_body={"top_k": 5, "min_p": 0.1, "request_id": "mine"})
    assert answer.choices[0].message.content == "5" and answer.id == "cmpl-mine"


def test_the_text_ends_before_or_after_the_stop_text():
    endpoint = Endpoint("one two three")
    assert endpoint.chatted(stop=["zero", "two"]).choices[0].message.content == "one "
    assert endpoint.sampling[0]["stop"] == ("zero", "two")
    included = {"stop": "two", "extra_body": {"include_stop_str_in_output": True}}
    assert Endpoint("one two three").completed(**included).choices[0].text == "one two"


def test_the_shorter_limit_of_tokens_holds():
    for fields, expected in (
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 10**9}, 100),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
    ):
        endpoint = Endpoint()
        endpoint.chatted(**fields)
        assert [sampling["max_tokens"] for sampling in endpoint.sampling] == [expected]


def test_a_seed_repeats_the_answer_to_one_prompt_in_one_session():
    def seeds(session_seed: int) -> list[int]:
        endpoint = Endpoint()
        endpoint.session.seed = session_seed

        async def ask(client):
            for text, seed in (("a", 7), ("a", 7), ("a", 8), ("b", 7), ("a", None), ("a", None)):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], seed=seed)

        endpoint.asked(ask)
        return endpoint.seeds

    first, again, other = seeds(0), seeds(0), seeds(1)
    assert first == again and first[0] == first[1] and len(set(first)) == 5
    assert not set(first[:4]) & set(other[:4]), "the sessions of a group differ"
    assert first[4:] == [0, 1 << 20], "as if the others had not been"


def test_logprobs_are_those_of_the_sampled_tokens():
    choice = Endpoint().chatted(logprobs=True).choices[0]
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5, -0.5]
    assert all(re.fullmatch(r"token_id:\d+", entry.token) for entry in choice.logprobs.content)
    assert Endpoint().completed(logprobs=0).choices[0].logprobs.token_logprobs == [-0.5, -0.5]
    assert isinstance(Endpoint().completed(logprobs=5), openai.BadRequestError)


def test_without_parallel_calls_the_answer_has_the_first_call():
    two = f"{CALL}\n{CALL.replace('2', '3')}"
    for parallel, expected in ((True, 2), (False, 1)):
        endpoint = Endpoint(two, parser="hermes")
        message = endpoint.chatted(tools=[TOOL], parallel_tool_calls=parallel).choices[0].message
        assert [json.loads(call.function.arguments)["a"] for call in message.tool_calls] == [2, 3][:expected]


def test_the_next_turn_continues_the_answer_whose_second_call_was_left_out():
    endpoint = Endpoint(f"{CALL}\n{CALL}", parser="hermes")

    async def two_turns(client):
        fields = {"model": "m", "tools": [TOOL], "parallel_tool_calls": False}
        first = (await client.chat.completions.create(messages=ASK, **fields)).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "5"}
        return await client.chat.completions.create(messages=[*ASK, first.model_dump(), result], **fields)

    endpoint.asked(two_turns)
    assert len(endpoint.session.trajectories()) == 1 and endpoint.prompts[1].startswith(endpoint.prompts[0])


def test_template_arguments_reach_the_template_and_separate_branches():
    chat = format_of("qwen3")
    chat.tokenizer.chat_template = (
        "{% if enable_thinking is defined and not enable_thinking %}no {% endif %}" + chat.tokenizer.chat_template
    )
    endpoint = Endpoint(chat=chat)

    async def ask(client):
        for value in (True, False, False):
            fields = {"model": "m", "extra_body": {"chat_template_kwargs": {"enable_thinking": value}}}
            messages = list(ASK)
            for _ in range(2):
                answer = await client.chat.completions.create(messages=messages, **fields)
                messages += [answer.choices[0].message.model_dump(), *ASK]

    endpoint.asked(ask)
    assert [text.startswith("no ") for text in endpoint.prompts] == [False, False, True, True, True, True]
    assert len(endpoint.session.trajectories()) == 3


def test_tools_need_a_template_that_writes_them():
    for chat in (format_of("llama3"), ChatFormat(QWEN.tokenizer, False, {}, QWEN.stop_ids)):
        if "tools" not in str(chat.tokenizer.chat_template) or not chat.uses_chat:
            error = Endpoint(chat=chat).chatted(tools=[TOOL])
            assert isinstance(error, openai.BadRequestError) and "tools" in str(error)


def test_calls_need_a_template_that_writes_them():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    error = Endpoint(chat=ChatFormat(QWEN.tokenizer, False, {}, QWEN.stop_ids)).chatted(messages=messages)
    assert isinstance(error, openai.BadRequestError) and "tool calls" in str(error)
    assert Endpoint().chatted(messages=messages).choices[0].message.content == "5"


@pytest.mark.parametrize("field", ["messages", "tools", "prompt"])
def test_what_cannot_fit_is_rejected_before_it_is_tokenized(field, monkeypatch):
    def encode(*args, **fields):
        raise AssertionError("it is tokenized")

    endpoint, text = Endpoint(), "7" * 200_000
    monkeypatch.setattr(endpoint.chat.tokenizer, "encode", encode)
    error = {
        "messages": lambda: endpoint.chatted(messages=[{"role": "user", "content": text}]),
        "tools": lambda: endpoint.chatted(tools=[{"type": "function", "function": {"name": "a", "description": text}}]),
        "prompt": lambda: endpoint.completed(prompt=text),
    }[field]()
    assert isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded"


def test_a_developer_is_a_system_unless_the_template_knows_developers():
    endpoint = Endpoint()
    endpoint.chatted(messages=[{"role": "developer", "content": "Be brief."}, *ASK])
    assert "system\nBe brief." in endpoint.prompts[0]


def test_a_message_that_the_template_leaves_out_is_rejected():
    chat = format_of("qwen3")
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    error = Endpoint(chat=chat).chatted(messages=[{"role": "narrator", "content": "Once"}, *ASK])
    assert isinstance(error, openai.BadRequestError) and "narrator" in str(error)


@pytest.mark.parametrize("stream", [False, True])
def test_both_surfaces_answer_and_stream(stream):
    async def ask(client):
        texts = []
        for create in (
            client.chat.completions.create(model="m", messages=ASK, stream=stream),
            client.completions.create(model="m", prompt=["2+3="], stream=stream),
        ):
            answer = await create
            if not stream:
                choice = answer.choices[0]
                texts.append(choice.message.content if hasattr(choice, "message") else choice.text)
                continue
            text = ""
            async for chunk in answer:
                for choice in chunk.choices:
                    text += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
            texts.append(text)
        return texts

    assert Endpoint().asked(ask) == ["5", "5"]


def test_a_client_that_leaves_is_no_error(caplog, capfd):
    endpoint = Endpoint()

    async def hang(*args, **sampling):
        await asyncio.sleep(30)

    endpoint.session._sample = hang

    async def ask(client):
        with contextlib.suppress(openai.APITimeoutError):
            await client.chat.completions.create(model="m", messages=ASK, timeout=0.2)
        await asyncio.sleep(0.2)
        return endpoint.session._num_open

    assert endpoint.asked(ask) == 0
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())

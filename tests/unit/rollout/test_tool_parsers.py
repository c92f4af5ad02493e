"""vLLM's tool parsers behind the endpoint, with tokenizers that mark the parsers' markers as special tokens."""

import asyncio
import json
import logging

import pytest
from openai import AsyncOpenAI

from megatron_fp8rl.config import SessionConfig
from megatron_fp8rl.data.conversation import ChatFormat
from megatron_fp8rl.data.tokenizer import character_tokenizer, decode
from megatron_fp8rl.rollout.agents.gateway import Gateway
from megatron_fp8rl.rollout.agents.session import Session
from megatron_fp8rl.rollout.agents.tool_calls import ToolCalls
from tests.helpers.chat_templates import TEMPLATES
from tests.helpers.samples import make_completion

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ARGUMENTS = {"city": "Bonn", "days": 2}
JSON = json.dumps(ARGUMENTS)
NAMED = json.dumps({"name": "weather", "arguments": ARGUMENTS})
XML = "weather<arg_key>city</arg_key><arg_value>Bonn</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>"
CODER = "<function=weather><parameter=city>Bonn</parameter><parameter=days>2</parameter></function>"
# parser: (markers, which are special tokens; an answer with one call)
CALLS = {
    "mistral": ("[TOOL_CALLS]", f"[TOOL_CALLS][{NAMED}]"),
    "hermes": ("<tool_call> </tool_call>", f"<tool_call>\n{NAMED}\n</tool_call>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> "
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "glm45": (
        "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
        f"<tool_call>{XML}</tool_call>",
    ),
    "qwen3_coder": ("<tool_call> </tool_call>", f"<tool_call>{CODER}</tool_call>"),
    "internlm": (
        "<|action_start|> <|plugin|> <|action_end|>",
        f'<|action_start|><|plugin|>{{"name": "weather", "parameters": {JSON}}}<|action_end|>',
    ),
    "jamba": ("<tool_calls> </tool_calls>", f"<tool_calls>[{NAMED}]</tool_calls>"),
    "granite": ("<|tool_call|>", f"<|tool_call|>[{NAMED}]"),
    "llama3_json": ("<|python_tag|>", f"<|python_tag|>{NAMED}"),
    "pythonic": ("<|python_tag|>", "<|python_tag|>[weather(city='Bonn', days=2)]"),
    "xlam": ("[TOOL_CALLS]", f"[TOOL_CALLS][{NAMED}]"),
}
ALONE = ("llama3_json", "pythonic", "granite", "internlm", "jamba", "xlam")  # answers without text before the call


def tokenizer_of(markers: str):
    tokenizer = character_tokenizer()
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", *markers.split()]
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(special))})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATES["qwen3"]
    return tokenizer


def asked(parser: str, tokenizer, answer: str, **request):
    """The endpoint's choice for a request of the official client, when the policy samples an answer."""
    ids = (*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id)

    async def sample(token_ids, seed, session, **sampling):
        return make_completion(ids, [-0.5] * len(ids), text=decode(tokenizer, ids))

    async def ask():
        tools = ToolCalls(parser, tokenizer)
        tools.load()
        gateway = Gateway("m", tools)
        await gateway.start()
        chat = ChatFormat(tokenizer, True, {}, frozenset({tokenizer.eos_token_id}))
        session = Session("s", SessionConfig(), chat, sample, 0, token_budget=4096, max_completion_tokens=1024)
        key = gateway.open_session(session)
        try:
            async with AsyncOpenAI(base_url=gateway.url, api_key=key, max_retries=0) as client:
                request.setdefault("tools", TOOLS)
                messages = [{"role": "user", "content": "?"}]
                answered = await client.chat.completions.create(model="m", messages=messages, **request)
                return answered.choices[0]
        finally:
            await gateway.close()

    return asyncio.run(ask())


def of_vllm(parser: str, tokenizer, answer: str):
    """(content, [(name, arguments)]) of vLLM's server: it adjusts the request, decodes the tokens and parses them."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=TOOLS, model="m")
    parsing = ParserManager.get_parser(tool_parser_name=parser, enable_auto_tools=True)(tokenizer, request.tools)
    request = parsing.adjust_request(request)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)
    _, content, calls = parsing.parse(text, request, enable_auto_tools=True)
    return content, [(call.name, call.arguments) for call in calls or ()]


@pytest.mark.parametrize("parser", CALLS)
def test_a_call_between_special_tokens_is_a_call(parser):
    markers, call = CALLS[parser]
    tokenizer = tokenizer_of(markers)
    answer = call if parser in ALONE else f"I look it up.{call}"
    choice = asked(parser, tokenizer, answer)
    assert choice.finish_reason == "tool_calls", choice
    (sent,) = choice.message.tool_calls
    assert sent.id and sent.type == "function" and sent.function.name == "weather"
    assert json.loads(sent.function.arguments) == ARGUMENTS
    assert (choice.message.content or "") == ("" if parser in ALONE else "I look it up.")
    content, calls = of_vllm(parser, tokenizer, answer)
    if calls:  # vLLM's server leaves out the special markers of some parsers and then finds no call
        assert (choice.message.content, [(sent.function.name, sent.function.arguments)]) == (content, calls)


def test_a_call_as_bare_json_ends_with_tool_calls():
    choice = asked("llama3_json", tokenizer_of("<|python_tag|>"), NAMED)
    (sent,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and json.loads(sent.function.arguments) == ARGUMENTS


def test_bare_json_without_the_markers_of_the_parser_is_text():
    tokenizer = tokenizer_of(CALLS["hermes"][0])
    choice = asked("hermes", tokenizer, NAMED)
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("stop", None, NAMED)
    assert of_vllm("hermes", tokenizer, NAMED) == (NAMED, [])


def test_a_call_before_a_stop_string_is_a_call():
    markers, call = CALLS["hermes"]
    choice = asked("hermes", tokenizer_of(markers), f"{call}\nObservation: 3", stop=["Observation:"])
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize("request_options", [{"tools": []}, {"tool_choice": "none"}])
def test_without_tools_the_markers_are_text(request_options):
    markers, call = CALLS["hermes"]
    choice = asked("hermes", tokenizer_of(markers), call, **request_options)
    assert (choice.finish_reason, choice.message.content) == ("stop", call)


def test_an_answer_at_which_a_parser_fails_is_text_and_is_reported_once(caplog):
    tokenizer = tokenizer_of(CALLS["mistral"][0])
    tools, answer = ToolCalls("mistral", tokenizer), "[TOOL_CALLS][]a[TOOL_CALLS][]"  # vLLM's parser raises
    with caplog.at_level(logging.WARNING):
        assert [tools.message(answer, TOOLS) for _ in range(2)] == [{"content": answer}] * 2
    (record,) = (record for record in caplog.records if record.name.startswith("megatron_fp8rl"))
    assert "--session.tool_parser mistral fails" in record.getMessage()


def test_a_parser_whose_markers_the_tokenizer_lacks_is_refused():
    with pytest.raises(ValueError, match="--session.tool_parser = 'mistral' does not fit the tokenizer .*Choose"):
        ToolCalls("mistral", character_tokenizer()).load()

"""vLLM's tool parsers behind the endpoint, with tokenizers that mark the parsers' markers as special tokens."""

import asyncio
import json
import logging
from dataclasses import replace

import pytest
from openai import AsyncOpenAI

from megatron_fp8rl.config import ConfigError, SessionConfig
from megatron_fp8rl.data.conversation import ChatFormat
from megatron_fp8rl.data.tokenizer import PRINTABLE_ASCII, character_tokenizer, decode
from megatron_fp8rl.preflight.data_check import check_data
from megatron_fp8rl.rollout.agents.gateway import Gateway
from megatron_fp8rl.rollout.agents.session import Session
from megatron_fp8rl.rollout.agents.tool_calls import ToolCalls, before_stop
from tests.helpers.chat_templates import TEMPLATES, format_of
from tests.helpers.samples import make_completion
from tests.helpers.sessions import Engine, agent_file, config, play, prompt

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ARGUMENTS = {"city": "Bonn", "days": 2}
JSON = json.dumps(ARGUMENTS)
NAMED = json.dumps({"name": "weather", "arguments": ARGUMENTS})
XML = "weather<arg_key>city</arg_key><arg_value>Bonn</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>"
CODER = "<function=weather><parameter=city>Bonn</parameter><parameter=days>2</parameter></function>"
DSML = "｜DSML｜"
DSML_PARAMETERS = (
    f'<{DSML}parameter name="city" string="true">Bonn</{DSML}parameter>'
    f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>'
)
DSML_CALL = f'<{DSML}invoke name="weather">\n{DSML_PARAMETERS}\n</{DSML}invoke>'
STEP = (
    '<steptml:invoke name="weather"><steptml:parameter name="city">Bonn</steptml:parameter>'
    '<steptml:parameter name="days">2</steptml:parameter></steptml:invoke>'
)
PYTHON = "weather(city='Bonn', days=2)"
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
    "apertus": (
        "<|tools_prefix|> <|tools_suffix|>",
        f"<|tools_prefix|>{json.dumps([{'weather': ARGUMENTS}])}<|tools_suffix|>",
    ),
    "deepseek_v32": (
        f"<{DSML}function_calls> </{DSML}function_calls>",
        f"<{DSML}function_calls>\n{DSML_CALL}\n</{DSML}function_calls>",
    ),
    "deepseek_v4": (f"<{DSML}tool_calls> </{DSML}tool_calls>", f"<{DSML}tool_calls>\n{DSML_CALL}\n</{DSML}tool_calls>"),
    "ernie45": ("<tool_call> </tool_call>", f"<tool_call>\n{NAMED}\n</tool_call>"),
    "functiongemma": (
        "<start_function_call> <end_function_call> <escape>",
        "<start_function_call>call:weather{city:<escape>Bonn<escape>,days:<escape>2<escape>}<end_function_call>",
    ),
    "gemma4": ('<|tool_call> <tool_call|> <|"|>', '<|tool_call>call:weather{city:<|"|>Bonn<|"|>,days:2}<tool_call|>'),
    "gigachat3": ("<|function_call|> <|message_sep|> <|role_sep|>", f"<|function_call|>{NAMED}"),
    "glm47": (
        "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
        f"<tool_call>{XML}</tool_call>",
    ),
    "granite-20b-fc": ("<function_call>", f"<function_call>{NAMED}"),
    "granite4": ("<tool_call> </tool_call>", f"<tool_call>{NAMED}</tool_call>"),
    "hunyuan_a13b": ("<tool_calls> </tool_calls>", f"<tool_calls>[{NAMED}]</tool_calls>"),
    "hy_v3": (
        "<tool_calls> </tool_calls> <tool_call> </tool_call> <tool_sep>",
        f"<tool_calls><tool_call>{XML.replace('weather', 'weather<tool_sep>')}</tool_call></tool_calls>",
    ),
    "inkling": (
        "<|content_invoke_tool_json|> <|end_message|>",
        f"<|content_invoke_tool_json|>{json.dumps({'name': 'weather', 'args': ARGUMENTS})}<|end_message|>",
    ),
    "lfm2": ("<|tool_call_start|> <|tool_call_end|>", f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>"),
    "llama4_json": ("<|python_tag|>", f"<|python_tag|>{NAMED}"),
    "llama4_pythonic": ("<|python_start|> <|python_end|>", f"<|python_start|>[{PYTHON}]<|python_end|>"),
    "longcat": ("<longcat_tool_call> </longcat_tool_call>", f"<longcat_tool_call>{NAMED}</longcat_tool_call>"),
    "mimo": ("<tool_call> </tool_call>", f"<tool_call>{CODER}</tool_call>"),
    "minicpm5": (
        "</function>",
        '<function name="weather"><param name="city">Bonn</param><param name="days">2</param></function>',
    ),
    "minimax_m2": (
        "<minimax:tool_call> </minimax:tool_call>",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">Bonn</parameter>'
        '<parameter name="days">2</parameter></invoke></minimax:tool_call>',
    ),
    "olmo3": ("<function_calls> </function_calls>", f"<function_calls>{PYTHON}</function_calls>"),
    "phi4_mini_json": ("<|tool_call|>", f"functools[{NAMED}]"),
    "poolside_v1": (
        "<tool_call> </tool_call>",
        f"<tool_call>{XML.replace('weather', 'weather' + chr(10))}</tool_call>",
    ),
    "qwen3_xml": ("<tool_call> </tool_call>", f"<tool_call>{CODER}</tool_call>"),
    "seed_oss": ("<seed:tool_call> </seed:tool_call>", f"<seed:tool_call>{CODER}</seed:tool_call>"),
    "step3": (
        "<｜tool_calls_begin｜> <｜tool_call_begin｜> <｜tool_sep｜> <｜tool_call_end｜> <｜tool_calls_end｜>",
        f"<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>{STEP}<｜tool_call_end｜><｜tool_calls_end｜>",
    ),
    "step3p5": ("<tool_call> </tool_call>", f"<tool_call>\n{CODER}\n</tool_call>"),
}
# Parsers whose answers have no text before the call, or which drop it.
ALONE = frozenset(
    "llama3_json pythonic granite internlm jamba xlam llama4_json llama4_pythonic minicpm5 olmo3 phi4_mini_json".split()
)
# Parsers that cannot run here, and why.
MISSING = {
    "cohere_command3": "cannot be loaded .*cohere_melody",
    "cohere_command4": "cannot be loaded .*cohere_melody",
    "minimax_m3": "does not work here .*Rust",
    "openai": "does not work here .*Use HarmonyParser",
}


def tokenizer_of(markers: str):
    tokenizer = character_tokenizer(f"{PRINTABLE_ASCII}｜")
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", *markers.split()]
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(special))})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATES["qwen3"]
    return tokenizer


def asked(parser: str, tokenizer, answer: str, **request):
    """The endpoint's choice for a request of the official client, when the policy samples an answer."""
    return conversation(parser, tokenizer, answer, **request)[0][0]


def conversation(parser: str, tokenizer, *answers: str, **request):
    """The endpoint's choices when the policy samples ``answers``, with a tool's result after each, and the session."""
    sampled = iter(answers)

    async def sample(token_ids, seed, session, **sampling):
        ids = (*tokenizer.encode(next(sampled), add_special_tokens=False), tokenizer.eos_token_id)
        return make_completion(ids, [-0.5] * len(ids), text=decode(tokenizer, ids))

    async def ask():
        tools = ToolCalls(parser, tokenizer)
        tools.load()
        gateway = Gateway("m", tools)
        await gateway.start()
        chat = ChatFormat(tokenizer, True, {}, frozenset({tokenizer.eos_token_id}))
        session = Session("s", SessionConfig(), chat, sample, 0, token_budget=4096, max_completion_tokens=1024)
        key = gateway.open_session(session)
        request.setdefault("tools", TOOLS)
        messages, choices = [{"role": "user", "content": "?"}], []
        try:
            async with AsyncOpenAI(base_url=gateway.url, api_key=key, max_retries=0) as client:
                for _ in answers:
                    answered = await client.chat.completions.create(model="m", messages=messages, **request)
                    choices.append(answered.choices[0])
                    message = answered.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    for call in message.tool_calls or ():
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        finally:
            await gateway.close()
        return choices, session

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
    assert (choice.message.content or "").strip() == ("" if parser in ALONE else "I look it up.")
    content, calls = of_vllm(parser, tokenizer, answer)
    if calls:  # vLLM's server leaves out the special markers of some parsers and then finds no call
        assert (choice.message.content, [(sent.function.name, sent.function.arguments)]) == (content, calls)


@pytest.mark.parametrize("parser", CALLS)
def test_the_call_after_a_tool_s_result_continues_the_session(parser):
    markers, call = CALLS[parser]
    tokenizer = tokenizer_of(markers)
    later = call.replace("Bonn", "Rome").replace("weather:0", "weather:1")  # Kimi's models write the ids themselves
    choices, session = conversation(parser, tokenizer, call, later, "It rains.")
    cities = []
    for choice in choices[:2]:
        (sent,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and sent.function.name == "weather"
        cities.append(json.loads(sent.function.arguments)["city"])
    assert cities == ["Bonn", "Rome"]
    assert (choices[2].finish_reason, choices[2].message.content) == ("stop", "It rains.")
    assert choices[0].message.tool_calls[0].id != choices[1].message.tool_calls[0].id
    (trajectory,) = session.trajectories()  # nothing was tokenized again
    whole = tokenizer.decode(trajectory.token_ids)
    positions = [whole.index(part) for part in (call, later, "It rains.")]
    assert positions == sorted(positions) and whole.count("rain\n</tool_response>") == 2


def test_every_parser_of_vllm_is_tried_or_named_as_missing():
    from vllm.tool_parsers import ToolParserManager

    assert set(ToolParserManager.list_registered()) == CALLS.keys() | MISSING.keys()


@pytest.mark.parametrize("parser", MISSING)
def test_a_parser_that_cannot_run_here_is_refused_with_its_reason(parser):
    with pytest.raises(ValueError, match=f"--session.tool_parser = '{parser}'.* {MISSING[parser]}"):
        ToolCalls(parser, character_tokenizer()).load()


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


@pytest.mark.parametrize("parser", ["mistral", "deepseek_v3", "deepseek_v31", "hy_v3", "jamba", "lfm2", "llama3_json"])
def test_a_parser_whose_markers_the_tokenizer_lacks_is_refused(parser):
    with pytest.raises(ValueError, match=f"--session.tool_parser = '{parser}' does not fit the tokenizer .*Choose"):
        ToolCalls(parser, character_tokenizer()).load()


@pytest.mark.parametrize(
    ("parser", "message"),
    [
        ("hermez", "'hermez': vLLM has no such parser. Did you mean hermes"),
        ("mistral", "'mistral': does not fit the tokenizer .*Choose the parser of the model"),
    ],
)
def test_a_run_with_a_parser_that_cannot_be_used_is_refused_before_it_starts(parser, message, tmp_path):
    character_tokenizer().save_pretrained(tmp_path)
    cfg = config("calculator", tool_parser=parser)
    cfg = replace(cfg, data=replace(cfg.data, tokenizer=str(tmp_path)))
    with pytest.raises(ConfigError, match=f"--session.tool_parser = .*{message}.*Nothing was started"):
        check_data(cfg)


def test_an_agent_s_answer_ends_before_its_stop_string(tmp_path):
    """As an answer of vLLM's server does; its tokens are trained."""
    body = """
        first = await session.ask(stop=["Observation:", "7"])
        session.say("3", role="tool")
        second = await session.ask(stop="Observation:")
        assert session.messages[1] == {"role": "assistant", "content": "Act 1."}, session.messages
        return float((first, second) == ("Act 1.", "3"))
    """
    answers = lambda text: "3" if "Act" in text else "Act 1.Observation: 7"  # noqa: E731
    cfg = config(agent_file(tmp_path, body), max_tokens=400)
    chat = format_of("qwen3")
    (rollout,) = play(cfg, prompt(), engines=[Engine(answers, chat=chat)], chat=chat)
    assert rollout.reward == 1.0, rollout.detail
    (branch,) = rollout.branches
    assert "Act 1.Observation: 7" in chat.tokenizer.decode(branch.token_ids)


def test_a_call_after_a_stop_string_is_no_call():
    markers, call = CALLS["hermes"]
    choice = asked("hermes", tokenizer_of(markers), f"No.\nObservation: {call}", stop=["3", "Observation:"])
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("stop", None, "No.\n")


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("a b", (), "a b"),
        ("a b", ("x",), "a b"),
        ("a stop b", ("stop",), "a "),
        ("a}b{", ("{", "}"), "a}b"),  # in the order of the request, as vLLM cuts
        ("stop", ("stop",), ""),
    ],
)
def test_a_text_is_cut_at_the_stop_string_that_ended_it(text, stops, expected):
    from vllm.v1.engine.detokenizer import check_stop_strings

    assert before_stop(text, stops) == expected
    for included in (False, True):
        cut = check_stop_strings(text, len(text), list(stops), include_in_output=included)
        whole = cut is None or cut[1] == -1
        assert before_stop(text, stops, included=included) == (text if whole else text[: cut[1]])

"""The reward ``code``: a table of completions and rows with their scores, and rows that it refuses."""

import base64
import json
import pickle
import sys
import zlib
from pathlib import Path

import pytest

from megatron_fp8rl.config import RewardConfig
from megatron_fp8rl.envs import sandbox
from megatron_fp8rl.envs.rewards import code_tests
from megatron_fp8rl.envs.rewards.code_blocks import blocks, program_in
from megatron_fp8rl.envs.rewards.configured import build
from megatron_fp8rl.types import Prompt

CASES = Path(__file__).with_name("cases")
TABLE = [json.loads(line) for line in (CASES / "code.jsonl").read_text().splitlines()]
needs_sandbox = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())


@pytest.fixture(autouse=True)
def digits():
    limit = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(limit)


def prompt(row: dict, question: str = "Write it.") -> Prompt:
    return Prompt(
        prompt_id="t/0", environment="t", token_ids=(), text=row.get("prompt", question), answer="", metadata=row
    )


def rows() -> dict[str, dict]:
    return json.loads((CASES / "code_rows.json").read_text())


@needs_sandbox
@pytest.mark.parametrize("case", TABLE, ids=[case["why"] for case in TABLE])
def test_score_of_the_table(case):
    options = {"case_deadline_s": 2.0 if "endless" in case["why"] else 60.0}  # a busy machine is slow
    reward = build(RewardConfig(function="code", options=options))
    assert reward([prompt(rows()[case["row"]])], [case["completion"]]) == [case["score"]]


def test_the_table_covers_right_and_wrong_programs_of_every_row():
    assert len(TABLE) >= 60
    scores = {name: {case["score"] for case in TABLE if case["row"] == name} for name in rows()}
    assert all(values == {0, 1} for values in scores.values()), scores


def test_tests_that_cannot_fail_a_program_are_refused():
    refused = {
        "assert nothing": {"tests": ["print(f(2))"]},
        "define check.. and do not call it; name the tested function in the column entry_point": {
            "test": "def check(candidate):\n    assert candidate(2) == 4"
        },
        "define test_f.. with 2 arguments": {"test": "def test_f(a, b):\n    assert f(a) == b"},
        "are not Python": {"test": "assert f(2) = 4"},
        "are neither Python statements nor": {"tests": [1, 2]},
        "expect no output": {"input_output": {"inputs": ["1"], "outputs": [""]}},
        "have 2 inputs and 1 outputs": {"input_output": {"inputs": ["1", "2"], "outputs": ["1"]}},
        "have no inputs and outputs .keys: cases": {"input_output": {"cases": []}},
        "have no inputs and outputs$": {"input_output": {"inputs": [], "outputs": []}},
        "call add with 3, which is no list of arguments": {
            "input_output": {"fn_name": "add", "inputs": [3], "outputs": [3]}
        },
        "call a function without a name": {"tests": [{"input": "1", "output": "1", "testtype": "functional"}]},
        "t/0 has no tests in": {"input_output": ""},
    }
    for message, row in refused.items():
        with pytest.raises(ValueError, match=message):
            code_tests.tests_of(prompt(row))


@needs_sandbox
def test_tests_that_ran_no_assertion_are_no_evidence():
    reward = build(RewardConfig(function="code"))
    row = {"tests": ["for n in ():\n    assert f(n) == n"]}
    with pytest.raises(ValueError, match="the tests ran no assertion: 'for n in"):
        reward([prompt(row)], ["```python\ndef f(n):\n    return n\n```"])


@needs_sandbox
def test_a_share_counts_assertions_and_no_setup():
    reward = build(RewardConfig(function="code", options={"all_or_nothing": False}))
    row = {"tests": ["import math", "assert f(2) == 4", "assert f(3) == 9"]}
    scores = [reward([prompt(row)], [f"```python\n{text}\n```"])[0] for text in ("pass", "def f(n):\n    return 4")]
    assert scores == [0.0, 0.5]


def test_the_first_tests_keep_their_setup():
    row = {"tests": ["import math", *(f"assert f({n}) == {n}" for n in range(20))]}
    assert len(code_tests.tests_of(prompt(row)).first(16).statements) == 17
    cases = {"inputs": [str(n) for n in range(20)], "outputs": [str(n) for n in range(20)]}
    assert len(code_tests.tests_of(prompt({"tests": cases})).first(16).cases) == 16


def test_tests_of_known_data_sets_are_read():
    """Rows as their data sets' cards describe them."""
    taco = {"input_output": json.dumps({"inputs": ["3\n"], "outputs": ["9\n"], "fn_name": None})}
    assert code_tests.tests_of(prompt(taco)).cases == (("3\n", "9\n"),)
    synthetic = {
        "verification_info": json.dumps({"test_cases": [{"type": "stdin_stdout", "input": "3", "output": "9"}]})
    }
    assert code_tests.tests_of(prompt(synthetic)).cases == (("3", "9"),)
    calls = [{"type": "function_call", "fn_name": "f", "input": [3], "output": [9]}]
    tests = code_tests.tests_of(prompt({"verification_info": {"test_cases": calls}}))
    assert (tests.function, tests.cases) == ("f", (([3], [[9], 9]),))
    nested = {"reward_model": {"ground_truth": json.dumps({"inputs": ["3"], "outputs": ["9"]})}}
    assert code_tests.tests_of(prompt(nested), "reward_model.ground_truth").cases == (("3", "9"),)
    grid = Prompt(
        prompt_id="t/0",
        environment="t",
        token_ids=(),
        text="",
        answer='"], "outputs": ["9"]}',
        metadata={"full_answer": '{"inputs": ["####"], "outputs": ["9"]}'},
    )
    assert code_tests.tests_of(grid).cases == (("####", "9"),)


def test_one_program_is_chosen():
    two = "```python\ndef f():\n    return 1\n```\nor\n```python\ndef f():\n    return 2\n```\n"
    assert program_in(two, {"f"}) == "def f():\n    return 2\n"
    assert [block.tag for block in blocks("```sh\nls\n```\n~~~text\n```\n~~~")] == ["sh", "text"]


@needs_sandbox
def test_tests_with_a_missing_module_are_no_fault_of_the_program():
    reward = build(RewardConfig(function="code"))
    program = "```python\ndef f(n):\n    return n * n\n```"
    for row in (
        {"tests": ["import nowhere", "assert f(2) == 4"]},
        {"test_imports": ["import nowhere"], "test_list": ["assert f(2) == 4"]},
    ):
        with pytest.raises(ValueError, match="the tests import 'nowhere', which .* does not have; install it"):
            reward([prompt(row)], [program])
    assert reward([prompt({"tests": ["assert f(2) == 4"]})], [program.replace("def f", "import nowhere\ndef f")]) == [
        0.0
    ]


@needs_sandbox
@pytest.mark.parametrize(
    ("opening", "closing"), [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<reasoning>", "</reasoning>")]
)
def test_reasoning_has_to_end(opening, closing):
    """Reasoning that the template opened, or the completion."""
    reward = build(RewardConfig(function="code"))
    draft, program = (f"```python\ndef f(n):\n    return n {sign} n\n```" for sign in "+*")
    tests = {"tests": ["assert f(3) == 9"]}
    asked, plain = prompt(tests, f"<|assistant|>\n{opening}\n"), prompt(tests, f"Do not write {opening}. Go:")
    for text, score in ((program, 0), (f"{draft}{closing}{program}", 1), (f"{program}{closing}{draft}", 0)):
        assert reward([asked, plain], [text, opening + text]) == [score, score]
    assert reward([plain, prompt(tests, f"{opening}\n\n{closing}\n\n")], [program, program]) == [1, 1]


@needs_sandbox
def test_unfinished_reasoning_is_no_function_body():
    row = rows()["humaneval"]
    reward = build(RewardConfig(function="code"))
    body = "    return any(abs(a - b) < limit for i, a in enumerate(numbers) for b in numbers[:i])\n"
    assert reward([prompt(row)] * 3, [body, f"[THINK]{body}", f"[THINK]x[/THINK]\n{body}"]) == [1, 0, 1]


ECHO = "```python\nprint(input())\n```"
PACKED = base64.b64encode(zlib.compress(pickle.dumps('[{"input": "7", "output": "8", "testtype": "stdin"}]'))).decode()
BOMB = base64.b64encode(zlib.compress(b"[" * (300 << 20), 1)).decode()


class _Harmful:
    def __reduce__(self):
        return print, ("run",)


@needs_sandbox
@pytest.mark.parametrize(
    ("row", "cases"),
    [
        ({"private_tests": {"input": ["7"], "output": ["8"]}}, [("1", "1"), ("7", "8")]),
        (
            {"private_tests": {"input": [], "output": []}, "generated_tests": {"input": ["5"], "output": ["6"]}},
            [("1", "1"), ("5", "6")],
        ),
        ({"private_tests": None, "generated_tests": {"input": [], "output": []}}, [("1", "1")]),
        (
            {"public_tests": {"input": [], "output": []}, "private_tests": {"input": ["7"], "output": ["8"]}},
            [("7", "8")],
        ),
        ({"public_tests": None, "generated_tests": {"input": ["5"], "output": ["6"]}}, [("5", "6")]),
    ],
)
def test_hidden_tests_of_codecontests_count(row, cases):
    asked = prompt({"public_tests": {"input": ["1"], "output": ["1"]}, **row})
    assert list(code_tests.tests_of(asked).cases) == cases
    assert build(RewardConfig(function="code"))([asked], [ECHO]) == [float(all(a == b for a, b in cases))]
    if row.get("private_tests") and "public_tests" not in row:
        assert list(code_tests.tests_of(asked, "public_tests").cases) == [("1", "1")]  # if the user names the column


@needs_sandbox
@pytest.mark.parametrize(
    "private",
    [PACKED, '[{"input": "7", "output": "8"}]', [{"input": "7", "output": "8"}], PACKED[:40] + "\n" + PACKED[40:]],
)
def test_hidden_tests_of_livecodebench_count(private):
    public = '[{"input": "1", "output": "1", "testtype": "stdin"}]'
    asked = prompt({"public_test_cases": public, "private_test_cases": private})
    assert list(code_tests.tests_of(asked).cases) == [("1", "1"), ("7", "8")]
    right = ECHO.replace("input()", "input().replace('7', '8')")
    assert build(RewardConfig(function="code"))([asked, asked], [ECHO, right]) == [0.0, 1.0]
    assert list(code_tests.tests_of(prompt({"private_test_cases": private})).cases) == [("7", "8")]


@pytest.mark.parametrize(
    ("private", "problem"),
    [
        (PACKED[:-12], "'private_test_cases' are packed and cannot be read: .*; unpack them to JSON"),
        (base64.b64encode(zlib.compress(pickle.dumps(_Harmful()))).decode(), "they use builtins.print; unpack"),
        (BOMB, "unpack to more than 256 MiB"),
        ("AAAA", "'private_test_cases' are not all inputs and outputs: 'AAAA'; write them as JSON"),
        ('[{"input": "7", "output": "8"}', "are not all inputs and outputs"),
    ],
    ids=["cut", "code", "bomb", "text", "no JSON"],
)
def test_hidden_tests_that_cannot_be_read_are_refused(private, problem, capsys):
    row = {"public_test_cases": '[{"input": "1", "output": "1"}]', "private_test_cases": private}
    with pytest.raises(ValueError, match=problem):
        code_tests.tests_of(prompt(row))
    assert capsys.readouterr().out == ""


@needs_sandbox
def test_names_of_the_prompt_are_known_to_its_tests():
    """As in HumanEval, where some tests use a function of the prompt."""
    header = 'import math\n\n\ndef double(n):\n    return 2 * n\n\n\ndef half(n):\n    """Undo double."""\n'
    row = {"entry_point": "half", "test": "def check(candidate):\n    assert candidate(double(3)) == math.floor(3.5)\n"}
    program = "```python\ndef half(n):\n    return n // 2\n```"
    for question in (header, f"Complete this.\nfrom here:\n```python\n{header}```\nUse a block."):
        reward = build(RewardConfig(function="code"))
        scores = reward([prompt(row, question)] * 3, [program, program.replace("//", "*"), "```python\npass\n```"])
        assert scores == [1.0, 0.0, 0.0]

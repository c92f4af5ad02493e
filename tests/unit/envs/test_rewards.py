"""Rewards of rows: values against tables made by hand and math-verify, functions of users, programs and judges."""

import dataclasses
import http.server
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_fp8rl.config import EnvironmentConfig, RewardConfig
from megatron_fp8rl.envs import sandbox
from megatron_fp8rl.envs.rewards import answers, judge
from megatron_fp8rl.envs.rewards.configured import RowRewards, build, problem
from megatron_fp8rl.envs.rewards.extraction import answer_in
from megatron_fp8rl.envs.rewards.functions import RewardError
from megatron_fp8rl.envs.scoring import ScorePool
from megatron_fp8rl.types import Prompt

FUNCTIONS = Path(__file__).with_name("reward_functions.py")
needs_sandbox = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())


def prompt(answer: str = "", **row) -> Prompt:
    return Prompt(prompt_id="t/0", environment="t", token_ids=(), text="1 + 1?", answer=answer, metadata=row)


def score(reward: RewardConfig, completion: str, answer: str = "", **row):
    return build(reward)([prompt(answer, **row)], [completion])[0]


@pytest.mark.parametrize(
    ("completion", "actual"),
    [
        ("so <answer> 4 </answer>", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "4"),
        ("It is 4.", "It is 4."),
        ("<think>a <answer>3</answer></think>\n4", "4"),
        (r"thus \boxed{\frac{1}{2}} units", r"\frac{1}{2}"),
        (r"\boxed{3} then \boxed{4", "3"),
        ("work\n#### 42", "42"),
    ],
)
def test_the_answer_of_a_completion(completion, actual):
    assert answer_in(completion) == actual


def test_number_within_a_tolerance():
    assert answers.number(tolerance=0.01)("3.14", "3.1416") == 1
    assert answers.number()("3.14", "3.1416") == 0


def test_exact_format_and_length():
    assert score(RewardConfig(), " Paris ", "Paris") == 1 and score(RewardConfig(), "paris", "Paris") == 0
    assert score(RewardConfig(options={"ignore_case": True}), "paris", "Paris") == 1
    form = RewardConfig(function="format", options={"pattern": r"<think>.*</think>\s*\S+", "whole": True})
    assert score(form, "<think>a\nb</think> 4") == 1 and score(form, "x <think></think> 4") == 0
    short = RewardConfig(function="length", options={"free_characters": 4, "limit_characters": 8})
    assert [score(short, "x" * n) for n in (3, 4, 6, 8, 20)] == [0, 0, -0.5, -1, -1]


class TestProblems:
    def test_names_options_and_files_are_checked_before_anything_runs(self):
        assert "did you mean number" in problem(RewardConfig(function="numbr"))
        assert "number has no option 'tol' (options: tolerance)" in problem(
            RewardConfig(function="number", options={"tol": 1})
        )
        assert "format needs the option 'pattern'" in problem(RewardConfig(function="format"))
        assert "did you mean reward_functions.py" in problem(
            RewardConfig(function=f"{FUNCTIONS.parent}/reward_function.py:f")
        )
        assert "did you mean length_share" in problem(RewardConfig(function=f"{FUNCTIONS}:lenght_share"))
        assert problem(RewardConfig(function=f"{FUNCTIONS}:later")) == ""

    def test_a_syntax_error_names_the_line(self, tmp_path):
        (tmp_path / "r.py").write_text("def f(completion):\n    return (\n")
        assert "r.py, line 2" in problem(RewardConfig(function=f"{tmp_path}/r.py:f"))

    def test_a_file_that_cannot_be_imported(self, tmp_path):
        (tmp_path / "r.py").write_text("import no_such_thing\ndef f(completion): return 1\n")
        with pytest.raises(RewardError, match="r.py cannot be imported: ModuleNotFoundError"):
            build(RewardConfig(function=f"{tmp_path}/r.py:f"))


class TestFunctions:
    def test_a_function_gets_what_it_names(self):
        assert score(RewardConfig(function=f"{FUNCTIONS}:length_share"), "abcde") == 0.5
        assert score(RewardConfig(function=f"{FUNCTIONS}:length_share", options={"limit": 20}), "abcde") == 0.25
        assert score(RewardConfig(function=f"{FUNCTIONS}:later"), "2", "2") == 1.0
        assert score(RewardConfig(function=f"{FUNCTIONS}:in_batches"), "abc", "2", level=1) == 3.0

    def test_parts_and_weights(self):
        both = (RewardConfig(function=f"{FUNCTIONS}:everything", weight=0.5), RewardConfig(weight=2.0))
        actual = RowRewards(both).score(prompt("2", level=3), "2")
        assert actual == {"has_answer": 1.0, "level": 3.0, "plus": 1.0, "exact": 1.0, "reward": 0.5 * 5.0 + 2.0}
        own = RowRewards((RewardConfig(function=f"{FUNCTIONS}:weighted"),)).score(prompt(), "x")
        assert own == {"style": 1.0, "reward": 0.25}

    def test_rewards_of_one_name_have_parts_of_their_own(self, tmp_path):
        """A hidden part would be missing in records, and a sum of two would look like one reward."""
        forms = [RewardConfig(function="format", options={"pattern": pattern}) for pattern in ("a", "b", "c")]
        (tmp_path / "r.py").write_text("def f(completion): return {'format': 2.0, 'is_right': True}\n")
        rewards = RowRewards((*forms, RewardConfig(function=f"{tmp_path}/r.py:f")))
        parts = {"format": 1.0, "format-2": 0.0, "format-3": 1.0, "format-4": 2.0, "is_right": 1.0}
        assert rewards.score(prompt(), "a c") == {**parts, "reward": 4.0}

    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_a_reward_says_what_is_right(self, kind):
        rewards = RowRewards((RewardConfig(function=f"{FUNCTIONS}:says_what_is_right", options={"kind": kind}),))
        assert rewards.score(prompt("a"), "b") == {"right": 0.0, "form": 1.0, "is_right": 0.0, "reward": 1.0}
        assert rewards.score(prompt("A"), "A") == {"right": 1.0, "form": 0.0, "is_right": 1.0, "reward": 1.0}
        threshold = RewardConfig(function=f"{FUNCTIONS}:threshold", weight=0.5)
        assert RowRewards((threshold,)).score(prompt("A"), "A b") == {"is_right": 1.0, "reward": 0.4}
        both = RowRewards((threshold, RewardConfig(function=f"{FUNCTIONS}:says_what_is_right")))
        assert both.score(prompt("a"), "a") == {"right": 1.0, "form": 1.0, "is_right": 1.0, "reward": 0.5 + 2.0}
        assert both.score(prompt("a"), "ab") == {"right": 0.0, "form": 1.0, "is_right": 0.0, "reward": 0.5 + 1.0}

    def test_the_weight_of_a_single_reward_does_not_change_what_is_right(self):
        half, whole = f"{FUNCTIONS}:half", f"{FUNCTIONS}:length_share"
        assert RowRewards((RewardConfig(function=half, weight=2.0),)).score(prompt(), "x")["is_right"] == 0.0
        assert RowRewards((RewardConfig(function=whole, weight=0.5),)).score(prompt(), "x" * 10)["is_right"] == 1.0
        assert "is_right" not in RowRewards((RewardConfig(function=whole),)).score(prompt(), "x")

    def test_what_says_nothing_about_right_answers_is_named(self):
        two = RewardConfig(function=f"{FUNCTIONS}:says_what_is_right", options={"kind": "two"})
        with pytest.raises(TypeError, match=r"says_what_is_right\['is_right'\] is 2; it says whether"):
            RowRewards((two,)).score(prompt(), "x")
        with pytest.raises(TypeError, match="only_right returned {'is_right': True} and no reward"):
            RowRewards((RewardConfig(function=f"{FUNCTIONS}:only_right"),)).score(prompt(), "x")

    def test_what_is_no_number_is_named(self):
        with pytest.raises(TypeError, match="nothing returned None, which is not a number"):
            RowRewards((RewardConfig(function=f"{FUNCTIONS}:nothing"),)).score(prompt(), "x")

    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            ("numpy.float32(0.5)", 0.5),
            ("numpy.int64(2)", 2.0),
            ("numpy.array([0.5])", 0.5),
            ("torch.tensor(0.5, requires_grad=True)", 0.5),
            ("fractions.Fraction(1, 2)", 0.5),
            ("{'reward': 0.5, 'is_right': numpy.True_}", 0.5),
            ("numpy.array([3]) == 3", "which is not a number"),
            ("numpy.True_", "which is not a number"),
            ("torch.tensor(True)", "which is not a number"),
            ("{'part': numpy.bool_(False)}", r"f\['part'\] returned .*, which is not a number"),
            ("numpy.complex64(1 + 2j)", "which is not a number"),
            ("numpy.str_('0.5')", "which is not a number"),
            ("torch.tensor([1.0, 2.0])", "2 elements cannot be converted"),
            ("{}", "f returned {} and no reward; add the part 'reward'"),
        ],
    )
    def test_values_of_numpy_and_torch_are_numbers_as_those_of_python(self, tmp_path, code, expected):
        (tmp_path / "r.py").write_text(f"import fractions, numpy, torch\ndef f(completion): return {code}\n")
        rewards = RowRewards((RewardConfig(function=f"{tmp_path}/r.py:f"),))
        if isinstance(expected, float):
            assert rewards.score(prompt(), "x")["reward"] == expected
        else:
            with pytest.raises((TypeError, RuntimeError), match=expected):
                rewards.score(prompt(), "x")

    def test_parts_come_out_of_the_pool_and_failures_cost_one_score(self):
        rewards = (RewardConfig(), RewardConfig(function=f"{FUNCTIONS}:length_share", weight=0.1))
        bad = EnvironmentConfig(dataset="b.jsonl", rewards=(RewardConfig(function=f"{FUNCTIONS}:nothing"),))
        sources = {"t": EnvironmentConfig(dataset="t.jsonl", rewards=rewards), "b": bad}
        with ScorePool(sources, num_workers=1, deadline_s=20.0) as pool:
            actual = pool.submit(prompt("2"), "2").result(100)
            assert actual.parts == {"exact": 1.0, "length_share": 0.1} and actual.reward == pytest.approx(1.01)
            other = Prompt(prompt_id="b/0", environment="b", token_ids=(), text="", answer="")
            assert "returned None, which is not a number" in pool.submit(other, "x").result(100).detail

    def test_a_parameter_that_no_row_has_is_named(self, tmp_path):
        (tmp_path / "r.py").write_text("def f(prompt, completions_text, answer): return 1.0\n")
        with pytest.raises(RewardError, match="f has the parameter 'completions_text', which no row has; did you mean"):
            score(RewardConfig(function=f"{tmp_path}/r.py:f"), "x")

    def test_a_batch_of_another_length_fails_as_a_whole(self, tmp_path):
        """Each completion alone would get a score, so that a list of one value would look right."""
        (tmp_path / "r.py").write_text("def f(completions): return [1.0]\ndef g(completions): return 1.0\n")
        for name, message in (("f", "returned 1 rewards for 2 completions"), ("g", "g returned 1.0, and not a list")):
            with pytest.raises(RewardError, match=message):
                build(RewardConfig(function=f"{tmp_path}/r.py:{name}"))([prompt(), prompt()], ["a", "b"])
        source = EnvironmentConfig(dataset="t.jsonl", rewards=(RewardConfig(function=f"{tmp_path}/r.py:f"),))
        with ScorePool({"t": source}, num_workers=1, deadline_s=20.0) as pool:
            scores = [future.result(100) for future in [pool.submit(prompt(), "x") for _ in range(6)]]
            assert any("rewards for" in score.detail for score in scores)  # the first may be scored alone

    def test_what_waits_is_scored_in_one_call(self):
        source = EnvironmentConfig(
            dataset="t.jsonl",
            rewards=(RewardConfig(function=f"{FUNCTIONS}:of_a_batch", options={"wait_s": 0.3}), RewardConfig()),
        )
        with ScorePool({"t": source}, num_workers=1, deadline_s=20.0) as pool:
            scores = [pool.submit(prompt(str(i)), str(i % 5)) for i in range(40)]
            actual = [score.result(100) for score in scores]
        assert [score.parts["right"] for score in actual] == [float(i < 5) for i in range(40)]
        assert [score.reward - score.parts["calls"] for score in actual] == [2.0 * (i < 5) for i in range(40)]
        assert max(score.parts["calls"] for score in actual) >= 20

    @pytest.mark.parametrize(
        ("function", "detail"), [("of_a_batch", "exit code 3"), ("too_few", "returned 1 rewards for")]
    )
    def test_a_call_that_fails_costs_one_completion_its_score(self, function, detail):
        reward = RewardConfig(function=f"{FUNCTIONS}:{function}")
        with ScorePool(
            {"t": EnvironmentConfig(dataset="t.jsonl", rewards=(reward,))}, num_workers=1, deadline_s=20.0
        ) as pool:
            texts = ["1", "2", "stop", "4", "5"]
            actual = [score.result(100) for score in [pool.submit(prompt("4"), text) for text in texts]]
        if function == "too_few":  # alone each would get a score, and the mistake would not show
            assert {score.status == "scored" or detail in score.detail for score in actual} == {True}
            assert actual[2].status == "score_failed"
        else:
            assert [score.status == "scored" for score in actual] == [text != "stop" for text in texts]
            assert detail in actual[2].detail and actual[3].parts["right"] == 1.0

    def test_a_function_with_too_few_rewards_is_named(self):
        many = RowRewards((RewardConfig(function=f"{FUNCTIONS}:too_few"),))
        with pytest.raises(RewardError, match="too_few returned 1 rewards for 2 completions"):
            many.score_many([prompt(), prompt()], ["a", "b"])


@needs_sandbox
class TestPrograms:
    ASSERTS: ClassVar = ["assert f(2) == 4", "assert f(3) == 9", "assert f(-1) == 1"]

    def test_statements(self):
        good, half = "x ```python\ndef f(n):\n    return n * n\n```", "```\ndef f(n): return 4 if n == 2 else 1\n```"
        whole = RewardConfig(function="code")
        assert score(whole, good, tests=self.ASSERTS) == 1 and score(whole, half, tests=self.ASSERTS) == 0
        share = RewardConfig(function="code", options={"all_or_nothing": False, "tests": "checks"})
        assert score(share, half, checks=self.ASSERTS) == pytest.approx(2 / 3)
        assert score(whole, "no code", tests=self.ASSERTS) == 0

    @pytest.mark.parametrize(
        "program", ["import os\nos._exit(0)", "import sys\nsys.exit()", "print('0' * 32, 3)\nimport os; os._exit(0)"]
    )
    def test_a_program_that_ends_early_has_not_passed(self, program):
        assert score(RewardConfig(function="code"), f"```python\n{program}\n```", tests=self.ASSERTS) == 0

    def test_cases_of_input_and_output(self):
        cases = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
        program = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
        assert score(RewardConfig(function="code"), program, input_output=cases) == 1
        share = RewardConfig(function="code", options={"all_or_nothing": False})
        assert score(share, program.replace("a + b", "3"), input_output=cases) == 0.5

    def test_a_row_without_tests_is_named(self):
        with pytest.raises(ValueError, match="t/0 has no tests in"):
            score(RewardConfig(function="code"), "```\n1\n```")

    def test_the_weight_of_a_reward_in_a_sandbox_counts_once(self):
        threshold = RewardConfig(function=f"{FUNCTIONS}:threshold", weight=0.5, sandbox=True)
        assert RowRewards((threshold,)).score(prompt("A"), "A") == {"is_right": 1.0, "reward": 0.4}

    def test_a_function_of_a_user_in_a_sandbox(self, monkeypatch):
        monkeypatch.setenv("SECRET", "x")
        reward = build(RewardConfig(function=f"{FUNCTIONS}:surroundings", sandbox=True))
        assert reward([prompt()], ["x"])[0] == {"readable": 0.0, "variables": 0.0, "reward": 0.0}
        with pytest.raises(RuntimeError, match="its sandbox ended with status 3"):
            reward([prompt()], ["die"])[0]
        assert reward([prompt()], ["x"])[0]["readable"] == 0.0  # started again


@contextmanager
def answering(answer: Callable[[dict], tuple[int, dict]]):
    """A server that answers a request's JSON with (status, JSON); yields (url, requests)."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers.get("Authorization"), body))
            status, content = answer(body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def test_a_reward_model_does_not_read_reasoning():
    """The score of this model is the length of the answer that it reads."""

    def length(body: dict) -> tuple[int, dict]:
        return 200, {"data": [{"probs": [float(len(body["messages"][-1]["content"]))]}]}

    with answering(length) as (url, seen):
        opened = dataclasses.replace(prompt(), text="1 + 1?<|assistant|>\n<think>\n")
        texts = ["long reasoning", "so</think>\n\nab", "<think>12", "[THINK]1[/THINK]abc", "abcd"]
        asked = [opened, opened, prompt(), prompt(), prompt()]
        assert build(RewardConfig(function="model", options={"url": url}))(asked, texts) == [0.0, 2.0, 0.0, 3.0, 4.0]
        whole = build(RewardConfig(function="model", options={"url": url, "reasoning": True}))
        assert whole(asked[:1], texts[:1]) == [14.0]
    assert {path for path, *_ in seen} == {"/classify"}


class TestJudge:
    @contextmanager
    def served(self, *answers: tuple[int, str]):
        """An OpenAI-compatible server that gives these (status, content) in turn; yields (url, requests)."""
        left = list(answers)

        def reply(body: dict) -> tuple[int, dict]:
            status, content = left.pop(0)
            return status, {"choices": [{"message": {"content": content}}]}

        with answering(reply) as (url, seen):
            yield f"{url}/v1", seen

    def test_the_grade_is_a_share_of_the_highest(self, monkeypatch):
        monkeypatch.setenv("JUDGE_KEY", "very-secret")
        with self.served((503, ""), (200, "Grade: 7"), (200, "10")) as (url, seen):
            options = {"url": url, "model": "m", "highest": 10, "key_env": "JUDGE_KEY"}
            reward = build(RewardConfig(function="judge", options=options))
            assert reward([prompt("2")], ["my answer"])[0] == 0.7 and reward([prompt("2")], ["x"])[0] == 1.0
        path, key, body = seen[1]
        assert path == "/v1/chat/completions" and key == "Bearer very-secret" and body["model"] == "m"
        assert all(word in body["messages"][0]["content"] for word in ("1 + 1?", "my answer", "from 0 to 10"))

    @pytest.mark.parametrize(
        ("text", "highest", "share"),
        [
            ("8/10", 10, 0.8),
            ("8 out of 10", 10, 0.8),
            ("8/10", 1, 0.8),
            ("8 out of 10", 1, 0.8),
            ("I give it 8 out of 10.", 10, 0.8),
            ("**8/10**", 10, 0.8),
            ("8 / 10 points", 10, 0.8),
            ("80 %", 10, 0.8),
            ("80%", 1, 0.8),
            ("0.8 (80%)", 1, 0.8),
            ("Grade: 8", 10, 0.8),
            ("Score (0-10): 8", 10, 0.8),
            ("Rating: [[8]]", 10, 0.8),
            ('{"grade": 8, "errors": 2}', 10, 0.8),
            ("On a scale from 0 to 10, this is an 8.", 10, 0.8),
            ("Out of 10, this deserves 8.", 10, 0.8),
            ("The sum 3 + 4 is 7, which is right.\n\n8", 10, 0.8),
            ("8\n\nIt misses 2 of the 3 cases.", 10, 0.8),
            ("8/10: it misses 2 cases", 10, 0.8),
            ("Clarity: 3/10\nStyle: 9/10\nOverall: 8/10", 10, 0.8),
            ("<think>10 would be too much, 2 too little</think>8", 10, 0.8),
            ("1", 1, 1.0),
            ("0", 10, 0.0),
            ("0.0", 1, 0.0),
            ("4.5", 5, 0.9),
        ],
    )
    def test_the_grade_in_an_answer(self, text, highest, share):
        assert judge.share_in(text, highest) == pytest.approx(share)

    @pytest.mark.parametrize(
        ("text", "highest", "problem"),
        [
            ("50", 10, "not from 0 to 10"),
            ("8", 1, "not from 0 to 1"),
            ("11/10", 10, "not from 0 to 10"),
            ("-1", 10, "not from 0 to 10"),
            ("120%", 10, "not from 0 to 10"),
            ("8/100", 10, "out of 100, which is not 10"),
            ("1/2", 10, "out of 2, which is not 10"),
            ("7-8", 10, "no grade"),
            ("between 7 and 8", 10, "no grade"),
            ("7 or 8", 10, "no grade"),
            ("8,5", 10, "no grade"),
            ("Grade: B", 10, "no grade"),
            ("It is wrong.", 1, "no grade"),
            ("", 1, "no grade"),
            ("<think>8/10? no", 10, "no grade"),
            ("Clarity: 3/10\nStyle: 9/10", 10, "several grades"),
            ("Score: 8. A score of 10 would need a proof.", 10, "several grades"),
            ("I found 3 mistakes in 5 steps.", 10, "several grades"),
        ],
    )
    def test_an_unclear_grade_is_no_score(self, text, highest, problem):
        with pytest.raises(ValueError, match=problem):
            judge.share_in(text, highest)

    def test_a_grade_out_of_range_is_a_failed_score(self):
        with self.served((200, "12"), (200, "8/10")) as (url, _):
            reward = RewardConfig(function="judge", options={"url": url, "model": "m", "highest": 10})
            with ScorePool(
                {"t": EnvironmentConfig(dataset="t.jsonl", rewards=(reward,))}, num_workers=1, deadline_s=20.0
            ) as pool:
                first, second = pool.submit(prompt(), "x").result(100), pool.submit(prompt(), "y").result(100)
        assert (first.status, first.reward) == ("score_failed", 0.0)
        assert "m gave a grade that is not from 0 to 10: '12'" in first.detail
        assert (second.status, second.reward) == ("scored", 0.8)

    def test_unfinished_reasoning_is_not_graded(self):
        with self.served((200, "1"), (200, "1")) as (url, seen):
            reward = build(RewardConfig(function="judge", options={"url": url, "model": "m"}))
            opened = dataclasses.replace(prompt("2"), text="1 + 1?<|assistant|>\n[THINK]\n")
            texts = ["2", "so 2[/THINK]2", "<think>2", "<think>1</think>2"]
            assert reward([opened, opened, prompt("2"), prompt("2")], texts) == [0.0, 1.0, 0.0, 1.0]
        assert len(seen) == 2

    def test_failures_are_named_without_the_key(self, monkeypatch):
        monkeypatch.setenv("JUDGE_KEY", "very-secret")
        with self.served((401, "no"), (200, "no idea")) as (url, _):
            reward = build(RewardConfig(function="judge", options={"url": url, "model": "m", "key_env": "JUDGE_KEY"}))
            with pytest.raises(ValueError, match="HTTP 401") as caught:
                reward([prompt()], ["x"])[0]
            assert "very-secret" not in str(caught.value)
            with pytest.raises(ValueError, match="m gave no grade: 'no idea'"):
                reward([prompt()], ["x"])[0]
        with pytest.raises(RewardError, match="NO_SUCH_KEY"):
            build(RewardConfig(function="judge", options={"url": "u", "model": "m", "key_env": "NO_SUCH_KEY"}))


def test_a_reward_model_s_folder_lacks_a_part(tmp_path):
    reward = RewardConfig(function="model", options={"folder": str(tmp_path)})
    config = tmp_path / "config.json"
    assert "has no readable config.json" in problem(reward)
    config.write_text("[]")
    assert "has no readable config.json (it is not a JSON object)" in problem(reward)
    config.write_text('{"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}')
    assert "has no weights and no tokenizer; copy the whole model" in problem(reward)
    (tmp_path / "model.safetensors").touch()
    assert "has no tokenizer; copy" in problem(reward)
    (tmp_path / "tokenizer.json").touch()
    assert problem(reward) == ""

"""Each part on real runs: what earns, what costs, and what it has nothing to say to."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from rewarded import ADD, FAIL, MEND, READ, SOLVE, SUBMIT, new_runtime, opened, rolled

from nano_coder.run.execution import Runtime
from nano_preferences.registry import parse_reward
from nano_preferences.rewards.conduct import turn_worth
from nano_preferences.rewards.preference import LOADERS
from nano_preferences.rewards.reasoning import count_claims
from nano_preferences.rewards.size import changed_lines, falling
from nano_shared.errors import NanoError, UsageError
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.types import Denials, Task, Trajectory

BROKEN = "no action at all"
MISSING = "@read_file path=sum.py"
USE_OS = "@write_file path=sums.py\nimport os\n\n\ndef add(a, b):\n    return a + b  # noqa\n"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return new_runtime(tmp_path_factory.mktemp("parts"))


def component(runtime: Runtime, run: Trajectory, name: str, **settings: object) -> float | None:
    (done,) = opened(tests=1, **{name: {"weight": 0.5, **settings}}).apply([run], runtime)
    assert done.verdict is not None
    return done.verdict.components[name]


def run_of(runtime: Runtime, *texts: str, task: Task = ADD) -> Trajectory:
    (run,) = rolled(runtime, texts, task=task)
    return run


def test_process_pays_for_turns_that_worked_half_for_errors_mended_and_nothing_for_waste(
    runtime: Runtime,
) -> None:
    run = run_of(runtime, MISSING, READ, BROKEN, READ, MEND, SUBMIT)
    assert turn_worth(run.turns) == [0.5, 1.0, 0.0, 0.0, 1.0, 1.0]
    (done,) = opened(tests=1, process=1).apply([run], runtime)
    assert done.verdict is not None
    assert done.verdict.components["process"] == pytest.approx(3.5 / 6)
    assert done.reward == pytest.approx(0.5 + 0.5 * 3.5 / 6)
    turns = done.verdict.turn_rewards
    assert turns is not None
    assert math.fsum(turns) == pytest.approx(done.reward)
    # each turn's own share, and the outcome with the last
    assert turns[:5] == pytest.approx([0.5 / 12, 1 / 12, 0, 0, 1 / 12])
    assert turns[5] == pytest.approx(1 / 12 + 0.5)


def test_a_program_that_fails_has_told_something_and_a_call_that_fails_has_not(runtime: Runtime) -> None:
    run = run_of(runtime, "@shell\nexit 1", "@shell\nnosuchprogram", MISSING, SUBMIT)
    # the shell that found no program was mended by nothing: the one that worked came before it
    assert turn_worth(run.turns) == [1.0, 0.0, 0.0, 1.0]


def test_format_counts_turns_that_were_written_as_the_dialect_wants(runtime: Runtime) -> None:
    assert component(runtime, run_of(runtime, BROKEN, *SOLVE), "format") == 0.75


def test_length_falls_from_what_is_free_to_what_earns_nothing(runtime: Runtime) -> None:
    run = run_of(runtime, *SOLVE)
    n = run.num_sampled_tokens
    assert component(runtime, run, "length", free=n) == 1.0
    assert component(runtime, run, "length", at_most=2 * n) == pytest.approx(0.5)
    assert component(runtime, run, "length", at_most=n) == 0.0
    assert falling(5, 5, 5) == 1.0
    assert falling(6, 5, 5) == 0.0


def test_diff_size_counts_lines_whatever_they_look_like(runtime: Runtime) -> None:
    assert component(runtime, run_of(runtime, *SOLVE), "diff_size", free=0, at_most=4) == 0.5
    diff = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n--- not a header\n+++ nor this\n same\n@@ -9 +9 @@\n-a\n+b\n"
    assert changed_lines(diff) == 4


def test_lint_reads_the_text_and_neither_the_workspace_nor_its_noqa(runtime: Runtime) -> None:
    clean, unused = run_of(runtime, *SOLVE), run_of(runtime, USE_OS, SUBMIT)
    lenient = "@write_file path=ruff.toml\nlint.ignore = ['F401']\n"
    hushed = "@write_file path=sums.py\n# ruff: noqa\nimport os\n\n\ndef add(a, b):\n    return a + b\n"
    assert component(runtime, clean, "lint") == 1.0
    assert component(runtime, unused, "lint", at_most=2) == 0.5
    assert component(runtime, run_of(runtime, lenient, hushed, SUBMIT), "lint", at_most=2) == 0.5


def test_lint_says_nothing_where_no_python_changed_and_half_of_its_weight_counts(runtime: Runtime) -> None:
    task = Task.model_validate(
        {"key": "say", "prompt": "Say 4.", "hidden": {"kind": "answer", "answer": 4}, "tools": ["submit"]}
    )
    (run,) = opened(tests=1, lint=1).apply([run_of(runtime, "@submit\n4", task=task)], runtime)
    assert run.verdict is not None
    assert (run.verdict.components["lint"], run.reward) == (None, 0.75)


def overlooked(run: Trajectory) -> Trajectory:
    """The run as a grader sees it that looks at the solution alone."""
    assert run.verdict is not None
    return run.model_copy(update={"verdict": run.verdict.model_copy(update={"tampering": ()})})


@pytest.mark.slow
def test_visible_tests_run_again_on_the_original_tests(runtime: Runtime) -> None:
    assert component(runtime, run_of(runtime, *SOLVE), "visible_tests") == 1.0
    cheat = "@write_file path=test_sums.py\ndef test():\n    pass\n"
    cheated = run_of(runtime, MEND, cheat, SUBMIT)
    (run,) = opened(tests=1, visible_tests=1).apply([cheated], runtime)
    assert run.verdict is not None
    # the grader has named the edited test, and that closes the gate
    assert {found.kind for found in run.verdict.tampering} == {"tests"}
    assert (run.reward, run.verdict.components["visible_tests"]) == (0.0, None)
    (run,) = opened(tests=1, visible_tests=1).apply([overlooked(cheated)], runtime)
    assert run.verdict is not None
    assert run.verdict.components["visible_tests"] == 0.0


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("thought", "value"),
    [
        ("", None),
        ("Wrong:\n2|    return a - b", 1.0),
        ("The line `return a - b` in sums.py subtracts: 2 - 3 = -1, but 2 + 3 = 5.", 1.0),
        ("Wrong:\n2|    return a * b", 0.25),  # no such line; it is the one edited
        ("Wrong:\n1|def add(a, b):", 0.25),  # there is, but it is not the one edited
        ("2 + 3 = 6", 0.0),
        ("The function `subtract` is wrong.", 0.0),
        ("The fault is in helpers.py.", 0.0),
        ("`add` `a` `b` `return` `def` are fine, and 1 + 1 = 3", 0.5 * 5 / 6),
        ("1 + 2 + 3 = 6, as x = 4 - 1 = 3 says", None),
    ],
)
def test_reasoning_earns_where_it_can_be_looked_up_and_holds(
    thought: str, value: float | None, runtime: Runtime
) -> None:
    run = run_of(runtime, READ, f"{thought}\n{MEND}", SUBMIT)
    assert run.reward == 1.0
    assert component(runtime, run, "reasoning") == (None if value is None else pytest.approx(value))


def test_a_right_answer_by_flawed_steps_earns_less_than_one_by_sound_or_unsaid_steps(
    runtime: Runtime,
) -> None:
    thoughts = ("Wrong:\n2|    return a - b\n", "", "As 2 + 3 = 6:\n")
    runs = rolled(runtime, *[(READ, f"{t}{MEND}", SUBMIT) for t in thoughts], FAIL)
    sound, unsaid, flawed, failed = (
        r.reward or 0.0 for r in opened(tests=1, reasoning=0.5).apply(runs, runtime)
    )
    assert sound > unsaid > flawed > failed == 0


def test_the_answer_that_is_announced_is_the_one_submitted(runtime: Runtime) -> None:
    task = Task.model_validate({"key": "say", "prompt": "Say 4.", "hidden": {"kind": "answer", "answer": 4}})
    said = run_of(runtime, "The answer is 4.\n@submit\n4", task=task)
    other = run_of(runtime, "The answer is 5.\n@submit\n4", task=task)
    assert (count_claims(said).failed, count_claims(other).failed) == (0, 1)


def test_safety_costs_what_the_sandbox_had_to_refuse(runtime: Runtime) -> None:
    run = run_of(runtime, *SOLVE)
    assert component(runtime, run, "safety") == 1.0
    seen = run.turns[0].observations[0]
    for denials, value in (
        (Denials(network=1), 0.75),
        (Denials(writes_outside=1), 0.5),
        (Denials(secrets=1), 0.0),
    ):
        turn = run.turns[0].model_copy(
            update={"observations": (seen.model_copy(update={"denials": denials}),)}
        )
        denied = run.model_copy(update={"turns": (turn, *run.turns[1:])})
        assert component(runtime, denied, "safety") == value


def test_human_is_the_mean_of_what_was_said(tmp_path: Path) -> None:
    runtime = new_runtime(tmp_path)
    run = run_of(runtime, *SOLVE)
    assert component(runtime, run, "human") is None
    for kind, value in (("accept", None), ("thumb", -1.0), ("note", None), ("outcome", 0.5)):
        runtime.store.add_feedback(
            run.id, Feedback(kind=FeedbackKind(kind), value=value, created=time.time())
        )
    assert component(runtime, run, "human") == pytest.approx((1.0 + 0.0 + 0.5) / 3)
    runtime.store.add_feedback(run.id, Feedback(kind=FeedbackKind.OUTCOME, value=7.0, created=time.time()))
    with pytest.raises(UsageError, match="value 7; it must lie between 0 and 1"):
        component(runtime, run, "human")


def test_the_constitution_checks_what_can_be_checked(runtime: Runtime) -> None:
    (kept,) = opened(tests=1, constitution=1).apply([run_of(runtime, *SOLVE)], runtime)
    assert kept.verdict is not None
    assert kept.verdict.components["constitution"] == 1.0
    edited = (
        "@write_file path=test_sums.py\ndef test():\n    try:\n        pass\n    except Exception: pass\n"
    )
    run = overlooked(run_of(runtime, MEND, edited, SUBMIT))
    (broken,) = opened(tests=1, constitution=1).apply([run], runtime)
    assert broken.verdict is not None
    parts = broken.verdict.components
    assert (parts["constitution.tests_untouched"], parts["constitution.no_silenced_errors"]) == (0.0, 0.0)
    assert parts["constitution.small_change"] == parts["constitution.stays_inside"] == 1.0
    # weights: 2 and 1 broken of 2 + 1 + 1 + 1 + 1
    assert parts["constitution"] == pytest.approx(3 / 6)


PRINCIPLES = """
principles:
  - id: no_new_dependencies
    text: No dependency is added.
    check: {kind: no_new_dependencies}
  - id: docstrings
    text: Only where a Markdown file was changed.
    applies_when: {changed: "*.md"}
    check: {kind: required, pattern: "^#"}
"""


def test_principles_are_data_and_apply_when_they_say(tmp_path: Path, runtime: Runtime) -> None:
    file = tmp_path / "principles.yaml"
    file.write_text(PRINCIPLES)
    uses_numpy = "@write_file path=extra.py\nimport math, numpy.linalg\nfrom sums import add\n"
    (run,) = opened(tests=1, constitution={"weight": 1, "path": str(file)}).apply(
        [run_of(runtime, uses_numpy, MEND, SUBMIT)], runtime
    )
    assert run.verdict is not None
    assert run.verdict.components["constitution.no_new_dependencies"] == 0.0
    assert "constitution.docstrings" not in run.verdict.components


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("principles = []", "principles"),
        ('[[principles]]\nid = "A b"\ntext = "x"', "id = 'A b'"),
        (
            '[[principles]]\nid = "a"\ntext = "x"\ncheck = {kind = "forbidden", pattern = "("}',
            "no regular expression",
        ),
        (
            '[[principles]]\nid = "a"\ntext = "x"\ncheck = {kind = "max_changed_lines"}',
            "`at_most` belongs to",
        ),
        ('[[principles]]\nid = "a"\ntext = "x"\n[[principles]]\nid = "a"\ntext = "y"', "'a' is used twice"),
        ('[[principles]]\nid = "a"\ntext = "x"', "principle a has no check, so it needs a judge"),
        ("= 3", "cannot read"),
    ],
)
def test_principles_that_cannot_be_read_are_refused_by_file(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "principles.toml"
    file.write_text(text)
    with pytest.raises(NanoError, match="constitution") as error:
        opened(tests=1, constitution={"weight": 1, "path": str(file)})
    assert sentence in str(error.value)


def test_preference_by_words_needs_a_name_where_there_is_not_one_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="nano-rl reward-model makes one"):
        parse_reward("tests=1,preference=0.2")


def test_preference_is_an_error_until_a_reward_model_is_given(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings in ({"weight": 1.0}, {"weight": 1.0, "checkpoint": "nowhere"}):
        with pytest.raises(NanoError, match="reward model"):
            opened(tests=1, preference=settings)
    turns = lambda runs, blobs: [-float(len(run.turns)) for run in runs]  # noqa: E731
    shorter = lambda name: turns if name == "short" else None  # noqa: E731
    monkeypatch.setattr("nano_preferences.rewards.preference.LOADERS", [*LOADERS, shorter])
    value = component(runtime, run_of(runtime, *SOLVE), "preference", checkpoint="short")
    assert value == pytest.approx(1 / (1 + math.exp(3)))

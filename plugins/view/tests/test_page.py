"""The page of `nano-rl report`: what it tells of a training, and that a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browser, needs_browser, serving
from builders import trajectory, turn, verdict
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from integration.tiny_model import build_tiny
from nano_rl.checkpoints.promotion import difference
from nano_rl.cli import cli
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import HELD_OUT_FILE, success_metrics
from nano_rl.improve.gate import decide
from nano_rl.improve.project import open_project
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.groups import Group, form_groups
from nano_rl.learn.metrics import METRICS, MetricsWriter
from nano_rl.learn.objectives import ObjectiveConfig
from nano_rl.training_record import TOKENIZER, Rollout, TrainingRecord, TrainingView, Watcher
from nano_shared.errors import GuardTripped, UsageError
from nano_shared.printable import printable
from nano_shared.store import LogStore
from nano_shared.types import Observation, Tampering, ToolCall, Trajectory
from nano_view.report.figures import AT_MOST, main_plots, series
from nano_view.report.improve import PROJECTS
from nano_view.report.page import Trainings
from nano_view.report.panel import interval_of
from nano_view.report.training import by_family, by_level, choose

HOSTILE = (
    "<script>document.title='owned'</script>\"'><img src=x onerror=\"document.title='owned'\">"
    "</pre></details><!-- ]]> & {{ 7*7 }} \u202etxt.exe\x00\x1b[31m \U000e0041 ünïcode 漢字"
)


def hostile_run(number: int, tokenizer: Path) -> Trajectory:
    """A run in which everything that a model, a program or a task can write is an attack on the page."""
    from tokenizers import Tokenizer

    ids = tuple(Tokenizer.from_file(str(tokenizer)).encode(HOSTILE).ids)
    seen = Observation(
        tool=HOSTILE, ok=False, text=HOSTILE, exit_code=1, files_changed=(HOSTILE,), started=1.0, ended=2.0
    )
    made = turn(3, ids, logprobs=[-(i % 7) / 2 for i in range(len(ids))])
    made = made.model_copy(
        update={
            "calls": (ToolCall(name=HOSTILE, arguments={HOSTILE: HOSTILE}),),
            "observations": (seen,),
            "parse_error": HOSTILE,
            "completion": made.completion.model_copy(update={"text": HOSTILE}),
        }
    )
    reward = float(number % 2)
    run = trajectory(made, run_id=f"run-{number}", key=f"task-{number // 2}", prompt=HOSTILE, reward=reward)
    task = run.task.model_copy(
        update={
            "files": {f"{HOSTILE.replace(chr(0), '')}.py": HOSTILE},
            "level": number // 2,
            "family": HOSTILE,
        }
    )
    judged = verdict(reward).model_copy(
        update={
            "checks": {HOSTILE: "fail"},
            "tampering": (Tampering(kind="exit", detail=HOSTILE),) if number == 0 else (),
            "failure_kind": HOSTILE,
            "components": {HOSTILE: 0.5},
        }
    )
    return run.model_copy(
        update={"task": task, "verdict": judged, "answer": HOSTILE, "diff": HOSTILE, "stop_detail": HOSTILE}
    )


def _train(folder: Path, watch: Watcher, groups: list[Group]) -> None:
    """Twelve steps, and a guard that stops the thirteenth."""
    with MetricsWriter(folder / METRICS) as metrics, watch:
        for step in range(12):
            watch.on_groups(step, groups, [])
            values = {"step": float(step), "reward_mean": step / 12, "entropy": 2.0 - step / 10, "ess": 1.0}
            values |= {"seconds_generate": 1.0, "seconds_train": 2.0 + step, "controls_graded": 1.0}
            metrics.write(step, {**values, **success_metrics(groups), f"tampering/{HOSTILE[:30]}": 1.0})
        raise GuardTripped(f"step 12: {HOSTILE}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of twelve steps, as `nano-rl train` leaves it."""
    home = tmp_path_factory.mktemp("home")
    made = home / "trainings" / "mine"
    tiny = build_tiny(home / "tiny", [HOSTILE], hidden=32, layers=1, vocab_size=300)
    made.mkdir(parents=True)
    shutil.copy(tiny / "tokenizer.json", made / TOKENIZER)
    runs = [hostile_run(number, made / TOKENIZER) for number in range(4)]
    with LogStore.open(home / "log.db") as log:
        for run in runs:
            log.append(run)
    groups = form_groups(runs)
    watch = Watcher(made, TrainingView(), [], done=0)
    with pytest.raises(GuardTripped):
        _train(made, watch, groups)
    config = TrainConfig(objective=ObjectiveConfig(beta=0.125))
    TrainingRecord(
        name="mine", model=HOSTILE, tasks=HOSTILE, log=str(home / "log.db"), started=0.0, nano="0",
        config=config.model_dump(mode="json"),
    ).write(made)  # fmt: skip
    result = CliRunner().invoke(cli, ["report", str(made)], catch_exceptions=False)
    assert result.output.splitlines()[-1] == str(made / "report.html")
    return made


def answers_of(path: Path) -> dict[str, Any]:
    """The data that a page holds."""
    (data,) = re.findall(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    answers: dict[str, Any] = json.loads(data)["answers"]
    return answers


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    """The page of the training, by section."""
    page = answers_of(folder / "report.html")["training name=mine"]
    return {section["title"]: section for section in page["sections"]} | {"tiles": page["tiles"]}


def test_the_page_tells_the_whole_story(told: dict[str, Any]) -> None:
    plots = {plot["title"] for plot in told["Curves"]["plots"]}
    assert {"Reward", "Success by level", "Entropy", "Effective samples", "Time by phase"} <= plots
    assert [row[0] for table in told["Success"]["tables"] for row in table["rows"]] == [
        "level 0",
        "level 1",
        HOSTILE,
    ]
    assert any(f"guard: step 12: {HOSTILE}" in line["text"] for line in told["Guards and events"]["lines"])
    assert told["Hacking"]["tables"][0]["rows"][-1][0] == "all"
    whys = [row[0]["text"] for row in told["Rollouts"]["tables"][0]["rows"]]
    assert whys[:2] == ["Best at the beginning", "Worst at the beginning"]
    settings = [row for table in told["Settings"]["tables"] for row in table["rows"]]
    assert ["beta", {"text": "0.125"}] in settings
    assert ["steps", "12", ""] in told["tiles"]


def test_the_rollouts_that_it_points_to_are_in_the_page(folder: Path, told: dict[str, Any]) -> None:
    answers = answers_of(folder / "report.html")
    for row in told["Rollouts"]["tables"][0]["rows"]:
        run = answers[f"run id={row[0]['run']}"]
        assert run["turns"][0]["tokens"]["spelled"], "the training's own tokenizer spells them"
        assert f"group id={run['group']['of']}" in answers


def test_metrics_that_are_always_zero_are_named_in_one_line(told: dict[str, Any]) -> None:
    assert told["All metrics"]["note"].startswith("0 in every step: ")
    assert not [row for row in told["All metrics"]["tables"][0]["rows"] if row[1:3] == ["0", "0"]]


def test_a_training_without_its_log_still_has_a_page(folder: Path, tmp_path: Path) -> None:
    arguments = ["report", str(folder), "-o", str(tmp_path / "r.html"), "--log", str(tmp_path / "none.db")]
    CliRunner().invoke(cli, arguments, catch_exceptions=False)
    sections = answers_of(tmp_path / "r.html")["training name=mine"]["sections"]
    (rollouts,) = [section for section in sections if section["title"] == "Rollouts"]
    assert all("is not shown: there is no log at" in line["text"] for line in rollouts["lines"])
    assert rollouts["tables"][0]["rows"][0][0] == "Best at the beginning"
    assert not (tmp_path / "none.db").exists()


def test_metrics_alone_make_a_page(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with MetricsWriter(tmp_path / "old" / METRICS) as metrics:
        metrics.write(0, {"step": 0.0, "loss": 1.0})
    result = CliRunner().invoke(cli, ["report", str(tmp_path / "old")], catch_exceptions=False)
    assert result.exit_code == 0
    assert "No rollout is recorded" in json.dumps(answers_of(tmp_path / "old" / "report.html"))


def test_rounding_does_not_fill_a_plot() -> None:
    noise = [{"step": float(n), "approx_kl": 1e-8 * (n % 3)} for n in range(20)]
    (plot,) = main_plots(noise)
    assert (plot["title"], plot["span"]) == ("KL", 0.001)


def test_lengths_are_sampled_tokens_a_rollout() -> None:
    rows = [{"step": 0.0, "tokens_rollout": 900.0, "rollouts": 9.0}, {"step": 1.0}]
    (plot,) = [plot for plot in main_plots(rows) if plot["title"] == "Length"]
    assert plot["curves"][0]["values"] == (100.0,)


def test_the_interval_of_a_mean_reward_stays_within_what_a_reward_can_be() -> None:
    ordinary = {"reward_mean": 0.98, "reward_error": 0.05, "reward_min": 0.0, "reward_max": 1.0}
    assert interval_of("reward_mean", ordinary) == (pytest.approx(0.98 - 1.96 * 0.05, abs=1e-3), 1.0)
    composed = {"reward_mean": 1.2, "reward_error": 0.5, "reward_min": -0.3, "reward_max": 1.5}
    assert interval_of("reward_mean", composed) == (pytest.approx(0.22, abs=1e-3), 1.5)


def held_out_folder(folder: Path, name: str, learning_rate: float) -> Path:
    """A training of twelve steps with measurements on held-out tasks."""
    made = folder / name
    made.mkdir()
    with MetricsWriter(made / METRICS) as metrics:
        for step in range(12):
            metrics.write(step, {"step": float(step), "reward_mean": step / 12, "seconds_train": 1800.0})
    rows = [{"step": n, "success": n / 20, "graded": 10, "low": 0.0, "high": 0.9} for n in (0, 6, 12)]
    (made / HELD_OUT_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig(optimizer=OptimizerConfig(learning_rate=learning_rate))
    TrainingRecord(
        name=name, model=HOSTILE, log=str(folder / "log.db"), started=0.0, nano="0",
        config=config.model_dump(mode="json"),
    ).write(made)  # fmt: skip
    return made


def test_the_page_draws_success_on_held_out_tasks(tmp_path: Path) -> None:
    made = held_out_folder(tmp_path, "mine", 1e-4)
    CliRunner().invoke(cli, ["report", str(made)], catch_exceptions=False)
    curves = answers_of(made / "report.html")["training name=mine"]["sections"][0]["plots"]
    (curve,) = [plot["curves"][0] for plot in curves if plot["title"] == "Held-out success"]
    assert (curve["steps"], curve["values"], curve["high"]) == ([0, 6, 12], [0, 0.3, 0.6], [0.9, 0.9, 0.9])


def test_two_trainings_stand_side_by_side(tmp_path: Path) -> None:
    made = [held_out_folder(tmp_path, name, rate) for name, rate in (("one", 1e-4), ("two", 3e-4))]
    result = CliRunner().invoke(cli, ["report", *map(str, made)], catch_exceptions=False)
    assert result.output.splitlines()[-1] == str(made[0] / "comparison.html")
    answers = answers_of(made[0] / "comparison.html")
    assert {"training name=one", "training name=two"} <= set(answers)
    _, curves, settings, whole = answers["training name=one,two"]["sections"]
    assert settings["tables"][0]["rows"] == [["optimizer.learning_rate", "0.0001", "0.0003"]]
    assert ["optimizer.learning_rate", "0.0001", "0.0003"] in whole["tables"][0]["rows"]
    assert len(whole["tables"][0]["rows"]) > 20
    assert {plot["title"] for plot in curves["plots"]} == {"Held-out success", "Reward"}
    reward = {plot["title"]: plot for plot in curves["plots"]}["Reward"]["curves"]
    assert [curve["hours"][-1] for curve in reward] == [pytest.approx(12 * 0.5), pytest.approx(12 * 0.5)]
    assert [[c["name"] for c in plot["curves"]] for plot in curves["plots"]] == [["one", "two"]] * 2
    as_json = CliRunner().invoke(cli, ["report", *map(str, made), "--json"], catch_exceptions=False)
    assert set(json.loads(as_json.output)) == {"one", "two"}
    with pytest.raises(UsageError, match="--hacks reads one training"):
        CliRunner().invoke(cli, ["report", *map(str, made), "--hacks"], catch_exceptions=False)


def test_the_viewer_lists_trainings_and_follows_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_HOME", str(folder.parents[1]))
    (row,) = Trainings().rows()
    assert (row["name"], row["cells"]["steps"]) == ("mine", "12")
    with pytest.raises(UsageError, match="trainings: mine"):
        Trainings().read("../../etc")
    (folder.parent / "torn").mkdir()
    (folder.parent / "torn" / METRICS).write_text("no JSON\n")
    assert {row["name"] for row in Trainings().rows()} == {"mine", "torn"}
    shutil.rmtree(folder.parent / "torn")


# --------------------------------------------------------------------------- in a real browser


@pytest.fixture(scope="module")
def shown() -> Iterator[Page]:
    with browser() as chromium, chromium.page(viewport={"width": 400, "height": 800}) as page:
        yield page


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_the_page_and_runs_nothing_of_it(shown: Page, folder: Path) -> None:
    page = shown.open((folder / "report.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.title() == "mine · nano"
    assert page.inner_text("main").count("<script>document.title='owned'</script>") > 3
    assert page.locator("main :is(script, img)").count() == 0
    assert page.locator("svg").count() >= 12
    assert shown.violations() == []
    assert not shown.overflows()
    page.get_by_role("link", name="Best at the beginning").click()
    page.wait_for_selector("h1:has-text('Run run-')")
    assert page.locator(".tokens .s4").count() > 0
    assert shown.complaints == []


@pytest.mark.slow
@needs_browser
def test_a_curve_tells_its_values_to_pointer_and_keys(shown: Page, folder: Path) -> None:
    page = shown.open((folder / "report.html").as_uri())
    reward = page.locator("figure", has_text="Reward").locator("svg").first
    reward.hover()
    assert re.match(
        r"Reward, step [56]; reward_mean: 0\.(4167|5)",
        page.inner_text("#status").replace("reward mean", "reward_mean"),
    )
    reward.focus()
    page.keyboard.press("ArrowRight")
    assert "step" in page.locator("figure", has_text="Reward").locator("text.value").first.text_content()
    page.keyboard.press("Tab")
    assert page.inner_text("#status") == ""


@pytest.mark.slow
@needs_browser
def test_a_training_grows_on_the_page_while_it_goes(
    shown: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nano_view.answers import LogView
    from nano_view.app import view_app

    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    going = MetricsWriter(tmp_path / "trainings" / "going" / METRICS)
    going.write(0, {"step": 0.0, "reward_mean": 0.5})
    with LogStore.open(tmp_path / "log.db") as log, serving(view_app(LogView(log))) as root:
        page = shown.open(f"{root}#/trainings")
        page.get_by_role("link", name="going").click()
        page.wait_for_selector("dd:has-text('1')")
        for step in range(1, 7):
            going.write(step, {"step": float(step), "reward_mean": 0.5 + step / 20})
        page.wait_for_selector(".tiles dd:has-text('7')")
    going.close()
    shown.complaints.clear()


@needs_browser
def test_curves_of_trainings_are_smoothed_zoomed_and_laid_over_each_other_by_step_or_time(
    shown: Page, tmp_path: Path
) -> None:
    made = [held_out_folder(tmp_path, name, rate) for name, rate in (("one", 1e-4), ("two", 3e-4))]
    CliRunner().invoke(cli, ["report", *map(str, made)], catch_exceptions=False)
    page = shown.open((made[0] / "comparison.html").as_uri())
    svg, whole = (
        page.locator("figure", has_text="Reward").locator("svg"),
        page.get_by_role("button", name="Whole range"),
    )

    def line() -> str:
        return str(svg.locator("path[stroke-width='1.7']").first.get_attribute("d"))

    by_step = line()
    page.get_by_label("Smoothing").fill("50")
    assert line() != by_step
    page.get_by_label("Smoothing").fill("5")
    assert line() == by_step
    page.get_by_label("Along").select_option("time")
    assert "hours" in svg.text_content()
    assert not whole.is_visible()
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    height = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.3 * box["width"], height)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], height, steps=3)
    page.mouse.up()
    whole.wait_for()
    assert line().count("L") in (2, 3, 4), "a third of twelve steps"
    assert shown.violations() == []
    assert not shown.overflows()
    svg.focus()
    page.keyboard.press("-")
    assert line().count("L") == 11
    assert not whole.is_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("+")
    assert line().count("L") < 11
    assert shown.complaints == []


# --------------------------------------------------------------------------------- its parts


@given(st.text())
def test_visible_text_hides_nothing(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert all(c in "\n\t" or c.isprintable() or c.isspace() for c in shown)
    shown.encode()


def test_a_page_shows_the_ends_of_a_training_and_its_hacks() -> None:
    def runs(step: int, *rewards: float | None) -> list[Rollout]:
        return [Rollout(id=f"{step}-{n}", reward=r, outcome=r) for n, r in enumerate(rewards)]

    steps = {0: runs(0, None), 1: runs(1, 0.0, 1.0, 0.5, 0.5), 2: runs(2, 0.2, 0.3), 3: runs(3, None)}
    steps[2].append(Rollout(id="control", reward=0.0, tampered=True, control=True))
    chosen = [(c.why, c.step, c.rollout.id) for c in choose(steps)]
    assert chosen[:2] == [("Best at the beginning", 1, "1-1"), ("Worst at the beginning", 1, "1-0")]
    assert chosen[3:5] == [("Best at the end", 2, "2-1"), ("Worst at the end", 2, "2-0")]
    assert chosen[-1] == ("An impossible control was passed", 2, "control")
    assert choose(steps) == choose(steps)
    assert choose({}) == []


def test_success_by_family_compares_the_first_and_the_last_quarter() -> None:
    def step(passed: bool, family: str) -> list[Rollout]:
        control = Rollout(id="c", family=family, outcome=1.0, control=True)
        return [Rollout(id="x", level=2, family=family, outcome=float(passed)), control]

    steps = {n: step(n >= 4, "a" if n < 7 else "b") for n in range(8)}
    a, b = by_family(steps)
    assert a.first is not None
    assert (a.first.successes, a.first.graded, a.all.graded) == (0, 2, 7)
    assert (b.first, b.all.rate) == (None, 1.0)
    (level,) = by_level(steps)
    assert level.last is not None
    assert (level.name, level.last.successes, level.last.graded) == ("level 2", 2, 2)


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=1200))
def test_a_curve_stays_within_its_band_and_the_page_small(values: list[float | None]) -> None:
    curve = series([{"step": float(n), "loss": v} for n, v in enumerate(values)], "loss")
    if all(value is None for value in values):
        assert curve is None
        return
    assert curve is not None
    assert len(curve.steps) <= AT_MOST
    slack = 1e-6
    for low, line, high in zip(curve.low, curve.line, curve.high, strict=True):
        assert low - slack <= line <= high + slack


def test_the_viewer_shows_an_improved_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    project = open_project(tmp_path)
    with project.locked():
        first = project.begin("shipped")
    gain = difference("held out", [(str(place), float(place < 9)) for place in range(40)])
    ended = {
        "ended": 1.0, "candidate": "shop-1", "rates": (0.1, 0.325), "decision": decide(1, gain, None),
        "gained": {"a.py::f": "r1"}, "lost": {"a.py::g": "r2"},
        "tasks": {"train": 80, "held_out": 40, "run": 3},
    }  # fmt: skip
    project.save(first.model_copy(update=ended))
    (row,) = PROJECTS.rows()
    assert row["cells"]["held-out success"] == "10% to 32%"
    page = PROJECTS.read(row["name"])
    curve, decision, cycles, changes = page["sections"]
    assert decision["note"] == "shop-1 was promoted."
    assert decision["lines"][0]["text"].startswith(
        "held-out tasks, shop-1 against shipped: +22.5% (95 % interval"
    )
    assert decision["lines"][1]["text"] == "general tasks: none are installed"
    assert curve["plots"][0]["curves"][0]["values"] == (0.325,)
    assert cycles["tables"][0]["rows"][0][-1] == "promoted shop-1"
    assert [line[:2] for line in changes["tables"][0]["rows"]] == [
        ["solved now", "a.py::f"], ["not any more", "a.py::g"],
    ]  # fmt: skip
    assert "3 of runs" in str(page["tiles"])
    json.dumps(page)

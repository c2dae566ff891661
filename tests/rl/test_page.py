"""The report's page: valid, self-contained, escaped against what a model writes, fit for a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from builders import trajectory, turn, verdict
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nano_rl.cli import cli
from nano_rl.config.training import TrainConfig
from nano_rl.gather.success import HELD_OUT_FILE, success_metrics
from nano_rl.learn.config import ObjectiveConfig, OptimizerConfig
from nano_rl.learn.metrics import METRICS, MetricsWriter
from nano_rl.learn.rows.group import Group, form_groups
from nano_rl.record.training_record import TOKENIZER, Rollout, TrainingRecord
from nano_rl.report.figures import main_plots
from nano_rl.report.live import NoView, Watcher
from nano_rl.report.panel import interval_of
from nano_rl.report.plot import AT_MOST, READINGS, Plotter, series
from nano_rl.report.training import by_family, by_level
from nano_rl.report.transcript import TokenText, choose, load_decoder, pieces
from nano_rl.tiny_model import build_tiny
from nano_shared.errors import GuardTripped, UsageError
from nano_shared.printable import printable
from nano_shared.store import LogStore
from nano_shared.types import Observation, Tampering, ToolCall, Trajectory, TurnTokens

HOSTILE = (
    "<script>document.title='owned'</script>\"'><img src=x onerror=\"document.title='owned'\">"
    "</pre></details><!-- ]]> & {{ 7*7 }} \u202etxt.exe\x00\x1b[31m \U000e0041 ünïcode 漢字"
)
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)  # fmt: skip  # noqa: E501


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
    watch = Watcher(made, NoView(), [], done=0)
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


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


class Strict(HTMLParser):
    """Refuses what the standard refuses and a browser mends in silence: bad nesting, doubled ids."""

    VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.wanted: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} at {self.getpos()} has an attribute twice"
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "aria-labelledby" or (name == "href" and (value or "").startswith("#")):
                self.wanted.append((value or "").lstrip("#"))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        assert self.open, f"</{tag}> at {self.getpos()} closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()} does not nest"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def parsed(page: str) -> Strict:
    parser = Strict()
    parser.feed(page)
    parser.close()
    return parser


def test_the_page_is_valid(page: str, parsed: Strict) -> None:
    assert page.startswith("<!DOCTYPE html>")
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(parsed.wanted) <= set(parsed.ids)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)  # well-formed by itself too
    assert page.count("<svg") >= 6


def test_nothing_that_a_model_writes_becomes_markup(page: str, parsed: Strict) -> None:
    assert not {"script", "img", "iframe", "object", "form"} & set(parsed.tags)
    assert not [a for a in parsed.attributes if a[1].startswith("on")]
    assert "\x00" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "default-src 'none'" in page
    assert parsed.text.count("<script>document.title='owned'</script>") > 8, "it is shown as what it is"
    assert "{{ 7*7 }}" in parsed.text


def test_the_page_loads_nothing_from_elsewhere(page: str, parsed: Strict) -> None:
    links = [value for _, name, value in parsed.attributes if name in ("src", "href", "xlink:href", "action")]
    assert all(link.startswith("#") for link in links)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_the_page_tells_the_whole_story(parsed: Strict) -> None:
    text = parsed.text
    for part in (
        "Best at the beginning", "Worst at the beginning", "Best at the end",
        "beta0.125", "guard: step 12",
        "Success by level", "Time by phase", "level 1", "tampering, exit", "12 steps",
    ):  # fmt: skip
        assert re.sub(r"\s+", "", part) in re.sub(r"\s+", "", text), part


def test_sampled_tokens_are_shaded_and_say_their_logprobs(parsed: Strict) -> None:
    shades = {value for tag, name, value in parsed.attributes if tag == "span" and name == "class"}
    assert {"t0", "t1", "t2", "t3", "t4"} <= shades
    told = [value for tag, name, value in parsed.attributes if tag == "span" and name == "title"]
    assert any("-0.500 nats (60.7%)" in title for title in told)


def test_keys_reach_everything_that_scrolls_or_folds(parsed: Strict) -> None:
    scrolling = [a for a in parsed.attributes if a[1:] == ("class", "wide")]
    reachable = [a for a in parsed.attributes if a[1:] == ("tabindex", "0")]
    assert len(scrolling) == len(reachable) > 0
    assert parsed.tags.count("details") == parsed.tags.count("summary") > 0


def test_a_training_without_its_log_still_has_a_page(folder: Path, tmp_path: Path) -> None:
    arguments = ["report", str(folder), "-o", str(tmp_path / "r.html"), "--log", str(tmp_path / "none.db")]
    CliRunner().invoke(cli, arguments, catch_exceptions=False)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "is not shown:" in text
    assert not (tmp_path / "none.db").exists()


def test_metrics_alone_make_a_page(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with MetricsWriter(tmp_path / "old" / METRICS) as metrics:
        metrics.write(0, {"step": 0.0, "loss": 1.0})
    result = CliRunner().invoke(cli, ["report", str(tmp_path / "old")], catch_exceptions=False)
    assert result.exit_code == 0
    assert "No rollout is recorded" in (tmp_path / "old" / "report.html").read_text(encoding="utf-8")


def test_a_curve_shows_its_values_under_the_pointer(page: str) -> None:
    (reward,) = re.findall(r'<svg class="plot" role="img" aria-label="Reward over.*?</svg>', page, re.DOTALL)
    strips = re.findall(r'<g class="at">(.*?)</g>', reward)
    assert len(strips) == 12
    assert ">step 6<" in strips[6]
    assert ">reward mean: 0.5" in strips[6]


def test_values_under_the_pointer_stay_few() -> None:
    curve = series([{"step": float(n), "loss": 1.0} for n in range(5000)], "loss")
    assert curve is not None
    assert Plotter().curves([curve], "loss").count('class="at"') <= READINGS


def test_rounding_does_not_fill_a_plot() -> None:
    noise = [{"step": float(n), "approx_kl": 1e-8 * (n % 3)} for n in range(20)]
    (plot,) = main_plots(noise, Plotter())
    ticks = "".join(re.findall(r"<text[^>]*>([^<]+)</text>", plot.svg))
    assert "0.001" in ticks
    assert "1e" not in ticks


def test_the_interval_of_a_mean_reward_stays_within_what_a_reward_can_be() -> None:
    ordinary = {"reward_mean": 0.98, "reward_error": 0.05, "reward_min": 0.0, "reward_max": 1.0}
    assert interval_of("reward_mean", ordinary) == (pytest.approx(0.98 - 1.96 * 0.05, abs=1e-3), 1.0)
    composed = {"reward_mean": 1.2, "reward_error": 0.5, "reward_min": -0.3, "reward_max": 1.5}
    assert interval_of("reward_mean", composed) == (pytest.approx(0.22, abs=1e-3), 1.5)


def test_metrics_that_are_always_zero_are_named_in_one_line(page: str, parsed: Strict) -> None:
    assert "0 in every step: " in parsed.text
    table = page[page.index('id="metrics"') :]
    assert not re.search(r"<td>0</td><td>0</td><td>0</td>", table)


def held_out_folder(folder: Path, name: str, learning_rate: float) -> Path:
    """A training of twelve steps with measurements on held-out tasks."""
    made = folder / name
    made.mkdir()
    with MetricsWriter(made / METRICS) as metrics:
        for step in range(12):
            metrics.write(step, {"step": float(step), "reward_mean": step / 12})
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
    text = (made / "report.html").read_text(encoding="utf-8")
    assert "Held-out success" in text
    assert "held-out: 0.6 (0 to 0.9)" in text


def test_two_trainings_stand_side_by_side(tmp_path: Path) -> None:
    made = [held_out_folder(tmp_path, name, rate) for name, rate in (("one", 1e-4), ("two", 3e-4))]
    result = CliRunner().invoke(cli, ["report", *map(str, made)], catch_exceptions=False)
    assert result.output.splitlines()[-1] == str(made[0] / "comparison.html")
    text = (made[0] / "comparison.html").read_text(encoding="utf-8")
    parser = Strict()
    parser.feed(text)
    assert parser.open == []
    assert "script" not in parser.tags
    assert "optimizer.learning_rate0.00010.0003" in re.sub(r"\s+", "", parser.text)
    assert {"Held-out success", "Reward"} <= set(re.findall(r"<strong>(.*?)</strong>", text))
    assert "one: 0.25" in text
    assert "two: 0.25" in text
    as_json = CliRunner().invoke(cli, ["report", *map(str, made), "--json"], catch_exceptions=False)
    assert set(json.loads(as_json.output)) == {"one", "two"}
    with pytest.raises(UsageError, match="--hacks reads one training"):
        CliRunner().invoke(cli, ["report", *map(str, made), "--hacks"], catch_exceptions=False)


# --------------------------------------------------------------------------- in a real browser


def browser(*arguments: str) -> str:
    assert CHROMIUM is not None
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000")
    done = subprocess.run(
        [CHROMIUM, *flags, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed; the parser's tests hold everywhere")
@pytest.mark.parametrize("guarded", [True, False], ids=["as it is", "without its policy"])
def test_a_browser_runs_nothing_of_it(page: str, guarded: bool, tmp_path: Path) -> None:
    text = page if guarded else re.sub(r"<meta http-equiv[^>]*>", "", page)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    seen = browser("--dump-dom", f"file://{tmp_path}/page.html")
    assert "<title>mine: report of a training</title>" in seen


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed; the parser's tests hold everywhere")
def test_a_browser_shows_it_on_a_phone_without_scrolling_sideways(page: str, tmp_path: Path) -> None:
    measure = (
        "<script>const f=document.createElement('iframe');f.style.width='390px';f.srcdoc="
        "document.querySelector('template').innerHTML;f.onload=()=>{const d=f.contentDocument;"
        "d.querySelectorAll('details').forEach(e=>e.open=true);"
        "document.title=d.documentElement.scrollWidth+' '+d.querySelectorAll('svg').length};"
        "document.body.append(f)</script>"
    )
    body = page[page.index("<style>") : page.index("</body>")].replace("</head>", "").replace("<body>", "")
    (tmp_path / "phone.html").write_text(f"<body><template>{body}</template>{measure}", encoding="utf-8")
    seen = browser("--dump-dom", f"file://{tmp_path}/phone.html")
    found = re.search(r"<title>(\d+) (\d+)</title>", seen)
    assert found, seen[:300]
    assert int(found[1]) <= 390
    assert int(found[2]) == page.count("<svg")


# --------------------------------------------------------------------------------- its parts


@given(st.text())
def test_visible_text_hides_nothing(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert all(c in "\n\t" or c.isprintable() or c.isspace() for c in shown)
    shown.encode()


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=30))
def test_the_pieces_of_sampled_tokens_are_their_text(decoder: object, text: str) -> None:
    tokenizer, decode = decoder  # type: ignore[misc]
    ids = tuple(tokenizer.encode(text).ids)
    tokens = TurnTokens(context_ids=(), sampled_ids=ids, logprobs=tuple(-float(i) for i in range(len(ids))))
    found = list(pieces(tokens, decode))
    assert "".join(piece.text for piece in found) == decode(ids)
    assert [x for piece in found for x in piece.logprobs] == list(tokens.logprobs)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> object:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / TOKENIZER)), load_decoder(folder / TOKENIZER)


def test_a_shade_is_that_of_the_least_likely_token() -> None:
    assert [TokenText("x", (logprob,)).shade for logprob in (0.0, -0.2, -1.0, -2.0, -9.0)] == [0, 1, 2, 3, 4]
    assert TokenText("漢", (-0.01, -9.0)).shade == 4


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

"""`nano-rl improve`: tasks of a project, a split that never moves, a gate that chance does not pass, and a
promotion for that project alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from git_repository import commit, git
from looping import tiny_model
from promoted import NANO, checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "coder"))

from executions import SUBMIT, a_runtime, a_task, act

from nano_coder.commands.options import Setup
from nano_coder.config import AgentConfig
from nano_coder.models.opening import default_model
from nano_coder.run.execution import Project as RunProject
from nano_coder.run.execution import grade_run, run_task
from nano_rl.checkpoints.evaluate import sign_flip
from nano_rl.checkpoints.promotion import SuccessDifference, difference, promote, read_history
from nano_rl.command_setup import trainings_dir
from nano_rl.commands.improve import _for_project
from nano_rl.gather.rollouts import ORACLE
from nano_rl.improve import cycle as cycles
from nano_rl.improve.cycle import minutes_until, parse_pause, parse_window, taught_profile
from nano_rl.improve.gate import ERROR, FEWEST_PLACES, decide, error_of, fallen
from nano_rl.improve.project import ProjectTask, open_project
from nano_rl.improve.tasks import TASKS, by_turns
from nano_rl.improve.training import imitate, trained_seconds
from nano_rl.learn.metrics import METRICS, MetricsWriter
from nano_rl.tasks.code_places import SHARES, SplitPart, changed_places, functions_of, part_of
from nano_shared.checkpoint import read_checkpoint
from nano_shared.errors import UsageError
from nano_shared.files import checkpoints_dir
from nano_shared.owners import project_id
from nano_shared.snapshot import BlobStore, Snapshot, load, open_blobs, snapshot_texts
from nano_shared.store import LogStore
from nano_shared.types import Split, Task
from nano_suites.drawing import make_tasks

pytest_plugins = ["command_lines"]
pytestmark = pytest.mark.usefixtures("home")
CHECK = "python test_it.py"


def project_at(folder: Path) -> RunProject:
    return RunProject(directory=str(folder.resolve()))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of 24 functions, each tested; a cycle looks for few mutants of them."""
    monkeypatch.setattr("nano_rl.improve.tasks.MUTANTS", 8)
    folder = tmp_path / "shop"
    folder.mkdir()
    functions = [f"def f{n}(a, b):\n    return a * {n} + b\n" for n in range(24)]
    (folder / "prices.py").write_text("\n\n".join(functions))
    tests = [f"assert prices.f{n}(2, 3) == {2 * n + 3}" for n in range(24)]
    (folder / "test_it.py").write_text("import prices\n\n" + "\n".join(tests) + "\n")
    return folder


# --------------------------------------------------------------------------------------- places


def test_a_hash_decides_the_part_for_ever() -> None:
    assert [part_of(f"shop/prices.py::f{n}").value for n in range(8)] == [
        "validation", "train", "train", "train", "held_out", "train", "train", "train",
    ]  # fmt: skip
    parts = [part_of(f"{n}.py::f") for n in range(10_000)]
    for part, share in SHARES.items():
        assert parts.count(part) / 10_000 == pytest.approx(share, abs=0.02)


def test_every_second_mutant_is_held_out_until_the_gate_has_enough() -> None:
    places = [f"shop/prices.py::f{n}" for n in range(400)]
    turn = by_turns(40)
    order = sorted(places, key={place: turn(place) for place in places}.__getitem__)
    held = [part_of(place) is SplitPart.HELD_OUT for place in order]
    assert [sum(held[:n]) for n in (2, 20, 80)] == [1, 10, 40]
    assert held[80:] == [part_of(p) is SplitPart.HELD_OUT for p in sorted(order[80:], key=places.index)]
    assert sorted(order) == sorted(places)
    assert not any(part_of(place) is SplitPart.HELD_OUT for place in sorted(places, key=by_turns(0))[:2])


def snapshots(blobs: BlobStore, *texts: dict[str, str]) -> list[Snapshot]:
    return [load(snapshot_texts(files, blobs), blobs) for files in texts]


CODE = """import os

LIMIT = 3


class Shop:
    @property
    def size(self):
        def inner():
            return 1
        return inner()

    async def open(self):
        return True


def close():
    pass
"""


@pytest.mark.parametrize(
    ("old", "new", "places"),
    [
        ("LIMIT = 3", "LIMIT = 4", ["a.py"]),
        ("return 1", "return 2", ["a.py::Shop.size"]),
        ("@property", "@cached", ["a.py::Shop.size"]),
        ("return True", "return False", ["a.py::Shop.open"]),
        ("    pass\n", "", ["a.py"]),
        ("import os\n", "import os\nimport sys\n", ["a.py"]),
    ],
)
def test_a_place_is_the_function_around_what_changed(
    tmp_path: Path, old: str, new: str, places: list[str]
) -> None:
    blobs = open_blobs(str(tmp_path / "blobs"))
    one, other = snapshots(blobs, {"a.py": CODE}, {"a.py": CODE.replace(old, new)})
    assert changed_places(one, other, blobs) == places
    one, other = snapshots(blobs, {"a.c": "1"}, {"a.c": "2", "b.py": "x = 1"})
    assert changed_places(one, other, blobs) == ["a.c", "b.py"]


def test_code_is_the_same_whatever_its_comments_layout_and_name() -> None:
    one = functions_of("def f(a):\n    '''Doc.'''\n    return a + 1  # more\n")
    other = functions_of("@cache\ndef g(a):\n    return (a\n            + 1)\n")
    assert [f[3] for f in one] == [f[3] for f in other] != [f[3] for f in functions_of("def f(a): return a")]
    assert functions_of("def f(:") == []


# --------------------------------------------------------------------------------------- gate


def gained(better: int, worse: int = 0, of: int = 40) -> SuccessDifference:
    values = [1.0] * better + [-1.0] * worse + [0.0] * (of - better - worse)
    return difference("held out", [(str(place), value) for place, value in enumerate(values)])


def test_the_errors_of_all_cycles_are_one_error() -> None:
    assert sum(map(error_of, range(1, 100_000))) == pytest.approx(ERROR, abs=1e-6)


@pytest.mark.parametrize(
    ("cycle", "held_out", "general", "why"),
    [
        (1, gained(8), None, None),
        (1, gained(8), gained(0, 1), None),
        (1, gained(8), gained(0, 3), "general"),
        (1, gained(5, 1), None, "beyond noise"),
        (30, gained(8), None, "beyond noise"),
        (30, gained(18), None, None),
        (1, gained(0, 8), None, "beyond noise"),
        (1, gained(8, of=FEWEST_PLACES - 1), None, "too few"),
    ],
)
def test_what_is_promoted(
    cycle: int, held_out: SuccessDifference, general: SuccessDifference | None, why: str | None
) -> None:
    decision = decide(cycle, held_out, general)
    assert decision.promoted is (why is None)
    assert why is None or why in decision.objections[0]


def test_a_policy_that_does_not_change_is_hardly_ever_promoted() -> None:
    """benchmarks/improve_gate.py takes 500 projects."""

    usual = gained(1)

    def promoted(seed: int) -> bool:
        rng = random.Random(seed)
        for cycle in range(1, 31):
            values = [[float(rng.random() < 0.4) - (rng.random() < 0.4)] for _ in range(40)]
            mean = sum(value for (value,) in values) / 40
            update = {"mean": mean, "p_better": sign_flip(values)}
            if decide(cycle, usual.model_copy(update=update), None).promoted:
                return True
        return False

    assert sum(map(promoted, range(40))) <= 5


@pytest.mark.parametrize("seed", range(3))
def test_a_fall_is_found_and_luck_is_not(seed: int) -> None:
    rng = random.Random(seed)
    before = [rng.random() < 0.7 for _ in range(120)]
    found = fallen(before, [rng.random() < 0.1 for _ in range(120)])
    assert found is not None
    assert 5 <= found <= 60
    assert fallen(before, before[::-1]) is None
    assert fallen([], [False] * 50) is None, "there is nothing to compare with"


# --------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86_400), ("90m", 5400), ("1.5d", 129_600)])
def test_a_pause(text: str, seconds: float) -> None:
    assert parse_pause(text) == seconds


@pytest.mark.parametrize(
    ("window", "now", "minutes"),
    [
        ("22:00-07:00", "23:15", 0), ("22:00-07:00", "06:59", 0), ("22:00-07:00", "07:00", 900),
        ("22:00-07:00", "21:30", 30), ("9:00-17:30", "17:29", 0), ("9:00-17:30", "17:30", 930),
    ],
)  # fmt: skip
def test_a_window(window: str, now: str, minutes: int) -> None:
    assert minutes_until(parse_window(window), datetime.strptime(now, "%H:%M")) == minutes


# --------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--check", CHECK, "--minutes", "0"], "leaves no time"),
        (["--check", CHECK, "--minutes", "nan"], "leaves no time"),
        (["--check", CHECK, "--every", "9999999999999d"], "up to a year"),
        (["--check", CHECK, "--every", "soon"], "write 90m, 24h or 1d"),
        (["--check", CHECK, "--every", "0h"], "write 90m, 24h or 1d"),
        (["--check", CHECK, "--every", "1h", "--between", "night"], "write 22:00-07:00"),
        (["--check", CHECK, "--every", "1h", "--between", "22:00-25:00"], "write 22:00-07:00"),
        (["--check", CHECK, "--between", "22:00-07:00"], "give --every too"),
        (["--status", "--undo"], "give one of them"),
        (["--check", CHECK, "--model", "openai:gpt-5"], "name a local model with --model"),
        (["--check", CHECK, "--model", "nonsense"], "nonsense"),
        ([], "there is no check"),
        (["--undo"], "there is no promotion to take back"),
        (["--global"], "nothing is promoted for shop"),
        (["--why"], "no cycle of shop has ended"),
        (["--check", "python nothing.py"], "No such file or directory)"),
        (["--check", "true && false"], "as it is (it prints nothing)"),
        (["--check", "no-such-program"], "cannot be run"),
        (["--check", "true"], "0 tasks to train on"),
    ],
)
def test_bad_input_is_a_sentence(
    nano: NANO, shop: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    code, out, err = nano("improve", "-C", shop, *arguments)
    assert said in out + err
    assert code == (0 if "true" in arguments else 2)


def test_a_check_that_the_user_has_not_trusted_teaches_nothing(nano: NANO, shop: Path) -> None:
    (shop / "nano.toml").write_text(f'check = "{CHECK}"\n')
    code, _, err = nano("improve", "-C", shop)
    assert (code, "nano-coder trust" in err) == (2, True)


def test_a_cycle_makes_tasks_trains_and_decides_and_goes_on_where_it_was(
    nano: NANO, shop: Path, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cycles, "GENERAL", 2)
    monkeypatch.setattr("nano_rl.improve.tasks.MUTANTS", 20)
    monkeypatch.setattr("nano_rl.improve.training._MOST_STEPS", 1)
    monkeypatch.setattr("nano_rl.improve.tasks.TURNS", 1)
    model = tiny_model(tmp_path / "tiny", max_positions=2000, tasks=[])
    arguments = ("improve", "-C", shop, "--check", CHECK, "--model", model, "--json")
    code, out, err = nano(*arguments, "--minutes", "0.001")
    cut = json.loads(out)
    assert (code, cut["ended"]) == (0, None), err
    assert "goes on" in cut["said"]
    code, out, err = nano(*arguments, "--minutes", "5")
    cycle = json.loads(out)
    assert (code, cycle["number"]) == (0, 1), err
    assert cycle["ended"] is not None
    assert cycle["candidate"]
    assert "held-out places are too few" in cycle["said"]
    project = open_project(shop)
    tasks = project.read(TASKS, ProjectTask)
    assert {one.part for one in tasks} >= {SplitPart.TRAIN, SplitPart.HELD_OUT}
    for one in tasks:
        assert {part_of(place) for place in one.places} == {one.part}
        assert one.task.split is (Split.TEST if one.part is SplitPart.HELD_OUT else Split.TRAIN)
    held = {code for one in tasks if one.part is SplitPart.HELD_OUT for code in one.codes}
    assert held.isdisjoint(code for one in tasks if one.part is not SplitPart.HELD_OUT for code in one.codes)
    assert read_history(project.id) == ()
    for flag, said in (("--status", "places"), ("--why", "general"), ("--dry-run", "cycle 2")):
        code, out, _ = nano("improve", "-C", shop, "--check", CHECK, "--model", model, flag)
        assert (code, said in out) == (0, True), out


def test_solutions_take_half_of_the_time_of_imitation_at_most(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nano_rl.improve.training._AT_ONCE", 2)
    tasks = make_tasks(levels=[0], n=5, seed=1, split=Split.TRAIN, views=["copy"])
    model = str(tiny_model(tmp_path / "tiny", max_positions=2000, tasks=tasks))
    told = list[str]()
    assert imitate("hurried", model, tasks, AgentConfig(), time.monotonic(), told.append)
    assert read_checkpoint(checkpoints_dir() / "hurried")
    with LogStore.open(home / "log.db") as store:
        assert len(store.ids()) == 2
    assert "imitating 2 solutions of 5 training tasks" in told
    assert told[-1].startswith("imitation: step 1 of ")


@pytest.mark.slow
def test_tasks_are_of_runs_commits_and_mutants(
    nano: NANO, shop: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_rl.improve.tasks.MUTANTS", 3)
    right = (shop / "prices.py").read_text()
    git(shop, "init", "-q", "-b", "main")
    (shop / "test_it.py").write_text("import prices\n\nassert prices.f3(2, 3) == 9\n")
    commit(shop, "begun", {"prices.py": right.replace("a * 5 +", "a * 4 +")})
    more = "import prices\n\nassert prices.f3(2, 3) == 9\nassert prices.f5(2, 3) == 13\n"
    commit(shop, "mended", {"prices.py": right, "test_it.py": more})
    wrong = right.replace("return a * 3 + b", "return a * 3 - b")
    line = 1 + wrong.splitlines().index("    return a * 3 - b")
    texts = [act("edit_file", path="prices.py", line=line, new="    return a * 3 + b"), SUBMIT]
    runtime = a_runtime(home, texts, store=LogStore.open(), project=project_at(shop))
    files = {"prices.py": wrong, "test_it.py": more}
    start = snapshot_texts(files, runtime.store.blobs)
    run = grade_run(run_task(a_task(files={}, snapshot=start, check=CHECK), runtime), runtime)
    assert run.reward == 1
    _, _, err = nano("improve", "-C", shop, "--check", CHECK)
    tasks = {one.source: one for one in open_project(shop).read(TASKS, ProjectTask)}
    assert {"run", "commit", "mutant"} == set(tasks), err
    assert "1 new runs with a check, 1 of them solved" in err
    assert tasks["run"].places == ("prices.py::f3",)
    assert tasks["commit"].places == ("prices.py::f5",)
    _, _, err = nano("improve", "-C", shop, "--check", CHECK)
    assert "0 new runs" in err
    assert "new commits" not in err


def test_a_checkpoint_is_promoted_for_one_project(nano: NANO, shop: Path, tmp_path: Path) -> None:
    one, other = checkpoint("one"), checkpoint("other")
    project = project_id(shop)
    usual = default_model()
    promote(one, project=project)
    promote(other, project=project)
    assert (default_model(project), default_model(project_id(tmp_path)), default_model()) == (
        "other", usual, usual,
    )  # fmt: skip
    assert nano("improve", "-C", shop, "--undo")[1] == "one runs for shop now\n"
    assert default_model(project) == "one"
    assert nano("improve", "-C", shop, "--global")[0] == 0
    assert default_model() == default_model(project_id(tmp_path)) == "one"
    assert nano("improve", "-C", shop, "--undo")[1] == "the usual policy runs for shop now\n"


def test_what_repairs_by_a_check_runs_where_there_is_one(shop: Path) -> None:
    leads, repairs = checkpoint("leads"), checkpoint("repairs", profile="repair-1")
    project = project_id(shop)
    promote(leads)
    promote(repairs, project=project)
    assert default_model(project) == "repairs"
    assert default_model(project, checked=False) == "leads"


@pytest.mark.parametrize(
    ("model", "profile"),
    [("shipped", "repair-1"), ("smollm2-135m-instruct", "repair-1"), ("tiny", "compact-1")],
)
def test_the_small_models_that_come_with_nano_learn_to_repair(
    nano: NANO, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, profile: str
) -> None:
    named = str(tiny_model(tmp_path / "tiny", tasks=[])) if model == "tiny" else model
    arguments = ("improve", "-C", shop, "--check", CHECK, "--model", named, "--dry-run", "--json")
    assert json.loads(nano(*arguments)[1])["profile"] == profile
    monkeypatch.setenv("NANO_PROFILE", "compact-1")
    assert json.loads(nano(*arguments)[1])["profile"] == "compact-1"


@pytest.mark.parametrize(("place", "profile"), [("app.js", "compact-1"), ("app.py::main", "repair-1")])
def test_who_repairs_needs_tasks_in_python(place: str, profile: str) -> None:
    one = ProjectTask(task=a_task(), source="run", places=(place,), part=SplitPart.TRAIN, cycle=1)
    assert taught_profile(AgentConfig(), "shipped", [one]) == profile


def test_a_promotion_after_which_runs_fail_is_taken_back_and_said_once(nano: NANO, shop: Path) -> None:
    from test_admission import a_run

    promote(checkpoint("worse"), project=project_id(shop))
    moment = read_history(project_id(shop))[-1].created
    with LogStore.open() as store:
        for number in range(60):
            after, passed = number >= 30, float(number < 30)
            task = Task(key=f"t{number}", prompt="Mend it.", check="false")
            started = moment + (number if after else number - 100)
            store.append(
                a_run(
                    f"r{number}",
                    passed,
                    task=task,
                    directory=str(shop.resolve()),
                    started=started,
                    ended=started,
                )
            )
    _, _, err = nano("improve", "-C", shop, "--check", "true")
    assert "worse is taken back: since its promotion 0 of 7 checked runs passed, of as many before 7" in err
    assert [one.kind for one in read_history(project_id(shop))] == ["promoted", "rolled_back"]
    assert "taken back" not in nano("improve", "-C", shop, "--check", "true")[2]


def test_the_time_of_a_training_is_that_of_all_processes_that_took_part(home: Path) -> None:
    """A cycle that was cut short goes on in another process, which writes on in the same file."""
    for name, row in (("shop-1", {"seconds": 2.5}), ("shop-1-rl", {"step_time": 4.0})):
        for at in (0, 2):
            with MetricsWriter(trainings_dir() / name / METRICS, resume_at=at) as metrics:
                for step in range(at, at + 2):
                    metrics.write(step, row)
    assert trained_seconds(["shop-1"]) == 10
    assert trained_seconds(["shop-1", "shop-1-rl"]) == 26
    assert trained_seconds(["no-such"]) == 0


def test_a_project_is_worked_on_with_the_interpreter_of_its_own_environment(shop: Path) -> None:
    (python := shop / ".venv" / "bin" / "python").parent.mkdir(parents=True)
    python.touch()
    setup = Setup(AgentConfig(check="true"), {})
    assert _for_project(setup, open_project(shop)).config.python == str(python.resolve())
    named = setup._replace(config=AgentConfig(check="true", python="/usr/bin/python3"))
    assert _for_project(named, open_project(shop)) == named


def test_runs_are_read_by_their_columns_and_those_of_others_with_consent(nano: NANO, shop: Path) -> None:
    from test_admission import a_run

    here = str(shop.resolve())
    checked, bare = Task(key="c", prompt="Mend it.", check="true"), Task(key="b", prompt="Mend it.")
    given = {"owner": "ann@x", "share": "train"}
    with LogStore.open() as store:
        store.append(a_run("mine", 1.0, task=checked, directory=here))
        store.append(a_run("free", 1.0, task=bare, directory=here))
        store.append(a_run("given", 1.0, task=checked, directory=here, **given))
        store.append(a_run("kept", 1.0, task=checked, directory=here, **given | {"share": "team"}))
        store.append(a_run("oracle", 1.0, task=checked, directory=here, policy=ORACLE))
        store.append(a_run("elsewhere", 1.0, task=checked, directory="/elsewhere"))
    out = json.loads(nano("improve", "-C", shop, "--dry-run", "--json")[1])
    assert (out["runs"], out["solved"], out["check"]) == (2, 2, "true")


def test_a_line_that_a_killed_process_left_counts_for_nothing(shop: Path) -> None:
    project = open_project(shop)
    task = Task(key="one", prompt="Mend it.", check=CHECK)
    row = ProjectTask(task=task, source="mutant", places=("a.py::f",), part=SplitPart.TRAIN, cycle=1)
    project.append(TASKS, [row])
    with (project.folder / TASKS).open("a") as file:
        file.write('{"task": {"key": "tw')
    assert project.read(TASKS, ProjectTask) == [row]
    project.append(TASKS, [row])
    assert project.read(TASKS, ProjectTask) == [row, row]


def test_one_process_at_a_time(shop: Path) -> None:
    with open_project(shop).locked(), pytest.raises(UsageError, match="another process improves"):
        with open_project(shop).locked():
            pass


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_nothing_and_promotes_nothing_half(
    shop: Path, home: Path, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "tiny", max_positions=2000, tasks=[])
    line = [sys.executable, "-m", "nano_rl", "improve", "-C", str(shop), "--check", CHECK, "--minutes", "2"]
    environment = {**os.environ, "NANO_MODEL": model, "OMP_NUM_THREADS": "1"}
    project, rng, seen = open_project(shop), random.Random(7), list[ProjectTask]()
    for _ in range(30):
        process = subprocess.Popen(line, env=environment, start_new_session=True, stderr=subprocess.PIPE)
        try:
            process.wait(rng.uniform(2, 20))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        said = process.communicate()[1].decode()
        assert "Traceback" not in said, said
        tasks = project.read(TASKS, ProjectTask)
        assert tasks[: len(seen)] == seen, "no task is lost, and none crosses the split"
        seen = tasks
        for one in tasks:
            assert {part_of(place) for place in one.places} == {one.part}
        for written in checkpoints_dir().glob("[!.]*"):
            read_checkpoint(written)
        assert [cycle.number for cycle in project.cycles()] == list(range(1, len(project.cycles()) + 1))
        assert read_history(project.id) == ()
    assert len({one.task.key for one in seen}) == len(seen) > 0

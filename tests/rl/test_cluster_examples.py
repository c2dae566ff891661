"""The recipes of examples/cluster: what they hand to nano-rl is what nano-rl takes, and the files parse."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from nano_rl.cli import cli

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
TRAIN = FOLDER / "train.toml"
SCRIPTS = ("one_node.sh", "cluster.sbatch")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def settings(arguments: list[str]) -> dict[str, Any]:
    """What `nano-rl train` makes of them, without training."""
    shown = CliRunner().invoke(cli, ["train", *arguments, "--print-config"])
    assert shown.exit_code == 0, shown.output
    return tomllib.loads(shown.output)


def trainer_arguments(text: str) -> list[str]:
    """Those of the one `nano_rl train` of a script, with the config where it lies."""
    (command,) = re.findall(r"-m nano_rl train ((?:.*\\\n)*.*)", text)
    words = shlex.split(command.replace("\\\n", " ").rstrip(" &"))
    values = {"$here/train.toml": str(TRAIN), "${engines%,}": "http://a:8000/v1,http://b:8000/v1"}
    return [values.get(word, word) for word in words]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_bash(name: str) -> None:
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run([bash, "-n", FOLDER / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_a_training_that_nano_takes(name: str) -> None:
    shown = settings(trainer_arguments((FOLDER / name).read_text()))
    assert shown["engine"] == ["http://a:8000/v1", "http://b:8000/v1"]
    assert shown["asynchronous"]
    assert shown["objective"]["max_staleness"] == 2


def test_the_ray_job_starts_a_training_on_all_engines() -> None:
    (job,) = documents("rayjob.yaml")
    program, verb, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (program, verb) == ("nano-rl", "train")
    shown = settings([str(TRAIN) if word == "/config/train.toml" else word for word in arguments])
    service, engines = documents("engines.yaml")
    assert shown["ray"] == "auto"
    assert shown["engine"] == [
        f"http://{engines['metadata']['name']}-{number}.{service['metadata']['name']}:8000/v1"
        for number in range(engines["spec"]["replicas"])
    ]


def test_ray_is_that_of_our_tests_and_all_containers_see_one_folder() -> None:
    (job,) = documents("rayjob.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    pinned = (FOLDER.parents[1] / "constraints.txt").read_text()
    assert f"ray=={cluster['rayVersion']}\n" in pinned
    _, engines = documents("engines.yaml")
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"], engines["spec"]]
    for (pod,) in (group["template"]["spec"]["containers"] for group in groups):
        paths = {mount["mountPath"]: mount["subPath"] for mount in pod["volumeMounts"] if "subPath" in mount}
        assert paths == {"/models": "models", "/data/nano": "nano"}


def test_engines_take_the_adapters_that_the_trainer_makes() -> None:
    rank = tomllib.loads(TRAIN.read_text())["lora_rank"]
    for name in (*SCRIPTS, "engines.yaml"):
        text = (FOLDER / name).read_text()
        (given,) = re.findall(r'--max-lora-rank[, ]+"?(\d+)', text)
        assert int(given) >= rank
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in text

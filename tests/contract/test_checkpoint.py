"""Checkpoints: whole or absent, verified when read, and named by their manifest."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nano_shared.checkpoint import (
    Manifest,
    TrainedOn,
    atomic_checkpoint,
    checkpoint_names,
    latest_checkpoint,
    latest_name,
    point_latest,
    read_checkpoint,
    resolve_checkpoint,
    write_manifest,
)
from nano_shared.errors import CheckpointError
from nano_shared.files import checkpoints_dir, content_hash
from nano_shared.types import Split, Task

MANIFEST = Manifest(
    name="one",
    kind="adapter",
    base_model="base",
    profile="compact-1",
    profile_hash="p",
    template_hash="t",
    tools_hash="u",
    policy_version=7,
    config={"lr": 1e-5},
    metrics={"success": 0.5, "kl": None},
    code_version="0.1.0",
    created=1.0,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    return tmp_path


def save(name: str = "one") -> Path:
    target = checkpoints_dir() / name
    with atomic_checkpoint(target) as folder:
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.json").write_text("{}")
        write_manifest(folder, MANIFEST.model_copy(update={"name": name}))
    return target


def test_what_is_written_is_read():
    manifest = read_checkpoint(save())
    assert manifest.files == {
        "adapter_model.safetensors": content_hash(b"weights"),
        "tokenizer/vocab.json": content_hash(b"{}"),
    }
    assert manifest == MANIFEST.model_copy(update={"files": manifest.files})


def test_missing_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"no such checkpoint: .*nothing"):
        read_checkpoint(tmp_path / "nothing")


def test_folder_without_a_manifest(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no manifest\.json"):
        read_checkpoint(tmp_path)


def test_missing_file_is_named():
    target = save()
    (target / "tokenizer" / "vocab.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer/vocab\.json is missing"):
        read_checkpoint(target)


def test_corrupt_file_is_named():
    target = save()
    (target / "adapter_model.safetensors").write_bytes(b"weightz")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is corrupt"):
        read_checkpoint(target)
    assert read_checkpoint(target, verify=False).name == "one"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "newer nano .manifest 2, this one reads 1.; upgrade"),
        ({"surprise": 1}, "surprise: Extra inputs"),
        ({"kind": "half"}, "kind: "),
        ({"files": {"../../etc/passwd": "sha256:0"}}, "must be relative"),
    ],
)
def test_manifest_that_is_not_ours(change, message):
    path = save() / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path.parent)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_manifest_that_is_damaged(text):
    path = save() / "manifest.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_checkpoint(path.parent)


def test_an_error_leaves_no_checkpoint():
    target = checkpoints_dir() / "one"

    def write_half() -> None:
        with atomic_checkpoint(target) as folder:
            (folder / "weights").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert [path.name for path in checkpoints_dir().iterdir()] == [".one.lock"]


def test_a_checkpoint_never_changes():
    target = save()
    with pytest.raises(CheckpointError, match="exists"):
        save()
    assert read_checkpoint(target).name == "one"


def test_kill_9_leaves_no_checkpoint_and_the_next_attempt_sweeps():
    target = checkpoints_dir() / "one"
    code = (
        "import sys\nfrom pathlib import Path\nfrom nano_shared.checkpoint import atomic_checkpoint\n"
        "with atomic_checkpoint(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'weights').write_bytes(b'half'); print('half', flush=True); sys.stdin.read()"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "half\n"
    with pytest.raises(CheckpointError, match="being written by another process"):
        save()
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    assert not target.exists()
    assert list(checkpoints_dir().glob(".one.tmp-*"))
    assert read_checkpoint(save()).name == "one"
    assert not list(checkpoints_dir().glob(".one.tmp-*"))


def test_names_paths_and_latest(tmp_path):
    target = save()
    assert resolve_checkpoint("one") == target
    assert resolve_checkpoint(target) == target
    assert checkpoint_names() == ["one"]
    with pytest.raises(CheckpointError, match=r"no checkpoint 'two'.*known: one"):
        resolve_checkpoint("two")
    with pytest.raises(CheckpointError, match="promoted yet"):
        resolve_checkpoint("latest")


def test_the_pointer_moves_and_goes():
    assert latest_checkpoint() is None
    one, two = save("one"), save("two")
    point_latest(latest_name(one))
    assert latest_checkpoint() == one
    point_latest(latest_name(two))
    assert resolve_checkpoint("latest") == two
    assert (checkpoints_dir() / "latest").read_text() == "two\n"
    point_latest(None)
    point_latest(None)
    assert latest_checkpoint() is None


def test_the_pointer_may_name_a_checkpoint_elsewhere(tmp_path):
    elsewhere = save("one").rename(tmp_path / "elsewhere")
    point_latest(latest_name(elsewhere))
    assert latest_checkpoint() == elsewhere


def test_a_pointer_that_leads_nowhere():
    save()
    point_latest("one")
    (checkpoints_dir() / "one").rename(checkpoints_dir() / "renamed")
    with pytest.raises(CheckpointError, match="names 'one', which is no checkpoint"):
        latest_checkpoint()


def test_trained_on_counts_and_hashes():
    tasks = [Task(key=str(n), prompt="p", split=Split.TRAIN if n else None) for n in range(3)]
    trained_on = TrainedOn.of(["b", "a", "b"], tasks)
    assert (trained_on.runs, trained_on.run_ids) == (2, ("a", "b"))
    assert trained_on.runs_hash == content_hash(["a", "b"])
    assert trained_on.tasks_hash == content_hash(sorted(task.id for task in tasks))
    assert (trained_on.tasks, set(trained_on.task_ids)) == (3, {task.id for task in tasks})
    assert set(trained_on.splits) == {"none", "train"}
    assert len(TrainedOn.of(map(str, range(5000)), []).run_ids) == 1000

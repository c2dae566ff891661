"""Images reach a model that sees, are logged as they are, and are kept away from one that does not."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from executions import SUBMIT, a_runtime, a_task, act
from pictures import picture
from PIL import Image
from strict_api import KEY, Fail, Say, call, strict_api
from typer.testing import CliRunner

from nano_coder.agent.profiles import API_1, COMPACT_1, with_tools
from nano_coder.cli import cli
from nano_coder.models.endpoint.chat_completion import accepted_by
from nano_coder.models.endpoint.policy import EndpointPolicy, Patience
from nano_coder.run.execution import Runtime, run_task
from nano_coder.run.fork import fork_run
from nano_coder.run_formats import read_log, write_log
from nano_coder.tools.tool import load_image
from nano_coder.verify.trainable import RefusalCode, imitation_refusal, verify
from nano_logs.deletion import delete_runs
from nano_shared.errors import ImagesRefused, UsageError
from nano_shared.run_facts import facts_of
from nano_shared.snapshot import MemoryBlobs
from nano_shared.store import LogStore
from nano_shared.types import ImageRef, Sampling, StopReason, Trajectory
from nano_view.answers import LogView
from nano_vision.image_file import read_image

LOOK = call("view_image", path="shot.png")
PNG = picture()
SVG = b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg xmlns="http://www.w3.org/2000/svg"/>'


@pytest.fixture(autouse=True)
def _nothing_learnt() -> None:
    accepted_by.cache_clear()


def runtime_on(folder: Path, server: Any) -> Runtime:
    policy = EndpointPolicy("sees", server.base_url, KEY, patience=Patience(first_wait=0.001, retry=0.3))
    profile = with_tools(API_1, ["view_image"])
    return a_runtime(folder, policy=policy, profile=profile, sampling=Sampling(max_tokens=999))


def shown_task(runtime: Runtime, folder: Path, **changes: Any) -> Any:
    (folder / "mock.png").write_bytes(PNG)
    return a_task(images=(load_image(folder / "mock.png", runtime.store),), **changes)


def with_picture(runtime: Runtime) -> Any:
    """A task whose workspace holds `shot.png`."""
    from nano_shared import snapshot

    folder = Path(runtime.store.blobs.root).parent / "work"
    folder.mkdir()
    (folder / "shot.png").write_bytes(PNG)
    return a_task(files={}, snapshot=snapshot.snapshot_directory(folder, runtime.store.blobs))


def sent_images(request: dict[str, Any]) -> list[bytes]:
    lists = (m["content"] for m in request["messages"] if isinstance(m["content"], list))
    urls = [part["image_url"]["url"] for parts in lists for part in parts if part["type"] == "image_url"]
    return [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]


def test_a_hosted_model_sees_the_users_image_and_the_log_keeps_its_bytes(tmp_path: Path) -> None:
    with strict_api(Say("A gradient."), Say("A gradient.")) as (server, script):
        runtime = runtime_on(tmp_path, server)
        task = shown_task(runtime, tmp_path)
        run = run_task(task, runtime)
    assert sent_images(script.seen[0]) == [PNG] == sent_images(script.seen[1])
    (image,) = run.images
    assert (image.media_type, image.width, image.height) == ("image/png", 40, 30)
    assert runtime.store.get(run.id) == run
    assert runtime.store.get_blob(image.blob) == PNG
    assert RefusalCode.IMAGES in [finding.kind for finding in verify(run)]
    refusal = imitation_refusal(facts_of(run), None)
    assert refusal is not None
    assert refusal.kind == RefusalCode.IMAGES


def test_view_image_shows_a_file_of_the_jail_after_all_answers_to_the_calls(tmp_path: Path) -> None:
    steps = (Say(None, (LOOK, call("read_file", path="none.py"))), Say("Seen."), Say("Seen."))
    with strict_api(*steps) as (server, script):
        runtime = runtime_on(tmp_path, server)
        run = run_task(with_picture(runtime), runtime)
    seen = run.turns[0].observations[0]
    assert (seen.ok, seen.text) == (True, "shot.png: image/png, 40 x 30 pixels")
    assert runtime.store.get_blob(seen.images[0].blob) == PNG
    assert [m["role"] for m in script.seen[1]["messages"]] == [
        "system", "user", "assistant", "tool", "tool", "user",
    ]  # fmt: skip
    assert sent_images(script.seen[1]) == [PNG]
    assert sent_images(script.seen[2]) == [PNG], "it stays in the conversation"
    assert runtime.store.get(run.id) == run


def test_a_fork_shows_the_images_of_its_log_again(tmp_path: Path) -> None:
    with strict_api(Say(None, (LOOK,)), Say("Seen."), Say("Seen."), Say("Again."), Say("Again.")) as (
        server,
        script,
    ):
        runtime = runtime_on(tmp_path, server)
        run = run_task(with_picture(runtime), runtime)
        (fork,) = fork_run(run, runtime, at=1, n=1, seed=0)
        assert sent_images(script.seen[3]) == [PNG]
        accepted_by(f"{server.base_url}/chat/completions", "sees").refused.add("images")
        with pytest.raises(ImagesRefused, match="sees no images"):
            fork_run(run, runtime, at=1, n=1, seed=0)
    assert fork.images == run.images


BROKEN = {
    "nothing.png": (b"", "is empty"),
    "text.png": (b"hello, I am a text\n" * 20, "is no PNG, JPEG, GIF or WebP image, whatever its name says"),
    "cut.png": (picture(300, 300)[:-2000], "damaged"),
    "cut.jpg": (picture(300, 300, "JPEG")[:2000], "damaged"),
    "drawing.svg": (SVG, "SVG drawing"),
    "bitmap.bmp": (picture(kind="BMP"), "is no PNG, JPEG"),
}


def bomb() -> bytes:
    """A PNG of 50,000 x 50,000 pixels in some hundred bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body


def animated() -> bytes:
    frames, out = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")], BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_image_is_refused_by_its_name(name: str) -> None:
    data, said = BROKEN[name]
    with pytest.raises(UsageError, match=said) as refused:
        read_image(data, name)
    assert str(refused.value).startswith(name)


def test_what_would_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"would have (more|50000 x 50000) pixels"):
        read_image(bomb(), "bomb.png")
    with pytest.raises(UsageError, match=r"animated \(2 frames"):
        read_image(animated(), "two.gif")
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(UsageError, match="more than 20 MB"):
        load_image(large, LogStore.open(tmp_path / "log.db"))
    with pytest.raises(UsageError, match="no such image file"):
        load_image(tmp_path / "gone.png", LogStore.open(tmp_path / "log.db"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_the_four_formats_are_read(kind: str) -> None:
    image = read_image(picture(kind=kind), "a")
    assert (image.media_type, image.width, image.height) == (f"image/{kind.lower()}", 40, 30)


def test_the_agent_reads_why_a_file_cannot_be_shown(tmp_path: Path) -> None:
    profile = with_tools(COMPACT_1, ["view_image"])
    files = {"text.png": "no image", "empty.png": ""}
    big = "open('big.png', 'wb').truncate(21 << 20)"
    names = ("text.png", "empty.png", "gone.png", ".", "big.png", "../../etc/shadow")
    looks = [act("view_image", profile, path=name) for name in names]
    texts = [act("python", profile, code=big), *looks, SUBMIT]
    runtime = a_runtime(tmp_path, texts, profile=profile)
    runtime.policy.sees = True  # type: ignore[attr-defined]
    run = run_task(a_task(files=files), runtime)
    said = [turn.observations[0].text for turn in run.turns[1:-1]]
    assert "whatever its name says" in said[0]
    assert "is empty" in said[1]
    assert "no such file: gone.png" in said[2]
    assert ". is a directory" in said[3]
    assert "more than 20 MB" in said[4]
    assert not any(turn.observations[0].ok for turn in run.turns[1:-1])
    assert run.stop is StopReason.FINISHED
    assert run.images == ()


def test_a_blind_model_is_shown_nothing(tmp_path: Path) -> None:
    profile = with_tools(COMPACT_1, ["view_image"])
    runtime = a_runtime(tmp_path, [act("view_image", profile, path="shot.png"), SUBMIT], profile=profile)
    with pytest.raises(ImagesRefused, match="scripted sees no images, and 1 would be shown; name a model"):
        run_task(shown_task(runtime, tmp_path), runtime)
    assert runtime.store.ids() == [], "nothing was begun"
    run = run_task(with_picture(runtime), runtime)
    seen = run.turns[0].observations[0]
    assert (seen.ok, seen.images) == (False, ())
    assert "this model sees no images" in seen.text


BLIND = Fail(400, body=b'{"error": {"message": "little is not a multimodal model"}}')


def test_a_server_that_turns_out_blind_ends_what_the_user_showed_and_nothing_is_lost(tmp_path: Path) -> None:
    with strict_api(BLIND) as (server, _):
        runtime = runtime_on(tmp_path, server)
        with pytest.raises(ImagesRefused, match=r"not a multimodal model.*holds what was asked") as refused:
            run_task(shown_task(runtime, tmp_path), runtime)
        assert refused.value.exit_code == 2
        ((run_id, _),) = runtime.store.ids()
        run = runtime.store.get(run_id)
        assert run.stop is StopReason.POLICY_ERROR
        assert runtime.store.get_blob(run.images[0].blob) == PNG
        with pytest.raises(ImagesRefused, match="openai:sees sees no images, and 1 would"):
            run_task(shown_task(runtime, tmp_path), runtime)  # known by now, and not asked again
        assert len(runtime.store.ids()) == 1


def test_a_server_that_turns_out_blind_goes_on_without_what_a_tool_showed(tmp_path: Path) -> None:
    steps = (Say(None, (LOOK,)), BLIND, Say("I cannot see it."), Say("I cannot see it."))
    with strict_api(*steps) as (server, script):
        runtime = runtime_on(tmp_path, server)
        run = run_task(with_picture(runtime), runtime)
    assert run.answer == "I cannot see it."
    told = [m["content"] for m in script.seen[2]["messages"] if m["role"] == "tool"]
    assert told == ["shot.png: image/png, 40 x 30 pixels\n[images left out, since this model sees none: 1]"]


def test_the_images_of_a_run_travel_with_it_and_go_with_it(tmp_path: Path) -> None:
    with strict_api(Say(None, (LOOK,)), Say("Seen."), Say("Seen.")) as (server, _):
        runtime = runtime_on(tmp_path, server)
        run = run_task(with_picture(runtime), runtime)
    store = runtime.store
    rows = list(write_log([store.logged(run.id)], store.blobs, set()))
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    blobs = MemoryBlobs()
    ((_, read),) = read_log(tmp_path / "runs.jsonl", blobs)
    assert read.trajectory == run
    assert blobs.get(run.images[0].blob) == PNG

    view = LogView(store).run({"id": run.id})
    (shown,) = view["turns"][0]["seen"][0]["images"]
    assert base64.b64decode(shown["data"].removeprefix("data:image/png;base64,")) == PNG
    assert shown["about"] == "image/png, 40 x 30 pixels"

    path = store.blobs.path(run.images[0].blob)
    whole = path.read_bytes()
    path.write_bytes(zlib.compress(b"another picture"))
    assert "corrupt" in str(store.check_blobs(run.id, set()))
    path.write_bytes(whole)
    assert store.check_blobs(run.id, set()) is None

    for each in store.blobs.ids():
        age(store, each)
    delete_runs(store, [run.id])
    assert run.images[0].blob not in store.blobs


def age(store: LogStore, blob: str) -> None:
    import os

    os.utime(store.blobs.path(blob), (0, 0))


def test_run_shows_an_image_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "mock.png").write_bytes(PNG)
    with strict_api(Say("A gradient."), Say("A gradient.")) as (server, script):
        arguments = ["run", "What is it?", "-C", str(project), "--model", "openai:sees", "--json"]
        arguments += ["--base-url", server.base_url]
        monkeypatch.setenv("NANO_API_KEY", KEY)
        done = CliRunner().invoke(cli, [*arguments, "--image", str(tmp_path / "mock.png")])
        assert done.exit_code in (0, 1), done.output
        assert sent_images(script.seen[0]) == [PNG]
        for name in ("mock.txt", "gone.png"):
            (tmp_path / "mock.txt").write_text("text")
            wrong = CliRunner().invoke(cli, [*arguments, "--image", str(tmp_path / name)])
            assert isinstance(wrong.exception, UsageError)
            assert wrong.exception.exit_code == 2
    store = LogStore.open(tmp_path / "home/log.db")
    assert [len(store.get(run).images) for run, _ in store.ids()] == [1]


def test_a_dump_without_images_is_that_of_before(tmp_path: Path) -> None:
    run = run_task(a_task(), a_runtime(tmp_path, [SUBMIT]))
    assert '"images"' not in run.model_dump_json()
    shown = ImageRef(blob="sha256:" + "0" * 64, media_type="image/png", width=1, height=1)
    again = run.model_copy(update={"task": run.task.model_copy(update={"images": (shown,)})})
    assert Trajectory.model_validate_json(again.model_dump_json()).images == (shown,)
    assert again.task.id != run.task.id

"""Images in values and in the log: by reference, part of what is hashed, no trace where there are none."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from log_values import a_run, a_turn

from nano_shared.files import content_hash
from nano_shared.run_facts import facts_of
from nano_shared.store import LogStore
from nano_shared.types import ImageRef, Message, Observation, Role, Task

DATA = b"the bytes of a picture"
IMAGE = ImageRef(blob=content_hash(DATA), media_type="image/png", width=40, height=30)
SEEN = Observation(tool="read_file", ok=True, text="x", started=1.0, ended=2.0)
SAID = Message(role=Role.USER, content="hi")
TASK = Task(key="k", prompt="p", files={"a.py": "1\n"})


def test_hashes_of_what_shows_no_image_are_those_of_before_there_were_images() -> None:
    """The hashes were computed by the version before."""
    assert TASK.id == "sha256:e16b3cb91a9dda1b0ab545817ab21f00412942793bb8cf5cdc3978d3cfb2ab99"
    observation = content_hash(SEEN.model_dump(mode="json"))
    assert observation == "sha256:fb13f07494fd205f8c7b35d28761fd9c86ffc254273c74b6d1fca752733d2fcc"
    message = content_hash(SAID.model_dump(mode="json"))
    assert message == "sha256:16f8cb767a35734754f0a2194fe24297707e46b4b6e80b9356f3742c10ed9ad2"


@pytest.mark.parametrize("value", [SEEN, SAID, TASK])
def test_an_image_is_part_of_what_is_hashed(value: Any) -> None:
    shown = value.model_copy(update={"images": (IMAGE,)})
    assert type(value).model_validate_json(shown.model_dump_json()) == shown
    assert content_hash(shown.model_dump(mode="json")) != content_hash(value.model_dump(mode="json"))


def shows() -> list[Any]:
    """Runs that show the image: their task, an observation, a message."""
    turn = a_turn(0)
    observed = turn.model_copy(update={"observations": (SEEN.model_copy(update={"images": (IMAGE,)}),)})
    told = turn.model_copy(update={"messages": (SAID.model_copy(update={"images": (IMAGE,)}),)})
    task = TASK.model_copy(update={"images": (IMAGE,)})
    return [a_run(task=task, turns=(turn,)), a_run(turns=(observed,)), a_run(turns=(told,))]


@pytest.mark.parametrize("place", range(3))
def test_the_log_keeps_and_verifies_the_images_of_a_run(place: int, tmp_path: Path) -> None:
    run = shows()[place]
    with LogStore.open(tmp_path / "log.db") as store:
        store.append(run)
        assert store.blobs.put(DATA) == IMAGE.blob
        assert store.get(run.id) == run
        assert run.images == (IMAGE,)
        with closing(store.facts()) as facts:  # type: ignore[type-var]
            (found,) = facts
        assert found.shows_images
        assert facts_of(run).shows_images
        assert store.check_blobs(run.id, set()) is None
        store.blobs.path(IMAGE.blob).write_bytes(b"changed")
        assert "corrupt" in str(store.check_blobs(run.id, set()))


def test_the_word_images_in_a_text_shows_none(tmp_path: Path) -> None:
    said = Message(role=Role.USER, content='"images": [')
    run = a_run(turns=(a_turn(0).model_copy(update={"messages": (said,)}),))
    with LogStore.open(tmp_path / "log.db") as store:
        store.append(run)
        with closing(store.facts()) as facts:  # type: ignore[type-var]
            assert [found.shows_images for found in facts] == [False]


@pytest.mark.parametrize("wrong", [{"blob": "abc"}, {"media_type": "text/plain"}, {"width": 0}, {"more": 1}])
def test_a_reference_to_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ImageRef.model_validate(IMAGE.model_dump() | wrong)

"""A verdict is hashed with what it judged when it is written, and blobs by their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from log_values import a_run, verdicts

from nano_coder.verify.trainable import findings
from nano_logs.redact.redactor import Redactor
from nano_logs.redact.runs import redact_run
from nano_logs.verify import _look
from nano_shared import schema, snapshot
from nano_shared.files import new_run_id
from nano_shared.run_facts import RunFilter
from nano_shared.snapshot import pack
from nano_shared.store import LogStore
from nano_shared.types import StopReason, Trust, Verdict

PASSED = Verdict(reward=1.0, trust=Trust.HIDDEN, grader="nano-grader 4", graded_hash="sha256:0")
FORGED = "verdict of another run"


def appended(store: LogStore, verdict: Verdict = PASSED, snapshot: str | None = None) -> str:
    made = a_run(verdict=verdict).model_copy(
        update={"id": new_run_id(), "snapshot": snapshot, "stop": StopReason.FINISHED}
    )
    store.append(made)
    return made.id


def sealed(store: LogStore, of: str) -> bool | None:
    (facts,) = store.facts(RunFilter(runs=(of,)))
    assert facts.verdict is not None
    return facts.sealed


def edit(store: LogStore, **values: object) -> None:
    with store.database.engine.begin() as connection:
        connection.execute(sa.update(schema.verdicts).values(**values))


@pytest.mark.usefixtures("backend")
def test_what_is_written_holds_and_what_is_edited_does_not(tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        made = appended(store)
        assert sealed(store, made) is True
        for values in ({"reward": 0.5}, {"trust": "user_check"}, {"checks": {"a": "pass"}}, {"grader": "me"}):
            edit(store, **values)
            assert sealed(store, made) is False, values
            (facts,) = store.facts(RunFilter(runs=(made,)))
            assert FORGED in [finding.kind for finding in findings(facts) if finding.blocks]
            store.add_verdict(made, PASSED)
            assert sealed(store, made) is True


def test_a_verdict_of_an_older_nano_has_no_seal_and_is_taken_as_it_is(tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        made = appended(store)
        edit(store, seal=None)
        assert sealed(store, made) is None
        (facts,) = store.facts(RunFilter(runs=(made,)))
        assert FORGED not in [finding.kind for finding in findings(facts)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(verdict=verdicts)
def test_any_verdict_is_read_as_it_was_sealed(tmp_path: Path, verdict: Verdict) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        assert sealed(store, appended(store, verdict)) is True


def test_a_verdict_that_redaction_rewrites_is_sealed_again(tmp_path: Path) -> None:
    secret = "ghp_" + "a1B2c3D4e5F6" * 3
    with LogStore.open(tmp_path / "log.db") as store:
        whole = appended(store, PASSED.model_copy(update={"checks": {secret: "pass"}}))
        assert redact_run(store, whole, Redactor())
        assert secret not in store.get(whole).model_dump_json()
        assert sealed(store, whole) is True
        edit(store, reward=0.25)
        redact_run(store, whole, Redactor())
        assert sealed(store, whole) is False  # redaction does not make good what was edited


def test_a_corrupt_file_of_a_workspace_is_told(tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        tree = snapshot.snapshot_texts({"a.py": "x = 1\n"}, store.blobs)
        made = appended(store, snapshot=tree)
        (facts,) = store.facts(RunFilter(runs=(made,)))
        look = _look(facts, store, False, None, set())
        assert "blob is corrupt" not in [check.kind for check in look.checks]
        (blob,) = snapshot.blobs_of(tree, store.blobs)
        store.blobs.path(blob).write_bytes(pack(b"x = 2\n"))
        look = _look(facts, store, False, None, set())
        assert "blob is corrupt" in [check.kind for check in look.checks if check.blocks]
        assert not look.trainable

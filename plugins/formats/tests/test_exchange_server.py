"""`nano-rl tasks serve` as NeMo Gym's agents use it: seed, call tools, verify; and what it refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from nano_coder.sandbox.protocol import open_sandbox
from nano_formats.episode import Episode
from nano_formats.nemo_gym.server import COOKIE, GymSessions, gym_app
from nano_formats.nemo_gym.tasks import NEMO_GYM
from nano_shared.hidden_checks import AnswerChecks, Case, CaseChecks
from nano_shared.store import LogStore
from nano_shared.types import Split, Task
from nano_suites.drawing import make_tasks

CODE = Task(
    key="inc",
    prompt="Write inc in s.py.",
    artifacts=("s.py",),
    tools=("write_file", "read_file"),
    hidden=CaseChecks(entry_point="inc", cases=(Case(args=[1], expected=2),)),
)
ASK = Task(key="ask", prompt="2 + 2?", hidden=AnswerChecks(answer=4))
ANSWER = {
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}]
}


(LOOKUP,) = make_tasks(suite="logic", levels=(0,), n=1, seed=0, split=Split.TRAIN)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    sandbox, store = open_sandbox(), LogStore.open(tmp_path / "log.db")
    sessions = GymSessions(lambda task: Episode(task, sandbox, store), most=2, idle_seconds=600)
    with TestClient(gym_app([CODE, ASK, LOOKUP], sessions), base_url="http://127.0.0.1:8010") as client:
        yield client


def row(task: Task) -> dict[str, object]:
    (written,) = NEMO_GYM.to_rows(task)
    return written


@pytest.mark.parametrize(("result", "reward"), [("n + 1", 1.0), ("n", 0.0)])
def test_an_agent_works_and_is_verified(client: TestClient, result: str, reward: float) -> None:
    assert client.post("/seed_session", json=row(CODE)).status_code == 200
    content = f"def inc(n):\n    return {result}\n"
    wrote = client.post("/write_file", json={"path": "s.py", "content": content})
    assert (wrote.status_code, wrote.text) == (200, "wrote s.py")
    verdict = client.post("/verify", json={**row(CODE), "response": {"output": []}}).json()
    assert (verdict["reward"], verdict["mask_sample"]) == (reward, False)
    assert verdict["responses_create_params"] == row(CODE)["responses_create_params"]
    assert client.post("/read_file", json={"path": "s.py"}).status_code == 410  # verified, so closed


def test_the_tools_of_a_domain_are_served_too(client: TestClient) -> None:
    offered = row(LOOKUP)["responses_create_params"]["tools"]  # type: ignore[index]
    assert "lookup" in {tool["name"] for tool in offered}
    assert client.post("/seed_session", json=row(LOOKUP)).status_code == 200
    for action in LOOKUP.oracle or ():
        assert client.post(f"/{action.name}", json=action.arguments).status_code == 200
    verdict = client.post("/verify", json={**row(LOOKUP), "response": {"output": []}}).json()
    assert verdict["reward"] == 1.0


def test_an_answer_needs_no_session(client: TestClient) -> None:
    assert client.post("/verify", json={**row(ASK), "response": ANSWER}).json()["reward"] == 1.0


def test_what_is_asked_wrongly_is_answered_with_a_sentence(client: TestClient) -> None:
    def refused(path: str, status: int, **request: object) -> None:
        answer = client.post(path, **request)  # type: ignore[arg-type]
        assert answer.status_code == status, answer.text
        assert len(answer.json()["detail"]) > 10

    refused("/read_file", 400, json={"path": "a"})
    refused("/seed_session", 400, content=b"{")
    refused("/seed_session", 400, content=b"[]")
    refused("/seed_session", 422, json={})
    refused("/seed_session", 404, json={"verifier_metadata": {"nano_key": "other"}})
    assert client.post("/seed_session", json=row(CODE)).status_code == 200
    refused("/no_such_tool", 404, json={})
    refused("/shell", 404, json={"command": "true"})  # the task does not offer it
    refused("/read_file", 422, json={})
    refused("/read_file", 422, json={"path": "a", "how": "fast"})
    refused("/verify", 422, json={})
    refused("/aggregate_metrics", 422, json={"verify_responses": [{"reward": "high"}]})
    refused("/aggregate_metrics", 422, json={"verify_responses": [{"reward": 10**400}]})


def test_sessions_are_bounded_and_apart(client: TestClient) -> None:
    first = client.post("/seed_session", json=row(CODE)).cookies[COOKIE]
    client.post("/write_file", json={"path": "s.py", "content": "x = 1\n"})
    second = client.post("/seed_session", json=row(CODE)).cookies[COOKIE]
    assert second != first
    assert "error" in client.post("/read_file", json={"path": "s.py"}).text
    assert client.post("/seed_session", json=row(CODE)).status_code == 429
    client.post("/close_session", json={"resources_session_id": first})
    assert client.post("/seed_session", json=row(CODE)).status_code == 200


def test_a_mean_leaves_masked_samples_out(client: TestClient) -> None:
    rows = [{"reward": 1.0}, {"reward": 0.0}, {"reward": 0.0, "mask_sample": True}]
    metrics = client.post("/aggregate_metrics", json={"verify_responses": rows}).json()["key_metrics"]
    assert metrics == {"mean/reward": 0.5, "samples": 3, "masked": 1}

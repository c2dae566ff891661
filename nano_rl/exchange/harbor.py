"""Harbor task directories: read where a jail can do what the container would, written for any task.

Absolute paths of a container are moved into the jail: the working directory becomes /work, and /tests,
/logs and /solution lie below /tmp/harbor, which exists only while the verifier runs.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping

from nano_rl.exchange.dockerfile import Image, read_dockerfile
from nano_rl.exchange.folder_format import FolderFormat, Tree
from nano_rl.exchange.harbor_config import HarborConfig, read_config
from nano_rl.exchange.harbor_export import write_harbor
from nano_rl.exchange.refusal import Refused
from nano_shared.types import HiddenChecks, Limits, OracleAction, Provenance, Task

NAME = "harbor"
PLACE = "/tmp/harbor"
TESTS, REWARD = ".harbor-tests", ".harbor-reward"
_FETCHES = re.compile(
    r"^\s*(?:sudo\s+)?(?:\S+=\S+\s+)*"
    r"(apt-get|apt|apk|yum|dnf|curl|wget|uvx?|npm|docker|git\s+clone|(?:python3?\s+-m\s+)?pip3?\s+install)\b"
)


def read_harbor(tree: Tree, name: str) -> Task:
    config = read_config(tree.text("task.toml"))
    image = _image(tree, config)
    tests = tree.below("tests")
    if "test.sh" not in tests:
        raise Refused("tests/test.sh", "is missing, and nothing else writes the reward")
    for path, text in tests.items():
        if path != "Dockerfile":
            _refuse_fetching(f"tests/{path}", text)
    inside = {"/tests": f"{PLACE}/tests", "/logs": f"{PLACE}/logs", "/solution": f"{PLACE}/solution"}
    inside[image.workdir] = "/work"
    seconds = config.agent.timeout_sec
    limits = {"max_seconds": seconds, "memory_mb": config.environment.memory_mb}
    return Task(
        key=config.task.name if config.task else name,
        prompt=moved(tree.text("instruction.md"), inside),
        files=image.files,
        limits=Limits(**{key: value for key, value in limits.items() if value is not None}),
        hidden=HiddenChecks(
            kind="reward_file",
            command=_command(config.verifier.env),
            files={f"{TESTS}/{path}": moved(text, inside) for path, text in tests.items()},
            reward_path=REWARD,
        ),
        oracle=_oracle(tree, inside),
        provenance=Provenance(source=NAME),
    )


def moved(text: str, inside: Mapping[str, str]) -> str:
    """The text with each absolute path of the container where it is in the jail."""
    longest_first = sorted(inside, key=len, reverse=True)
    pattern = "|".join(re.escape(path) for path in longest_first)
    return re.sub(rf"(?<![\w.~}}/-])({pattern})(?![\w-]|\.\w)", lambda found: inside[found[1]], text)


def _image(tree: Tree, config: HarborConfig) -> Image:
    services = [path for path in tree.files if posixpath.basename(path).startswith("docker-compose")]
    if services:
        raise Refused(services[0], "starts services, which needs Docker")
    if "environment/Dockerfile" not in tree.files:
        raise Refused("environment/Dockerfile", "is missing, so nothing says what the agent starts with")
    if "environment/.dockerignore" in tree.files:
        raise Refused("environment/.dockerignore", "chooses what is copied, which needs Docker")
    image = read_dockerfile(
        tree.text("environment/Dockerfile"), tree.below("environment"), "environment/Dockerfile"
    )
    if config.environment.workdir not in (None, image.workdir):
        raise Refused("task.toml.environment.workdir", "is not the working directory of the Dockerfile")
    return image


def _refuse_fetching(path: str, text: str) -> None:
    for number, line in enumerate(text.split("\n"), start=1):
        if path.endswith(".sh") and (found := _FETCHES.match(line)):
            raise Refused(f"{path}:{number}", f"calls `{found[1]}`, which needs a network")


def _command(env: Mapping[str, str]) -> str:
    """Lay the tests out as the container has them, run them, and leave the reward in the workspace."""
    settings = "".join(f"{key}={shlex.quote(value)} " for key, value in sorted(env.items()))
    verifier = f"{PLACE}/logs/verifier"
    return (
        f"rm -rf {PLACE} {REWARD} && mkdir -p {verifier} {PLACE}/logs/agent {PLACE}/logs/artifacts"
        f" && cp -R {TESTS} {PLACE}/tests && rm -rf {TESTS} && cd /work"
        f" && {{ {settings}bash {PLACE}/tests/test.sh;"
        f" cp {verifier}/reward.json {REWARD} 2>/dev/null || cp {verifier}/reward.txt {REWARD}; }}"
    )


def _oracle(tree: Tree, inside: Mapping[str, str]) -> tuple[OracleAction, ...] | None:
    """The solution as one shell action: its files exist only while it runs."""
    scripts = tree.below("solution")
    if "solve.sh" not in scripts:
        return None
    folder = f"{PLACE}/solution"
    lines = [f"rm -rf {folder}"]
    for path, text in sorted(scripts.items()):
        target = f"{folder}/{path}"
        lines.append(f"mkdir -p {shlex.quote(posixpath.dirname(target))}")
        lines.append(f"printf %s {shlex.quote(moved(text, inside))} > {shlex.quote(target)}")
    run = OracleAction(name="shell", arguments={"command": "\n".join([*lines, f"bash {folder}/solve.sh"])})
    return run, OracleAction(name="submit")


HARBOR = FolderFormat(
    name=NAME,
    summary="Harbor task directories",
    marker="task.toml",
    read_tree=read_harbor,
    write_tree=write_harbor,
)

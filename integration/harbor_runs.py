"""Harbor's own `harbor run`, with nano as its agent and nano's jail as its environment.

    python3.12 -m venv harbor && harbor/bin/pip install harbor==0.24.0 podman-compose -e .
    python integration/harbor_runs.py --harbor harbor/bin --out FOLDER [--model openai:NAME --base-url URL]

Three tasks of our own are run in containers of podman, where there is podman, and in nano's jail. The policy
does what the prompt says in backquotes, under byte tokens; with --model another acts too, say one that
`nano-coder serve` serves. Each trial's result is read with Harbor's own model: rewards, and for each turn
prompt ids, sampled ids and as many log-probs. Exit code 1 where something else was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from smoke import CANNOT, parse

IMAGE = "debian:nano"
TASKS = {
    "greet": ("echo hello > greeting.txt", "grep -qx hello greeting.txt", {}),
    "count": ("grep -c a words.txt > count.txt", "grep -qx 2 count.txt", {"words.txt": "a\nb\nca\n"}),
    "mend": (
        "sed -i 's/x + x/x * x/' square.py",
        "python3 -c 'from square import square; assert square(3) == 9'",
        {"square.py": "def square(x):\n    return x + x\n"},
    ),
}
"""name -> what solves it, what checks it, and the files that it starts with"""
POLICY = '''
import re
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import COMPACT_1
from nano_coder.models.scripted import ScriptedPolicy
from nano_shared.types import ToolCall


class Obedient(ScriptedPolicy):
    """Does what the prompt says in backquotes, then submits."""

    def complete(self, conversation, sampling):
        if not self._texts:
            said = "".join(message.content for message in conversation.messages)
            command = re.findall("`([^`]+)`", said)[-1]
            calls = ToolCall(name="shell", arguments={"command": command}), ToolCall(name="submit")
            write = DIALECTS[COMPACT_1.dialect].render
            self._texts = tuple(write("", (call,), COMPACT_1.tools) for call in calls)
        return super().complete(conversation, sampling)


def obedient(name, options):
    policy = Obedient((), tokens=True)
    policy.profile = COMPACT_1.name
    return policy
'''
CONFIG = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""
"""for control groups of version 1, under which crun does not run"""
READ = """
import json, sys
from pathlib import Path
from harbor.models.trial.result import TrialResult
for path in sorted(Path(sys.argv[1]).glob("*/*/result.json")):
    trial = TrialResult.model_validate_json(path.read_text())
    context, rewards = trial.agent_result, trial.verifier_result and trial.verifier_result.rewards
    print(json.dumps({"task": trial.task_name, "rewards": rewards, "failed": trial.exception_info and
        trial.exception_info.exception_message, "details": context and context.rollout_details}))
"""


def write_task(folder: Path, name: str) -> None:
    command, check, files = TASKS[name]
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    (folder / "instruction.md").write_text(f"Run `{command}` in the shell.\n")
    (folder / "task.toml").write_text(
        'schema_version = "1.0"\n[verifier]\ntimeout_sec = 120.0\n[agent]\ntimeout_sec = 300.0\n'
        "[environment]\nbuild_timeout_sec = 300.0\nmemory_mb = 1024\n"
    )
    copied = "".join(f"COPY {file} /app/\n" for file in files)
    (folder / "environment/Dockerfile").write_text(f"FROM {IMAGE}\nWORKDIR /app\n{copied}")
    for file, text in files.items():
        (folder / "environment" / file).write_text(text)
    (folder / "solution/solve.sh").write_text(f"#!/bin/bash\ncd /app\n{command}\n")
    (folder / "tests/test.sh").write_text(
        f"#!/bin/bash\ncd /app\nif {check}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    )


def run(harbor: Path, tasks: Path, out: Path, options: list[str]) -> list[dict[str, object]]:
    """Every trial of a job, as Harbor's own models read it."""
    shutil.rmtree(out, ignore_errors=True)
    argv = [str(harbor / "harbor"), "run", "-p", str(tasks), "-o", str(out), "-n", "1", "--yes", *options]
    environment = {
        **os.environ, "PATH": f"{harbor}:{os.environ['PATH']}", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "CONTAINERS_CONF": str(tasks.parent / "containers.conf"),
    }  # fmt: skip
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    out.mkdir(exist_ok=True)
    (out / "said.txt").write_text(done.stdout)
    read = subprocess.run([harbor / "python", "-c", READ, out], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in read.stdout.splitlines()]


def exact(trial: dict[str, object]) -> bool:
    """Whether each turn has a prompt, sampled ids, and as many log-probs."""
    details = trial["details"]
    if not isinstance(details, list) or len(details) != 1:
        return False
    prompts, sampled, logprobs = (
        details[0][key] for key in ("prompt_token_ids", "completion_token_ids", "logprobs")
    )
    turns = list(zip(prompts, sampled, logprobs, strict=True))
    return bool(turns) and all(p and s and len(s) == len(lp) for p, s, lp in turns)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--harbor", type=Path, required=True, help="bin of an environment that has Harbor and nano"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", choices=("jail", "podman"), help="where the trials run; both where left out"
    )
    parser.add_argument("--model", help="a further policy, by nano's names")
    parser.add_argument("--base-url")
    given = parse(parser)
    if given.smoke and not given.harbor:
        print(f"{CANNOT}it needs an environment with Harbor, named by --harbor")
        return 0
    tasks, harbor = given.out.resolve() / "tasks", given.harbor.absolute()
    shutil.rmtree(tasks, ignore_errors=True)
    for name in TASKS:
        write_task(tasks / name, name)
    (tasks.parent / "policy.py").write_text(POLICY)
    (tasks.parent / "containers.conf").write_text(CONFIG)
    agent = ["--agent-import-path", "nano_formats.harbor.agent:NanoAgent"]
    places = {"jail": ["--environment-import-path", "nano_formats.harbor.environment:JailEnvironment"]}
    if given.only != "jail" and shutil.which("podman"):
        from container_image import make_debian_image

        subprocess.run(["podman", "tag", make_debian_image(), f"localhost/{IMAGE}"], check=True)
        places["podman"] = ["-e", "podman"]
    if given.only == "podman":
        del places["jail"]
    held = True
    for place, options in places.items():
        ways = {"oracle": ["-a", "oracle"], "nano": [*agent, "-m", f"{tasks.parent}/policy.py:obedient"]}
        if given.model:
            ways["model"] = [*agent, "-m", given.model, "--ak", f"base_url={given.base_url}"]
        for way, chosen in ways.items():
            trials = run(harbor, tasks, given.out.resolve() / f"{place}-{way}", [*options, *chosen])
            for trial in trials:
                tokens = "" if way == "oracle" else f", exact tokens: {exact(trial)}"
                print(
                    f"{place:7} {way:7} {trial['task']:8} {trial['rewards']}{tokens} {trial['failed'] or ''}"
                )
                held &= way == "oracle" or exact(trial)
                held &= way == "model" or trial["rewards"] == {"reward": 1.0}
            held &= len(trials) == len(TASKS)
    print("as it should be" if held else "NOT as it should be")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

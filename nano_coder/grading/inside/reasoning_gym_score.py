"""Scores one answer with reasoning-gym: the program that runs in the jail.

Reads one JSON object from stdin; writes `ready` after recreating the question that was asked, then the score.
"""

import hashlib
import json
import os
import sys

import reasoning_gym


def main() -> None:
    job = json.load(sys.stdin)
    # prints of a dataset must not mix with the answers
    out, sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8"), sys.stderr
    dataset = reasoning_gym.create_dataset(job["dataset"], seed=job["seed"], size=1, **job["config"])
    entry = dataset[0]
    digest = hashlib.sha256(entry["question"].encode("utf-8", "surrogatepass")).hexdigest()
    if job["question"] != f"sha256:{digest}":
        sys.exit("another question was made")
    print("ready", file=out, flush=True)
    score = float(dataset.score_answer(job["answer"], entry))
    print(json.dumps(score), file=out, flush=True)


main()

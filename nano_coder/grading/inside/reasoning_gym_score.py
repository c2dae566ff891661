"""Run in a jail: makes a question of reasoning-gym again and scores an answer by its dataset's own rule.

Reads one JSON object from stdin; writes `ready` once the question is the one that was asked, then the score.
"""

import hashlib
import json
import os
import sys

import reasoning_gym


def main() -> None:
    asked = json.load(sys.stdin)
    # whatever a dataset prints must not stand between the answers
    out, sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8"), sys.stderr
    dataset = reasoning_gym.create_dataset(asked["dataset"], seed=asked["seed"], size=1, **asked["config"])
    entry = dataset[0]
    digest = hashlib.sha256(entry["question"].encode("utf-8", "surrogatepass")).hexdigest()
    if asked["question"] != f"sha256:{digest}":
        sys.exit("another question was made")
    print("ready", file=out, flush=True)
    score = float(dataset.score_answer(asked["answer"], entry))
    print(json.dumps(score), file=out, flush=True)


main()

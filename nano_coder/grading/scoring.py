"""Run in a jail: makes a question of reasoning-gym again and scores an answer by its dataset's own rule.

Reads one JSON object from stdin; writes `ready` once the question is the one that was asked, then the score.
"""

import hashlib
import json
import sys

import reasoning_gym


def main() -> None:
    asked = json.load(sys.stdin)
    dataset = reasoning_gym.create_dataset(asked["dataset"], seed=asked["seed"], size=1, **asked["config"])
    entry = dataset[0]
    digest = hashlib.sha256(entry["question"].encode("utf-8", "surrogatepass")).hexdigest()
    if asked["question"] != f"sha256:{digest}":
        sys.exit("another question was made")
    print("ready", flush=True)
    score = float(dataset.score_answer(asked["answer"], entry))
    print(json.dumps(score), flush=True)


main()

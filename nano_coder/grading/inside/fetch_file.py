"""Fetches the reward file: the program that runs in the jail after the command, and follows no links."""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import Any

LONGEST = 65536


def fetched(path: str) -> dict[str, Any]:
    folder = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    *parents, name = path.strip("/").split("/")
    try:
        for parent in parents:
            folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            return {"problem": "link", "detail": "is a link"}
        if not stat.S_ISREG(status.st_mode):
            return {"problem": "reward_missing", "detail": "is no regular file"}
        if not status.st_mode & os.fstat(folder).st_mode & stat.S_IWUSR:
            return {"problem": "read_only", "detail": "cannot be written by the command"}
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return {"problem": "reward_missing", "detail": "was not written"}
    except OSError as error:
        return {"problem": "link", "detail": f"cannot be reached without a link ({error.strerror})"}
    data = os.read(file, LONGEST + 1)
    if len(data) > LONGEST:
        return {"problem": "reward_malformed", "detail": "is too long"}
    return {"text": data.decode("utf-8", "replace")}


print(json.dumps(fetched(sys.argv[1])))

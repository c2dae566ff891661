"""The texts of sampled tokens, by a tokenizer that is proved to be the run's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from nano_shared.errors import ConfigError
from nano_shared.extension_points import call_extension
from nano_shared.files import checkpoints_dir, nano_home
from nano_shared.policy import DecodeIds
from nano_shared.types import REDACTED_ID, Completion

_FILE = "tokenizer.json"
_UNFINISHED = "\ufffd"


def load_decoder(path: Path) -> DecodeIds | None:
    """The decoder of a tokenizer.json; None if the library is missing, or the file is missing or damaged."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    if not path.is_file():
        return None
    try:
        tokenizer = call_extension(partial(Tokenizer.from_file, str(path)), name=str(path))
    except ConfigError:  # a damaged file
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def token_texts(ids: tuple[int, ...], decode: DecodeIds) -> Iterator[tuple[str, int]]:
    """(text, number of tokens) in order; the texts, joined, are the decoded ids. A token is decoded together
    with the previous ones, since some tokenizers decode it differently at the start, and with the next ones
    if it ends within a character."""
    behind, begin = 0, 0
    for end in range(1, len(ids) + 1):
        before = decode(ids[behind:begin])
        text = decode(ids[behind:end])
        if text.endswith(_UNFINISHED) and end < len(ids):
            continue
        yield text[len(before) :], end - begin
        behind, begin = begin, end


class Decoders:
    """The tokenizers at hand: of the checkpoints, trainings and converted models in NANO_HOME. A tokenizer is
    used for the tokens of some weights only if it spells the text that was logged beside them."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        """`folders` come before those of NANO_HOME."""
        self._folders = folders
        self._loaded: dict[Path, DecodeIds | None] = {}
        self._found: dict[str, DecodeIds] = {}

    def find(self, policy: str, completion: Completion) -> DecodeIds | None:
        """The decoder of a completion's tokens; None if no tokenizer at hand spells its text."""
        tokens = completion.tokens
        if tokens is None or not tokens.sampled_ids or REDACTED_ID in tokens.sampled_ids:
            return None
        known = self._found.get(completion.policy_id)
        for decode in [known] if known else map(self._load, self._places(policy)):
            if decode is not None and completion.text and _spells(decode, completion):
                self._found[completion.policy_id] = decode
                return decode
        return None

    def _load(self, path: Path) -> DecodeIds | None:
        if path not in self._loaded:
            self._loaded[path] = load_decoder(path)
        return self._loaded[path]

    def _places(self, policy: str) -> Iterator[Path]:
        yield from (folder / _FILE for folder in self._folders)
        homes = [checkpoints_dir(), checkpoints_dir().parent / "trainings", nano_home() / "models"]
        if policy and "\0" not in policy and len(policy) < 256:
            yield Path(policy) / _FILE
            yield from (home / policy / _FILE for home in homes)
        for home in homes:
            yield from sorted(home.glob(f"*/{_FILE}"))


def _spells(decode: DecodeIds, completion: Completion) -> bool:
    assert completion.tokens is not None
    try:
        return decode(completion.tokens.sampled_ids).startswith(completion.text)
    except (OverflowError, ValueError):  # ids beyond the tokenizer's range
        return False

"""What the viewer shows, as plain JSON: pages of runs and groups, whole runs, and two runs side by side.

Every answer is bounded: lists come in pages, long texts are cut and fetched in parts.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from nano_coder.agent.actions import workspace_after
from nano_coder.verify.trainable import RefusalCode, blocking, verify
from nano_shared import snapshot_change
from nano_shared.errors import LogError, UsageError
from nano_shared.extension_points import Extensions
from nano_shared.run_facts import RunFilter
from nano_shared.store import LogStore
from nano_shared.types import REDACTED_ID, ImageRef, Observation, StopReason, Trajectory, Turn
from nano_view.run_pages import ORDERS, SUMS, RunChoice, RunPages
from nano_view.token_texts import Decoders, token_texts

Query = Mapping[str, str]
ViewData = dict[str, Any]
PAGE = 100
"""rows of one page"""
_SCANNED = 1000
"""largest number of runs that are looked at for one page"""
_TURNS = 30
"""turns of one answer"""
_TOKENS = 3000
"""tokens of a turn that are shown at first"""
_SHOWN = 10_000
"""characters of a text that are shown at first"""
_DRAWN = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""what a browser draws and never executes"""
_LARGEST_IMAGE = 4 << 20
"""bytes of an image that a page shows"""
_PART = 500_000
"""characters of a text that one further request brings"""


class TrainingReader(Protocol):
    """Trainings for the viewer; an extension of the group nano.trainings."""

    def rows(self) -> list[ViewData]:
        """`name` and `cells` (text by heading) of each training, newest first."""

    def read(self, name: str) -> ViewData:
        """The page of a training. Raises UsageError for one that it does not know."""

    def compare(self, names: Sequence[str]) -> ViewData:
        """A page with a curve for each training. Raises UsageError as `read`."""


TokenColumns = Mapping[int, Mapping[str, list[float]]]
"""turn -> name -> [M] a number for each sampled token"""
TRAININGS = Extensions[Any]("nano.trainings")


class LogView:
    """Answers over one log, and over the trainings that extensions read."""

    def __init__(
        self, store: LogStore, scores: Callable[[Trajectory], TokenColumns] | None = None,
        folders: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """`scores` gives further numbers of tokens; tokenizers are sought in `folders` first."""
        self.store = store
        self._pages = RunPages(store)
        self._scores = scores
        self._decoders = Decoders(folders)
        self.answers: dict[str, Callable[[Query], ViewData]] = {
            "runs": self.runs, "sums": self.sums, "groups": self.groups, "group": self.group,
            "run": self.run, "turn": self.turn, "text": self.text, "pair": self.pair,
            "trainings": self.trainings, "training": self.training,
        }  # fmt: skip

    # ----------------------------------------------------------------------------------- lists

    def runs(self, query: Query) -> ViewData:
        """A page of runs in the order `sort`. `may` is "train" or a RefusalCode, `text` is in a run; such
        pages may be short, and still go on."""
        chosen, after, may = _chosen(query), _cursor(query, float, str), query.get("may")
        order, text = _one_of(query, "sort", ORDERS), query.get("text")
        if may not in (None, "train", *RefusalCode):
            raise UsageError(f"no refusal code {may!r:.60}; there are {', '.join(RefusalCode)}")
        if may == "train":
            chosen = chosen.model_copy(update={"tokens": True})
        rows: list[ViewData] = []
        for _ in range(_SCANNED // PAGE if may or text else 1):
            page = self._pages.page(chosen, after, limit=PAGE, order=order)
            after = (page[-1]["place"], page[-1]["id"]) if len(page) == PAGE else None
            page = self._refused(self._pages.mentioning(page, text) if text else page)
            rows += [row for row in page if not may or _is(row, may)]
            if after is None or len(rows) >= PAGE:
                break
        return {"rows": rows, "next": after, "codes": _meanings(rows), "choices": _CHOICES}

    def sums(self, query: Query) -> ViewData:
        """What the chosen runs came to and took, by model, project or week; `text` and `may` choose none."""
        return {"rows": self._pages.sums(_chosen(query), _one_of(query, "by", SUMS))}

    def _refused(self, rows: list[ViewData]) -> list[ViewData]:
        """The rows with the codes for which each may not train."""
        ids = tuple(row["id"] for row in rows)
        with closing(self.store.facts(RunFilter(runs=ids))) as facts:  # type: ignore[type-var]
            refused = {run.id: list(dict.fromkeys(blocking(run))) for run in facts}
        return [row | {"refused": refused.get(row["id"], [])} for row in rows]

    def groups(self, query: Query) -> ViewData:
        rows = self._pages.groups(_chosen(query), _cursor(query, float, str, str, int), limit=PAGE)
        after = None
        if len(rows) == PAGE:
            last = rows[-1]
            step = -1 if last["parent_step"] is None else last["parent_step"]
            after = (last["newest"], last["task"], last["parent"] or "", step)
        return {"rows": [row | {"task": row["task"][:_SHOWN]} for row in rows], "next": after}

    def group(self, query: Query) -> ViewData:
        """The group of the run `id`: its figures, a page of its runs, and its best and worst run."""
        group = self._pages.group_of(_required(query, "id"))
        if group is None:
            raise LogError(f"no run {query['id']!r:.100} in log {self.store.url}")
        chosen = RunChoice(group=group)
        after = _cursor(query, float, str)
        rows = self._refused(self._pages.page(chosen, after, limit=PAGE))
        ends = {end: self._pages.page(chosen, limit=1, order=end) for end in ("best", "worst")}
        return {
            "group": self._pages.groups(chosen, limit=1)[0], "rows": rows, "codes": _meanings(rows),
            "next": (rows[-1]["started"], rows[-1]["id"]) if len(rows) == PAGE else None,
            **{end: found[0]["id"] if found else None for end, found in ends.items()},
        }  # fmt: skip

    # ------------------------------------------------------------------------------------ a run

    def run(self, query: Query) -> ViewData:
        """A run with its turns from `first` on."""
        run = self.store.get(_required(query, "id"))
        first = _number(query, "first")
        return {
            **self._head(run),
            "tree": self._pages.tree(run.id),
            "group": self._lens(run)["group"],
            "verdict": run.verdict and run.verdict.model_dump(mode="json"),
            "feedback": [f.model_dump(mode="json") for f in self.store.feedback(run.id)],
            "findings": [finding.as_dict() for finding in verify(run)],
            "files": {name: _cut(text, f"file:{name}") for name, text in list(run.task.files.items())[:200]},
            "turns": self._turns(run, first, first + _TURNS),
        }

    def _head(self, run: Trajectory) -> ViewData:
        names = ("id", "policy", "stop", "stop_detail", "started", "ended", "parent", "parent_step",
                 "profile", "seed", "directory", "reward")  # fmt: skip
        return {
            **{name: getattr(run, name) for name in names},
            "task": run.task.key[:_SHOWN], "level": run.task.level, "family": run.task.family,
            "split": run.task.split, "prompt": _cut(run.task.prompt, "prompt"),
            "answer": None if run.answer is None else _cut(run.answer, "answer"),
            "diff": _cut(run.diff, "diff"), "turn_count": len(run.turns), "tokens": run.num_sampled_tokens,
            "usage": _usage(run), "images": self._images(run.task.images),
        }  # fmt: skip

    def _turns(self, run: Trajectory, first: int, last: int) -> list[ViewData]:
        lens = self._lens(run)
        return [self._turn(run, turn, lens, _TOKENS) for turn in run.turns[first:last]]

    def turn(self, query: Query) -> ViewData:
        """One turn with all its tokens."""
        run, at = self.store.get(_required(query, "id")), _number(query, "turn")
        if at >= len(run.turns):
            raise UsageError(f"run {run.id} has {len(run.turns)} turns, and no turn {at}")
        return self._turn(run, run.turns[at], self._lens(run), None)

    def _lens(self, run: Trajectory) -> ViewData:
        """What the tokens of a run are compared with: its group, the newest version of its policy, scores."""
        (group,) = self._pages.groups(RunChoice(group=self._pages.group_of(run.id)), limit=1)
        group["task"] = group["task"][:_SHOWN]
        scores = self._scores(run) if self._scores else {}
        return {"group": group, "newest": self._pages.newest_version(run.policy), "scores": scores}

    def _turn(self, run: Trajectory, turn: Turn, lens: Mapping[str, Any], most: int | None) -> ViewData:
        completion, at = turn.completion, f"turn:{turn.index}"
        changed = turn.snapshot and any(seen.files_changed for seen in turn.observations)
        return {
            "index": turn.index, "inherited": turn.index < run.inherited, "finish": completion.finish,
            "policy": run.policy, "usage": completion.api and completion.api.usage.model_dump(),
            "policy_id": completion.policy_id, "version": completion.policy_version,
            "seconds": turn.ended - turn.started, "parse_error": turn.parse_error, "repairs": turn.repairs,
            "text": _cut(completion.text, f"{at}:text"), "thought": _cut(turn.thought, f"{at}:thought"),
            "messages": [
                {"role": m.role, "content": _cut(m.content, f"{at}:message:{n}")}
                | {"images": self._images(m.images)}
                for n, m in enumerate(turn.messages)
            ],
            "calls": [
                {"tool": call.name, "arguments": _cut(_arguments(call.arguments), f"{at}:call:{n}")}
                for n, call in enumerate(turn.calls)
            ],
            "seen": [
                _observation_data(o, f"{at}:seen:{n}") | {"images": self._images(o.images)}
                for n, o in enumerate(turn.observations)
            ],
            "diff": f"{at}:diff" if changed else None,
            "tokens": self._tokens(run, turn, lens, most),
        }  # fmt: skip

    def _tokens(
        self, run: Trajectory, turn: Turn, lens: Mapping[str, Any], most: int | None
    ) -> ViewData | None:
        """The sampled tokens with what is known of each; None for a text-only turn."""
        tokens = turn.completion.tokens
        if tokens is None:
            return None
        ids = tokens.sampled_ids[:most]
        decode = self._decoders.find(run.policy, turn.completion)
        pieces = list(token_texts(ids, decode)) if decode else [(f"[{_named(i)}]", 1) for i in ids]
        columns: dict[str, Any] = {"logprob": tokens.logprobs[: len(ids)]}
        scores = lens["scores"].get(turn.index, {})
        columns |= {name: values[: len(ids)] for name, values in scores.items()}
        if turn.index >= run.inherited:
            if run.reward is not None:
                columns["advantage"] = run.reward - lens["group"]["mean"]
            if lens["newest"] is not None:
                columns["age"] = max(0, lens["newest"] - turn.completion.policy_version)
        readable = decode and REDACTED_ID not in tokens.context_ids
        context = decode(tokens.context_ids[:most]) if decode and readable else ""
        return {
            "row": tokens.row, "read": len(tokens.context_ids), "sampled": len(tokens.sampled_ids),
            "texts": [text for text, _ in pieces], "counts": [count for _, count in pieces],
            "columns": columns, "spelled": decode is not None, "context": context[:_SHOWN],
            "more": len(tokens.sampled_ids) - len(ids),
        }  # fmt: skip

    def _images(self, images: Sequence[ImageRef]) -> list[ViewData]:
        """Each with what is known of it, and as an address of its data; None for one that is large, or whose
        blob is not there."""
        return [{"about": str(image), "data": self._data_address(image)} for image in images]

    def _data_address(self, image: ImageRef) -> str | None:
        try:
            data = self.store.get_blob(image.blob)
        except LogError:
            return None
        known = image.media_type in _DRAWN and len(data) <= _LARGEST_IMAGE
        return f"data:{image.media_type};base64,{base64.b64encode(data).decode()}" if known else None

    def text(self, query: Query) -> ViewData:
        """A part of a long text of a run, from the character `from` on."""
        run, part = self.store.get(_required(query, "id")), _required(query, "part")
        start = _number(query, "from")
        whole = self._part(run, part)
        end = start + _PART
        return {"text": whole[start:end], "next": end if end < len(whole) else None}

    def _part(self, run: Trajectory, part: str) -> str:
        name, _, rest = part.partition(":")
        if name == "file" and rest in run.task.files:
            return run.task.files[rest]
        if name in ("prompt", "answer", "diff"):
            return {"prompt": run.task.prompt, "answer": run.answer or "", "diff": run.diff}[name]
        at, _, kind = rest.partition(":")
        if name == "turn" and at.isdecimal() and len(at) < 10 and int(at) < len(run.turns):
            kind, _, number = kind.partition(":")
            found = self._turn_part(run, run.turns[int(at)], kind)
            place = int(number[:10]) if number.isdecimal() else 0
            if place < len(found):
                return found[place]
        raise UsageError(f"run {run.id} has no part {part!r:.100}")

    def _turn_part(self, run: Trajectory, turn: Turn, kind: str) -> Sequence[str]:
        if kind == "diff":
            before, after = (workspace_after(run, turn.index + more) for more in (0, 1))
            return [snapshot_change.diff(before, after, self.store.blobs)]
        if kind == "blob":
            blobs = [self.store.get_blob(o.blob) if o.blob else b"" for o in turn.observations]
            return [blob.decode("utf-8", "replace") for blob in blobs]
        return {
            "text": [turn.completion.text], "thought": [turn.thought],
            "message": [message.content for message in turn.messages],
            "call": [_arguments(call.arguments) for call in turn.calls],
            "seen": [seen.text for seen in turn.observations],
        }.get(kind, [])  # fmt: skip

    def pair(self, query: Query) -> ViewData:
        """Two runs from the turn on in which their tokens first differ."""
        sides = [self.store.get(_required(query, name)) for name in ("left", "right")]
        place = first_difference(*sides)
        heads = [self._head(run) | {"turns": self._turns(run, place["turn"], place["turn"] + _TURNS)}
                 for run in sides]  # fmt: skip
        return {
            "place": place, "left": heads[0], "right": heads[1], "group": self._lens(sides[0])["group"]["of"],
        }  # fmt: skip

    # -------------------------------------------------------------------------------- trainings

    def trainings(self, query: Query) -> ViewData:
        return {"rows": [row for reader in TRAININGS.values() for row in reader.rows()]}

    def training(self, query: Query) -> ViewData:
        """The training `name`, or a comparison of several, separated by commas."""
        name = _required(query, "name")
        problem = UsageError("no installed package reads trainings; nano_rl does")
        for reader in TRAININGS.values():
            try:
                found: ViewData = reader.compare(name.split(",")) if "," in name else reader.read(name)
                return found
            except UsageError as refused:
                problem = refused
        raise problem


def _usage(run: Trajectory) -> ViewData | None:
    """Tokens and dollars (as far as prices are known) of a run's own turns; None where no API answered."""
    usages = [turn.completion.api.usage for turn in run.own_turns if turn.completion.api]
    costs = [usage.cost for usage in usages if usage.cost is not None]
    sums = {name: sum(getattr(u, name) for u in usages) for name in ("prompt", "cached", "completion")}
    return sums | {"cost": sum(costs) if costs else None} if usages else None


def first_difference(left: Trajectory, right: Trajectory) -> ViewData:
    """Where two runs first differ: `turn`, `what` (read, sampled, ...) and `at`; equal ones after the end."""
    shared = 0
    for turn, (a, b) in enumerate(zip_longest(left.turns, right.turns)):
        if a is None or b is None:
            return {"turn": turn, "what": "end", "at": 0, "shared": shared}
        for what, ours, theirs in _streams(a, b):
            if ours != theirs:
                at = _common(ours, theirs)
                return {"turn": turn, "what": what, "at": at, "shared": shared + at}
            shared += len(ours)
    return {"turn": len(left.turns), "what": "nothing", "at": 0, "shared": shared}


def _streams(a: Turn, b: Turn) -> Iterator[tuple[str, Sequence[Any], Sequence[Any]]]:
    ours, theirs = a.completion.tokens, b.completion.tokens
    if ours is None or theirs is None:
        yield "text", a.completion.text, b.completion.text
        seen = ["\n".join(o.text for o in turn.observations) for turn in (a, b)]
        yield "observation", seen[0], seen[1]
    else:
        yield "read", ours.context_ids, theirs.context_ids
        yield "sampled", ours.sampled_ids, theirs.sampled_ids


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def _chosen(query: Query) -> RunChoice:
    names = ("policy", "task", "reward", "stop", "project", "week")
    wanted = {name: query[name] for name in names if query.get(name)}
    try:
        return RunChoice.model_validate(wanted)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg']}") from None


_LONGEST_CURSOR = 2000
_LARGEST = 1e15
"""no second and no number of a row is above"""


def _cursor(query: Query, *kinds: type) -> tuple[Any, ...] | None:
    """The values of `after`, of these kinds; a float may be written as an integer."""
    if not query.get("after"):
        return None
    try:
        values = json.loads(query["after"]) if len(query["after"]) <= _LONGEST_CURSOR else None
        json.dumps(values, ensure_ascii=False).encode()  # a lone surrogate is no text of a log
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or len(values) != len(kinds) or not all(map(_fits, values, kinds)):
        raise UsageError("`after` is no cursor of this list")
    return tuple(values)


def _fits(value: object, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    whole = isinstance(value, int) or kind is float
    return isinstance(value, int | float) and whole and abs(value) < _LARGEST  # which not a number is not


def _required(query: Query, name: str) -> str:
    if not query.get(name):
        raise UsageError(f"{name} is missing")
    return query[name]


def _one_of(query: Query, name: str, known: Mapping[str, object]) -> str:
    """What the query names, or the first that is known."""
    given = query.get(name) or next(iter(known))
    if given not in known:
        raise UsageError(f"no {name} {given!r:.60}; there are {', '.join(known)}")
    return given


def _number(query: Query, name: str) -> int:
    text = query.get(name) or "0"
    if not text.isdecimal() or len(text) > 12:
        raise UsageError(f"{name} must be a number, not {text!r:.60}")
    return int(text)


def _is(row: ViewData, may: str) -> bool:
    return not row["refused"] if may == "train" else may in row["refused"]


def _meanings(rows: Sequence[ViewData]) -> dict[str, str]:
    """The sentence of each refusal code of these rows."""
    return {code: code.meaning for row in rows for code in row["refused"]}


_CHOICES = {
    "sort": list(ORDERS),
    "by": [name for name in SUMS if name != "all"],
    "stop": ["unfinished", *StopReason],
    "reward": {"full": "1 or more", "partial": "between 0 and 1", "zero": "0 or less", "none": "none"},
    "may": {"train": "may train", **{code.value: f"refused: {code.value}" for code in RefusalCode}},
}


def _cut(text: str, part: str) -> str | ViewData:
    """The text, or its beginning with its length, and the name by which `text` gives the rest."""
    return text if len(text) <= _SHOWN else {"text": text[:_SHOWN], "length": len(text), "part": part}


def _arguments(arguments: Mapping[str, Any]) -> str:
    """A call's arguments, one a line; texts as they are, other values as JSON."""
    return "\n".join(f"{k} = {v if isinstance(v, str) else json.dumps(v)}" for k, v in arguments.items())


def _observation_data(seen: Observation, part: str) -> ViewData:
    names = ("tool", "ok", "exit_code", "signal", "timed_out", "bytes_total", "truncated", "files_changed")
    return {
        **{name: getattr(seen, name) for name in names},
        "denials": {name: count for name, count in seen.denials if count},
        "seconds": seen.ended - seen.started,
        "text": _cut(seen.text, part),
        "whole": part.replace(":seen:", ":blob:") if seen.blob else None,
    }


def _named(token: int) -> str:
    return "redacted" if token == REDACTED_ID else str(token)

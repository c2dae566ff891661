"""Extensions by name: of installed packages and of files of users; and the code of users while it runs."""

from __future__ import annotations

import contextvars
import functools
import importlib
import importlib.util
import inspect
import os
import re
import signal
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from nano_shared import __version__
from nano_shared.errors import ConfigError, NanoError, UsageError
from nano_shared.files import real_path
from nano_shared.printable import IN_USER_CODE, one_line

if TYPE_CHECKING:
    import asyncio


T = TypeVar("T")
PATIENCE = 60.0
"""seconds after which a call is named on stderr, and again each time that it has taken twice as long"""
GRACE = 10.0
"""seconds that a call which is under way has to end after Ctrl-C"""
OURS = ("nano_coder", "nano_rl", "nano_shared")
_calls: dict[object, tuple[str, float]] = {}
"""call under way -> its name, and its start by the monotonic clock"""
_lock = threading.Lock()
_watcher: threading.Thread | None = None
_before: tuple[str | None, Any, Any]


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Within the block runs code of users, which messages call `name`. Current folder, stdout and stderr are
    the same after the last of those that run at a time."""
    global _before
    call, before = object(), IN_USER_CODE.set(True)
    with _lock:
        if not _calls:
            _before = (_current_folder(), sys.stdout, sys.stderr)
        _calls[call] = (name, time.monotonic())
        _start_watcher()
    try:
        yield
    finally:
        IN_USER_CODE.reset(before)
        with _lock:
            del _calls[call]
            if not _calls:
                _restore(*_before)


def _restore(folder: str | None, *streams: Any) -> None:
    if folder and folder != _current_folder():
        with suppress(OSError):  # users' code deleted it
            os.chdir(folder)
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        now = getattr(sys, name)
        bars = [s for s in (now, stream) if type(s).__module__.startswith("rich.")]  # begin and end meanwhile
        if now is not stream and not bars:
            setattr(sys, name, stream)


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None


def _start_watcher() -> None:
    global _watcher
    if _watcher is None or not _watcher.is_alive():  # as after a fork
        _watcher = threading.Thread(target=_watch, name="nano-user-code", daemon=True)
        _watcher.start()


def _watch() -> None:
    global _watcher
    due: dict[str, float] = {}
    while True:
        time.sleep(min(1.0, PATIENCE / 4))
        with _lock:
            calls = list(_calls.values())
            if not calls:
                _watcher = None
                return
        since = {name: min(began for other, began in calls if other == name) for name, _ in calls}
        due = {name: due.get(name, PATIENCE) for name in since}
        for name, began in since.items():
            if (seconds := time.monotonic() - began) >= due[name]:
                due[name] = 2 * seconds
                _say(f"{name} has been running for {seconds:.0f} s and is waited for; Ctrl-C ends that")


def _say(text: str) -> None:
    print(f"nano: {one_line(text, 500)}", file=sys.stderr, flush=True)


def leave_hanging_calls(signal_number: int = signal.SIGINT) -> None:
    """After Ctrl-C: unless the calls that are under way end within GRACE, interrupt once more, then exit."""
    under_way = dict(_calls)

    def look() -> None:
        time.sleep(GRACE)
        if left := [name for call, (name, _) in under_way.items() if call in _calls]:
            _say(f"{left[0]} is still running {GRACE:g} s later, and is not waited for")
            os.kill(os.getpid(), signal_number)
            time.sleep(GRACE / 2)
            os._exit(128 + signal_number)

    if under_way:
        threading.Thread(target=look, name="nano-leave", daemon=True).start()


@functools.cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    import asyncio  # a fifth of the time that `--help` takes

    loop = asyncio.new_event_loop()

    def run() -> None:
        while not loop.is_closed():  # code of users may stop it
            loop.run_forever()

    threading.Thread(target=run, name="nano-user-loop", daemon=True).start()
    return loop


def result_of(function: Callable[..., Any], *args: Any, seconds: float | None = None, **named: Any) -> Any:
    """What a function of users returns, awaited if it is `async`.

    Raises TimeoutError if that takes more than `seconds`; the function then goes on in a thread of its own.
    """
    began = time.monotonic()
    call = functools.partial(function, *args, **named)
    result = call() if seconds is None else _in_thread(call).result(seconds)
    if not inspect.isawaitable(result):
        return result

    async def awaited() -> tuple[Any, BaseException | None]:
        try:
            return await result, None
        except (SystemExit, KeyboardInterrupt) as problem:  # would end the loop
            return None, problem

    from asyncio import run_coroutine_threadsafe

    future = run_coroutine_threadsafe(awaited(), _event_loop(os.getpid()))
    try:
        value, problem = future.result(
            None if seconds is None else max(0.0, seconds + began - time.monotonic())
        )
    finally:
        future.cancel()
    if problem is not None:
        raise problem
    return value


def _in_thread(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as problem:  # raised again by who waits
            future.set_exception(problem)

    threading.Thread(target=run, name="nano-user-call", daemon=True).start()
    return future


def read_number(value: object) -> float | None:
    """A number of any library as a float: numpy and torch scalars, bools, decimals, fractions.

    None for what is no number, such as text. NaN and infinity are returned as they are.
    """
    if value is None or isinstance(value, str | bytes | bytearray):
        return None
    try:
        if callable(item := getattr(value, "item", None)):  # an array with one element
            value = item()
        return None if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def error_text(problem: BaseException) -> str:
    """Its type and its message; of a value that a model of pydantic refuses, the first that is wrong."""
    pydantic = sys.modules.get("pydantic")  # whose import takes a command's time
    if pydantic and isinstance(problem, pydantic.ValidationError):
        first = problem.errors()[0]
        return f"ValidationError: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__


def raised_at(problem: BaseException) -> str:
    """The file and line of users' code that raised, as " (FILE, line N)"; empty if it has none."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(problem.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in OURS
    ]
    own = [(file, line) for file, line in frames if not _is_library(file)]
    if isinstance(problem, SyntaxError) or not own:
        return ""  # the message of a syntax error has its place
    file, line = own[-1]
    return f" ({os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file}, line {line})"


def _is_library(file: str) -> bool:
    return file.startswith(("<frozen", *_libraries()))


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()})


_sources: dict[str, str] = {}
"""file of users that this process has imported -> hash of its source then"""


def note_source(path: Path) -> None:
    """Keep the hash of a file of users, which is imported now."""
    from nano_shared.files import file_hash

    _sources.setdefault(str(path), file_hash(path))  # imported once


def source_hashes() -> dict[str, str]:
    """Every file of users that this process has imported, with the hash of its source then."""
    return dict(_sources)


def source_hash(value: object) -> str | None:
    """The hash of the file that a module, a class, a function or an object comes from; None for ours."""
    named = str(getattr(value, "__module__", None))
    module = value if isinstance(value, ModuleType) else sys.modules.get(named)
    file = getattr(module, "__file__", None)
    return _sources.get(os.path.realpath(file)) if file else None


PLUGINS = {
    group: {name: plugin for plugin, names in brought.items() for name in names.split()}
    for group, brought in {
        "nano.agents": {"apis": "command"},
        "nano.blob_stores": {"cluster": "s3 gs az"},
        "nano.checks": {"graders": "suite mutants", "suites": "state scorer metrics"},
        "nano.controls": {"suites": "impossible"},
        "nano.critics": {"preferences": "ppo"},
        "nano.curricula": {"suites": "levels"},
        "nano.dialects": {
            "formats": "llama-3 pythonic mistral mistral-args deepseek deepseek-3 glm glm-4 kimi gemma phi"
            " harmony"
        },
        "nano.environments": {"formats": "nemo-gym openenv verifiers"},
        "nano.gatherers": {"cluster": "ahead servers"},
        "nano.general_tasks": {"suites": "functions"},
        "nano.images": {"vision": "reader"},
        "nano.learners": {"cluster": "ranks"},
        "nano.log_databases": {"cluster": "postgresql"},
        "nano.models": {"gguf": "gguf", "vision": "vision"},
        "nano.profiles": {"suites": "compact-2 hermes-2"},
        "nano.project_tasks": {"mining": "commits"},
        "nano.reward_composers": {"preferences": "composed"},
        "nano.run_formats": {"formats": "atif nemo-gym claude-code codex"},
        "nano.sandboxes": {"containers": "bwrap podman none"},
        "nano.settings": {"logs": "redact", "mcp": "mcp"},
        "nano.sinks": {"view": "tensorboard wandb trackio"},
        "nano.suites": {"suites": "functions shell sql data logic search perceive plan memory reasoning-gym"},
        "nano.task_checks": {"mining": "oracles"},
        "nano.task_rows": {"formats": "published"},
        "nano.terms": {"preferences": "preferences"},
        "nano.tools": {"suites": "lookup", "vision": "view_image", "web": "fetch_url web_search"},
        "nano.workers": {"cluster": "ray"},
    }.items()
}
"""group -> an extension of ours that the core's wheel does not hold -> the plug-in that does"""
Validator = Callable[[Any], str | None]
"""says what is wrong with an extension's value; None where it fits"""


class Extensions(Mapping[str, T]):
    """The installed extensions of a group by name; each is loaded when it is asked for."""

    def __init__(self, group: str, kind: type[T] | None = None, *, check: Validator | None = None) -> None:
        self.group = group
        self._kind, self._check = kind, check

    def find(self, name: str) -> T:
        """The extension of that name, or the value of `path.py:name`. Raises as `find_extension`."""
        return find_extension(self.group, name, self._kind, check=self._check)

    def named(self, option: str, name: str) -> T:
        """As `find`, for what a command line names: raises UsageError, with the option."""
        try:
            return self.find(name)
        except ConfigError as problem:
            raise UsageError(f"{option}: {problem}") from None

    def source(self, name: str) -> str:
        """The module and the package that register a name; empty if none does."""
        return ", ".join(map(_source, _registered(self.group).get(name, ())))

    def __getitem__(self, name: str) -> T:
        """Raises KeyError for a name that is not installed, and ConfigError as `find` does."""
        if name not in self:
            raise KeyError(name)
        return self.find(name)

    def __contains__(self, name: object) -> bool:
        return name in _registered(self.group)

    def __iter__(self) -> Iterator[str]:
        return iter(_registered(self.group))

    def __len__(self) -> int:
        return len(_registered(self.group))


def call_extension(
    function: Callable[..., Any],
    *args: object,
    name: str,
    of: object = None,
    passing: tuple[type[Exception], ...] = (),
    error: type[NanoError] = ConfigError,
    seconds: float | None = None,
    **named: object,
) -> Any:
    """Call an extension's function, as `user_code` does; one that is `async` is awaited.

    `of` is the object whose code it is, where that is not the function's own. What code that is not ours
    raises becomes an `error` with its name, file and line; exceptions of `passing`, and TimeoutError after
    `seconds`, pass.
    """
    module = str(getattr(function if of is None else of, "__module__", ""))
    if is_ours(module):
        return function(*args, **named)
    try:
        with user_code(name):
            return result_of(function, *args, seconds=seconds, **named)
    except BaseException as problem:  # pytest's and asyncio's among them are no Exception
        late = seconds is not None and isinstance(problem, TimeoutError)
        if late or isinstance(problem, (NanoError, KeyboardInterrupt, *passing)):
            raise
        raise error(f"{name} raised {error_text(problem)}{raised_at(problem)}") from problem


def takes(function: object, *names: str) -> str | None:
    """Why an extension cannot be called with arguments of these names in this order; None where it can."""
    if not callable(function):
        return f"is {described(function)}, and should be a function of ({', '.join(names)})"
    try:
        inspect.signature(function).bind(*names)
    except TypeError as problem:
        return f"is called with ({', '.join(names)}), and takes ({_parameters(function)}): {problem}"
    return None


def _parameters(function: Callable[..., object]) -> str:
    return ", ".join(inspect.signature(function).parameters)


def extension_names(group: str) -> list[str]:
    """Names of the installed extensions of a group, ours first, each part in alphabetical order."""
    return list(_registered(group))


def is_hosted(model: str | None) -> bool:
    """Whether a model's name is SCHEME:NAME of an API. Those of our plug-ins run on this machine."""
    scheme, colon, _ = (model or "").partition(":")
    models = "nano.models"
    return bool(colon) and scheme not in PLUGINS[models] and scheme in extension_names(models)


def find_extension(
    group: str, name: str, kind: type[T] | None = None, *, check: Validator | None = None
) -> T:
    """The extension of that name, or the value that `path.py:name` refers to.

    `kind` is the class that the value must be an instance of, `check` any further condition. Raises
    ConfigError for an unknown name, one that two packages register, a file that is not there, code that
    raises when it is imported, and a value of another kind; the message names the source.
    """

    def problem_of(value: object) -> str | None:
        if kind is not None and not isinstance(value, kind):
            return f"is {described(value)}, and {group} takes values of type {kind.__name__}"
        return check(value) if check else None

    if is_reference(name) and name not in _registered(group):
        value, source = find_in_module(name, problem_of)
    else:
        value, source = _from_entry_point(group, name)
    if problem := problem_of(value):
        raise ConfigError(f"{source} {problem}")
    return value  # type: ignore[no-any-return]


_SCHEMES = ("nano.models", "nano.environments", "nano.suites", "nano.rewards")
"""groups whose names are followed by an argument, NAME:ARGUMENT"""
_MODULE_NAME = re.compile(r"([A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*")


def is_reference(name: str) -> bool:
    """Whether a name is `path.py:name`, or `module:name` of a module that Python finds from here."""
    if name.rpartition(":")[0].endswith(".py"):
        return True
    named = _MODULE_NAME.fullmatch(name)
    if named is None or any(name.partition(":")[0] in _registered(group) for group in _SCHEMES):
        return False
    return PathFinder.find_spec(named[1], [os.getcwd(), *sys.path]) is not None


def absolute_reference(name: str) -> str:
    """The reference with an absolute path, so that it holds in other folders; other names as they are."""
    file, _, attribute = name.rpartition(":")
    return f"{real_path(file)}:{attribute}" if file.endswith(".py") else name


def refuse_missing(group: str, name: str, what: str = "") -> None:
    """Raises UsageError, about `what`, if a plug-in of ours that is not installed brings this extension of a
    group."""
    if name not in _registered(group) and (plugin := PLUGINS.get(group, {}).get(name)):
        raise missing_plugin(what or f"{name!r}", plugin)


def missing_plugin(what: str, plugin: str) -> UsageError:
    """For what a plug-in of ours brings, where that is not installed."""
    return UsageError(
        f"{what} comes with the plug-in {plugin}, which is not installed here;"
        f" pip install 'nano-rl-coder[{plugin}]'"
    )


def is_ours(module: str) -> bool:
    """Whether a module, or an entry point's value, is of this repository's own packages."""
    return module.partition(".")[0] in OURS


def described(value: object) -> str:
    """What a value is, for a sentence that refuses it."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


@functools.cache
def _entry_points() -> Any:
    """`EntryPoints` of all groups, by `select`: each search reads a file of every installed package."""
    return entry_points()


@functools.cache
def _registered(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Name -> the entry points of that name: more than one where packages contradict each other."""
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for entry in _entry_points().select(group=group):
        # a package that is on the path twice is registered twice
        found.setdefault(entry.name, {}).setdefault((entry.value, _package(entry)), entry)
    order = sorted(found, key=lambda name: (not any(is_ours(value) for value, _ in found[name]), name))
    return {name: tuple(found[name].values()) for name in order}


def _from_entry_point(group: str, name: str) -> tuple[object, str]:
    registered = _registered(group)
    if name not in registered:
        refuse_missing(group, name)
        listed = ", ".join(_nearest_first(name, registered)) or "none"
        raise ConfigError(f"{group} has no {name!r}; there are {listed}, or path.py:name")
    entry, *others = registered[name]
    if others:
        sources = " and ".join(_source(entry) for entry in registered[name])
        raise ConfigError(f"{group} has several {name!r}: {sources}; uninstall all but one of the packages")
    return _loaded(entry), _source(entry)


@functools.cache
def _loaded(entry: EntryPoint) -> object:
    try:
        if is_ours(entry.value):
            return entry.load()
        _refuse_other_version(entry)
        with user_code(_source(entry)):
            return entry.load()
    except NanoError as problem:
        raise ConfigError(f"{_source(entry)}: {problem}") from None
    except (ImportError, AttributeError) as problem:
        raise ConfigError(f"{_source(entry)} cannot be loaded: {problem}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise ConfigError(f"{_source(entry)} raised {error_text(problem)} at import") from None


def _refuse_other_version(entry: EntryPoint) -> None:
    """Raises ConfigError for a package whose metadata asks for another version of ours."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for text in (entry.dist.requires if entry.dist is not None else None) or ():
        needed = Requirement(text)
        ours = canonicalize_name(needed.name) == "nano-rl-coder"
        if ours and not needed.specifier.contains(__version__, prereleases=True):
            raise ConfigError(
                f"it needs {needed.name}{needed.specifier}, and this is {needed.name} {__version__}: install"
                " the version of the package that was made for it"
            )


def user_module(name: str) -> ModuleType:
    """A module of users: of a file `path.py`, or by its name, also from the current folder.

    Raises ConfigError for one that is not there, and for what it raises when it is imported, with the line.
    """
    if not name.endswith(".py"):
        return _imported(name)
    path = real_path(name)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return _module(path)


def _imported(name: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    with _importing(f"{name}:"):
        module = importlib.import_module(name)
    if module.__file__:
        note_source(real_path(module.__file__))
    return module


@functools.cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"nano_extension_{path.stem}_{abs(hash(path)):x}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look up their module by name
    sys.modules[spec.name] = module
    note_source(path)
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # last, so that what lies beside it takes no module's place
    with _importing(str(path)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importing(source: str) -> Iterator[None]:
    """Code of users is imported within the block. Raises ConfigError for what it raises."""
    try:
        with user_code(source):
            yield
    except NanoError as problem:
        raise ConfigError(f"{source.removesuffix(':')}: {problem}{raised_at(problem)}") from None
    except ModuleNotFoundError as problem:
        raise ConfigError(f"{source} cannot import {problem.name}: {problem}{raised_at(problem)}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise ConfigError(f"{source} raised {error_text(problem)} at import{raised_at(problem)}") from None


def find_in_module(reference: str, fits: Validator) -> tuple[Any, str]:
    """(value, where it is) of `path.py:name` or `module:name`.

    Raises ConfigError as `user_module`, and for a name that is not there, with those whose values fit: the
    nearest first. The value itself is not checked.
    """
    file, _, attribute = reference.rpartition(":")
    module = user_module(file)
    source = str(real_path(file)) if file.endswith(".py") else file
    if not hasattr(module, attribute):
        known = [n for n, value in vars(module).items() if _is_offered(n, value, module) and not fits(value)]
        listed = ", ".join(_nearest_first(attribute, known))
        raise ConfigError(
            f"{source} defines no {attribute!r}; "
            + (f"what fits there is {listed}" if listed else "nothing in it fits")
        )
    return getattr(module, attribute), f"{source}:{attribute}"


def _nearest_first(name: str, known: Collection[str]) -> list[str]:
    near = get_close_matches(name, known, n=len(known) or 1)
    return [*near, *(other for other in known if other not in near)]


def _is_offered(name: str, value: object, module: ModuleType) -> bool:
    """Not what is private, and no class or function that the module imported."""
    defined = isinstance(value, type) or inspect.isroutine(value)
    return not name.startswith("_") and (not defined or value.__module__ == module.__name__)


def _source(entry: EntryPoint) -> str:
    return f"{entry.value} (package {_package(entry)})"


def _package(entry: EntryPoint) -> str:
    return _name_of(entry.dist) if entry.dist is not None else "unknown"


@functools.cache
def _name_of(package: Distribution) -> str:
    """Its name, which the library parses out of the package's metadata each time."""
    return package.name

"""The tools `bash` and `job`: a shell that keeps directory, variables and functions, with background jobs.

Each call is a bash of its own, which reads what the one before saved at its end; so a call that is killed
loses what it did to the shell, and no more. A job is a session of processes with a folder of its own. All
that lies outside the workspace, which an agent may clean; it can change these files, and so its own shell.
"""

from __future__ import annotations

import json
from typing import Any

from nano_coder.sandbox.protocol import ExecResult
from nano_coder.tools.shell import execution_result
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

ANEW = ".nano/shell-anew"
"""is there where a run goes on in a new jail, until the next call"""
LONGEST_COMMAND = 100_000
_MOST_STATE = 1 << 18

# Runs inside the jail, a call each: `run`, `read` and `stop` of the order's `op`.
_PROGRAM = r"""
import glob, json, os, shlex, shutil, signal, sys, time

MOST = 2 << 20
NANO = "/opt/nano/state" if os.access("/opt/nano/state", os.W_OK) else os.path.join(os.getcwd(), ".nano")
JOBS, STATE = os.path.join(NANO, "jobs"), os.path.join(NANO, "shell")
CALL = os.path.join(JOBS, "call")
RESTORE = f"[ -r {shlex.quote(STATE)} ] && . {shlex.quote(STATE)} 2>/dev/null\n"
SAVE = f'''__nano_save() {{
{{ set +x; trap - EXIT; [ -d {shlex.quote(NANO)} ] || mkdir -p {shlex.quote(NANO)}; }} 2>/dev/null
{{ shopt -p; declare -p; alias -p; declare -f; printf 'cd -- %q\n' "$PWD"; set +o; }} \
>{shlex.quote(STATE + ".new")} 2>/dev/null
exit "$1"
}}
trap '__nano_save $?' EXIT
'''
WATCHED = '''bash -c "$1" bash "$2"; echo $? >"$3"'''
order = json.load(sys.stdin)


def start(argv, out, **more):
    os.makedirs(os.path.dirname(out), exist_ok=True)
    open(out, "ab").close()
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    usual = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT]
    return os.posix_spawnp(argv[0], argv, os.environ, file_actions=streams, setsigdef=usual, **more)


def members(session):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X") and int(fields[3]) == session and int(name) != os.getpid():
            found.append(int(name))
    return found


def opened(path):
    return open(path if os.path.exists(path) else os.devnull, "rb")


def show(file, since=0):
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(since)
        if size - since <= 2 * MOST:
            sys.stdout.buffer.write(file.read(size - since))
        else:
            sys.stdout.buffer.write(file.read(MOST) + b"\n[...]\n")
            file.seek(size - MOST)
            sys.stdout.buffer.write(file.read(MOST))
    return size


def note(text):
    sys.stdout.flush()
    print(f"[{text}]", flush=True)


def jobs():
    return sorted(int(name) for name in os.listdir(JOBS) if name.isdigit()) if os.path.isdir(JOBS) else []


def record(session, command):
    number = (jobs() or [0])[-1] + 1
    folder = os.path.join(JOBS, str(number))
    os.makedirs(CALL, exist_ok=True)  # the command may have removed it
    os.rename(CALL, folder)
    with open(os.path.join(folder, "job"), "w") as file:
        json.dump({"session": session, "command": command, "started": time.time(), "shown": 0}, file)
    return number, folder


def run(command, background):
    shutil.rmtree(CALL, ignore_errors=True)
    if background:
        number, folder = record(0, command)
        out, code = os.path.join(folder, "out"), os.path.join(folder, "code")
        argv = ["bash", "-c", WATCHED, "bash", RESTORE + 'eval "$1"', command, code]
        session = start(argv, out, setsid=True)
        change(folder, session=session)
        return note(f"job {number} is running; its output: job number={number}")
    out = os.path.join(CALL, "out")
    pid = start(["bash", "-c", RESTORE + SAVE + 'eval "$1"', "bash", command], out)
    written = open(out, "rb")  # the command may remove it
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    session = os.getsid(0)
    if members(session):
        time.sleep(0.05)
    left = members(session)
    size = show(written)
    keep_state()
    if glob.glob(os.path.join(NANO, "output_*")) and not os.path.lexists(".nano"):
        os.symlink(NANO, ".nano")
    if left and order["kept"]:
        number, folder = record(session, command)
        change(folder, shown=size)
        note(f"what it started runs on as job {number}")
    else:
        shutil.rmtree(CALL, ignore_errors=True)
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


def keep_state():
    new = STATE + ".new"
    if not os.path.exists(new):
        note("the shell was replaced or killed: directory, variables and functions are as before the call")
    elif os.path.getsize(new) > order["most"]:
        os.unlink(new)
        note(f"variables and functions are over {order['most']} bytes, and are as before the call")
    else:
        os.replace(new, STATE)


def change(folder, **values):
    path = os.path.join(folder, "job")
    with open(path) as file:
        known = json.load(file)
    with open(path + ".new", "w") as file:
        json.dump(known | values, file)
    os.replace(path + ".new", path)
    return known | values


def how(folder, job):
    for_s = f"after {time.time() - job['started']:.0f} s"
    if members(job["session"]):
        return f"running {for_s}"
    try:
        with open(os.path.join(folder, "code")) as file:
            return f"ended with exit code {int(file.read())}"
    except (OSError, ValueError):
        return "ended; it left no exit code"


def find(number):
    folder = os.path.join(JOBS, str(number))
    try:
        return folder, change(folder)
    except (OSError, ValueError):
        known = ", ".join(map(str, jobs())) or "none"
        sys.exit(f"no job {number}; there are: {known}")


def read(number, wait):
    folder, job = find(number)
    until = time.monotonic() + wait
    while members(job["session"]) and time.monotonic() < until:
        time.sleep(0.05)
    state = how(folder, job)
    change(folder, shown=show(opened(os.path.join(folder, "out")), job["shown"]))
    note(f"job {number}: {state}")


def stop(number):
    folder, job = find(number)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + 2
        for pid in members(job["session"]):
            try:
                os.kill(pid, sign)
            except OSError:
                pass
        while members(job["session"]) and time.monotonic() < until:
            time.sleep(0.02)
    read(number, 0)


match order["op"]:
    case "run":
        run(order["command"], order["background"])
    case "read":
        read(order["number"], order["wait"])
    case "stop":
        stop(order["number"])
    case "list":
        for number in jobs():
            folder, job = find(number)
            print(f"job {number}: {how(folder, job)}: {job['command'][:200]}")
    case "cut":
        show(opened(os.path.join(CALL, "out")))
    case "anew":
        os.unlink(os.path.join(NANO, "shell-anew"))
"""


@tool(body="command", mutates=True)
def bash(context: ToolContext, command: str, background: bool = False) -> ToolResult:
    """Run a bash command line. Directory, variables and functions are kept for the next call, and /tmp. With
    background it goes on as a job while you work, such as a server or a long test; the tool job shows its
    output and stops it."""
    if len(command.encode("utf-8", "replace")) > LONGEST_COMMAND:
        raise ToolFailure(
            f"the command is longer than {LONGEST_COMMAND} bytes: put it into a file and run that"
        )
    if "\0" in command:
        raise ToolFailure("the command holds a NUL byte, which no shell takes")
    kept = context.keep()
    if background and not kept:
        raise ToolFailure("this sandbox keeps no process between calls: run it without background")
    done = order(context, op="run", command=command, background=background, kept=kept, most=_MOST_STATE)
    result = execution_result(done)
    notes = [*_lost(done, kept), *_begun_anew(context)]
    if done.timed_out:  # what it wrote lies in its file
        said = order(context, op="cut").stdout.decode("utf-8", "backslashreplace").rstrip("\n")
        notes = [*filter(None, [said]), *notes]
    if not notes:
        return result
    return ToolResult(text="\n".join([*notes, result.text]), ok=result.ok, execution=done)


def order(context: ToolContext, **what: Any) -> ExecResult:
    """Run an order of the shell's program in the jail."""
    return context.run_python(_PROGRAM, isolated=True, stdin=json.dumps(what).encode())


def _lost(done: ExecResult, kept: bool) -> list[str]:
    if done.oom and kept:
        return ["[all processes were ended for memory: background jobs and /tmp are gone]"]
    if done.timed_out or done.oom:
        return ["[its processes were ended; directory, variables and functions are as before the call]"]
    return []


def _begun_anew(context: ToolContext) -> list[str]:
    try:
        context.jail.read(ANEW)
    except OSError:
        return []
    order(context, op="anew")
    return ["[the shell began anew: variables, functions, background jobs and /tmp of before are gone]"]


@tool(mutates=True)
def job(context: ToolContext, number: int | None = None, wait: float = 0, stop: bool = False) -> ToolResult:
    """Show what a background job has written since the last time, and whether it runs; without a number, list
    the jobs. With wait, give it so many seconds to end; with stop, end it."""
    context.keep()
    if number is None:
        done = order(context, op="list")
        return ToolResult(text=execution_result(done).text if done.stdout else "[no jobs]", execution=done)
    longest = context.limits.tool_seconds * 0.8
    if not 0 <= wait <= longest:
        raise ToolFailure(f"wait is 0 to {longest:g} seconds")
    op = {"op": "stop"} if stop else {"op": "read", "wait": wait}
    return execution_result(order(context, number=number, **op))

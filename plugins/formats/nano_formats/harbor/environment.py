"""nano's jail as an environment of Harbor: no daemon, no image, no network.

    harbor run -p TASK --environment-import-path nano_formats.harbor.environment:JailEnvironment

Harbor imports this module, in an environment of its own that has nano too; nothing of nano does. It serves
the tasks that `nano-rl tasks import --from harbor` takes: a plain base image, WORKDIR, COPY and mkdir.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import tarfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from nano_coder.sandbox.jail_request import FLOOD_BYTES
from nano_coder.sandbox.namespaces import NsJail, NsSandbox
from nano_formats.harbor.config import Image, read_dockerfile
from nano_shared.files import scratch_folder
from nano_shared.types import Limits

_LINKED = ("/logs", "/tests", "/solution", "/harbor")
"""folders that Harbor uses beside the working directory; in the jail they are in /tmp"""
_SECONDS = 3600.0
"""longest command, where Harbor says nothing"""
_MEMORY_MB = 2048


class JailEnvironment(BaseEnvironment):  # type: ignore[misc]
    @staticmethod
    def type() -> str:
        return "nano-jail"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        self._image()

    def _image(self) -> Image:
        """Raises Refused with the line of the Dockerfile that needs a container build."""
        context = {}
        for path in sorted(self.environment_dir.rglob("*")):
            if path.is_file():
                context[str(path.relative_to(self.environment_dir))] = path.read_text(encoding="utf-8")
        name = "environment/Dockerfile"
        if "Dockerfile" not in context:
            raise FileNotFoundError(f"{name} is missing, so nothing says what the agent starts with")
        return read_dockerfile(context["Dockerfile"], context, name)

    async def start(self, force_build: bool) -> None:
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        image = self._image()
        links = [(f"/tmp/harbor{path}", path) for path in _LINKED]
        if image.workdir != "/work":
            links.append(("/work", image.workdir))
        limits = Limits(tool_seconds=_SECONDS, memory_mb=self.task_env_config.memory_mb or _MEMORY_MB)
        with scratch_folder("harbor") as folder:
            for name, text in image.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
            self._jail: NsJail = NsSandbox().with_links(links).open(folder, limits)
        self._jail.keep()  # containers keep processes and /tmp between commands
        self._workdir = image.workdir
        made = " ".join(f"/tmp/harbor{path}" for path in _LINKED)
        logs = " ".join(f"/logs/{name}" for name in ("agent", "verifier", "artifacts"))
        self._shell(f"mkdir -p {made} && mkdir -p {logs}")

    async def stop(self, delete: bool) -> None:
        if hasattr(self, "_jail"):
            await asyncio.to_thread(self._jail.close)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Raises RuntimeError for a command that runs out of time. A jail has one user."""
        variables = self._merge_env(env) or {}
        options = {"env": variables, "timeout": timeout_sec or _SECONDS}
        return await asyncio.to_thread(self._exec, command, cwd, options)

    def _exec(self, command: str, cwd: str | None, options: Any) -> ExecResult:
        where = shlex.quote(cwd or self._workdir)
        done = self._jail.run(["bash", "-c", f"cd {where} || exit\n{command}"], **options)
        if done.timed_out:
            raise RuntimeError(f"Command timed out after {options['timeout']} seconds")
        return ExecResult(
            stdout=done.stdout.decode("utf-8", "replace"),
            stderr=done.stderr.decode("utf-8", "replace"),
            return_code=128 + done.signal if done.signal is not None else done.exit_code or 0,
        )

    def _shell(self, line: str, stdin: bytes = b"") -> bytes:
        """The output of a line that has to work. Raises FileNotFoundError with what it said otherwise."""
        done = self._jail.run(["bash", "-c", line], stdin=stdin, output_bytes=FLOOD_BYTES)
        if not done.ok:
            raise FileNotFoundError(f"{line}: {done.stderr.decode('utf-8', 'replace').strip()}")
        return done.stdout

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target, data = shlex.quote(str(target_path)), Path(source_path).read_bytes()
        mode = f"{Path(source_path).stat().st_mode & 0o777:o}"
        line = f"mkdir -p $(dirname {target}) && cat > {target} && chmod {mode} {target}"
        await asyncio.to_thread(self._shell, line, data)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source_dir, ".")
        target = shlex.quote(str(target_dir))
        line = f"mkdir -p {target} && tar -C {target} --no-same-owner -xf -"
        await asyncio.to_thread(self._shell, line, packed.getvalue())

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        data = await asyncio.to_thread(self._shell, f"cat {shlex.quote(str(source_path))}")
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        packed = await asyncio.to_thread(self._shell, f"tar -C {shlex.quote(str(source_dir))} -cf - .")
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(target_dir, filter="data")  # names and links stay below the target

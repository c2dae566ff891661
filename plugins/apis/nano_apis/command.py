"""`nano-coder serve`: the model as an OpenAI- and Anthropic-compatible server that logs what it answers."""

from __future__ import annotations

import gc
import resource
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nano_coder.commands.options import Setup, agent_options
from nano_coder.config import AgentConfig, open_store
from nano_coder.installed_views import VIEWS
from nano_shared.errors import UsageError
from nano_shared.extension_points import call_extension

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from nano_apis.served_models import Adapters, ServedModel
    from nano_coder.models.opening import OpenedPolicy
    from nano_coder.serve.access import Access
    from nano_shared.store import LogStore

API_PROFILE = "api-1"


@agent_options("model", "base_url", "profile", "log", more=())
def command(
    setup: Setup,
    host: Annotated[
        str, Option(help="Address to listen on; one that others reach needs --key.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    key: Annotated[
        list[str] | None,
        Option(metavar="KEY", help="API key that clients must send; repeatable.", envvar="NANO_SERVE_KEY"),
    ] = None,
    upstream: Annotated[
        str | None,
        Option(metavar="URL", help="Serve the --model of this server of OpenAI's API."),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        Option(
            metavar="KEY", help="Key that may also load adapters; repeatable.", envvar="NANO_SERVE_ADMIN_KEY"
        ),
    ] = None,
) -> int:
    """Serve a model on OpenAI's and Anthropic's APIs; every request is logged.

    A client changes nothing but its base URL, http://HOST:PORT/v1, or http://HOST:PORT/sessions/NAME/v1 to
    name its session, which POST /sessions/NAME/reward rewards.
    """
    from nano_coder.serve.access import listening_socket, opened_access, root_of, run_server

    config = setup.config
    access = opened_access(host, key, admin_key, variables=("NANO_SERVE_KEY", "NANO_SERVE_ADMIN_KEY"))
    if upstream is not None:
        config = _before(upstream, config)
    if config.profile is None and (config.model or "").startswith("openai:"):
        config = config.model_copy(update={"profile": API_PROFILE})
    from nano_apis.app import serve_app
    from nano_apis.conversations import Conversations, end_interrupted
    from nano_apis.generation import ServerLimits

    with listening_socket(host, port) as listening:  # before a model is loaded for nothing
        store = open_store(config)
        end_interrupted(store, ServerLimits().idle_seconds)
        opener = _ModelOpener(config, store)
        conversations = Conversations(opener.open(config.model))
        usual = ServerLimits().concurrent
        busy = max(usual, getattr(conversations.model.policy, "agents_together", usual))
        pages = _pages(store, access)
        app = serve_app(
            conversations, access=access,
            adapters=opener.adapters(conversations.model),
            promoted=None if config.model else lambda: opener.promoted(conversations.model),
            pages=pages, limits=ServerLimits(concurrent=config.at_once or busy),
        )  # fmt: skip
        root = root_of(host, listening)
        print(
            f"{conversations.model.name} on {root}/v1, logged in {store.url}{_shown(pages, root, access)}",
            file=sys.stderr,
            flush=True,
        )
        # as many connections as this process may hold: by default 1024 idle ones would be the most
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            most = min(hard, 1 << 16) if hard >= 0 else 1 << 16
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        gc.collect()
        gc.freeze()  # a large request would have all modules and weights traversed, while nobody is answered
        run_server(app, listening)
    return 0


def _pages(store: LogStore, access: Access) -> dict[str, ASGIApp]:
    """What installed views serve beside the APIs, by path; nothing where clients have keys and nobody has an
    admin key, since who may only infer does not read what others asked."""
    if access.keys and not access.admin_keys:
        return {}
    opened = {
        name: call_extension(view.served, store, access, name=f"the view {name}")
        for name, view in VIEWS.items()
    }
    return {name: page for name, page in opened.items() if page is not None}


def _shown(pages: Collection[str], root: str, access: Access) -> str:
    """Where the pages are, or what would show the log, as the end of a sentence."""
    if pages:
        return ", shown on " + " and ".join(f"{root}/{page}/" for page in pages)
    if VIEWS or (access.keys and not access.admin_keys):
        return ""
    return f"; pip install 'nano-rl-coder[view]' shows it on {root}/view/"


class _ModelOpener:
    """Opens what the server serves, one at a time: transformers loads no two models at once."""

    def __init__(self, config: AgentConfig, store: LogStore) -> None:
        self._config, self._store = config, store
        self._loading = threading.Lock()

    def open(self, name: str | None) -> ServedModel:
        from nano_coder.models.opening import open_policy

        with self._loading:
            name = name or self._config.model or self._default()
            found = open_policy(name, self._config, scheduler="free")
        return self._served(found)

    def promoted(self, current: ServedModel) -> ServedModel | None:
        """The default model, where it is no longer the current one."""
        name = self._default()
        return self.open(name) if name != current.name else None

    @staticmethod
    def _default() -> str:
        """That of the project in the current directory."""
        from nano_coder.models.opening import default_model
        from nano_shared.owners import project_id

        return default_model(project_id(Path()))

    def adapters(self, model: ServedModel) -> Adapters | None:
        """The adapters of local weights; None for a model of another kind."""
        from nano_apis.served_models import Adapters
        from nano_coder.models.local.policy import LocalPolicy
        from nano_coder.models.opening import SharedBase, adapter_base_of

        if not isinstance(model.policy, LocalPolicy):
            return None
        config = self._config
        base = SharedBase(model.name, dtype=config.dtype, device=config.device, kv_gib=config.kv_gib)

        def opened(folder: Path) -> ServedModel:
            with self._loading:
                return self._served(base.open(folder))

        return Adapters(base.name, adapter_base_of, opened)

    def _served(self, found: OpenedPolicy) -> ServedModel:
        from nano_apis.served_models import ServedModel
        from nano_coder.config import redacting_store

        decode = getattr(found.policy, "decode", None)
        return ServedModel(
            policy=found.policy, profile=found.profile, name=found.name,
            store=redacting_store(self._store, decode, self._config),
        )  # fmt: skip


def _before(url: str, config: AgentConfig) -> AgentConfig:
    """The configuration of a server before that one. Raises UsageError if its model must be named."""
    from nano_coder.models.endpoint.model_card import read_cards

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--upstream {url!r} is no URL; give http://HOST:PORT/v1")
    name = (config.model or "").removeprefix("openai:")
    if not name:
        names = [card.id for card in read_cards(url, config.api_key)]
        if len(names) != 1:
            some = f"serves {', '.join(names[:8])}" if names else "lists no models"
            raise UsageError(f"{url} {some}: name one with --model NAME")
        name = names[0]
    return config.model_copy(update={"base_url": url, "model": f"openai:{name}"})

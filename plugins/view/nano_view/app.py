"""The viewer over HTTP: the page, its script and style, and the answers it asks for. It changes nothing."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from http.cookies import SimpleCookie
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from nano_coder.serve.access import Access, Action, BadRequest
from nano_shared.errors import NanoError
from nano_shared.printable import printable
from nano_view.answers import LogView, plain

POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src {connect}; img-src data:;"
    " base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy of the page"""
_HEADERS = {
    "Content-Security-Policy": POLICY.format(script="'self'", style="'self'", connect="'self'")
    + "; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_COOKIE = "nano_view_key"
_KNOWN = 256
"""answers of which it is known that they have not changed"""
_TYPES = {"view.html": "text/html", "view.js": "text/javascript", "view.css": "text/css"}


def asset(name: str) -> str:
    """The text of a file beside this module."""
    return files("nano_view").joinpath(name).read_text(encoding="utf-8")


def view_app(view: LogView, access: Access | None = None) -> Starlette:
    """The application, mountable below a path. With admin keys, ?key=KEY on its page sets a cookie."""
    allowed = access or Access()

    def authorised(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            refusal = _refusal(request, allowed)
            response = refusal or answer(request)
            response.headers.update(_HEADERS)
            return response

        return endpoint

    def page(name: str, request: Request) -> Response:
        if name == "view.html" and (key := request.query_params.get("key")):
            root = f"{request.scope.get('root_path', '')}/"
            response: Response = RedirectResponse(root, status_code=303)
            response.set_cookie(_COOKIE, _digest(key), path=root, httponly=True, samesite="strict")
            return response
        return Response(asset(name), media_type=_TYPES[name])

    known: OrderedDict[tuple[str, bytes], Any] = OrderedDict()

    def answer(name: str, request: Request) -> Response:
        """The JSON answer; 304 if the client has it already, without asking a log that has not changed."""
        stamp = None if name.startswith("training") else view.store.stamp()
        had, url = request.headers.get("if-none-match"), (name, request.scope["query_string"])
        if had and stamp and known.get(url) == (stamp, had):
            return Response(status_code=304, headers={"ETag": had})
        response = _answer(view.answers[name], request)
        known[url] = (stamp, response.headers["ETag"])
        while len(known) > _KNOWN:
            known.popitem(last=False)
        return response

    paths = {"/": "view.html", "/view.js": "view.js", "/view.css": "view.css"}
    routes = [Route(path, authorised(partial(page, name))) for path, name in paths.items()]
    routes += [Route(f"/api/{name}", authorised(partial(answer, name))) for name in view.answers]
    return Starlette(routes=routes)


def _answer(answer: Callable[..., object], request: Request) -> Response:
    try:
        body, status = plain(answer(request.query_params)), 200
    except NanoError as problem:
        body, status = {"error": printable(str(problem), 1000)}, 400
    text = json.dumps(body)  # ASCII, which spells lone surrogates too
    tag = f'"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(text, status, {"ETag": tag}, media_type="application/json")


def _refusal(request: Request, access: Access) -> Response | None:
    given = request.query_params.get("key")
    if given is None and (cookie := SimpleCookie(request.headers.get("cookie", "")).get(_COOKIE)):
        held = cookie.value.encode()
        given = next((k for k in access.admin_keys if hmac.compare_digest(held, _digest(k).encode())), "")
    try:
        access.check(request, Action.VIEW, given)
    except BadRequest as problem:
        if access.admin_keys:
            return Response("wrong or missing key: open the page with ?key=KEY once\n", 401)
        return Response(f"{problem}\n", problem.status)
    return None


def _digest(key: str) -> str:
    return hashlib.sha256(f"nano view {key}".encode()).hexdigest()

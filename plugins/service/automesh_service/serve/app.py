"""The application: the routes, the guard around them, and the few pages of its own."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware import Middleware

from automesh_service.serve import agents, studies, submissions
from automesh_service.serve.access import Reader
from automesh_service.serve.guard import Guard
from automesh_service.serve.problems import Problem, handle_problems
from automesh_service.serve.service import OpenService, ServiceHere
from automesh_service.submissions.home import is_held

_STATIC = files("automesh_service.serve") / "static"
_OF_REPORT = files("automesh.report.html") / "static"
# The policy of the service's own pages, which contain no text from users. They load nothing from
# other origins, and show the page of a study in a frame that has no origin.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "frame-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_FILES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "format.js": "text/javascript; charset=utf-8",
}
_SHARED = ("dom.js", "format.js")
"""Files that the report uses, too."""


def make_app(service: OpenService) -> FastAPI:
    """Makes the ASGI application of an open service."""
    app = FastAPI(
        title="automesh",
        summary="Studies of device meshes: list and watch them, submit searches, load rules.",
        version=version("jax-automesh"),
        openapi_url="/v1/openapi.json",
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        middleware=[Middleware(Guard, service)],  # pyright: ignore[reportArgumentType]
        redirect_slashes=False,
    )
    app.state.service = service
    handle_problems(app)
    app.include_router(studies.router)
    app.include_router(submissions.router)
    app.include_router(agents.router)

    @app.get("/v1/health", tags=["service"], summary="Whether the service works")
    def health(service: ServiceHere) -> JSONResponse:
        """Answers 200 while the studies can be listed and, if there should be a runner, it runs;
        else 503. Needs no token."""
        has_runner = service.settings.takes_submissions and service.settings.has_runner
        runs = not has_runner or is_held(service.home.lock("runner"))
        can_list = service.metrics.can_list and service.catalogue.is_fresh
        state = {"storage": can_list, "runner": runs}
        return JSONResponse(state, status_code=200 if all(state.values()) else 503)

    @app.get("/metrics", tags=["service"], summary="Metrics for Prometheus")
    def metrics(service: ServiceHere, holder: Reader) -> Response:
        del holder
        return Response(_metrics(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    def index() -> Response:
        return _own("index.html")

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> Response:
        return _own(name)

    @app.get("/studies/{name}", include_in_schema=False)
    @app.get("/submissions/{name}", include_in_schema=False)
    def show(name: str, request: Request) -> Response:
        # The page reads from its own address which study it shows.
        del name, request
        return _own("index.html")

    return app


def _metrics(service: OpenService) -> bytes:
    counts: dict[str, int] = {}
    for one in service.catalogue.known().values():
        counts[one.summary.state] = counts.get(one.summary.state, 0) + 1
    service.metrics.studies.clear()
    for state, count in counts.items():
        service.metrics.studies.labels(state).set(count)
    service.metrics.submissions.clear()
    for state, count in service.store.counts().items():
        service.metrics.submissions.labels(state).set(count)
    return service.metrics.text()


def _own(name: str) -> Response:
    """Returns one of the service's own files."""
    if name not in _FILES:
        raise Problem(404, "there is no such page")
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    return Response(_content(name), media_type=_FILES[name], headers=headers)


@cache
def _content(name: str) -> bytes:
    return ((_OF_REPORT if name in _SHARED else _STATIC) / name).read_bytes()

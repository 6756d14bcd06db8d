"""A service for tests: its real server in a thread of the test, studies to show, a client."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import ssl
import tarfile
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automesh import limits
from automesh.outcomes import Measured
from automesh.report.comparison import Verification
from automesh.tuner.measure.decision import Decision
from automesh.tuner.study.metadata import Footer, Notebook
from automesh.tuner.study.study import open_study, parse_storage
from automesh_service.serve.catalogue import Catalogue
from automesh_service.serve.net.addresses import bound
from automesh_service.serve.net.http_server import make_server, run_server
from automesh_service.serve.service import OpenService, ServiceSettings, open_service
from automesh_service.submissions.home import open_home
from tests.support.processes import free_ports
from tests.support.samples import explain_samples as samples
from tests.tuner.explain.test_study import VERSIONS, header

BEST = samples.plan("fsdp:4,tp:4", remat="full")
SCRIPT = b"def build(mesh):\n    raise NotImplementedError\n"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server has answered; names of headers in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A service that runs, with a token of each scope for `ann`, and one for `bob` to submit."""

    service: OpenService
    port: int
    tokens: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        method: str,
        path: str,
        *,
        token: str = "admin",
        body: bytes | dict[str, Any] | None = None,
        **headers: str,
    ) -> Reply:
        """Sends a request. `token` names one of `tokens`, or is one; empty for none."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if given := self.tokens.get(token, token):
            sent["Authorization"] = f"Bearer {given}"
        if isinstance(body, dict):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=150)
        try:
            connection.request(method, path, body=body, headers=sent)
            reply = connection.getresponse()
            names = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(status=reply.status, headers=names, body=reply.read())
        finally:
            connection.close()

    def send_bundle(self, data: bytes, *, token: str = "submit") -> str:
        """Sends a bundle and returns its name."""
        digest = hashlib.sha256(data).hexdigest()
        reply = self.ask("PUT", f"/v1/bundles/{digest}", token=token, body=data)
        assert reply.status == 201, reply.text
        return digest

    def audited(self) -> list[dict[str, Any]]:
        """The audit, the latest first."""
        return self.ask("GET", "/v1/audit").json()


@contextmanager
def running_service(
    folder: Path,
    *,
    results: Path | None = None,
    context: ssl.SSLContext | None = None,
    connections: int = limits.CONNECTIONS,
) -> Generator[Running]:
    """Runs a service without a runner; `service.catalogue.refresh()` reads the studies."""
    port = free_ports(1)
    settings = ServiceSettings(
        results=results or folder / "results",
        names=(f"127.0.0.1:{port}", f"localhost:{port}"),
        connections=connections,
    )
    service = open_service(open_home(folder / "service"), settings)
    tokens = {scope: service.tokens.make("ann", scope, 3600.0) for scope in ("read", "submit")}
    tokens["admin"] = service.tokens.make("root", "admin", None)
    tokens["bob"] = service.tokens.make("bob", "submit", None)
    read_all(service.catalogue)
    server = make_server(service, context, graceful_s=1)
    thread = threading.Thread(target=run_server, args=(server, bound("127.0.0.1", port)))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Running(service=service, port=port, tokens=tokens)
    finally:
        service.close()
        server.should_exit = True
        thread.join(30)
        service.catalogue.close()
        service.database.close()


def read_all(catalogue: Catalogue) -> None:
    """Has all studies read, also those that take longer on a busy machine."""
    end_s = time.monotonic() + 300.0
    while catalogue.refresh() or any(
        one.summary.state == "unread" for one in catalogue.known().values()
    ):
        assert time.monotonic() < end_s
        time.sleep(0.02)


def make_estimated(folder: Path, **changes: object) -> Path:
    """A study of which nothing was tried."""
    folder.mkdir(parents=True)
    with open_study(
        parse_storage("", folder), folder.name, source_hash="abc", versions=VERSIONS
    ) as study:
        Notebook(study=study, source_hash="abc", versions=VERSIONS).note_header(
            header(folder, **changes)
        )
    return folder


def make_measured(folder: Path, *, storage: str = "", step_s: float = 0.25) -> Path:
    """A study that has ended with a rule."""
    folder.mkdir(parents=True, exist_ok=True)
    place = parse_storage(storage, folder)
    with open_study(place, folder.name, source_hash="abc", versions=VERSIONS) as study:
        book = Notebook(study=study, source_hash="abc", versions=VERSIONS)
        book.note_header(header(folder))
        book.note_decision(decision(step_s))
        book.note_footer(
            Footer(
                stop_reason="nothing is left to try",
                rules_path="mesh_rules.toml",
                interrupted=False,
                made="2026-11-25T00:00:00+00:00",
            )
        )
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    (logs / "worker-1.log").write_text("compiled\n\x1b]0;owned\x07<script>alert(1)</script>\n")
    return folder


def decision(step_s: float) -> Decision:
    measured = Measured(
        step_s=step_s,
        interval_s=(step_s * 0.99, step_s * 1.01),
        rounds_s=(step_s,),
        losses=(2.0, 1.5),
        numerics="agree",
        numerics_detail="",
        values="synthetic",
        raced_out=False,
        confirmed=True,
        peak_bytes=10,
    )
    verification = Verification(processes=3, baseline="")
    return Decision(
        winner=BEST,
        verification=verification,
        comparisons=(),
        confirmed=((BEST, measured),),
        sentence="nothing is left to try",
        made="2026-11-25T00:00:00+00:00",
    )


def tar_of(files: Mapping[str, bytes], *extra: tarfile.TarInfo, mode: str = "w") -> bytes:
    """A tar with files, and further members without content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # pyright: ignore
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member)
    return buffer.getvalue()


def order(**changes: Any) -> dict[str, Any]:
    """An order as JSON."""
    return {"entry": "train.py", "targets": ["cpu:2"], "budget": "1m", **changes}

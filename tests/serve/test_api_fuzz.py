"""Requests that are made from the description of the API: none of them ends in a 5xx.

`pytest -m long tests/serve/test_api_fuzz.py` makes 20,000; what runs always makes a hundred.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from automesh.serve.limiter import Limiter
from tests.serve.test_submissions import BUNDLE
from tests.support.service import Running, make_measured, running_service

schemathesis = pytest.importorskip("schemathesis", reason="pip install 'jax-automesh[fuzz]'")


@schemathesis.serializer("application/toml")
def as_it_is(_: Any, value: Any) -> bytes:
    """A rules file, which is a text."""
    return value.encode(errors="replace") if isinstance(value, str) else json.dumps(value).encode()


NAME = "train-gpu-h100-16-0123abcd"
FEW, ALL = 4, 20_000
# Streams last; and the health of a service without its runner is 503.
_LEFT_OUT = ("/events", "/v1/health")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fuzzed")
    make_measured(folder / "results" / NAME)
    with running_service(folder) as running:
        running.tokens["agent"] = running.service.tokens.make("gpu-host", "agent", None)
        yield running


@pytest.fixture
def no_limits(fuzzed: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else most requests would be refused as too many."""
    for name in ("take", "take_refusal"):
        monkeypatch.setattr(Limiter, name, lambda *_: 0.0)
    monkeypatch.setattr(Limiter, "take_note", lambda *_: False)


def fuzz(running: Running, most: int) -> Counter[int]:
    """Sends up to `most` requests for each operation; how often each status was answered."""
    schema = schemathesis.openapi.from_url(f"{running.url}/v1/openapi.json")
    digest = running.send_bundle(BUNDLE)
    known: dict[str, list[Any]] = {
        "name": [NAME], "digest": [digest], "number": ["0" * 16], "lease": ["0" * 32],
    }  # fmt: skip
    seen: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path.endswith(_LEFT_OUT):
            continue

        @settings(
            max_examples=most,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            case=st.one_of(*(operation.as_strategy(generation_mode=one) for one in MODES)),
            token=st.sampled_from(["admin", "admin", "submit", "read", "agent", ""]),
            has_known=st.booleans(),
            data=st.data(),
        )
        def send(case: Any, token: str, has_known: bool, data: st.DataObject) -> None:
            if has_known:
                for name in case.path_parameters or ():
                    if name in known:
                        case.path_parameters[name] = data.draw(st.sampled_from(known[name]))
            headers = {"Authorization": f"Bearer {running.tokens[token]}"} if token else {}
            reply = case.call(headers=headers, timeout=60)
            seen[reply.status_code] += 1
            said = f"{case.as_curl_command()}\n{reply.text[:500]}"
            assert reply.status_code < 500 or reply.status_code == 503, said
            assert reply.status_code != 503 or "retry-after" in reply.headers, said
            if reply.status_code >= 400:
                assert reply.headers["content-type"][0].startswith("application/problem"), said
                assert json.loads(reply.text)["detail"], said

        send()
    return seen


MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.mark.slow
@pytest.mark.usefixtures("no_limits")
def test_a_few_requests_of_each_kind(fuzzed: Running) -> None:
    seen = fuzz(fuzzed, FEW)
    assert seen.total() > 50
    assert seen[200] and seen[422] and seen[401]


@pytest.mark.long
@pytest.mark.usefixtures("no_limits")
def test_twenty_thousand_requests(fuzzed: Running) -> None:
    kinds = sum(
        1
        for _ in schemathesis.openapi.from_url(f"{fuzzed.url}/v1/openapi.json").get_all_operations()
    )
    seen = fuzz(fuzzed, ALL // (kinds - 2) + 1)
    print(dict(sorted(seen.items())))
    assert seen.total() >= 0.9 * ALL

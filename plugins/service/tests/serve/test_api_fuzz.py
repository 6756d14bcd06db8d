"""Requests that are made from the description of the API: none of them ends in a 5xx.

`pytest -m long plugins/service/tests/serve/test_api_fuzz.py` makes 20,000; what runs always makes a
hundred.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from automesh_service.serve.limiter import Limiter
from plugins.service.tests.serve.test_submissions import BUNDLE, submit
from plugins.service.tests.support.service import Running, make_measured, order, running_service

_WHY_NOT = "pip install 'jax-automesh-service[fuzz]'"
schemathesis = pytest.importorskip("schemathesis", reason=_WHY_NOT)


@schemathesis.serializer("application/toml")
def as_it_is(_: Any, value: Any) -> bytes:
    """A rules file, which is a text."""
    return value.encode(errors="replace") if isinstance(value, str) else json.dumps(value).encode()


NAME = "train-gpu-h100-16-0123abcd"
FEW, ALL = 4, 20_000
PARTS = 4  # of the long test, for `-n 4`
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


def operations(running: Running) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{running.url}/v1/openapi.json")
    every = [found.ok() for found in schema.get_all_operations()]
    return [one for one in every if not one.path.endswith(_LEFT_OUT)]


def fuzz(running: Running, some: Sequence[Any], most: int) -> Counter[int]:
    """Sends up to `most` requests for each operation; how often each status was answered."""
    digest = running.send_bundle(BUNDLE)
    number = submit(running, digest).json()["number"]
    lease = running.ask("POST", "/v1/agent/leases", token="agent", body=SOUND[LEASES]).json()["id"]
    known: dict[str, list[Any]] = {
        "name": [NAME],
        "digest": [digest],
        "number": ["0" * 16, number],
        "lease": ["0" * 32, lease],
    }
    seen: Counter[int] = Counter()
    for operation in some:
        fuzz_one(operation, running, most, known, seen)
        print(operation.method, operation.path, dict(sorted(seen.items())), flush=True)
    return seen


def fuzz_one(
    operation: Any, running: Running, most: int, known: dict[str, list[Any]], seen: Counter[int]
) -> None:
    """Sends up to `most` requests for one operation, and counts what was answered.

    Args:
      known: what parameters of a path may name.
    """

    @settings(
        max_examples=most,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=SUPPRESSED,
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
            if operation.path in SOUND and isinstance(case.body, dict):
                sound = {**SOUND[operation.path]}
                if "bundle" in sound:
                    sound["bundle"] = data.draw(st.sampled_from(known["digest"]))
                case.body = nearly_sound(case.body, sound, data)
        headers = {"Authorization": f"Bearer {running.tokens[token]}"} if token else {}
        reply = case.call(headers=headers, timeout=600)
        seen[reply.status_code] += 1
        learn(operation.path, reply, known)
        said = f"{case.as_curl_command()}\n{reply.text[:500]}"
        assert reply.status_code < 500 or reply.status_code == 503, said
        assert reply.status_code != 503 or "retry-after" in reply.headers, said
        if reply.status_code >= 400:
            assert reply.headers["content-type"][0].startswith("application/problem"), said
            assert json.loads(reply.text)["detail"], said

    send()


# Bodies that do something, of which a few fields are left as they were drawn.
STUDIES, LEASES = "/v1/studies", "/v1/agent/leases"
SOUND: dict[str, dict[str, Any]] = {
    STUDIES: {"bundle": "", "order": order()},
    LEASES: {"name": "gpu-7", "takes": ["*"], "has": ["cpu:2"], "place": "/a"},
}


def nearly_sound(
    drawn: dict[str, Any], sound: dict[str, Any], data: st.DataObject
) -> dict[str, Any]:
    """A body that would be taken, but for some of its fields."""
    whole = {**drawn, **sound}
    if isinstance(drawn.get("order"), dict):
        odd = {name: value for name, value in drawn["order"].items() if data.draw(st.booleans())}
        whole["order"] = {**sound["order"], **odd}
    return whole


def learn(path: str, reply: Any, known: dict[str, list[Any]]) -> None:
    """Keeps the latest names of what was made, for the requests about them."""
    made = {STUDIES: (201, "number", "number"), LEASES: (200, "id", "lease")}
    status, field, name = made.get(path, (0, "", ""))
    if reply.status_code == status:
        found = json.loads(reply.text)
        if isinstance(found, dict) and found.get(field):
            known[name] = [*known[name][-4:], found[field]]


SUPPRESSED = (
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.too_slow,
    HealthCheck.large_base_example,
)
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.mark.slow
@pytest.mark.usefixtures("no_limits")
def test_a_few_requests_of_each_kind(fuzzed: Running) -> None:
    seen = fuzz(fuzzed, operations(fuzzed), FEW)
    assert seen.total() > 50
    assert seen[200] and seen[422] and seen[401]


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("no_limits")
def test_twenty_thousand_requests(fuzzed: Running, part: int) -> None:
    every = operations(fuzzed)
    seen = fuzz(fuzzed, every[part::PARTS], ALL // len(every) + 1)
    print(dict(sorted(seen.items())))
    assert seen.total() >= 0.9 * ALL * len(every[part::PARTS]) / len(every)

"""Every field of the API has a bound that its description states, and that is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plugins.service.tests.serve.test_submissions import BUNDLE
from plugins.service.tests.support.service import Running, order


def unbounded(schema: Any, where: str, parts: dict[str, Any]) -> Iterator[str]:
    """Places in a schema that may have any length or size."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from unbounded(parts[name], f"{where}:{name}", parts)
        return
    for one in schema.get("anyOf", ()):
        yield from unbounded(one, where, parts)
    if "enum" in schema or "const" in schema:
        return
    match schema.get("type"):
        case "string" if "maxLength" not in schema:
            yield where
        case "integer" | "number" if not {"minimum", "maximum"} <= schema.keys():
            yield where
        case "array":
            if "maxItems" not in schema:
                yield where
            yield from unbounded(schema["items"], f"{where}[]", parts)
        case "object":
            if schema.get("additionalProperties") is not False:
                yield where
            for name, one in schema["properties"].items():
                yield from unbounded(one, f"{where}.{name}", parts)
        case _:
            pass


def test_every_field_of_a_request_has_a_bound(running: Running) -> None:
    found = running.ask("GET", "/v1/openapi.json", token="").json()
    parts = found["components"]["schemas"]
    open_ones: list[str] = []
    count = 0
    for path, methods in found["paths"].items():
        for method, one in methods.items():
            for parameter in one.get("parameters", ()):
                count += 1
                where = f"{method} {path} {parameter['name']}"
                open_ones += unbounded(parameter["schema"], where, parts)
            for kind in one.get("requestBody", {}).get("content", {}).values():
                count += 1
                open_ones += unbounded(kind["schema"], f"{method} {path}", parts)
    assert count > 40
    assert open_ones == []


@pytest.mark.parametrize("top", [2**70, 2**63, 1001, -1, 1.5, "3", True, None])
def test_top_of_an_order(running: Running, top: object) -> None:
    digest = running.send_bundle(BUNDLE)
    body = {"bundle": digest, "order": order(top=top)}
    reply = running.ask(
        "POST", "/v1/studies", token="submit", body=body, Idempotency_Key="bounds-of-top"
    )
    assert reply.status == 422
    assert "top" in reply.json()["detail"]


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/audit?before={}", "/v1/audit?size={}", "/v1/submissions?page={}"),
        *("/v1/studies?page={}", "/v1/studies?size={}", "/v1/studies/x/table.txt?top={}"),
        *("/v1/studies/x/table.txt?width={}", "/v1/studies/x/logs/y?offset={}"),
        "/v1/submissions/0123456789abcdef/log?offset={}",
    ],
)
@pytest.mark.parametrize("number", [2**63, 2**70, -1, "9" * 5000])
def test_numbers_that_no_database_holds(running: Running, path: str, number: object) -> None:
    assert running.ask("GET", path.format(number)).status == 422


def test_names_that_no_file_has(running: Running) -> None:
    for path in ("/v1/studies/{}", "/v1/studies/{}/rules.toml", "/v1/submissions/{}/log"):
        assert running.ask("GET", path.format("x" * 401)).status == 422
        assert running.ask("GET", path.format("x" * 400)).status == 404
    for bundle in ("0" * 65, "x" + "0" * 64):
        body = {"bundle": bundle, "order": order()}
        headers = {"Idempotency_Key": "bounds-of-names"}
        reply = running.ask("POST", "/v1/studies", token="submit", body=body, **headers)
        assert reply.status == 422

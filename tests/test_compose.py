"""compose.yaml is a Compose file for old and new readers, and shows nothing to the network."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

LOOPBACK = re.compile(r"^127\.0\.0\.1:(\d+|\$\{\w+:-\d+\}):\d+$")


@pytest.fixture(scope="module")
def compose(checkout: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((checkout / "compose.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def schema() -> Draft7Validator:
    """The schema of docker-compose 1.29.2, which newer ones widen; it calls itself 2019-09 and uses Draft 7."""
    text = (Path(__file__).parent / "data" / "compose_spec.json").read_text()
    return Draft7Validator(json.loads(text))


def not_loopback(compose: dict[str, Any]) -> list[str]:
    ports = [str(port) for service in compose["services"].values() for port in service.get("ports", [])]
    return [port for port in ports if not LOOPBACK.match(port)]


def test_the_schema_accepts_the_file(compose: dict[str, Any], schema: Draft7Validator) -> None:
    assert [error.message for error in schema.iter_errors(compose)] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("services", "postgres", "imaeg"), "postgres:17"),
        (("services", "postgres", "ports"), "127.0.0.1:5432:5432"),
        (("services", "postgres", "healthcheck", "retries"), "many"),
        (("services", "vllm", "deploy", "resources", "reservations", "gpus"), 1),
        (("sevices",), {}),
    ],
)
def test_the_schema_rejects_a_broken_variant(
    compose: dict[str, Any], schema: Draft7Validator, path: tuple[str, ...], value: object
) -> None:
    broken = copy.deepcopy(compose)
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert list(schema.iter_errors(broken))


def test_ports_are_published_on_loopback_only(compose: dict[str, Any]) -> None:
    assert not_loopback(compose) == []
    assert all(service.get("network_mode") != "host" for service in compose["services"].values())


@pytest.mark.parametrize("port", ["5432:5432", "0.0.0.0:5432:5432", "127.0.0.1:5432", "[::]:5432:5432", "5432"])
def test_a_port_shown_to_the_network_would_be_found(port: str) -> None:
    assert not_loopback({"services": {"postgres": {"ports": [port]}}}) == [port]


def test_every_service_can_say_that_it_is_healthy(compose: dict[str, Any]) -> None:
    assert all("healthcheck" in service for service in compose["services"].values())


def test_readme_and_file_name_the_same_services(compose: dict[str, Any], checkout: Path) -> None:
    named = set(re.findall(r"docker compose(?: --profile \w+)? up -d (\w+)", (checkout / "README.md").read_text()))
    assert named == set(compose["services"])


def test_the_old_version_key_is_absent(compose: dict[str, Any]) -> None:
    assert "version" not in compose

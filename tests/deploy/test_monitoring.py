"""Alert rules and the Grafana dashboard, before a real Prometheus that reads a real server."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from glint.server.flags import add_flags
from tests.deploy.conftest import DEPLOY
from tests.e2e.served import Served, free_port, served
from tests.e2e.small_glm import write_small_glm

FOLDER = DEPLOY / "monitoring"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
PANELS = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in DASHBOARD["panels"]}
SELECTOR = re.compile(r"\b(glint:\w+|process_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
OF_PROMETHEUS = {"instance", "job"}
SCRAPES = 4

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="needs prometheus and promtool (Debian: apt install prometheus)",
)


def promtool(*arguments: str | Path) -> None:
    """Run promtool; its complaint fails the test."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a small random model."""
    folder = tmp_path_factory.mktemp("monitored")
    with served(folder / "log", "--model", str(write_small_glm(folder / "glm"))) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus with our configuration and rules that has read the server a few times, under some load."""
    folder = tmp_path_factory.mktemp("prometheus")
    configuration = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    shutil.copy(FOLDER / "alerts.yaml", folder)
    port = free_port()
    flags = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30) as client:
            wait_for_scrapes(client, server, folder / "log")
            yield client
    finally:
        process.terminate()
        process.wait(30)


def wait_for_scrapes(client: httpx.Client, server: Served, log: Path) -> None:
    """Send requests until Prometheus has seen their figures move."""
    deadline = time.monotonic() + 90
    while True:
        body = {"prompt": "Hi there", "max_tokens": 5, "ignore_eos": True}
        assert httpx.post(f"{server.url}/generate", json=body, timeout=60).status_code == 200
        if is_ready(client):
            counted = query(client, f"count_over_time(glint:steps_total[1m]) > {SCRAPES}")
            if counted and query(client, "increase(glint:requests_total[1m]) > 0"):
                return
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def is_ready(client: httpx.Client) -> bool:
    """Whether Prometheus answers queries; it listens before it has read its storage, and says 503 until then."""
    try:
        return client.get(client.base_url.join("/-/ready")).status_code == 200
    except httpx.TransportError:
        return False


def query(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """What an expression gives now."""
    answer = client.get("/query", params={"query": expression})
    assert answer.status_code == 200, (expression, answer.text)
    return list(answer.json()["data"]["result"])


def exported(server: Served) -> dict[str, list[dict[str, str]]]:
    """The labels of every sample that the server writes, by the sample's name."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", FOLDER / "alerts.yaml")
    promtool("check", "config", FOLDER / "prometheus.yaml")


def test_the_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "alerts.yaml").read_text()
    file = tmp_path / "tests.yaml"
    file.write_text(text.replace("RULES", str(FOLDER / "alerts.yaml")))
    promtool("test", "rules", file)
    assert {rule["alert"] for rule in RULES} == set(re.findall(r'alertname="(\w+)"', text))


def test_every_alert_says_what_to_do() -> None:
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "action"} and rule["labels"]["severity"] in (
            "warning",
            "critical",
        )
        assert all(text.endswith(".") for text in rule["annotations"].values())


def test_flags_in_the_actions_exist() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    known = set(re.findall(r"--[a-z-]+", parser.format_help()))
    named = {flag for rule in RULES for flag in re.findall(r"--[a-z-]+", rule["annotations"]["action"])}
    assert len(named) > 4 and named <= known


@pytest.mark.parametrize("expression", [*(rule["expr"] for rule in RULES), *chain.from_iterable(PANELS.values())])
def test_metrics_and_labels_are_those_that_the_server_writes(server: Served, expression: str) -> None:
    found = exported(server)
    used = SELECTOR.findall(expression)
    assert used or 'up{job="glint"}' in expression
    for name, matchers in used:
        assert name in found, name
        for label, operator, value in MATCHER.findall(matchers):
            if label not in OF_PROMETHEUS:
                values = {labels.get(label) for labels in found[name]}
                assert set(value.split("|") if operator == "=~" else [value]) <= values, (name, label)
    for group in re.findall(r"by \(([^)]*)\)", expression):
        for label in set(group.split(", ")) - OF_PROMETHEUS:
            assert all(any(label in labels for labels in found[name]) for name, _ in used), (expression, label)


@pytest.mark.parametrize("title", PANELS)
def test_every_panel_of_the_dashboard_shows_something(prometheus: httpx.Client, title: str) -> None:
    for expression in PANELS[title]:
        written = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
        values = [float(series["value"][1]) for series in query(prometheus, written)]
        assert values and all(math.isfinite(value) for value in values), written


def test_a_real_prometheus_evaluates_every_rule(prometheus: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while True:
        (group,) = prometheus.get("/rules").json()["data"]["groups"]
        if all(rule["health"] == "ok" for rule in group["rules"]):
            break
        assert time.monotonic() < deadline, group
        time.sleep(0.2)
    assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in RULES}
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(PANELS) == len(panels)
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24

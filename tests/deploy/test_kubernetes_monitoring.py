"""ServiceMonitor, autoscaler and the adapter's rules: the metrics they name are metrics that the server writes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from glint.server.auth import METRICS_PATH
from glint.server.metrics import EngineReading, Metrics
from tests.deploy.command_lines import parse_serve
from tests.deploy.test_kubernetes import FOLDER, documents, server_of

MONITORING = documents(FOLDER / "monitoring")
SERVICE_MONITOR_FIELDS = {"selector", "endpoints", "namespaceSelector", "jobLabel", "targetLabels", "podTargetLabels"}
ENDPOINT_FIELDS = {"port", "path", "scheme", "interval", "scrapeTimeout", "honorLabels", "relabelings"}


def rules() -> dict[str, dict[str, Any]]:
    """The rules of the Prometheus adapter, by the name that the autoscaler sees."""
    listed = yaml.safe_load((FOLDER / "monitoring" / "adapter-values.yaml").read_text())["rules"]["custom"]
    return {rule["name"]["as"]: rule for rule in listed}


def metrics_of() -> list[dict[str, Any]]:
    """The metrics of the autoscaler."""
    return list(MONITORING["HorizontalPodAutoscaler"]["spec"]["metrics"])


def written_gauges() -> dict[str, float]:
    """The gauges that a server with seven waiting requests and half of its pages in use writes."""
    reading = EngineReading(
        num_running=3, num_waiting=7, pages_free=4, pages_held=8, pages_cached=4, num_preemptions=0, cpu_seconds={}
    )
    text = Metrics("model", lambda: reading, {}).render()[0].decode()
    return {name: float(value) for name, value in re.findall(r"^(glint:\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("metric", metrics_of(), ids=lambda metric: metric["pods"]["metric"]["name"])
def test_the_autoscaler_follows_a_metric_that_the_server_writes(metric: dict[str, Any]) -> None:
    rule = rules()[metric["pods"]["metric"]["name"]]
    series = re.search(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert series is not None and series[1] in written_gauges()
    assert series[1].replace(":", "_") == rule["name"]["as"]
    assert {"namespace", "pod"} == set(rule["resources"]["overrides"])
    for part in ("<<.Series>>", "<<.LabelMatchers>>", "<<.GroupBy>>"):
        assert part in rule["metricsQuery"]


def test_the_gauges_mean_what_the_targets_say() -> None:
    gauges = written_gauges()
    assert gauges["glint:num_requests_waiting"] == 7
    assert gauges["glint:kv_cache_usage_perc"] == 0.5
    assert {metric["pods"]["metric"]["name"] for metric in metrics_of()} == set(rules())


def test_the_autoscaler_scales_the_deployment() -> None:
    target = MONITORING["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    deployment = documents()["Deployment"]
    assert target == {"apiVersion": deployment["apiVersion"], "kind": "Deployment", "name": "glint"}
    assert deployment["metadata"]["name"] == "glint"
    assert "replicas" not in deployment["spec"]


def test_the_service_monitor_reads_the_metrics_of_the_service() -> None:
    monitor = MONITORING["ServiceMonitor"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    spec = monitor["spec"]
    assert set(spec) <= SERVICE_MONITOR_FIELDS
    (endpoint,) = spec["endpoints"]
    assert set(endpoint) <= ENDPOINT_FIELDS
    service = documents()["Service"]
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["path"] == METRICS_PATH
    assert parse_serve(server_of()["args"]).open_metrics
    assert int(endpoint["scrapeTimeout"].removesuffix("s")) < int(endpoint["interval"].removesuffix("s"))

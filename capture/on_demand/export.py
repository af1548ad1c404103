"""Sends the summary of a recording as OpenTelemetry metrics, over OTLP by HTTP.

Where to is said by the variables of OpenTelemetry itself: `OTEL_EXPORTER_OTLP_ENDPOINT` and its relatives.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opgrip.errors import UserError, one_line

MOST_OPERATORS = 100
"""Whose times are sent, those that took longest."""
TIMEOUT_S = 5.0
TIMEOUTS = ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
NOT_SENT = "the trace is there, but its summary could not be sent"


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a recording."""

    name: str
    unit: str
    description: str
    value: float
    attributes: Mapping[str, str] = field(default_factory=dict)


def check_export() -> None:
    """Raise `UserError` where what sends metrics is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.metric_exporter
        import opentelemetry.sdk.metrics  # noqa: F401
    except ImportError as error:
        raise UserError(f"--otlp needs {error.name or 'opentelemetry'}", "pip install 'opgrip[otlp]'") from error


def metrics_of(result: Mapping[str, Any]) -> Iterator[Metric]:
    """What is sent of a recording.

    Parameters
    ----------
    result : what its process answered
    """
    from opgrip.traces.table.trace import load

    yield Metric("opgrip.recordings", "{recording}", "recordings", 1)
    yield Metric("opgrip.steps", "{step}", "steps that were recorded", result["steps"])
    yield Metric("opgrip.calls", "{call}", "calls in them", result["calls"])
    yield Metric("opgrip.dropped", "{call}", "calls that could not be recorded", result["dropped"])
    table = load(Path(result["file"])).summary("op").head(MOST_OPERATORS)
    for op, time_us, calls in zip(table["op"].astype(str), table["time_us"], table["calls"], strict=True):
        about = {"operator": op}
        yield Metric("opgrip.operator.time", "s", "time in calls of an operator", float(time_us) / 1e6, about)
        yield Metric("opgrip.operator.calls", "{call}", "calls of an operator", int(calls), about)


def export(result: Mapping[str, Any], process: Mapping[str, Any]) -> None:
    """Send the summary of a recording.

    Parameters
    ----------
    process : what the process says of itself

    Raises
    ------
    UserError : where it cannot be sent
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
    from opentelemetry.sdk.resources import Resource

    names = {"service.name": "name", "host.name": "host", "process.pid": "pid", "opgrip.rank": "rank"}
    about = {name: process[word] for name, word in names.items() if process.get(word) is not None}
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], Resource.create(about), shutdown_on_exit=False)
    meter = provider.get_meter("opgrip")
    for metric in metrics_of(result):
        counter = meter.create_counter(metric.name, metric.unit, metric.description)
        counter.add(metric.value, dict(metric.attributes))
    data = reader.get_metrics_data()
    timed = any(name in os.environ for name in TIMEOUTS)
    exporter = OTLPMetricExporter(timeout=None if timed else TIMEOUT_S)
    # what it says of each try is said in one line below
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL + 1)
    try:
        sent = data is not None and exporter.export(data) is MetricExportResult.SUCCESS
    except Exception as error:
        raise UserError(NOT_SENT, one_line(error)) from error
    finally:
        exporter.shutdown()
        provider.shutdown()
    if not sent:
        hint = "OTEL_EXPORTER_OTLP_ENDPOINT, set for the command that asks, names who receives it; else localhost:4318"
        raise UserError(NOT_SENT, hint)

"""The dashboard and the alert rules ask only for what a running server has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

NAME = re.compile(r"\b(?:charonia_|nv_|vllm:)[a-z0-9_:]+")
SELECTION = re.compile(r"\b((?:charonia_|nv_|vllm:)[a-z0-9_:]+)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|on|without) \(([^)]*)\)")
PLACEHOLDER = re.compile(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}")
OF_PROMETHEUS = {"instance", "job"}
"""Labels that the scraper adds."""


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.fixture(scope="module")
def series(scraped: str) -> dict[str, set[str]]:
    """The labels of each name in the scrape."""
    found: dict[str, set[str]] = {}
    for line in scraped.splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels = re.findall(r'(\w+)="', rest) if rest else []
            found.setdefault(name.split(" ")[0], set()).update(labels)
    # Where there are several: tests/e2e/test_frontends.py.
    found["charonia_event_loop_lag_seconds"].add("frontend")
    found["charonia_frontend_restarts_total"] = set()
    # Where there are rollouts: tests/e2e/test_rollouts.py.
    found["charonia_rollout_decisions_total"] = {"route", "decision"}
    return found


def complaints(expression: str, told: str, series: dict[str, set[str]]) -> Iterator[str]:
    """What an expression, and the text shown with it, ask for in vain."""
    names = set(NAME.findall(expression))
    yield from (f"no metric {name}" for name in names - series.keys())
    for name, selectors in SELECTION.findall(expression):
        asked = set(re.findall(r"(\w+) ?[=!]", selectors))
        yield from (f"{name} has no label {label}" for label in asked - series.get(name, set()))
    known = OF_PROMETHEUS.union(*(series.get(name, set()) for name in names))
    shown = {label for group in GROUPING.findall(expression) for label in words(group)} | set(PLACEHOLDER.findall(told))
    yield from (f"nothing in {expression} has a label {label}" for label in shown - known)


@pytest.fixture(scope="module")
def dashboard(root: Path) -> Any:
    return json.loads((root / "deploy" / "grafana" / "charonia.json").read_text())


@pytest.fixture(scope="module")
def rules(root: Path) -> list[Any]:
    groups = yaml.safe_load((root / "deploy" / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_dashboard_shows_what_there_is(dashboard: Any, series: dict[str, set[str]]) -> None:
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    wrong = [said for target in targets for said in complaints(target["expr"], target["legendFormat"], series)]
    assert len(targets) > 20
    assert wrong == []


def test_the_dashboard_is_whole(dashboard: Any) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)\}?", json.dumps(dashboard))) <= variables


def test_the_rules_watch_what_there_is(rules: list[Any], series: dict[str, set[str]]) -> None:
    wrong = [said for rule in rules for said in complaints(rule["expr"], str(rule["annotations"]), series)]
    assert wrong == []
    watched = " ".join(rule["expr"] for rule in rules)
    for name in (
        "last_load_failed",
        "rollout_decisions",
        "up{",
        "model_ready",
        "queue_age",
        "kv_cache_usage",
        "core_restarts",
        "instance_restarts",
    ):
        assert name in watched


def test_the_rules_are_whole(rules: list[Any]) -> None:
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Charonia\w+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_check_bites(series: dict[str, set[str]]) -> None:
    assert list(complaints("rate(charonia_nonsense_total[5m])", "", series)) == ["no metric charonia_nonsense_total"]
    expression = 'sum by (colour) (charonia_model_ready{shape="round"})'
    assert len(list(complaints(expression, "{{size}}", series))) == 3

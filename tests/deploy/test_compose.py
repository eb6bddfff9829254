"""The compose file: three services that find each other, and files that are where it says."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from charonia.cli.app import app


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    """With its variables at their defaults, as where nothing is set."""
    written = (root / "deploy" / "compose.yaml").read_text()
    assert "$" not in re.sub(r"\$\{\w+:-[^}]*\}", "", written), "a variable without a default"
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", written)


@pytest.fixture(scope="module")
def services(text: str) -> Any:
    return yaml.safe_load(text)["services"]


def mounts(service: Any) -> dict[str, str]:
    """Path in the container -> file, directory or volume."""
    return {path: source for source, path, *_ in (volume.split(":") for volume in service["volumes"])}


def test_it_is_a_compose_file(text: str) -> None:
    compose_spec = pytest.importorskip("compose_spec")
    compose_spec.PyCompose.from_yaml(text).to_spec()
    with pytest.raises(Exception, match="prots"):
        compose_spec.PyCompose.from_yaml(text.replace("ports:", "prots:", 1)).to_spec()


def test_what_it_mounts_is_there(services: Any, text: str, root: Path) -> None:
    for service in services.values():
        for source in mounts(service).values():
            local = source.startswith(".")
            assert (root / "deploy" / source).exists() if local else source in yaml.safe_load(text)["volumes"]


def test_the_server_is_locked_up(services: Any, sibling: Callable[[str], ModuleType], root: Path) -> None:
    server = services["charonia"]
    app.parse_args(server["command"], exit_on_error=False, print_error=False)
    assert server["read_only"]
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert mounts(server).keys() == {"/models", "/home/charonia"}
    assert "--model-repository=/models" in server["command"]
    [seconds] = [int(word.partition("=")[2]) for word in server["command"] if word.startswith("--exit-timeout")]
    assert int(server["stop_grace_period"].removesuffix("s")) >= seconds + 35
    assert (root / server["build"]["dockerfile"]).is_file()
    assert all(port.startswith("127.0.0.1:") for value in services.values() for port in value["ports"])


def test_prometheus_scrapes_the_server(services: Any, root: Path) -> None:
    assert mounts(services["prometheus"])["/etc/prometheus"] == "./prometheus"
    folder = root / "deploy" / "prometheus"
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["charonia:8002"]}]
    assert [(folder / name).is_file() for name in config["rule_files"]] == [True]


def test_grafana_shows_the_dashboard(services: Any, root: Path) -> None:
    folder, mounted = root / "deploy" / "grafana", mounts(services["grafana"])
    provisioning = folder / "provisioning"
    assert mounted["/etc/grafana/provisioning"] == "./grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "charonia.yaml").read_text())["providers"]
    assert mounted[provider["options"]["path"] + "/charonia.json"] == "./grafana/charonia.json"
    choices = json.loads((folder / "charonia.json").read_text())["templating"]["list"]
    assert source["type"] in [choice["query"] for choice in choices if choice["type"] == "datasource"]


@pytest.fixture(scope="module")
def routed(root: Path) -> str:
    written = (root / "deploy" / "compose.router.yaml").read_text()
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", written)


def test_a_router_stands_before_two_servers_alike(routed: str, root: Path) -> None:
    compose_spec = pytest.importorskip("compose_spec")
    compose_spec.PyCompose.from_yaml(routed).to_spec()
    services = yaml.safe_load(routed)["services"]
    router = services.pop("router")
    first, second = services.values()
    assert first == second
    app.parse_args(first["command"], exit_on_error=False, print_error=False)
    assert (root / "deploy" / mounts(first)["/model"]).is_dir()
    assert "ports" not in first, "the router alone is reached"
    command = router["command"]
    assert command[command.index("--worker-urls") + 1 :] == [f"http://{name}:8000" for name in services]
    assert router["depends_on"] == [*services]
    assert all(port.startswith("127.0.0.1:") for port in router["ports"])

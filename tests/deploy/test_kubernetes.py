"""The manifests: each overlay as kubectl renders it, held against Kubernetes' schemas, this server's command line,
variables, endpoints and metrics. None of it was applied to a cluster."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema
import msgspec
import pytest
import yaml

from charonia.classic_backends.batching import instance
from charonia.cli.app import app
from charonia.cli.options import ServeOptions
from charonia.engine.config import KVEventsConfig

OVERLAYS = ("single", "gpu", "claim", "bucket", "autoscaling", "ray", "leaderworkerset", "gateway", "kserve")
CUSTOM = {
    "ServiceMonitor": "service_monitor",
    "ServingRuntime": "serving_runtime",
    "LLMInferenceServiceConfig": "llm_inference_service_config",
    "RayCluster": "ray_cluster",
    "LeaderWorkerSet": "leader_worker_set",
    "InferencePool": "inference_pool",
    "HTTPRoute": "http_route",
}
RUNTIMES = ("ServingRuntime", "LLMInferenceServiceConfig")
"""What KServe makes pods of, which adds to them."""
WRITTEN_TO = {"/tmp", "/home/charonia", "/dev/shm"}
RAYS_OWN = "RAY_"
VERSIONS = ("1.30", "1.37")
"""The oldest Kubernetes that the manifests are for, and a new one."""


class Pod(NamedTuple):
    """A pod of an overlay, wherever its template stands. `owner` is the kind of what makes it."""

    owner: str
    labels: dict[str, str]
    spec: dict[str, Any]

    def containers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.spec["containers"]
        return found

    def servers(self) -> list[dict[str, Any]]:
        return [container for container in self.containers() if container.get("args", [""])[0] == "serve"]


@pytest.fixture(scope="module")
def kubernetes(root: Path) -> Path:
    return root / "deploy" / "kubernetes"


@pytest.fixture(scope="module")
def rendered(kubernetes: Path) -> Callable[[str], list[Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    found: dict[str, list[Any]] = {}

    def render(overlay: str) -> list[Any]:
        if overlay not in found:
            command = ["kubectl", "kustomize", str(kubernetes / "overlays" / overlay)]
            said = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert said.returncode == 0, said.stderr
            found[overlay] = list(yaml.safe_load_all(said.stdout))
        return found[overlay]

    return render


@pytest.fixture(scope="module")
def validated() -> list[Any]:
    """Resources that stand in several overlays alike are validated once."""
    return []


def pods(resources: list[Any]) -> Iterator[Pod]:
    for resource in resources:
        spec = resource.get("spec", {})
        if resource["kind"] == "ServingRuntime":
            yield Pod(resource["kind"], {}, {name: spec[name] for name in ("containers", "volumes")})
        if resource["kind"] == "LLMInferenceServiceConfig":
            yield Pod(resource["kind"], {}, spec["template"])
            continue
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if resource["kind"] == "RayCluster" else [spec]
        templates = [group["template"] for group in groups if "template" in group]
        if resource["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            templates = [group["leaderTemplate"], group["workerTemplate"]]
        for template in templates:
            yield Pod(resource["kind"], template["metadata"]["labels"], template["spec"])


def of_kind(resources: list[Any], kind: str) -> Any:
    [found] = [resource for resource in resources if resource["kind"] == kind]
    return found


def value_of(container: Any, flag: str, default: Any) -> str:
    values = [word.partition("=")[2] for word in container["args"] if word.startswith(f"{flag}=")]
    return values[-1] if values else str(default)


def test_every_overlay_is_tested(kubernetes: Path) -> None:
    assert {path.name for path in (kubernetes / "overlays").iterdir()} == set(OVERLAYS)
    used = " ".join(path.read_text() for path in kubernetes.glob("*/*/kustomization.yaml"))
    unused = [path.name for path in (kubernetes / "components").iterdir() if f"/{path.name}\n" not in used]
    assert unused == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resources_are_as_their_schemas_say(
    overlay: str, rendered: Callable[[str], list[Any]], validated: list[Any], root: Path
) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    resources = rendered(overlay)
    built_in = [resource for resource in resources if resource["kind"] not in CUSTOM]
    for each in (resource for resource in resources if resource["kind"] in CUSTOM):
        schema = root / "tests" / "deploy" / "schemas" / f"{CUSTOM[each['kind']]}.yaml"
        jsonschema.Draft202012Validator(yaml.safe_load(schema.read_text())).validate(each)
    for pod in (pod for pod in pods(resources) if pod.owner in CUSTOM):
        of_pod = {"name": "pod", "labels": pod.labels}
        built_in.append({"apiVersion": "v1", "kind": "Pod", "metadata": of_pod, "spec": pod.spec})
    for each in built_in:
        if each not in validated:
            validated.append(each)
            for version in VERSIONS:
                validator.validate(each, version, strict=True)


def test_a_wrong_resource_is_found(rendered: Callable[[str], list[Any]], root: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    deployment = of_kind(rendered("single"), "Deployment")
    wrong = deployment | {"spec": deployment["spec"] | {"replcas": 2}}
    with pytest.raises(validator.ValidationError, match="replcas"):
        validator.validate(wrong, VERSIONS[0], strict=True)
    monitor = of_kind(rendered("gpu"), "ServiceMonitor")
    schema = yaml.safe_load((root / "tests" / "deploy" / "schemas" / "service_monitor.yaml").read_text())
    with pytest.raises(jsonschema.ValidationError, match="targets"):
        jsonschema.validate(monitor | {"spec": monitor["spec"] | {"targets": []}}, schema)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_command_line_is_this_versions(overlay: str, rendered: Callable[[str], list[Any]]) -> None:
    servers = [server for pod in pods(rendered(overlay)) for server in pod.servers()]
    assert servers
    for server in servers:
        _, bound, _ = app.parse_args(server["args"], exit_on_error=False, print_error=False)
        options = bound.arguments["options"]
        assert isinstance(options, ServeOptions)
        assert (bound.arguments.get("model") is None) == bool(options.repository.model_repository), server["args"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_variables_are_read_by_somebody(overlay: str, rendered: Callable[[str], list[Any]], root: Path) -> None:
    told = (root / "docs" / "flags.md").read_text().partition("## Environment\n")[2].partition("\n## ")[0]
    known = set(re.findall(r"`([A-Z][A-Z_]+)`", told))
    for container in (container for pod in pods(rendered(overlay)) for container in pod.containers()):
        in_arguments = set(re.findall(r"\$\((\w+)\)", " ".join(container.get("args", []))))
        named = {variable["name"] for variable in container.get("env", [])}
        assert in_arguments <= named
        assert [name for name in named - known - in_arguments if not name.startswith(RAYS_OWN)] == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_may_do_little(overlay: str, rendered: Callable[[str], list[Any]]) -> None:
    for pod in pods(rendered(overlay)):
        of_pod = pod.spec.get("securityContext", {})
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for container in (*pod.containers(), *pod.spec.get("initContainers", [])):
            may = of_pod | container["securityContext"]
            assert may["runAsNonRoot"]
            assert may["runAsUser"] == 10001
            assert may["seccompProfile"] == {"type": "RuntimeDefault"}
            assert may["allowPrivilegeEscalation"] is False
            assert may["readOnlyRootFilesystem"] is True
            assert may["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            assert "cpu" in container["resources"]["requests"]
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert mounts.keys() >= WRITTEN_TO
            assert all(volume["emptyDir"]["sizeLimit"] for path, volume in mounts.items() if path in WRITTEN_TO)
            assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        if pod.owner not in RUNTIMES:
            assert pod.spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_server_has_the_time_to_end(overlay: str, rendered: Callable[[str], list[Any]]) -> None:
    ending = instance._CLOSE_SECONDS + instance._INTERRUPT_SECONDS
    for pod in pods(rendered(overlay)):
        for server in pod.servers():
            running = float(value_of(server, "--exit-timeout-secs", "30"))
            if pod.owner == "ServingRuntime":  # the seconds are the InferenceService's, and stand in the docs
                continue
            before = server["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert pod.spec["terminationGracePeriodSeconds"] >= before + running + ending


def test_a_pool_has_the_servers_and_their_route_the_pool(rendered: Callable[[str], list[Any]]) -> None:
    resources = rendered("gateway")
    pool, route = of_kind(resources, "InferencePool"), of_kind(resources, "HTTPRoute")
    [pod] = [pod for pod in pods(resources) if pod.servers()]
    [server] = pod.servers()
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
    [port] = pool["spec"]["targetPorts"]
    assert port["number"] == int(value_of(server, "--http-port", 8000))
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    config = msgspec.json.decode(value_of(server, "--kv-events-config", ""), type=KVEventsConfig)
    [events] = [each for each in resources if each["metadata"]["name"] == "charonia-events"]
    opened = {port["port"] for rule in events["spec"]["ingress"] for port in rule["ports"]}
    assert opened == {int(endpoint.rpartition(":")[2]) for endpoint in (config.endpoint, config.replay_endpoint or "")}
    assert config.topic.split("@")[1:] == ["$(POD_IP)", server["args"][1]]


def test_a_group_is_one_server(rendered: Callable[[str], list[Any]]) -> None:
    """As many workers as ranks; all go by the leader's address, and the leader alone is found by the service."""
    resources = rendered("leaderworkerset")
    group = of_kind(resources, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, worker = (next(pod for pod in pods(resources) if bool(pod.servers()) == leads) for leads in (True, False))
    [server] = leader.servers()
    assert group["size"] - 1 == int(value_of(server, "--pipeline-parallel-size", 1))
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    [head] = leader.spec["initContainers"]
    assert head["restartPolicy"] == "Always", "a sidecar: there before the server, and after it"
    [port] = [word.partition("=")[2] for word in head["command"] if word.startswith("--port=")]
    [joining] = worker.containers()
    assert f"--address=$(LWS_LEADER_ADDRESS):{port}" in joining["command"]
    assert head["startupProbe"]["tcpSocket"]["port"] == int(port)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_what_there_is(overlay: str, rendered: Callable[[str], list[Any]], served: Any) -> None:
    for pod in pods(rendered(overlay)):
        for server in pod.servers():
            ports = {port["name"]: port["containerPort"] for port in server["ports"]}
            serving = int(value_of(server, "--http-port", 8000))
            assert serving in ports.values()
            probes = [probe for name, probe in server.items() if name.endswith("Probe")]
            assert {"readinessProbe", "livenessProbe"} <= server.keys()
            for asked in (probe["httpGet"] for probe in probes):
                assert ports.get(asked["port"], asked["port"]) == serving
                assert httpx.get(served.url + asked["path"]).status_code == 200


@pytest.mark.parametrize("overlay", [overlay for overlay in OVERLAYS if overlay != "kserve"])
def test_what_belongs_together_finds_each_other(overlay: str, rendered: Callable[[str], list[Any]]) -> None:
    resources = rendered(overlay)
    [pod] = [pod for pod in pods(resources) if pod.servers()]
    [server] = pod.servers()
    service, budget = (of_kind(resources, kind) for kind in ("Service", "PodDisruptionBudget"))
    policy, *_ = [resource for resource in resources if resource["kind"] == "NetworkPolicy"]
    selectors = (
        service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
        policy["spec"]["podSelector"]["matchLabels"],
    )
    others = [each.labels for each in pods(resources) if not each.servers()]
    for selector in selectors:
        assert selector.items() <= pod.labels.items()
        assert not [labels for labels in others if selector.items() <= labels.items()]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports.keys() == {"http", "grpc", "metrics"}
    assert all(port["port"] == ports[port["targetPort"]] for port in service["spec"]["ports"])
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert opened == ports.keys()
    for monitor in (resource for resource in resources if resource["kind"] == "ServiceMonitor"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} == {"metrics"}
    claimed = {v["persistentVolumeClaim"]["claimName"] for v in pod.spec["volumes"] if "persistentVolumeClaim" in v}
    assert claimed == {
        resource["metadata"]["name"] for resource in resources if resource["kind"] == "PersistentVolumeClaim"
    }


def test_the_autoscaler_goes_by_metrics_that_there_are(
    kubernetes: Path, rendered: Callable[[str], list[Any]], scraped: str
) -> None:
    autoscaler = of_kind(rendered("autoscaling"), "HorizontalPodAutoscaler")["spec"]
    asked = {metric["pods"]["metric"]["name"] for metric in autoscaler["metrics"]}
    adapter = yaml.safe_load((kubernetes / "components" / "autoscaling" / "prometheus-adapter.yaml").read_text())
    rules = {rule["seriesQuery"].partition("{")[0]: rule for rule in adapter["rules"]["custom"]}
    assert asked == rules.keys()
    assert asked <= {re.split(r"[{ ]", line)[0] for line in scraped.splitlines()}
    for rule in rules.values():
        labels = set(re.findall(r"(\w+)!=", rule["seriesQuery"]))
        assert labels == rule["resources"]["overrides"].keys() == {"namespace", "pod"}
        assert re.fullmatch(r"\w+ by \(<<\.GroupBy>>\) \(<<\.Series>>\{<<\.LabelMatchers>>\}\)", rule["metricsQuery"])
    deployment = of_kind(rendered("autoscaling"), "Deployment")
    target = autoscaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (deployment["kind"], deployment["metadata"]["name"])
    assert "replicas" not in deployment["spec"], "each apply would undo what the autoscaler did"


def test_a_ray_pod_stays_while_its_server_ends(rendered: Callable[[str], list[Any]]) -> None:
    """Ray ends the driver's ranks when it goes; what its container runs first waits for the server's port to close."""
    [pod] = [pod for pod in pods(rendered("ray")) if pod.servers()]
    assert pod.spec["shareProcessNamespace"]
    python, *waits = pod.containers()[0]["lifecycle"]["preStop"]["exec"]["command"]
    assert python == "python"
    assert "8000" in waits[-1]
    closed = [word.replace("8000", "1") for word in waits]
    assert subprocess.run([sys.executable, *closed], timeout=30).returncode == 0


def test_the_alert_rules_are_made_a_resource(root: Path) -> None:
    """By the docs' own line, up to kubectl."""
    [line] = re.findall(
        r"^(\(printf .*?\)) \| kubectl", (root / "docs" / "deploying.md").read_text(), re.DOTALL | re.MULTILINE
    )
    made = yaml.safe_load(subprocess.run(["sh", "-c", line], cwd=root, capture_output=True, check=True).stdout)
    assert made["kind"] == "PrometheusRule"
    assert made["spec"] == yaml.safe_load((root / "deploy" / "prometheus" / "rules.yml").read_text())

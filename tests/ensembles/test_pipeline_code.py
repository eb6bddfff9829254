"""The code of pipelines: read, imported with the modules beside it, and forgotten."""

import os
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from charonia.core.errors import InvalidArgument

from .pipelines import Models, answers, loaded, module_of, pipeline, write_code

GOOD = "async def run(request, lookup):\n    return {'U': words.SAYS}\n"
IMPORTS = "from . import words\n" + GOOD
HOOKS = """
import threading

words, log = None, []

{keyword} load(config):
    global words
    log.append((config.name, threading.current_thread() is threading.main_thread()))
    from . import words

{keyword} unload():
    log.append("unloaded")
    {last}

async def run(request, lookup):
    return {{"U": words.SAYS}}
"""


async def test_each_load_has_modules_of_its_own(tmp_path: Path) -> None:
    before_all, finders = set(sys.modules), list(sys.meta_path)
    one = await loaded(tmp_path, IMPORTS, words="SAYS = 'one'")
    before = set(sys.modules)
    other = await loaded(tmp_path, IMPORTS, version="2", words="SAYS = 'other'")
    write_code(tmp_path, IMPORTS, words="SAYS = 'new'")  # as long as before, within the same second
    anew = await loaded(tmp_path, IMPORTS, words="SAYS = 'new'")
    assert [await answers(each) for each in (one, other, anew)] == [[b"one"], [b"other"], [b"new"]]
    for each in (other, anew):
        await each.unload()
    assert set(sys.modules) == before
    assert await answers(one) == [b"one"]
    await one.unload()
    assert not {name for name in sys.modules if name.startswith("pipeline_glue")} - before_all
    assert finders == sys.meta_path
    assert not next(os.walk(tmp_path / "glue" / "1"))[1], "a file that appears would be a change of the model"


@pytest.mark.parametrize(("keyword", "in_loop"), [("def", False), ("async def", True)])
async def test_load_and_unload_are_called(tmp_path: Path, keyword: str, in_loop: bool) -> None:
    glue = await loaded(tmp_path, HOOKS.format(keyword=keyword, last=""), words="SAYS = 'here'")
    log = module_of(glue).log
    assert await answers(glue) == [b"here"]
    await glue.unload()
    assert log == [("glue", in_loop), "unloaded"]


async def test_a_failing_unload_is_told_and_forgets_the_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = set(sys.modules)
    glue = await loaded(tmp_path, HOOKS.format(keyword="def", last="1 / 0"), words="")
    await glue.unload()
    assert "'unload' of pipeline 'glue' has failed (glue/1/pipeline.py:13): ZeroDivisionError" in caplog.text
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("def run(:", "/glue/1/pipeline.py:1: invalid syntax"),
        ("\0", "/glue/1/pipeline.py: source code"),
        ("x = 1", "/glue/1/pipeline.py defines no 'run': write 'async def run(request, lookup)'"),
        ("\ndef run(a, b): pass", "/glue/1/pipeline.py:2: 'run' must be async: write 'async def run'"),
    ],
)
def test_what_is_no_pipeline_is_told_without_running_it(tmp_path: Path, code: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pipeline(tmp_path, code)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("async def run(request): yield", "cannot be imported: TypeError: too many positional arguments"),
        ("from asyncio import run", "cannot be imported: TypeError: 'run' must be an 'async def' of this directory"),
        ("import words\n" + GOOD, "a module beside it is imported by 'from . import words'"),
        ("import no_such\n" + GOOD, "ModuleNotFoundError: No module named 'no_such' (glue/1/pipeline.py:1)"),
        ("from . import broken\n" + GOOD, "/glue/1/broken.py:1: invalid syntax"),
        ("exit()\n" + GOOD, "SystemExit: None (glue/1/pipeline.py:1)"),
        ("def load(_): exit(3)\n" + GOOD, "'load' of pipeline 'glue' has failed (glue/1/pipeline.py:1): SystemExit"),
        ("def load(): pass\n" + GOOD, "'load' of pipeline 'glue' has failed: TypeError: load() takes 0 positional"),
    ],
)  # fmt: skip
async def test_code_that_fails_to_load_says_where(tmp_path: Path, code: str, text: str) -> None:
    before = set(sys.modules)
    with pytest.raises(InvalidArgument) as caught:
        await loaded(tmp_path, dedent(code), words="SAYS = 'x'", broken="def (")
    assert text in caught.value.message
    assert not [name for name in set(sys.modules) - before if name.startswith("pipeline_")]


async def test_models_are_declared(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="pipeline 'glue' asks itself"):
        pipeline(tmp_path, GOOD, asks="text, glue")
    with pytest.raises(InvalidArgument, match="depends on 'no' which has no loaded version: unknown model"):
        await loaded(tmp_path, GOOD, asks="text, no")
    assert (await loaded(tmp_path, GOOD, asks="text, no?, down?")).stats().ready
    assert await (await loaded(tmp_path, GOOD, asks="text, no?, down?")).unready_reason() == ""
    glue = await loaded(tmp_path, GOOD, asks="text, down")
    assert (glue.stats().ready, await glue.unready_reason()) == (False, "down is not ready")
    assert not pipeline(tmp_path, GOOD, asks="").stats().ready, "it is not loaded"
    code = "async def run(request, lookup):\n    return {'U': [str(lookup(request.text('T')).ready)]}"
    assert await answers(await loaded(tmp_path, code, Models(), asks="*")) == [b"False"]

"""Python models in an environment of their own: no package of this server is in it."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from charonia.classic_backends.python import environments
from charonia.classic_backends.python.environments import interpreter
from charonia.core.errors import InvalidArgument

from ..asking import answers
from .python_models import python_model, request, values

BODY = """
def execute(self, requests):
    import importlib.util
    found = [importlib.util.find_spec(name) is not None for name in ("numpy", "charonia", "msgspec", "torch")]
    text = pb_utils.Tensor("T", np.array([sys.prefix], dtype=object))
    return [pb_utils.InferenceResponse([text, pb_utils.Tensor("Y", np.array(found, np.int32))])]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with numpy alone."""
    directory = tmp_path_factory.mktemp("environment") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    [packages] = directory.glob("lib/python*/site-packages")
    numpy = Path(np.__file__).parent
    for name in ("numpy", "numpy.libs"):
        if (numpy.parent / name).is_dir():
            (packages / name).symlink_to(numpy.parent / name)
    return directory


async def test_a_model_runs_in_its_environment(tmp_path: Path, environment: Path) -> None:
    async with python_model(tmp_path, BODY, parameters={"EXECUTION_ENV_PATH": str(environment)}) as model:
        [response] = await answers(model, request(1))
    assert values(response) == {"T": [str(environment).encode()], "Y": [1, 0, 0, 0]}


def has_python(directory: Path) -> bool:
    return (directory / "bin" / "python").exists()


async def test_an_archive_beside_the_model_is_unpacked_once_and_removed(tmp_path: Path, environment: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.make_archive(str(tmp_path / "model" / "env"), "gztar", environment)
    parameters = {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env.tar.gz"}
    async with python_model(tmp_path, BODY, instances=2, parameters=parameters) as model:
        [response] = await answers(model, request(1))
        prefix = Path(values(response)["T"][0].decode())
        assert has_python(prefix)
        assert len(environments._unpacked) == 1
    assert values(response)["Y"] == [1, 0, 0, 0]
    assert not has_python(prefix)


@pytest.mark.parametrize(("content", "text"), [(None, "there is no"), (b"no archive", "cannot be unpacked")])
def test_what_is_no_environment_is_refused(tmp_path: Path, content: bytes | None, text: str) -> None:
    file = tmp_path / "env.tar.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidArgument, match=text) as caught, interpreter(tmp_path, {"EXECUTION_ENV_PATH": str(file)}):
        pass
    assert caught.value.field == "EXECUTION_ENV_PATH"
    with (
        pytest.raises(InvalidArgument, match="has no bin/python"),
        interpreter(tmp_path, {"EXECUTION_ENV_PATH": str(tmp_path)}),
    ):
        pass
    assert not environments._unpacked

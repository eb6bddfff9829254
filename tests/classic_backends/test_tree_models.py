"""Forests: what they answer beside the libraries that trained them, in all of Triton's forms."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from charonia.classic_backends.isolated.isolated_runtime import FIL as ISOLATABLE
from charonia.classic_backends.tree_models import FIL
from charonia.core.errors import InvalidArgument, NotFound
from charonia.core.model import ModelConfig
from charonia.core.runtime import InstancePlacement, Runtime

if find_spec("lightgbm") is None or find_spec("treelite") is None:
    pytest.skip("forests are LightGBM's, loaded by treelite", allow_module_level=True)

Describe = Callable[[Mapping[str, Any]], ModelConfig]
Forests = dict[str, tuple[Path, NDArray[Any]]]

ROWS = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
TOLD = (ROWS[:, 0] + ROWS[:, 1] > 0).astype(int) + (ROWS[:, 2] > 0.5)
ROWS[3, 1] = np.nan  # what is missing goes the trees' way, too


@pytest.fixture(scope="module")
def forests(tmp_path_factory: pytest.TempPathFactory) -> Forests:
    """Files of LightGBM by what they tell, with what LightGBM says of ROWS."""
    import lightgbm

    directory, made = tmp_path_factory.mktemp("forests"), {}
    settings = {"verbose": -1, "num_leaves": 4, "min_data_in_leaf": 1, "num_threads": 1, "seed": 1}
    for name, objective, labels in (
        ("number", {"objective": "regression"}, TOLD),
        ("two", {"objective": "binary"}, TOLD > 0),
        ("three", {"objective": "multiclass", "num_class": 3}, TOLD),
    ):
        booster = lightgbm.train(settings | objective, lightgbm.Dataset(ROWS, labels), 5)
        booster.save_model(directory / name)
        made[name] = directory / name, np.asarray(booster.predict(ROWS))
    return made


def place(version: Path, source: Path, name: str = "model.txt") -> None:
    version.mkdir(parents=True, exist_ok=True)
    (version / name).write_bytes(source.read_bytes())


def load(version: Path, described: Describe, **parameters: str) -> tuple[dict[str, Any], Runtime]:
    raw = dict(FIL.complete(version, {"name": "model", "max_batch_size": 0}, parameters))
    return raw, FIL.load(version, described({**raw, "backend": "fil"}), InstancePlacement(), parameters)


def answer(runtime: Runtime, rows: NDArray[Any] = ROWS) -> NDArray[Any]:
    [made] = runtime.execute({"input__0": rows}, ["output__0"])
    assert made["output__0"].dtype == np.float32
    return made["output__0"]


LGBM = {"model_type": "lightgbm"}


def test_numbers(version: Path, described: Describe, forests: Forests) -> None:
    file, expected = forests["number"]
    place(version, file)
    raw, runtime = load(version, described, **LGBM)
    assert raw["input"] == [{"name": "input__0", "data_type": "TYPE_FP32", "dims": [4]}]
    assert raw["output"] == [{"name": "output__0", "data_type": "TYPE_FP32", "dims": [1]}]
    np.testing.assert_allclose(answer(runtime)[:, 0], expected, rtol=1e-5)


def test_two_classes(version: Path, described: Describe, forests: Forests) -> None:
    file, expected = forests["two"]
    place(version, file)
    np.testing.assert_allclose(answer(load(version, described, **LGBM)[1])[:, 0], expected, rtol=1e-5)
    raw, runtime = load(version, described, **LGBM, predict_proba="true", output_class="true")
    assert raw["output"][0]["dims"] == [2]
    np.testing.assert_allclose(answer(runtime), np.stack([1 - expected, expected], 1), rtol=1e-5)
    for name in ("output_class", "is_classifier"):
        _, runtime = load(version, described, **LGBM, **{name: "true"}, threshold="0.7")
        assert answer(runtime)[:, 0].tolist() == (expected > 0.7).tolist()


def test_several_classes(version: Path, described: Describe, forests: Forests) -> None:
    file, expected = forests["three"]
    place(version, file)
    raw, runtime = load(version, described, **LGBM, predict_proba="true")
    assert raw["output"][0]["dims"] == [3]
    np.testing.assert_allclose(answer(runtime), expected, rtol=1e-5)
    raw, runtime = load(version, described, **LGBM, output_class="true")
    assert raw["output"][0]["dims"] == [1]
    assert answer(runtime)[:, 0].tolist() == expected.argmax(1).tolist()


def test_checkpoints_of_treelite(version: Path, described: Describe, forests: Forests) -> None:
    import treelite

    file, expected = forests["three"]
    version.mkdir(parents=True, exist_ok=True)
    treelite.frontend.load_lightgbm_model(file).serialize(version / "checkpoint.tl")
    _, runtime = load(version, described, model_type="treelite_checkpoint", predict_proba="true")
    np.testing.assert_allclose(answer(runtime), expected, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["xgboost_json", "xgboost_ubj"])
def test_xgboosts_files(version: Path, described: Describe, model_type: str) -> None:
    xgboost = pytest.importorskip("xgboost")
    settings = {"objective": "binary:logistic", "max_depth": 3, "nthread": 1}
    booster = xgboost.train(settings, xgboost.DMatrix(ROWS, TOLD > 0), 5)
    version.mkdir(parents=True, exist_ok=True)
    booster.save_model(version / ("xgboost.json" if model_type == "xgboost_json" else "xgboost.ubj"))
    _, runtime = load(version, described, model_type=model_type)
    np.testing.assert_allclose(answer(runtime)[:, 0], booster.predict(xgboost.DMatrix(ROWS)), rtol=1e-5)


def test_a_process_of_its_own_is_the_default(version: Path, described: Describe, forests: Forests) -> None:
    file, expected = forests["number"]
    place(version, file)
    raw = ISOLATABLE.complete(version, {"name": "model", "max_batch_size": 0}, LGBM)
    runtime = ISOLATABLE.load(version, described({**raw, "backend": "fil"}), InstancePlacement(), LGBM)
    try:
        assert runtime.traits.process is not None
        np.testing.assert_allclose(answer(runtime)[:, 0], expected, rtol=1e-5)
    finally:
        runtime.close()


def test_what_is_no_forest_is_refused(version: Path, described: Describe, forests: Forests) -> None:
    with pytest.raises(NotFound, match=r"unable to find .*xgboost\.model"):
        load(version, described)
    version.mkdir(parents=True, exist_ok=True)
    for name, model_type in (("xgboost.json", "xgboost_json"), ("checkpoint.tl", "treelite_checkpoint")):
        (version / name).write_bytes(b"{}")
        with pytest.raises(InvalidArgument, match=f"treelite cannot load .*{name} as {model_type}"):
            load(version, described, model_type=model_type)


def test_more_threads_than_there_can_be_are_refused_at_the_load(
    version: Path, described: Describe, forests: Forests
) -> None:
    place(version, forests["two"][0])
    with pytest.raises(InvalidArgument, match="parameter 'cpu_nthread' is too large: nthread"):
        load(version, described, **LGBM, cpu_nthread="1000")


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_type", "sklearn"), ("threshold", "x"), ("predict_proba", "maybe"), ("cpu_nthread", "-1")],
)
def test_wrong_parameters_are_refused_by_name(
    version: Path, described: Describe, forests: Forests, name: str, value: str
) -> None:
    place(version, forests["two"][0])
    with pytest.raises(InvalidArgument, match=f"parameter '{name}' must be"):
        load(version, described, **(LGBM | {name: value}))


def test_other_widths_are_refused_at_the_load(version: Path, described: Describe, forests: Forests) -> None:
    place(version, forests["two"][0])
    raw, _ = load(version, described, **LGBM)
    raw["input"] = [{"name": "input__0", "data_type": "TYPE_FP32", "dims": [5]}]
    with pytest.raises(InvalidArgument, match=r"\[-1, 5\] in the configuration, \[-1, 4\] in the model"):
        FIL.load(version, described({**raw, "backend": "fil"}), InstancePlacement(), LGBM)

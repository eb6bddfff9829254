"""`python -m charonia.classic_backends.pickled_forests PICKLE CHECKPOINT`: a pickled forest as treelite's checkpoint.

A pickle runs whatever it says: `charonia import --trust-pickle` runs this in a process of its own, servers never. The
last line that it prints is "classes" or "numbers": what the forest tells.
"""

import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from .tree_models import import_treelite


def to_treelite(model: Any) -> Any:
    """A forest of scikit-learn, XGBoost or LightGBM, also in the form of its estimator, as treelite's.

    Raises:
        TypeError: it is none.
    """
    treelite = import_treelite()
    library = type(model).__module__.partition(".")[0]
    match library:
        case "xgboost":
            return treelite.frontend.from_xgboost(model.get_booster() if hasattr(model, "get_booster") else model)
        case "lightgbm":
            return treelite.frontend.from_lightgbm(getattr(model, "booster_", model))
        case "sklearn":
            return import_module("treelite.sklearn").import_model(model)
    raise TypeError(
        f"{type(model).__module__}.{type(model).__name__} is no forest of scikit-learn, XGBoost or LightGBM"
    )


def main(source: Path, target: Path) -> str:
    """Write the checkpoint, and return what the forest tells."""
    with source.open("rb") as file:
        if source.suffix == ".joblib":
            import joblib

            model = joblib.load(file)
        else:
            model = pickle.load(file)
    to_treelite(model).serialize(str(target))
    return "classes" if hasattr(model, "predict_proba") else "numbers"


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), Path(sys.argv[2])))

"""`python savedmodels.py DIRECTORY`: makes SavedModels of TensorFlow there, in a process that tests do not share."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"


def write(directory: Path) -> None:
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    rows, strings = tf.TensorSpec([None, 2], tf.float32, name="x"), tf.TensorSpec([None, 1], tf.string, name="s")
    halves = tf.TensorSpec([None, 2], tf.bfloat16, name="h")

    class Scaler(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.weights = tf.Variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

        @tf.function(input_signature=[rows])  # type: ignore[untyped-decorator]
        def numbers(self, x: Any) -> dict[str, Any]:
            return {"y": x @ self.weights}

        @tf.function(input_signature=[strings, halves])  # type: ignore[untyped-decorator]
        def texts(self, s: Any, h: Any) -> dict[str, Any]:
            return {"joined": tf.strings.join([s, s]), "doubled": h + h}

        @tf.function(input_signature=[rows])  # type: ignore[untyped-decorator]
        def checked(self, x: Any) -> dict[str, Any]:
            tf.debugging.assert_less(x, 10.0, "too large")
            return {"y": x}

    scaler = Scaler()
    named = {"serving_default": scaler.numbers, "texts": scaler.texts, "checked": scaler.checked}
    tf.saved_model.save(scaler, str(directory / "scaler"), signatures=named)
    tf.saved_model.save(scaler, str(directory / "texts"), signatures={"texts": scaler.texts})


if __name__ == "__main__":
    write(Path(sys.argv[1]))

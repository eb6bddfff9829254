"""An encoder of BERT's kind by onnxruntime, over batches that are filled up to their longest text in the order in which
they come: text-embeddings-inference's way on a CPU."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BATCH, _BATCH_TOKENS = 32, 16384
"""Texts and tokens of a batch at most, as text-embeddings-inference has them where nothing is said."""
_OPSET = 20
_MASKED = -1e4


class PaddedEncoder:
    """The encoder in a directory of sentence-transformers, with the mean of a text's states as its vector."""

    def __init__(self, directory: Path, threads: int) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        options: Any = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads

        tokenizer: Any = Tokenizer
        self._tokenizer = tokenizer.from_file(str(directory / "tokenizer.json"))
        model = BertGraph(directory).model()
        self._session: Any = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Normalised vectors [N, size]."""
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch([*texts])]
        return np.concatenate([self._compute(batch) for batch in _batches(rows)])

    def _compute(self, rows: list[list[int]]) -> NDArray[np.float32]:
        longest = max(map(len, rows))
        ids = np.zeros((len(rows), longest), np.int64)
        mask = np.zeros((len(rows), longest), np.float32)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
            mask[place, : len(row)] = 1
        bias = ((1 - mask) * _MASKED)[:, None, None]
        positions = np.arange(longest, dtype=np.int64)[None]
        [states] = self._session.run(None, {"ids": ids, "positions": positions, "bias": bias})
        means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        vectors: NDArray[np.float32] = means / np.linalg.norm(means, axis=1, keepdims=True)
        return vectors


def _batches(rows: list[list[int]]) -> Iterator[list[list[int]]]:
    batch: list[list[int]] = []
    for row in rows:
        if len(batch) == _BATCH or sum(map(len, batch)) + len(row) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    yield batch


class BertGraph:
    """BERT in ONNX: `ids` [B, S], their `positions` [1, S], and a `bias` [B, 1, 1, S] of scores -> states [B, S,
    hidden]."""

    def __init__(self, directory: Path) -> None:
        from safetensors.numpy import load_file

        self._weights = load_file(directory / "model.safetensors")
        self._config = json.loads((directory / "config.json").read_text())
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def model(self) -> bytes:
        """The serialised graph."""
        from onnx import TensorProto, helper

        x = self._embeddings()
        for layer in range(self._config["num_hidden_layers"]):
            x = self._layer(x, f"encoder.layer.{layer}")
        inputs = [
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"]),
            helper.make_tensor_value_info("positions", TensorProto.INT64, [1, "length"]),
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, ["batch", 1, 1, "length"]),
        ]
        output = helper.make_tensor_value_info(x, TensorProto.FLOAT, ["batch", "length", self._config["hidden_size"]])
        graph = helper.make_graph(self._nodes, "bert", inputs, [output], self._constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)])
        model.ir_version = 9
        serialised: bytes = model.SerializeToString()
        return serialised

    def _op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        output = f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        from onnx import numpy_helper

        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def _weight(self, name: str, transposed: bool = False) -> str:
        weight = self._weights[name]
        return self._constant(name, weight.T if transposed else weight)

    def _norm(self, x: str, name: str) -> str:
        scale, shift = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return self._op("LayerNormalization", x, scale, shift, axis=-1, epsilon=self._config["layer_norm_eps"])

    def _linear(self, x: str, name: str) -> str:
        product = self._op("MatMul", x, self._weight(f"{name}.weight", transposed=True))
        return self._op("Add", product, self._weight(f"{name}.bias"))

    def _embeddings(self) -> str:
        names = {"ids": "word_embeddings", "positions": "position_embeddings"}
        words, places = (
            self._op("Gather", self._weight(f"embeddings.{table}.weight"), rows) for rows, table in names.items()
        )
        kind = self._constant("kind", self._weights["embeddings.token_type_embeddings.weight"][0])
        return self._norm(self._op("Add", self._op("Add", words, kind), places), "embeddings.LayerNorm")

    def _layer(self, x: str, name: str) -> str:
        hidden, heads = self._config["hidden_size"], self._config["num_attention_heads"]
        size = hidden // heads
        split = self._constant(f"{name}.split", np.array([0, 0, heads, size], np.int64))
        joined = self._constant(f"{name}.joined", np.array([0, 0, hidden], np.int64))
        scale = self._constant(f"{name}.scale", np.array(size**-0.5, np.float32))
        own = f"{name}.attention"
        queries, keys, values = (
            self._op("Reshape", self._linear(x, f"{own}.self.{part}"), split) for part in ("query", "key", "value")
        )
        queries, values = (self._op("Transpose", part, perm=[0, 2, 1, 3]) for part in (queries, values))
        keys = self._op("Transpose", keys, perm=[0, 2, 3, 1])
        scores = self._op("Add", self._op("Mul", self._op("MatMul", queries, keys), scale), "bias")
        mixed = self._op("MatMul", self._op("Softmax", scores, axis=-1), values)
        mixed = self._op("Reshape", self._op("Transpose", mixed, perm=[0, 2, 1, 3]), joined)
        x = self._norm(self._op("Add", self._linear(mixed, f"{own}.output.dense"), x), f"{own}.output.LayerNorm")
        inner = self._op("Gelu", self._linear(x, f"{name}.intermediate.dense"))
        return self._norm(self._op("Add", self._linear(inner, f"{name}.output.dense"), x), f"{name}.output.LayerNorm")

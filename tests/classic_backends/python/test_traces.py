"""The trace of a request, as its Python model hands it on: to other models, and to spans of its own."""

import json
from contextlib import aclosing
from pathlib import Path

import pytest

from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_control import ModelControl
from charonia.telemetry.otlp import OtlpTracer
from charonia.telemetry.shared_state import SharedState

from .python_models import request, values, write_model

CONFIG = """
backend: "%s" input { name: "X" data_type: TYPE_INT32 dims: -1 } output { name: "%s" data_type: TYPE_%s dims: -1 }
"""
BODY = """
def execute(self, requests):
    [r] = requests
    asked = pb_utils.InferenceRequest(model_name="echo", trace=r.trace(), requested_output_names=[],
                                      inputs=[pb_utils.Tensor("X", x(r))])
    assert not asked.exec().has_error()
    return [pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array([r.trace().get_context() or "none"]))])]
"""
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_its_spans_are_within_the_requests(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    shared, kept, tracer = SharedState(), InMemorySpanExporter(), OtlpTracer("http://127.0.0.1:9/v1/traces", "1")
    tracer._provider._active_span_processor._span_processors = (SimpleSpanProcessor(kept),)
    write_model(tmp_path, BODY)
    (tmp_path / "echo" / "1").mkdir(parents=True)
    (tmp_path / "model" / "config.pbtxt").write_text(CONFIG % ("python", "T", "STRING"))
    (tmp_path / "echo" / "config.pbtxt").write_text(CONFIG % ("identity", "Y", "INT32"))
    gateway = InProcessGateway(end_listeners=(tracer,), shared_state=shared)
    control = ModelControl(RepositoryCatalog([tmp_path]), gateway.registry, gateway.lifecycle)

    async def ask(*headers: tuple[bytes, bytes]) -> str:
        with gateway.open_request("test", headers) as context:
            async with aclosing((await gateway.acquire(context, "model")).infer(request(1))) as responses:
                [response] = [each async for each in responses]
        return str(values(response)["T"][0].decode())

    for name in ("echo", "model"):
        await control.load(name, None, {})
    assert await ask() == "none"
    shared.traces.send_spans(True)
    for headers in ((), ((b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()),)):
        kept.clear()
        told = json.loads(await ask(*headers))["traceparent"]
        spans = {span.name.split()[-1]: span for span in kept.get_finished_spans()}
        model, echo = spans["model"], spans["echo"]
        assert told == f"00-{model.context.trace_id:032x}-{model.context.span_id:016x}-01"
        assert (echo.parent.span_id, echo.context.trace_id) == (model.context.span_id, model.context.trace_id)
        if headers:
            assert (f"{model.context.trace_id:032x}", f"{model.parent.span_id:016x}") == (TRACE, PARENT)
        else:
            assert model.parent is None
    await gateway.lifecycle.close()

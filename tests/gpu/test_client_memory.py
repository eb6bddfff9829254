"""Memory of a GPU that another process lends: by the driver alone, and by a whole server.

Needs no torch. With the folder of a library made of tests/fake_cuda.c in LD_LIBRARY_PATH it runs on a CPU.
"""

import base64
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

from charonia.processes.cuda_memory import CudaError, CudaMemory, cuda_driver


def has_gpu() -> bool:
    try:
        cuda_driver()
    except CudaError:
        return False
    return True


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU that the driver finds")]

SIZE = 40 << 20
CLIENT = """
import sys
from ctypes import *
cuda = CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert not code, f"{name}: {code}"
device, context, pointer, handle = c_int(), c_void_p(), c_uint64(), (c_ubyte * 64)()
call("cuInit", 0)
call("cuDeviceGet", byref(device), 0)
call("cuDevicePrimaryCtxRetain", byref(context), device)
call("cuCtxPushCurrent_v2", context)
call("cuMemAlloc_v2", byref(pointer), c_size_t(int(sys.argv[1])))
call("cuIpcGetMemHandle", byref(handle), pointer)
print(bytes(handle).hex(), flush=True)
for line in sys.stdin:
    what, offset, given = line.split()
    at = c_uint64(pointer.value + int(offset))
    if what == "write":
        data = bytes.fromhex(given)
        call("cuMemcpyHtoD_v2", at, data, c_size_t(len(data)))
        call("cuStreamSynchronize", None)
        print("written", flush=True)
    else:
        data = create_string_buffer(int(given))
        call("cuMemcpyDtoH_v2", data, at, c_size_t(len(data)))
        print(data.raw.hex(), flush=True)
"""


class GpuClient:
    """A process with memory on the first GPU. `handle`: of that."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.handle = bytes.fromhex(self._line())

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the client ended"
        return line.strip()

    def _ask(self, *words: object) -> str:
        assert self._process.stdin
        print(*words, file=self._process.stdin, flush=True)
        return self._line()

    def write(self, offset: int, data: bytes) -> None:
        assert self._ask("write", offset, data.hex()) == "written"

    def read(self, offset: int, size: int) -> bytes:
        return bytes.fromhex(self._ask("read", offset, size))


@pytest.fixture
def client() -> Iterator[GpuClient]:
    command = [sys.executable, "-c", CLIENT, str(SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield GpuClient(process)
        assert process.stdin
        process.stdin.close()


def test_both_see_what_the_other_writes(client: GpuClient) -> None:
    memory = CudaMemory(client.handle, 0, cuda_driver())
    assert memory.size >= SIZE
    numbers = np.random.default_rng(1).bytes(3 << 20)
    for offset in (0, 12345, SIZE - len(numbers)):
        client.write(offset, numbers)
        assert bytes(memory.read(offset, len(numbers))) == numbers
        memory.write(offset, memoryview(numbers[::-1]))
        assert client.read(offset, len(numbers)) == numbers[::-1]


def test_a_handle_is_opened_as_often_as_anybody_likes(client: GpuClient) -> None:
    client.write(0, b"abcd")
    several = [CudaMemory(client.handle, 0, cuda_driver()) for _ in range(3)]
    while several:
        assert bytes(several[-1].read(0, 4)) == b"abcd"
        several.pop()
    assert bytes(CudaMemory(client.handle, 0, cuda_driver()).read(1, 2)) == b"bc"


def test_what_is_no_memory_is_refused(client: GpuClient) -> None:
    for handle, device in ((b"\1" * 64, 0), (client.handle, 1 << 20)):
        with pytest.raises(CudaError):
            CudaMemory(handle, device, cuda_driver())
    assert len(CudaMemory(client.handle, 0, cuda_driver()).read(0, 8)) == 8  # as well as before


CONFIG = """
backend: "identity"
max_batch_size: 0
input { name: "IN" data_type: TYPE_FP32 dims: -1 }
output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
"""


@pytest.mark.parametrize("frontends", ["1", "2"])
def test_a_server_reads_and_writes_a_client_s_memory(client: GpuClient, tmp_path: Path, frontends: str) -> None:
    pytest.importorskip("tritonclient")
    pytest.importorskip("httpx")
    (tmp_path / "models" / "same" / "1").mkdir(parents=True)
    (tmp_path / "models" / "same" / "config.pbtxt").write_text(CONFIG)
    spec = importlib.util.spec_from_file_location("gpu_serving", Path(__file__).parents[1] / "e2e" / "serving.py")
    assert spec
    assert spec.loader
    e2e = sys.modules["gpu_serving"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(e2e)
    flags = ["--model-repository", str(tmp_path / "models"), "--allow-client-shm=true", "--frontends", frontends]
    with e2e.served_well(tmp_path / "t", *flags, started=True) as server:

        def ask(path: str, body: Any = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            with urlopen(Request(server.url + path, data), timeout=60) as answer:
                return json.loads(answer.read() or b"null")

        raw = {"b64": base64.b64encode(client.handle).decode()}
        ask("/v2/cudasharedmemory/region/g/register", {"raw_handle": raw, "device_id": 0, "byte_size": SIZE})
        assert ask("/v2/cudasharedmemory/status") == [{"name": "g", "device_id": 0, "byte_size": SIZE}]
        numbers = np.arange(1 << 20, dtype=np.float32)
        client.write(4, numbers.tobytes())
        place = {"shared_memory_region": "g", "shared_memory_byte_size": numbers.nbytes}
        tensor = {"name": "IN", "datatype": "FP32", "shape": [len(numbers)]}
        tensor["parameters"] = {**place, "shared_memory_offset": 4}
        for number in range(8):
            offset = (number + 1) * (4 << 20) + 8
            into = {"name": "OUT", "parameters": {**place, "shared_memory_offset": offset}}
            ask("/v2/models/same/infer", {"inputs": [tensor], "outputs": [into]})
            assert client.read(offset, numbers.nbytes) == numbers.tobytes()
        ask("/v2/cudasharedmemory/unregister", {})
        assert ask("/v2/cudasharedmemory/status") == []

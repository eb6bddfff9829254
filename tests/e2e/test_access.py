"""Keys, TLS and web pages over a real server: who is let in, whose cache it is, and how long a request may take."""

import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

FLAGS = ["--executor", "fake", "--fake-vocab-size", "384", "--served-model-name", "m"]
PAGE = "https://app.example"
BODY = {"input_ids": list(range(1, 41)), "max_tokens": 2}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`server.pem` and `server.key`, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the openssl command")
    directory = tmp_path_factory.mktemp("certificate")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    files = ["-keyout", "server.key", "-out", "server.pem", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, *files], cwd=directory, check=True, capture_output=True)
    return directory


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_over_tls(serve: Any, tokenizer_only: Path, certificate: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha:k-alpha\nbeta:k-beta:2\n")
    flags = ["--http-server-cert", f"{certificate}/server.pem", "--http-server-key", f"{certificate}/server.key"]
    flags += ["--allowed-origins", PAGE, "--http-body-timeout-secs", "0.5"]
    with serve(str(tokenizer_only), *FLAGS, *flags, "--api-key-file", str(keys)) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=f"{certificate}/server.pem")
        with httpx.Client(base_url=server.url, verify=trusting, timeout=60) as client:
            _only_with_a_key(client)
            _a_page_may_ask(client)
            cached = [_cached(client, key) for key in ("k-alpha", "k-alpha", "k-beta")]
            _the_sdk_understands(server.url, client)
            _anthropics_sdk_understands(server.url, trusting)
            assert _half_a_body(server.address, trusting).startswith(b"HTTP/1.1 408 ")
            scrape = httpx.get(server.metrics_url).text
            assert server.stop() == 0
        assert "graceful shutdown exceeded" not in server.said, "an idle client that is slow to leave is no error"
        assert cached == [0, 32, 0], "a tenant's cache is his own"
        assert "k-alpha" not in server.said
        assert 'charonia_prompt_tokens_total{model="m",tenant="alpha",version="1"}' in scrape


def _anthropics_sdk_understands(url: str, trusting: ssl.SSLContext) -> None:
    import anthropic  # takes two seconds, which are not for every worker that reads this file

    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

    def count(key: str, **headers: str) -> int:
        http = anthropic.DefaultHttpxClient(verify=trusting)
        with anthropic.Anthropic(base_url=url, api_key=key, http_client=http, max_retries=0) as client:
            return client.messages.count_tokens(**asked, extra_headers=headers).input_tokens

    assert count("k-alpha") == count("k-alpha", **{"x-api-key": "k-alpha"}) > 0
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        count("k-gamma")
    with pytest.raises(anthropic.BadRequestError, match="different keys"):
        count("k-beta", **{"x-api-key": "k-alpha"})


def _half_a_body(address: tuple[str, int], trusting: ssl.SSLContext) -> bytes:
    """The answer to it."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k-beta\r\ncontent-length: 100\r\n\r\n{"
    with (
        socket.create_connection(address, 60) as plain,
        trusting.wrap_socket(plain, server_hostname="127.0.0.1") as wire,
    ):
        wire.sendall(head.encode())
        return wire.recv(1000)


def _only_with_a_key(client: httpx.Client) -> None:
    assert [client.get(path).status_code for path in ("/v2/health/ready", "/health", "/metrics")] == [200, 200, 401]
    assert "charonia_model_ready{" in client.get("/metrics", headers=bearer("k-beta")).text
    assert client.post("/v2/models/m/generate", json=BODY).status_code == 401
    assert client.post("/v2/models/m/generate", json=BODY, headers=bearer("k-beta")).status_code == 200


def _a_page_may_ask(client: httpx.Client) -> None:
    asking = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    assert client.options("/v2/models/m/infer", headers=asking).headers["access-control-allow-origin"] == PAGE
    asked = {"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [2], "data": [1, 2]}]}
    for path, body in (("infer", asked), ("generate", BODY), ("generate_stream", BODY)):  # infer answers on a short way
        answer = client.post(f"/v2/models/m/{path}", json=body, headers={"origin": PAGE, **bearer("k-beta")})
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (200, PAGE)


def _cached(client: httpx.Client, key: str) -> int:
    body = {"model": "m", "prompt": list(range(100, 140)), "max_tokens": 2}
    answer = client.post("/v1/completions", json=body, headers=bearer(key)).json()
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def _the_sdk_understands(url: str, http: httpx.Client) -> None:
    for key, right in (("k-alpha", True), ("k-gamma", False)):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=0)
        if right:
            assert [model.id for model in client.models.list()] == ["m"]
        else:
            with pytest.raises(openai.AuthenticationError, match="incorrect API key"):
                client.models.list()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--http-server-cert", "/no"], "charonia: TLS needs both --http-server-cert and --http-server-key\n"),
        (
            ["--http-server-cert", "/no", "--http-server-key", "/no"],
            "charonia: --http-server-cert and --http-server-key are not a certificate and its key: ",
        ),
        (["--api-key-file", "/no"], "charonia: cannot read --api-key-file /no: FileNotFoundError\n"),
        (["--api-key", "a:b:-1"], "charonia: --api-key 1 must have a weight that is a number above 0\n"),
    ],
)
def test_wrong_flags(refused: Any, tokenizer_only: Path, flags: list[str], says: str) -> None:
    said = refused(str(tokenizer_only), *FLAGS, *flags)
    assert said.startswith(says)
    assert said.count("\n") == 1


def test_a_timeout_is_a_finish_reason_or_triton_s_error(server: Any) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        long = {"input_ids": [1], "max_tokens": 2000, "stream": True, "return_finish_reason": True}
        with client.stream("POST", "/v2/models/slow/generate_stream", json=long | {"timeout": 3_000_000}) as running:
            lines = (line for line in running.iter_lines() if line)
            next(lines)
            refused = client.post("/v2/models/slow/generate", json=BODY | {"timeout": 100_000})
            assert (refused.status_code, refused.json()) == (503, {"error": "Request timeout expired"})
            chat = {"model": "slow", "prompt": "x", "timeout": 0.1}
            assert "Request timeout expired" in client.post("/v1/completions", json=chat).json()["error"]["message"]
            *_, last = lines
        assert '"finish_reason":"timeout"' in last


@pytest.mark.parametrize("frontends", [pytest.param("1", marks=pytest.mark.proof), "2"])
def test_a_gateways_headers_are_believed_where_a_flag_says_so(serve: Any, tokenizer_only: Path, frontends: str) -> None:
    flags = ["--trust-gateway-headers", "all", "--gateway-objectives", "batch=5", "--frontends", frontends]
    headers = {
        "x-request-id": "r-1",
        "x-gateway-inference-fairness-id": "team-a",
        "x-gateway-inference-objective": "batch",
        "x-slo-ttft-ms": "900",
        "x-slo-tpot-ms": "50",
        "x-session-id": "s-1",
    }
    with serve(str(tokenizer_only), *FLAGS, *flags) as server:
        url = f"{server.url}/v1/completions"
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2}
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "r-1")
        server.until(lambda: 'tenant="team-a"' in httpx.get(server.metrics_url).text)
        refusal = httpx.post(url, json=body, headers=headers | {"x-slo-ttft-ms": "soon"}, timeout=60)
        assert refusal.status_code == 400
        assert "x-slo-ttft-ms must be a number of milliseconds above 0" in refusal.json()["error"]["message"]
        assert refusal.json()["error"]["param"] == "x-slo-ttft-ms"
        v2 = httpx.post(f"{server.url}/v2/models/m/generate", json=BODY, headers={"x-gateway-inference-objective": "x"})
        assert (v2.status_code, v2.json()["error"]) == (
            400,
            "x-gateway-inference-objective: unknown objective 'x'; known are batch",
        )
        assert server.stop() == 0
        [line] = [line for line in server.said.splitlines() if "session=s-1" in line and "outcome=length" in line]
        assert "tenant=team-a" in line

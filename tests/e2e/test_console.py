"""The console in headless Chromium, over a real server: what its user sees, types and presses."""

import base64
import io
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from charonia import __version__

from .models import FAKE, write_config, write_model
from .serving import Server, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
)
PATIENCE = 30_000
"""Milliseconds that anything may take in a browser on a machine that is busy with something else."""
KEY = "console-secret"
ODD = "odd <i>name"
IDENTITY = """
backend: "identity"
input { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "B" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PAIR = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { step [
  { model_name: "echo" model_version: -1 input_map { key: "A" value: "IN" } output_map { key: "B" value: "between" } },
  { model_name: "echo" model_version: -1 input_map { key: "A" value: "between" } output_map { key: "B" value: "OUT" } }
] }
"""


ROUTES = """
routes:
  numbers:
    arms: [{model: echo, version: 1, weight: 3}, {model: twin, weight: 1}]
    sticky: {header: x-user}
"""


@pytest.fixture(scope="module")
def server(tokenizer_only: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`talker` counts, a hundred tokens a second; `pair` is made of `echo`; `spare` is not loaded, nor is one whose
    name would be markup."""
    models = tmp_path_factory.mktemp("models")
    write_model(models, "talker", tokenizer_only, **FAKE, fake_step_seconds=0.01)
    for name in ("echo", "twin", "spare"):
        write_config(models, name, IDENTITY)
    write_config(models, "pair", PAIR)
    write_config(models, ODD, 'backend: "<b>none</b>"')
    (models / "routes.yaml").write_text(ROUTES)
    flags = [
        "--model-repository",
        str(models),
        "--model-control-mode",
        "explicit",
        "--console",
        "--api-key",
        f"a:{KEY}",
    ]
    flags += ["--state-dir", str(tmp_path_factory.mktemp("state"))]
    for name in ("talker", "pair", "twin"):
        flags += ["--load-model", name]
    with serving(tmp_path_factory.mktemp("c") / "t", *flags) as running:
        yield running
        assert running.stop() == 0, running.said
        assert "Traceback" not in running.said


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        profile = tmp_path_factory.mktemp("profile")
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=QUIET.split()
        )
        context.set_default_timeout(PATIENCE)
        sync_api.expect.set_options(PATIENCE)
        yield context
        context.close()


@contextmanager
def console(browser: Any, server: Server) -> Iterator[Any]:
    """A page with the console, before a key is typed. Whatever a test does, it asks its own server alone, and breaks
    neither its policy nor its code."""
    page, wrong, asked = browser.new_page(), [], []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    page.on("request", lambda request: asked.append(request.url))
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(f"{server.url}/console")
    yield page
    page.close()
    assert wrong == []
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(server.url).netloc}


@pytest.fixture(scope="module")
def unlocked(browser: Any, server: Server) -> Iterator[Any]:
    """The console with a key, one for all tests: each begins where it wants."""
    with console(browser, server) as page:
        give_key(page, KEY)
        yield page


@pytest.fixture
def page(unlocked: Any) -> Any:
    """The list of models on a wide screen."""
    unlocked.set_viewport_size({"width": 1280, "height": 800})
    unlocked.evaluate("location.hash = '#models'")
    expect(row(unlocked, "talker")).to_contain_text("ready")
    return unlocked


def give_key(page: Any, key: str) -> None:
    if not page.locator("#credentials[open]").count():
        page.locator("#key").click()
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")


def set_most_tokens(page: Any, number: int) -> None:
    if not page.locator("details.settings[open]").count():
        page.locator("details.settings summary").click()
    page.get_by_label("Most tokens").fill(str(number))


def row(page: Any, model: str) -> Any:
    return page.locator("#models tbody tr").filter(has=page.get_by_role("rowheader", name=model, exact=True))


def expect(locator: Any) -> Any:
    return sync_api.expect(locator)


def test_what_is_asked_carries_the_key_that_was_typed(browser: Any, server: Server) -> None:
    with console(browser, server) as locked:
        only_with_a_key(locked)


def only_with_a_key(locked: Any) -> None:
    expect(locked.locator("#credentials-error")).to_have_text("This server asks for an API key.")
    assert "talker" not in locked.content()
    locked.keyboard.press("Escape")
    expect(locked.locator("#models .notice")).to_contain_text("This server asks for an API key.")
    give_key(locked, "another")
    expect(locked.locator("#credentials-error")).to_have_text("The server does not know this API key.")
    sent: list[tuple[str, dict[str, str]]] = []
    locked.on("request", lambda request: sent.append((urlsplit(request.url).path, request.headers)))
    locked.get_by_label("Headers, one a line").fill("host: elsewhere")
    give_key(locked, KEY)
    expect(locked.locator("#credentials-error")).to_have_text("Browsers let no page send the header “host”.")
    locked.get_by_label("Headers, one a line").fill("x-team: blue")
    give_key(locked, KEY)
    expect(row(locked, "talker")).to_contain_text("ready")
    assert {path for path, _ in sent} >= {"/v2/repository/index", "/v1/models", "/metrics", "/v2/models/talker/config"}
    assert {(headers["authorization"], headers["x-team"]) for _, headers in sent} == {(f"Bearer {KEY}", "blue")}
    kept = locked.evaluate(
        "[localStorage.length, sessionStorage.length, document.cookie, location.href.includes('secret')]"
    )
    assert kept == [0, 0, "", False]
    locked.reload()
    expect(locked.locator("#credentials-error")).to_have_text("This server asks for an API key.")


def test_loading_and_unloading_ask_first(page: Any, server: Server) -> None:
    posts: list[str] = []
    page.on("request", lambda request: posts.append(urlsplit(request.url).path) if request.method == "POST" else None)
    page.get_by_role("button", name="Load spare").click()
    expect(page.locator("#confirmation")).to_contain_text("Load spare?")
    page.keyboard.press("Escape")
    expect(page.locator("#confirmation")).to_be_hidden()
    assert not [path for path in posts if path.endswith("/load")]
    page.get_by_role("button", name="Load spare").click()
    page.locator("#confirmation .primary").click()
    expect(row(page, "spare")).to_contain_text("ready")
    expect(page.locator("#news")).to_contain_text("spare is loaded.")
    page.get_by_role("button", name="Unload spare").click()
    page.locator("#confirmation .primary").click()
    expect(row(page, "spare")).to_contain_text("unavailable")
    assert [path for path in posts if "spare" in path] == [
        f"/v2/repository/models/spare/{verb}" for verb in ("load", "unload")
    ]
    page.get_by_role("button", name="Unload echo").click()
    expect(page.locator("#confirmation")).to_contain_text("pair asks it, and will not be ready.")
    page.keyboard.press("Enter")  # on the first button, which is Cancel
    expect(row(page, "echo")).to_contain_text("ready")


def test_names_and_reasons_are_texts(page: Any) -> None:
    page.get_by_role("button", name=f"Load {ODD}").click()
    page.locator("#confirmation .primary").click()
    expect(page.locator("#news")).to_contain_text("<b>none</b>")
    expect(row(page, ODD)).to_contain_text("<b>none</b>")
    assert page.locator("#models i, #models td b, #news b").count() == 0


def test_a_chat_is_streamed_and_timed(page: Any) -> None:
    page.get_by_role("link", name="Chat", exact=True).first.click()
    message = page.get_by_label("Message")
    expect(message).to_be_focused()
    message.type("one")
    page.keyboard.press("Shift+Enter")
    message.type("two")
    assert message.input_value() == "one\ntwo"
    set_most_tokens(page, 5)
    message.press("Enter")
    times = page.locator(".turn.answer .times").last
    expect(times).to_have_text(
        re.compile(
            r"first token after [\d.]+ m?s · 5 tokens · [\d.,]+ tokens/s · [\d.]+ m?s in all · ended at the most"
        )
    )
    assert message.input_value() == ""
    assert page.locator(".turn.answer .text").last.inner_text()
    page.get_by_label("Endpoint").select_option("generate")
    set_most_tokens(page, 1000)
    message.fill("on")
    message.press("Enter")
    expect(times).to_contain_text("tokens/s")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(times).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    set_most_tokens(page, 100000)
    message.fill("too much")
    message.press("Enter")
    expect(page.locator(".turn.answer .notice")).to_contain_text("maximum context length")
    expect(message).to_have_value("too much")
    page.evaluate("location.hash = '#models'")
    expect(page.locator("#models")).to_be_visible()
    page.evaluate("location.hash = '#chat'")
    expect(page.locator(".turn.answer .notice")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    set_most_tokens(page, 1000)
    message.fill("long")
    message.press("Enter")
    expect(times).to_contain_text("tokens/s")
    page.get_by_role("button", name="New chat").click()
    set_most_tokens(page, 3)
    message.fill("short")
    message.press("Enter")
    expect(times).to_contain_text("3 tokens")
    expect(page.locator(".turn.answer")).to_have_count(1)


WRITTEN = """# Reverse

Use **slices**, `x[::-1]`, [the docs](https://docs.python.org) and never [this](javascript:alert(1)):

- one
- two
  - deeper

```python
print("<b>", x[::-1])
```

<img src=x onerror="document.title = 'broken'">
| a | b |
|---|---|
| 1 | 2 |
"""


def test_what_is_written_in_markdown_is_shown_as_such_and_markup_as_text(page: Any) -> None:
    """It comes in pieces of three letters, as from a model that writes it."""
    events = [
        "data: " + json.dumps({"choices": [{"delta": {"content": WRITTEN[at : at + 3]}}]}) + "\n\n"
        for at in range(0, len(WRITTEN), 3)
    ]
    answer = {"status": 200, "content_type": "text/event-stream", "body": "".join([*events, "data: [DONE]\n\n"])}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    page.evaluate("location.hash = '#chat/talker'")
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Endpoint").evaluate("select => select.value = 'chat'")
    page.get_by_label("Message").fill("how?")
    page.keyboard.press("Enter")
    shown = page.locator(".turn.answer .text").last
    expect(page.locator(".turn.answer .times").last).to_contain_text("in all")
    page.unroute("**/v1/chat/completions")
    expect(shown.locator("h3")).to_have_text("Reverse")
    expect(shown.locator("strong")).to_have_text("slices")
    assert shown.locator("a").evaluate_all("links => links.map(link => link.href)") == ["https://docs.python.org/"]
    assert shown.locator("li li").all_inner_texts() == ["deeper"]
    expect(shown.locator("pre code")).to_have_text('print("<b>", x[::-1])')
    fonts = shown.locator("code").evaluate_all("codes => codes.map(code => getComputedStyle(code).fontFamily)")
    assert len(fonts) == 2
    assert all("monospace" in font for font in fonts)
    assert shown.locator("td").all_inner_texts() == ["1", "2"]
    assert shown.locator("img, b").count() == 0
    expect(shown).to_contain_text("<img src=x onerror=")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.get_by_role("button", name="Copy code").click()
    expect(shown.get_by_role("button", name="Copy code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<b>", x[::-1])'
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


PASTE = """([name, type, base64]) => {
  const content = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([content], name, { type }));
  const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
  document.activeElement.dispatchEvent(event);
}"""


def paste(page: Any, name: str, kind: str, content: bytes) -> None:
    page.get_by_label("Message").focus()
    page.evaluate(PASTE, [name, kind, base64.b64encode(content).decode()])


def test_a_chat_takes_pictures_if_its_model_sees(browser: Any, server: Server) -> None:
    """By file and by paste. `talker` reads text alone; then its config says that it sees, and its answers come from
    here."""
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        text = 'data: {"choices": [{"delta": {"content": "Red."}}]}\n\ndata: [DONE]\n\n'
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    def describe(route: Any) -> None:
        config = (reply := route.fetch()).json()
        route.fulfill(
            response=reply, json={**config, "input": [*config["input"], {"name": "image_pixels", "optional": True}]}
        )

    with console(browser, server) as page:
        give_key(page, KEY)
        page.evaluate("location.hash = '#chat/talker'")
        expect(page.get_by_label("Message")).to_be_enabled()
        expect(page.get_by_role("button", name="Add picture")).to_be_disabled()
        paste(page, "a.png", "image/png", png(8, 8))
        expect(page.locator(".attach .notice")).to_have_text("talker reads text alone.")
        expect(page.locator(".attach canvas")).to_have_count(0)

    with console(browser, server) as page:
        page.route("**/v2/models/talker/config", describe)
        page.route("**/v1/chat/completions", answer)
        give_key(page, KEY)
        page.evaluate("location.hash = '#chat/talker'")
        expect(page.get_by_role("button", name="Add picture")).to_be_enabled()
        paste(page, "a.txt", "text/plain", b"text")
        expect(page.locator(".attach .notice")).to_contain_text("a.txt is no PNG, JPEG")
        wide = {"name": "wide.png", "mimeType": "image/png", "buffer": png(400, 100)}
        page.locator("input[type=file]").set_input_files([wide])
        expect(page.get_by_role("img", name="wide.png")).to_have_js_property("width", 112)
        expect(page.get_by_role("img", name="wide.png")).to_have_js_property("height", 28)
        expect(page.locator(".attach .notice")).to_be_hidden()
        paste(page, "small.png", "image/png", png(10, 20))
        expect(page.get_by_role("img", name="small.png")).to_have_js_property("width", 10)
        page.get_by_role("button", name="Remove wide.png").click()
        page.get_by_label("Message").fill("Which colour?")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".turn.answer .text").last).to_have_text("Red.")
        expect(page.locator(".turn.user").get_by_role("img", name="small.png")).to_be_visible()
        expect(page.locator(".attach canvas")).to_have_count(0)
        page.get_by_label("Message").fill("And now?")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".turn.answer > .text")).to_have_text(["Red.", "Red."])

    url = f"data:image/png;base64,{base64.b64encode(png(10, 20)).decode()}"
    seen = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which colour?"}]
    asked = {"role": "user", "content": seen}
    assert bodies[0]["messages"] == [asked]
    said = {"role": "assistant", "content": "Red."}
    assert bodies[1]["messages"] == [asked, said, {"role": "user", "content": "And now?"}]


def test_the_page_says_whose_server_it_is(page: Any) -> None:
    expect(page.locator("#server .name")).to_have_text(f"Charonia {__version__}")


def test_what_a_server_refuses_is_not_offered(browser: Any, server: Server) -> None:
    """A server that was started without control says so with its list of models."""
    with console(browser, server) as locked:
        locked.route(
            "**/v2/repository/index",
            lambda route: route.fulfill(
                response=(answer := route.fetch()), headers=answer.headers | {"x-charonia-model-control": "none"}
            ),
        )
        give_key(locked, KEY)
        expect(row(locked, "talker").get_by_role("button", name="Config talker")).to_be_visible()
        expect(locked.locator("#models .notice")).to_contain_text("loads and unloads nothing on request")
        assert locked.get_by_role("button", name=re.compile("load", re.IGNORECASE)).count() == 0


def test_what_limits_a_model_is_explained_on_demand(page: Any, server: Server) -> None:
    page.get_by_role("button", name="Explain talker").click()
    limits = page.locator("#document .limits")
    expect(limits.locator("li").first).to_be_visible()
    expect(limits).to_contain_text(re.compile(r"Version 1, in the last [\d.]+ s"))
    assert "nothing limits it" in limits.inner_text() or "Turn: " in limits.inner_text()
    with page.expect_request(f"{server.url}/v2/models/talker/explain"):
        page.get_by_role("button", name="Look again").click()
    page.keyboard.press("Escape")
    expect(limits).to_be_hidden()


def test_charts_follow_the_metrics(page: Any) -> None:
    page.evaluate("location.hash = '#chat/talker'")
    set_most_tokens(page, 20)
    page.get_by_label("Message").fill("x")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.answer .times").last).to_contain_text("in all")
    page.get_by_role("link", name="Metrics").click()
    charts = page.locator("#metrics figure")
    assert charts.count() == 8
    for title, value in (
        ("Time to first token", r"median \d"),
        ("Inter-token latency", r"median \d"),
        ("Tokens per second", r"generated [1-9]"),
        ("Batch size", r"a step 1"),
        ("KV cache", r"in use \d"),
    ):
        chart = charts.filter(has_text=title)
        expect(chart.locator(".legend")).to_have_text(re.compile(value))
        expect(chart.get_by_role("img")).to_have_attribute("aria-label", re.compile(f"{title}.*{value}"))
    picture = charts.filter(has_text="Tokens per second").get_by_role("img")
    picture.focus()
    page.keyboard.press("ArrowLeft")
    expect(picture).to_have_attribute("aria-label", re.compile(r"\d+ s ago"))
    page.locator("#metrics select").select_option("pair")
    assert "Time to first token" not in charts.all_inner_texts()
    expect(charts.filter(has_text="Requests per second")).to_be_visible()


def test_the_graph_is_the_server_s(page: Any) -> None:
    row(page, "pair").get_by_role("link", name="Graph").click()
    picture = page.get_by_role("img", name=re.compile("^pair: "))
    expect(picture.locator("text", has_text="echo · version 1")).to_have_count(2)
    expect(picture.locator("text", has_text="between: FP32 [4]")).to_be_visible()
    assert picture.locator("path.edge[marker-end]").count() == 3
    fill = "getComputedStyle(document.querySelector('#graph .node')).fill"
    light = page.evaluate(fill)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(fill) != light


def test_the_weights_of_a_route_are_changed(page: Any) -> None:
    page.locator("nav a[href='#routes']").click()
    arms = page.locator("#routes .arms tbody tr")
    expect(arms.filter(has_text="echo:1")).to_contain_text("75 %")
    expect(page.locator("#routes")).to_contain_text("Requests of one header x-user stay with one arm.")
    page.get_by_role("button", name="Change weights: numbers").click()
    page.locator("#confirmation").get_by_label("twin, the latest").fill("9")
    expect(page.locator("#confirmation")).to_contain_text("25 %")
    page.keyboard.press("Enter")
    expect(arms.filter(has_text="echo:1")).to_contain_text("25 %")


def test_a_rollout_is_started_and_aborted(page: Any) -> None:
    page.locator("nav a[href='#routes']").click()
    page.get_by_role("button", name="Start a rollout: numbers").click()
    page.locator("#confirmation select").select_option("echo:1")
    page.locator("#confirmation").get_by_label("Steps, % of the requests").fill("50, 100")
    page.locator("#confirmation .primary").click()
    expect(page.locator(".rollout")).to_contain_text("rollout to echo:1: running")
    expect(page.locator(".steps [aria-current]")).to_have_text("50 %")
    page.locator(".rollout summary").click()
    page.get_by_role("button", name="Abort the rollout: numbers").click()
    page.locator("#confirmation .primary").click()
    expect(page.locator(".rollout")).to_contain_text("rollout to echo:1: aborted")
    expect(page.locator(".rollout .events")).to_be_visible()


def test_an_arm_that_a_route_no_longer_has_keeps_its_count(page: Any, server: Server) -> None:
    body = {"inputs": [{"name": "A", "shape": [4], "datatype": "FP32", "data": [0, 0, 0, 0]}]}
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        users = [{"x-user": str(number)} for number in range(16)]
        answers = [client.post("/v2/models/numbers/infer", json=body, headers=user) for user in users]
        assert {answer.headers["x-charonia-arm"] for answer in answers} == {"echo:1", "twin:1"}
        assert client.put("/v2/routes/numbers", json={"arms": [{"model": "twin", "weight": 1}]}).status_code == 200
    page.locator("nav a[href='#routes']").click()
    arms = page.locator("#routes .arms tbody tr")
    expect(arms.filter(has_text="echo:1, formerly")).to_contain_text(re.compile(r"\d+ \(\d+ %\)"))


def test_a_small_screen_has_all_of_it(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    for section in ("models", "chat", "metrics", "graph", "routes"):
        page.get_by_role("link", name=section.capitalize(), exact=True).first.click()
        expect(page.locator(f"#{section}")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, section
        if section == "graph":
            picture = page.get_by_role("img", name=re.compile("^pair: "))
            assert picture.bounding_box()["width"] < float(picture.get_attribute("width"))
        if section == "models":
            buttons = page.locator("#models .actions > *").evaluate_all("all => all.map(each => each.offsetHeight)")
            assert min(buttons) >= 40, "too small for a finger"
    page.locator("#key").click()
    box = page.locator("#credentials").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    page.keyboard.press("Escape")
    expect(page.locator("#credentials")).to_be_hidden()


def test_the_keyboard_reaches_everything(page: Any) -> None:
    page.locator("#skip").focus()
    reached: list[str] = []
    while not page.evaluate("document.activeElement === document.body"):
        reached.append(page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent.trim()"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", reached
        page.keyboard.press("Tab")
    wanted = ["Models", "Chat", "Metrics", "Graph", "Key in use", "Config talker", "Unload talker", "Reload talker"]
    assert [each for each in dict.fromkeys(reached) if each in wanted] == wanted

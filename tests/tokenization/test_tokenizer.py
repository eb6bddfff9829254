import json
import subprocess
import sys
import threading
from copy import copy
from pathlib import Path

import msgspec
import pytest
import tokenizers
import transformers
from tokenizers import processors

from charonia.core.errors import ContextLengthExceeded, InvalidArgument, NotFound
from charonia.core.request import ChatMessage, Conversation, Tool
from charonia.core.sampling import TokenLimit
from charonia.tokenization.checkpoint_files import locate_checkpoint
from charonia.tokenization.detokenizer import make_detokenizer
from charonia.tokenization.tokenizer import Tokenizer

TEXTS = [
    "the lazy dog",
    " leading and trailing ",
    "",
    "été 🦊 日本語 👩‍👩‍👧",
    "a</s>b<|user|>",
    "\n\n\t x",
    "the 🦊</s>  dog" * 99,
]


def reference(directory: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(directory)


def configure(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers_does(checkpoint: Path, text: str) -> None:
    ours, theirs = Tokenizer.load(checkpoint), reference(checkpoint)
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_eos_token": True}, {"add_bos_token": True}])
def test_adds_special_tokens_as_the_configuration_says(checkpoint: Path, flags: dict[str, bool]) -> None:
    configure(checkpoint, **flags)
    assert Tokenizer.load(checkpoint).encode("the dog") == reference(checkpoint)("the dog")["input_ids"]


def test_learns_special_tokens_that_tokenizer_json_does_not_know(checkpoint: Path) -> None:
    configure(checkpoint, pad_token="<pad>", extra_special_tokens=["<tool>"])
    text = "the<pad>quick<tool>dog"
    ids = Tokenizer.load(checkpoint).encode(text)
    assert ids == reference(checkpoint)(text)["input_ids"]
    assert Tokenizer.load(checkpoint).decode(ids) == "thequickdog"


FLAGS = {"lstrip": True, "rstrip": True, "single_word": False, "normalized": False, "special": True}
WIDE = {"content": "<wide>", **FLAGS}
STRIPPED = "the <wide> dog<|end|> \n<|user|>\n the<|end|>x <|end|> y<pad> z <pad>"


@pytest.mark.parametrize(
    "changes",
    [
        {"pad_token": "<|end|>"},
        {"pad_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": False, "normalized": True}},
        {"pad_token": {"__type": "AddedToken", "content": "<wide>", **FLAGS}},
        {"pad_token": "<wide>", "added_tokens_decoder": {"400": WIDE}},
        {"pad_token": "<|end|>", "added_tokens_decoder": {"4": {"content": "<|end|>", **FLAGS, "lstrip": False}}},
        {"added_tokens_decoder": {"2": {"content": "<|user|>", **FLAGS, "single_word": True, "special": False}}},
        {"extra_special_tokens": ["<|end|>", "<pad>"], "pad_token": "<pad>"},
    ],
)
def test_a_special_token_keeps_what_it_strips(checkpoint: Path, changes: dict[str, object]) -> None:
    path = checkpoint / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][4] |= FLAGS
    path.write_text(json.dumps(content))
    configure(checkpoint, **changes)
    ours, theirs = Tokenizer.load(checkpoint), reference(checkpoint)
    ids = ours.encode(STRIPPED)
    assert ids == theirs(STRIPPED)["input_ids"]
    assert ours.decode(ids, special=True) == theirs.decode(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_special_token_keeps_what_it_strips_without_tokenizer_config(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").unlink()
    wide = {"content": "<wide>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False}
    (checkpoint / "special_tokens_map.json").write_text(json.dumps({"pad_token": wide}))
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert Tokenizer.load(checkpoint).encode(STRIPPED) == reference(checkpoint)(STRIPPED)["input_ids"]


def test_never_truncates(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert len(Tokenizer.load(checkpoint).encode("the quick brown fox jumps over the lazy dog")) > 4


def test_others_run_while_a_long_text_is_read(checkpoint: Path) -> None:
    tokenizer, begun, turns = Tokenizer.load(checkpoint), threading.Event(), 0
    done: list[int] = []

    def read() -> None:
        begun.set()
        done.append(len(tokenizer.encode("the quick brown fox " * 10_000)))

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait()
    while not done:
        turns += 1
    reader.join()
    assert turns > 1000  # a turn takes a tenth of a microsecond, and the text at least 50 ms


def test_what_is_far_too_long_is_known_by_its_beginning(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    with pytest.raises(
        ContextLengthExceeded, match="length is 8 tokens: the first 128 characters of prompt are 31 tokens"
    ) as error:
        tokenizer.prompt_ids("the lazy dog " * 10**6, limit=TokenLimit(8))
    assert error.value.field == "prompt"
    with pytest.raises(ContextLengthExceeded) as error:
        tokenizer.prompt_ids(Conversation((ChatMessage("user", "the lazy dog " * 10**6),)), limit=TokenLimit(8))
    assert error.value.field == "messages"


def test_the_last_tokens_are_those_of_the_whole_text(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    for text in ("fox", "the lazy dog " * 300, "<|assistant|>" * 300, " " * 5000, "🦊" * 400):
        for kept in (1, 7, 40):
            last = tokenizer.prompt_ids(text, special=False, limit=TokenLimit(8), kept=kept)
            assert last == tokenizer.encode(text, special=False)[-kept:]
    assert tokenizer.prompt_ids((1, 2, 3), kept=2) == [2, 3]
    chat = Conversation((ChatMessage("user", "the lazy dog " * 300),))
    assert tokenizer.prompt_ids(chat, kept=9) == tokenizer.prompt_ids(chat)[-9:]


@pytest.mark.parametrize("form", ["<s> $A", "$A </s>", "<s> <|user|> $A </s>", "$A"])
def test_what_stands_around_a_prompt_is_not_cut(checkpoint: Path, form: str) -> None:
    ids = {"<s>": 0, "</s>": 1, "<|user|>": 2}
    backend = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    special = [token for token in form.split() if token != "$A"]
    given = [(token, ids[token]) for token in special]
    backend.post_processor = processors.TemplateProcessing(single=form, special_tokens=given)
    backend.save(str(checkpoint / "tokenizer.json"))
    ours, theirs = Tokenizer.load(checkpoint), reference(checkpoint)
    theirs.truncation_side = "left"
    for text in ("a fox", "the lazy dog " * 300, "🦊" * 400, ""):
        for kept in (len(special) + 1, 7, 40):
            expected = theirs(text, truncation=True, max_length=kept)["input_ids"]
            assert ours.prompt_ids(text, limit=TokenLimit(8), kept=kept) == expected
    if special:
        assert ours.prompt_ids("a fox", kept=1) == [ids[special[0]]]


def test_a_text_of_long_tokens_is_read_to_its_end(checkpoint: Path) -> None:
    tokenizer, text = Tokenizer.load(checkpoint), "<|assistant|>" * 30
    assert len(text) > 16 * 20
    ids = tokenizer.prompt_ids(text, limit=TokenLimit(20))  # too many, but for others to judge
    assert ids == tokenizer.encode(text)
    assert len(ids) == 31


CHATS = [
    [("user", "hello <b>&</b> 🦊")],
    [("system", "be brief"), ("user", " spaced "), ("assistant", "ok"), ("user", "été")],
]


@pytest.mark.parametrize("turns", CHATS)
def test_renders_a_conversation_as_transformers_does(checkpoint: Path, turns: list[tuple[str, str]]) -> None:
    prompt = Conversation(tuple(ChatMessage(role, content) for role, content in turns))
    messages = [{"role": role, "content": content} for role, content in turns]
    theirs = reference(checkpoint).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.load(checkpoint).prompt_ids(prompt) == theirs


@pytest.mark.parametrize("last", ["so far", "so far ", " so  ", "user", "<", "s", ">\n"])
@pytest.mark.parametrize("turns", CHATS)
def test_continues_a_message_as_transformers_does(checkpoint: Path, turns: list[tuple[str, str]], last: str) -> None:
    turns = [*turns, ("assistant", last)]
    messages = [{"role": role, "content": content} for role, content in turns]
    theirs = reference(checkpoint).apply_chat_template(messages, continue_final_message=True, return_dict=False)
    said = tuple(ChatMessage(role, content) for role, content in turns)
    prompt = Conversation(said, add_generation_prompt=False, continue_final_message=True)
    assert Tokenizer.load(checkpoint).prompt_ids(prompt) == theirs


def test_another_template(checkpoint: Path) -> None:
    mine = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (checkpoint / "mine.jinja").write_text(mine)
    asked = Conversation((ChatMessage("user", "fox"),))
    given = Conversation(asked.messages, chat_template="{{ bos_token }}" + mine)
    tokenizer = Tokenizer.load(checkpoint)
    for template in (mine, str(checkpoint / "mine.jinja")):
        other = Tokenizer.load(checkpoint, template)
        assert other.prompt_ids(asked) == other.encode("[fox]", special=False)
        assert other.prompt_ids(given) == tokenizer.prompt_ids(given) == other.encode("[fox]")
    assert tokenizer.prompt_ids(asked) == Tokenizer.load(checkpoint).prompt_ids(asked)
    with pytest.raises(InvalidArgument, match="'nowhere' is neither a template nor a file") as refusal:
        Tokenizer.load(checkpoint, "nowhere")
    assert refusal.value.field == "chat_template"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "the request's chat template does not compile"),
        ("{{ " + "(" * 5000 + " }}", "the request's chat template does not compile"),
        ("x" * 200_000, "the request's chat template does not compile: it has 200000 characters"),
        ("{{ a }}" * 9000, "the request's chat template does not compile: it is too long: in Python it has"),
        ("{{ 1 / 0 }}", "messages do not fit the request's chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "messages do not fit the request's chat template"),
    ],
)
def test_a_request_s_template_is_the_request_s_fault(checkpoint: Path, template: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as refusal:
        Tokenizer.load(checkpoint).prompt_ids(Conversation((ChatMessage("user", "x"),), chat_template=template))
    assert refusal.value.field == ("messages" if "fit" in says else "chat_template")


def test_a_message_that_a_template_changes_cannot_be_continued(checkpoint: Path) -> None:
    template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    chat = Conversation((ChatMessage("assistant", "so far"),), {}, template, False, True)
    with pytest.raises(InvalidArgument, match="continue_final_message: the request's chat template does not write"):
        Tokenizer.load(checkpoint).prompt_ids(chat)


def test_other_prompts(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.prompt_ids((5, 6, 7)) == [5, 6, 7]
    assert tokenizer.prompt_ids("the dog") == tokenizer.encode("the dog")


def test_a_model_without_template_refuses_a_conversation(checkpoint: Path) -> None:
    configure(checkpoint, chat_template=None)
    with pytest.raises(InvalidArgument, match="no chat template") as refusal:
        Tokenizer.load(checkpoint).prompt_ids(Conversation((ChatMessage("user", "hello"),)))
    assert refusal.value.field == "messages"


def test_what_cannot_be_a_token_has_no_text(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.decode([10**6]) == ""
    for token in (-1, 2**70):
        with pytest.raises(InvalidArgument, match="token ids"):
            tokenizer.decode([token])


def test_text_that_is_not_unicode_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InvalidArgument, match="Unicode"):
        Tokenizer.load(checkpoint).encode("\ud800")


def test_a_directory_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_broken_files_are_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"tokenizer_config\.json"):
        Tokenizer.load(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        Tokenizer.load(checkpoint)


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no/such-model-anywhere"):
        locate_checkpoint("no/such-model-anywhere")
    assert locate_checkpoint(str(tmp_path)) == tmp_path


def test_leaves_torch_alone() -> None:
    check = (
        "import charonia.tokenization.tokenizer, charonia.tokenization.generation_defaults, sys; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers"} & set(loaded)


def test_conversations_with_tools_have_a_template_of_their_own_if_the_checkpoint_does(checkpoint: Path) -> None:
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    configure(checkpoint, chat_template=several)
    tokenizer, plain = Tokenizer.load(checkpoint), Conversation((ChatMessage("user", "x"),))
    tools = msgspec.structs.replace(plain, tools=(Tool("now"),))
    assert [tokenizer.template_source(prompt) for prompt in (plain, tools, "x")] == ["plain", "tools", ""]
    assert tokenizer.decode(tokenizer.prompt_ids(tools)) == "tools"


def test_special_tokens_that_are_to_be_shown_are_in_any_text_and_others_in_none(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    shown = tokenizer.showing(("<|user|>", "nowhere"))
    ids = tokenizer.encode("<|user|>a<|end|>", special=False)
    for detokenizing in (shown, without_bytes(shown)):
        assert make_detokenizer(detokenizing).push(ids) == shown.decode(ids) == "<|user|>a"
    assert make_detokenizer(shown, special=True).push(ids) == shown.decode(ids, special=True) == "<|user|>a<|end|>"
    assert tokenizer.showing(("nowhere",)) is tokenizer


def without_bytes(tokenizer: Tokenizer) -> Tokenizer:
    other = copy(tokenizer)
    other.bytes = None
    return other

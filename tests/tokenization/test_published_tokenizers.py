"""Tokenizers in other files than tokenizer.json, as their authors publish them, and the conversations that Mistral's
means."""

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from charonia.core.errors import InvalidArgument, NotFound
from charonia.core.media import MediaSource
from charonia.core.request import ChatMessage, Conversation, Tool, ToolCall
from charonia.tokenization.answers.answer_formats import MISTRAL, MISTRAL_LISTS, AnswerParsers, choose_format
from charonia.tokenization.generation_defaults import read_generation_defaults
from charonia.tokenization.media_text import MediaText
from charonia.tokenization.tokenizer import Tokenizer
from tests.published_models import SPECIAL_TOKENS, TEKKEN_PATTERN, write_qwen_words, write_tekken

TEXTS = (
    "The quick brown fox jumps over the lazy dog.\n\n  Grüße aus München, 東京 🚣‍♀️ e\u0301",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) // 10",
    " a  b\t\tc \r\n ",
    "",
)
TOOLS = (Tool("look", "It looks.", '{"type": "object", "properties": {"at": {"type": "string"}}}'),)
DECLARED = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "look", "description": "It looks.", "parameters": '
    '{"type": "object", "properties": {"at": {"type": "string"}}}}}][/AVAILABLE_TOOLS]'
)
FIRST, SECOND = ToolCall("callone01", "look", '{"at": "Köln", "n": 1}'), ToolCall("calltwo02", "look", "{}")


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def result(call: ToolCall, text: str) -> ChatMessage:
    return ChatMessage("tool", text, tool_call_id=call.id)


WORDS = (
    ChatMessage("system", "Be brief."),
    user("Hi"),
    ChatMessage("assistant", "Yes. "),
    user("More"),
    user("and more"),
)
CALLS = (
    user("Look."),
    ChatMessage("assistant", "", tool_calls=(FIRST, SECOND)),
    result(SECOND, '{"seen": 1}'),
    result(FIRST, "a river"),
    ChatMessage("assistant", "A river."),
    user("And?"),
)
LISTED = (
    '[TOOL_CALLS][{"name": "look", "arguments": {"at": "Köln", "n": 1}, "id": "callone01"}, '
    '{"name": "look", "arguments": {}, "id": "calltwo02"}]</s>'
)
EXPECTED = {
    "v3": (
        "<s>[INST]Hi[/INST]Yes.</s>[INST]Be brief.\n\nMore\n\nand more[/INST]",
        f'<s>[INST]Look.[/INST]{LISTED}[TOOL_RESULTS]{{"content": {{"seen": 1}}, "call_id": "calltwo02"}}'
        '[/TOOL_RESULTS][TOOL_RESULTS]{"content": "a river", "call_id": "callone01"}[/TOOL_RESULTS]A river.</s>'
        f"{DECLARED}[INST]And?[/INST]",
    ),
    "v7": (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Yes.</s>[INST]More\n\nand more[/INST]",
        f'<s>[INST]Look.[/INST]{LISTED}[TOOL_RESULTS]calltwo02[TOOL_CONTENT]{{"seen": 1}}[/TOOL_RESULTS]'
        f"[TOOL_RESULTS]callone01[TOOL_CONTENT]a river[/TOOL_RESULTS]A river.</s>{DECLARED}[INST]And?[/INST]",
    ),
    "v11": (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Yes.</s>[INST]More\n\nand more[/INST]",
        '<s>[INST]Look.[/INST][TOOL_CALLS]look[CALL_ID]callone01[ARGS]{"at": "Köln", "n": 1}'
        "[TOOL_CALLS]look[CALL_ID]calltwo02[ARGS]{}</s>[TOOL_RESULTS]callone01[TOOL_CONTENT]a river[/TOOL_RESULTS]"
        f'[TOOL_RESULTS]calltwo02[TOOL_CONTENT]{{"seen": 1}}[/TOOL_RESULTS]A river.</s>{DECLARED}[INST]And?[/INST]',
    ),
    "v13": (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Yes.</s>[INST]More\n\nand more[/INST]",
        f'<s>{DECLARED}[INST]Look.[/INST][TOOL_CALLS]look[ARGS]{{"at": "Köln", "n": 1}}[TOOL_CALLS]look[ARGS]{{}}</s>'
        '[TOOL_RESULTS]a river[/TOOL_RESULTS][TOOL_RESULTS]{"seen": 1}[/TOOL_RESULTS]A river.</s>[INST]And?[/INST]',
    ),
}
"""What mistral-common 1.13.1 writes of `WORDS`, and of `CALLS` with `TOOLS`, by the version of the file."""


def merged_by_rank(text: str, directory: Path) -> list[int]:
    """The ids that the file means: in each word of the pattern, the two neighbours that make the token of the lowest
    rank are one, until no two do."""
    file = json.loads((directory / "tekken.json").read_text())
    size = file["config"]["default_vocab_size"] - (special := file["config"]["default_num_special_tokens"])
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in file["vocab"][:size]}
    ids: list[int] = []
    for word, _ in pre_tokenizers.Split(Regex(TEKKEN_PATTERN), "isolated").pre_tokenize_str(text):
        parts = [bytes((byte,)) for byte in word.encode()]
        while pairs := [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [special + ranks[part] for part in parts]
    return ids


def test_a_tekken_file_merges_by_rank(tmp_path: Path) -> None:
    size = write_tekken(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.size, tokenizer.bounded) == (size, True)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [1, *merged_by_rank(text, tmp_path)]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0])
    assert tokenizer.encode("[INST]<s>[TRANSCRIBE]<SPECIAL_31>", special=False) == [3, 1, 26, 31]
    assert tokenizer.bytes is not None
    assert b"".join(tokenizer.bytes[token] for token in tokenizer.encode(TEXTS[0])) == TEXTS[0].encode()
    assert read_generation_defaults(tmp_path, tokenizer).eos == (2,)


@pytest.mark.parametrize("version", EXPECTED)
def test_conversations_are_those_of_mistral(tmp_path: Path, version: str) -> None:
    named = None if version in ("v3", "v7") else SPECIAL_TOKENS
    write_tekken(tmp_path, version, named)
    tokenizer = Tokenizer.load(tmp_path)
    chats = Conversation(WORDS), Conversation(CALLS, tools=TOOLS)
    for chat, expected in zip(chats, EXPECTED[version], strict=True):
        ids = tokenizer.prompt_ids(chat)
        assert tokenizer.decode(ids, special=True) == expected
        assert ids[0] == 1
        assert 3 in ids
    format_ = choose_format(tokenizer.own_template, AnswerParsers())
    assert format_.tools is (MISTRAL_LISTS if version in ("v3", "v7") else MISTRAL)
    assert (format_.reasoning is not None) == (version == "v13")


@pytest.mark.parametrize("version", EXPECTED)
def test_texts_of_one_message_are_apart_as_messages_are(tmp_path: Path, version: str) -> None:
    write_tekken(tmp_path, version, None if version in ("v3", "v7") else SPECIAL_TOKENS)
    tokenizer = Tokenizer.load(tmp_path)
    chat = Conversation((ChatMessage("user", "More\nand more", breaks=(4,)),))
    assert tokenizer.decode(tokenizer.prompt_ids(chat), special=True) == "<s>[INST]More\n\nand more[/INST]"


@pytest.mark.parametrize("version", EXPECTED)
def test_results_of_calls_with_one_id_stand_once(tmp_path: Path, version: str) -> None:
    """Ids that differ in their letters' case alone are two."""
    write_tekken(tmp_path, version)
    tokenizer = Tokenizer.load(tmp_path)
    calls = FIRST, ToolCall(FIRST.id, "look", "{}"), ToolCall(FIRST.id.upper(), "look", "{}")
    results = [result(call, f"seen{number}") for number, call in enumerate(calls)]
    chat = Conversation((user("Look."), ChatMessage("assistant", "", tool_calls=calls), *results))
    text = tokenizer.decode(tokenizer.prompt_ids(chat), special=True)
    assert [text.count(f"seen{number}") for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("version", ["v3", "v13"])
def test_tools_are_not_left_out_where_the_user_says_nothing(tmp_path: Path, version: str) -> None:
    write_tekken(tmp_path, version)
    tokenizer = Tokenizer.load(tmp_path)
    chat = Conversation((ChatMessage("system", "Be brief."), ChatMessage("assistant", "Hi.")), tools=TOOLS)
    with pytest.raises(InvalidArgument, match="user"):
        tokenizer.prompt_ids(chat)


def test_thoughts_sounds_and_images_have_their_places(tmp_path: Path) -> None:
    write_tekken(tmp_path / "v13", "v13")
    write_tekken(tmp_path / "v11", "v11")
    thinking, hearing = Tokenizer.load(tmp_path / "v13"), Tokenizer.load(tmp_path / "v11")
    thought = ChatMessage("assistant", "Yes.", reasoning="Well.")
    assert thinking.decode(thinking.prompt_ids(Conversation((user("Hi"), thought, user("?")))), special=True) == (
        "<s>[INST]Hi[/INST][THINK]Well.[/THINK]Yes.</s>[INST]?[/INST]"
    )
    sound = MediaSource("audio", data=b"x", offset=4, field="a")
    image = MediaSource("image", data=b"x", offset=5, field="b")
    media = MediaText({"audio": "[AUDIO]", "image": "[IMG]"}, (("audio", "[AUDIO][AUDIO]"), ("image", "[IMG]")))
    chat = Conversation(
        (ChatMessage("user", "Hear?", media=(sound,)), user("so"), ChatMessage("user", "Look:", media=(image,)))
    )
    assert hearing.decode(hearing.prompt_ids(chat, media=media), special=True) == (
        "<s>[INST]Hear[BEGIN_AUDIO][AUDIO][AUDIO]?\n\nso[IMG]Look:[/INST]"
    )
    begun = Conversation(
        (user("Hi"), ChatMessage("assistant", "So")), add_generation_prompt=False, continue_final_message=True
    )
    assert hearing.decode(hearing.prompt_ids(begun), special=True) == "<s>[INST]Hi[/INST]So"
    beside_system = Conversation((ChatMessage("system", "s"), ChatMessage("user", "Hear?", media=(sound,))))
    with pytest.raises(InvalidArgument, match="takes no words of the system beside sounds"):
        hearing.prompt_ids(beside_system, media=media)


def test_a_template_of_the_checkpoint_wins_and_a_later_version_has_none(tmp_path: Path) -> None:
    write_tekken(tmp_path, "v15")
    assert Tokenizer.load(tmp_path).own_template == ""
    (tmp_path / "chat_template.jinja").write_text("its own")
    assert Tokenizer.load(tmp_path).own_template == "its own"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"special_tokens": None}, "it is of version v11, and names no special tokens"),
        ({"special_tokens": [{"rank": 32, "token_str": "<s>"}]}, "is none of the first 32 tokens"),
        ({"vocab": [{"rank": 0, "token_bytes": "AA=="}]}, "of its 1 tokens of text 384 are to be used"),
        ({"vocab": [{"rank": 7, "token_bytes": "AA=="}] * 400}, "must have the ranks from 0 to 383"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, r"tekken.json cannot be read: .*token_bytes"),
        ({"config": {"pattern": "a"}}, r"tekken.json cannot be read: .*default_vocab_size"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    write_tekken(tmp_path)
    file = json.loads((tmp_path / "tekken.json").read_text())
    (tmp_path / "tekken.json").write_text(json.dumps(file | changes))
    with pytest.raises(InvalidArgument, match=complaint):
        Tokenizer.load(tmp_path)


def test_a_file_that_costs_too_much_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tekken(tmp_path)
    path = tmp_path / "tekken.json"
    written = path.read_text()
    path.write_text(f'{written[:-1]}, "image": {"[" * 50_000}{"]" * 50_000}}}')
    with pytest.raises(InvalidArgument, match=r"tekken.json cannot be read: maximum recursion"):
        Tokenizer.load(tmp_path)
    path.write_text(written.replace('"default_num_special_tokens": 32', f'"default_num_special_tokens": {1 << 40}'))
    with pytest.raises(InvalidArgument, match="it has 1099511627776 special tokens, and may have 16384"):
        Tokenizer.load(tmp_path)
    path.write_text(written)
    monkeypatch.setattr("charonia.tokenization.tekken_file._MOST_MERGES", 100)
    with pytest.raises(InvalidArgument, match="more than 100 pairs of its tokens make one"):
        Tokenizer.load(tmp_path)


QWEN_ADDED = {"<|endoftext|>": True, "<|end|>": True, "<|user|>": True, "<asr_text>": False}


def test_qwens_words_are_those_of_transformers(tmp_path: Path) -> None:
    write_qwen_words(tmp_path, QWEN_ADDED)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "<|user|>It's<asr_text> 12<|end|>"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_words_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    numbers = write_qwen_words(tmp_path, QWEN_ADDED)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    first = config["added_tokens_decoder"].pop(str(numbers["<|endoftext|>"]))
    path.write_text(json.dumps(config | {"added_tokens_decoder": config["added_tokens_decoder"] | {"9000": first}}))
    with pytest.raises(InvalidArgument, match=r"added_tokens_decoder\.\d+ is '<\|end\|>', which is token \d+ of the"):
        Tokenizer.load(tmp_path)
    path.write_text(json.dumps(config | {"tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(
        NotFound, match=r"no tokenizer.json; of others tekken.json, and vocab.json with merges.txt of Qwen2"
    ):
        Tokenizer.load(tmp_path)
    path.write_text(json.dumps(config))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nnothing here\n")
    with pytest.raises(InvalidArgument, match=r"vocab\.json and merges.txt cannot be read"):
        Tokenizer.load(tmp_path)

"""Media in the text of a prompt: what templates of each kind get, and what stands for a medium in the end."""

import pytest
import tokenizers
from jinja2 import Environment
from tokenizers import models, processors

from charonia.core.errors import InvalidArgument
from charonia.core.media import MediaSource
from charonia.core.request import ChatMessage, Conversation, prompt_media
from charonia.tokenization.chat_template import DEFAULT, ChatTemplate
from charonia.tokenization.media_text import MediaText, expand_media, message_parts
from charonia.tokenization.tokenizer import Tokenizer

BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<see><img></see>{% elif part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}</>{% endfor %}"
)
"""Texts and lists, as Qwen's."""
LISTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}<img>\n{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}</>"
    "{% endfor %}"
)
"""Lists alone, all images before all texts, as Llava's."""
TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TRIMMED = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</>{% endfor %}"
ADDED = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}</>{% endfor %}"
DEAF = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""Lists of texts, in which an image is lost."""
TOKEN = MediaText({"image": "<img>"}, (("image", "(1)"), ("image", "(2)")))


def image(offset: int) -> MediaSource:
    return MediaSource("image", b"x", offset=offset)


def talk(*messages: ChatMessage, **others: bool) -> Conversation:
    return Conversation(messages, **others)


TWO = talk(
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Left or right?", media=(image(0), image(5))),
    ChatMessage("assistant", "Left."),
)


@pytest.mark.parametrize(
    ("source", "takes_text", "takes_parts"),
    [
        (BOTH, True, True),
        (LISTS, False, True),
        (TEXTS, True, False),
        (TRIMMED, True, False),
        (ADDED, True, False),
        (DEAF, True, False),
    ],
)
def test_a_template_says_by_itself_what_it_takes(source: str, takes_text: bool, takes_parts: bool) -> None:
    template = ChatTemplate(source, {})
    assert (template.takes_text, template.takes_parts) == (takes_text, takes_parts)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (BOTH, "<system>Be brief.</><user><see><img></see>Left <see><img></see>or right?</><assistant>Left.</>"),
        (LISTS, "<system>Be brief.</><user><img>\n<img>\nLeft or right?</><assistant>Left.</>"),
        (TEXTS, "<system>Be brief.</><user><img>\nLeft <img>\nor right?</><assistant>Left.</>"),
    ],
)
def test_media_stand_where_the_message_has_them(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(TWO, TOKEN) == text


def test_a_template_gets_what_transformers_would_give_it() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "Left "}, {"type": "image"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [*parts, {"type": "text", "text": "or right?"}]},
        {"role": "assistant", "content": "Left."},
    ]
    wanted = Environment(trim_blocks=True, lstrip_blocks=True).from_string(BOTH).render(messages=messages)
    assert ChatTemplate(BOTH, {}).render(TWO, TOKEN) == wanted


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (BOTH, "<user>ab<see><img></see>cd</>"),
        (LISTS, "<user><img>\nabcd</>"),
        (TEXTS, "<user>a\nb<img>\nc\nd</>"),
        (DEAF, "a\nb<img>\nc\nd"),
    ],
)
def test_texts_beside_a_medium_are_parts_of_their_own(source: str, text: str) -> None:
    message = ChatMessage("user", "a\nbc\nd", media=(image(3),), breaks=(1, 4))
    assert message_parts(message) == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "image"},
        {"type": "text", "text": "c"},
        {"type": "text", "text": "d"},
    ]
    assert ChatTemplate(source, {}).render(talk(message), TOKEN) == text


def test_empty_texts_are_no_parts() -> None:
    message = ChatMessage("user", "\n\na\n\nb\n", media=(image(4),), breaks=(0, 1, 3, 4, 6))
    texts = [part.get("text", "<img>") for part in message_parts(message)]
    assert texts == ["a", "<img>", "b"]


def test_texts_alone_are_lists_where_the_template_takes_nothing_else() -> None:
    hello = talk(ChatMessage("user", "Hello"))
    assert ChatTemplate(LISTS, {}).render(hello) == "<user>Hello</>"
    assert ChatTemplate(BOTH, {}).render(hello) == "<user>Hello</>"


@pytest.mark.parametrize("source", [BOTH, LISTS, TEXTS])
def test_a_message_with_media_can_go_on(source: str) -> None:
    last = ChatMessage("assistant", "It is", media=(image(0),))
    conversation = talk(ChatMessage("user", "What?"), last, add_generation_prompt=False, continue_final_message=True)
    media = MediaText({"image": "<img>"}, (("image", "(1)"),))
    assert ChatTemplate(source, {}).render(conversation, media).endswith("It is")


def test_media_without_a_text() -> None:
    assert ChatTemplate(TEXTS, {}).render(talk(ChatMessage("user", "", media=(image(0),))), TOKEN) == "<user><img></>"


def test_a_text_cannot_pass_for_a_medium() -> None:
    forged = talk(ChatMessage("user", "see <img>", media=(image(0),)))
    with pytest.raises(InvalidArgument, match=r"messages\[0\].content has <img>") as refusal:
        ChatTemplate(BOTH, {}).render(forged, MediaText({"image": "<img>"}, (("image", "(1)"),)))
    assert refusal.value.field == "messages[0].content"


def test_placeholders_take_the_places_in_order() -> None:
    assert expand_media("a<img>b<img>", TOKEN, "messages") == "a(1)b(2)"
    assert expand_media("a<img>", MediaText({"image": "<img>"}, ()), "messages") == "a<img>"
    with pytest.raises(InvalidArgument, match="messages: the prompt has 1 places <img> for 2 images"):
        expand_media("a<img>", TOKEN, "messages")
    both = TOKEN._replace(
        tokens={"image": "<img>", "audio": "<snd>"}, placeholders=(*TOKEN.placeholders, ("audio", "(3)"))
    )
    assert expand_media("a<snd>b<img><img>", both, "messages") == "a(3)b(1)(2)"
    with pytest.raises(InvalidArgument, match="2 places <snd> for 1 sounds"):
        expand_media("<snd><img><img><snd>", both, "messages")


@pytest.mark.parametrize(("template", "begins"), [(TEXTS, 1), ("<s>" + TEXTS, 0)])
def test_a_model_that_sees_gets_what_its_processor_adds(template: str, begins: int) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "<user>": 1, "</>": 2, "hi": 3}, "hi"))
    backend.add_special_tokens(["<s>", "<user>", "</>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokens = {"bos_token": "<s>"}
    tokenizer = Tokenizer(backend, tokens, {DEFAULT: ChatTemplate(template, tokens)})
    chat = talk(ChatMessage("user", "hi"))
    own = tokenizer.prompt_ids(chat)
    assert tokenizer.prompt_ids(chat, media=MediaText({"image": "<img>"}, (), adds_special=True)) == [0] * begins + own
    assert own[-3:] == [1, 3, 2]


def test_the_media_of_a_prompt() -> None:
    assert [medium.offset for medium in prompt_media(TWO)] == [0, 5]
    assert prompt_media("text") == prompt_media((1, 2)) == ()


def test_a_text_that_has_the_places_itself_is_left_as_it_is() -> None:
    written = MediaText({"image": "<img>"}, (("image", ""), ("image", "")))
    assert expand_media("<img><img>|<img>", written, "prompt") == "<img><img>|<img>"
    with pytest.raises(InvalidArgument, match="messages: rows of an image need the image_grid_thw"):
        expand_media("<img>", written, "messages")
    known = MediaText({"image": "<img>"}, (("image", "<img>|<img>"), ("image", "<img>")))
    assert expand_media("<img>a<img>", known, "prompt") == "<img>|<img>a<img>"
    assert expand_media("<img>;<img>a<img>", known, "prompt") == "<img>;<img>a<img>"
    mixed = MediaText({"image": "<img>"}, (("image", ""), ("image", "(1)")))
    with pytest.raises(InvalidArgument, match="prompt: images that come as rows can't stand beside others"):
        expand_media("<img><img>", mixed, "prompt")

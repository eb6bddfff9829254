"""A small vocabulary with the kinds of tokens that models have, and texts followed by matchers token by token."""

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from charonia.core.request import GuidedDecoding
from charonia.engine.grammars.backend import GrammarMatcher
from charonia.engine.grammars.llguidance_backend import LLGuidanceBackend
from charonia.engine.grammars.vocabulary import Vocabulary, build_vocabulary

SIZE = 333
"""More than the tokenizer has: models round up."""

Follow = Callable[[GuidedDecoding, str], tuple[str, GrammarMatcher]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|end|>", "<|stop|>", "<|user|>", "<|channel|>", "<|message|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(['{"name": "value", "name": 1}', "yes, no; nothing at all", "grüße 東京"], trainer)
    made.add_tokens([AddedToken("</think>", special=False), AddedToken("[TOOL]", special=True)])
    return made


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return build_vocabulary(tokenizer, SIZE, (0, 1))


@pytest.fixture(scope="session")
def backend(vocabulary: Vocabulary) -> LLGuidanceBackend:
    return LLGuidanceBackend(vocabulary)


def allowed_tokens(matcher: GrammarMatcher) -> set[int]:
    mask = np.zeros(-(-SIZE // 32), np.int32)
    matcher.fill_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture(scope="session")
def follow(backend: LLGuidanceBackend, tokenizer: Tokenizer) -> Follow:
    """The part of a text that a constraint lets pass, token by token, and the matcher behind it."""

    def run(constraint: GuidedDecoding, text: str) -> tuple[str, GrammarMatcher]:
        matcher, passed = backend.compile(constraint).matcher(), list[int]()
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            if token not in allowed_tokens(matcher):
                break
            assert matcher.accept([token]), matcher.error
            passed.append(token)
        return tokenizer.decode(passed, skip_special_tokens=False), matcher

    return run

"""The rules of times in transcripts, beside those of transformers."""

from random import Random

import numpy as np
import torch
from transformers import GenerationConfig, WhisperTimeStampLogitsProcessor
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from charonia.core.resolved_sampling import LogitsParams, TimestampRules
from charonia.engine.worker.logits_processors import prepare_logits_params, process_logits

PROMPT = 3
END, NO_TIMESTAMPS, VOCABULARY = 20, 24, 40
RULES = TimestampRules(NO_TIMESTAMPS + 1, END, NO_TIMESTAMPS, 4)


def test_times_follow_the_same_rules_as_in_transformers() -> None:
    """Random texts of any shape, some of which no rule would have allowed, in one batch and each by itself."""
    random = Random(1)
    texts = [
        [random.choice([random.randrange(END), random.randrange(RULES.begin, VOCABULARY)]) for _ in range(length)]
        for length in [*range(7)] * 30
    ]
    table = torch.zeros(len(texts), PROMPT + 8, dtype=torch.int32)
    for line, text in enumerate(texts):
        table[line, PROMPT : PROMPT + len(text)] = torch.tensor(text)
    logits = torch.randn(len(texts), VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    params = LogitsParams(suppressed=(3, 7), suppressed_first=(5, END), timestamps=RULES)
    ours = logits.clone()
    rows = np.arange(len(texts))
    positions = np.array([PROMPT + len(text) for text in texts])
    process_logits(ours, [prepare_logits_params(PROMPT, params)] * len(texts), rows, positions, table)

    config = GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id = NO_TIMESTAMPS
    config.max_initial_timestamp_index = RULES.most_initial
    theirs = [
        SuppressTokensAtBeginLogitsProcessor([5, END], PROMPT),
        SuppressTokensLogitsProcessor([3, 7]),
        WhisperTimeStampLogitsProcessor(config, PROMPT),
    ]
    for line, text in enumerate(texts):
        ids = table[line : line + 1, : PROMPT + len(text)].long()
        expected = logits[line : line + 1].clone()
        for process in theirs:
            expected = process(ids, expected)
        assert torch.equal(ours[line], expected[0]), text


def test_rows_without_rules_keep_their_logits() -> None:
    table = torch.zeros(2, PROMPT + 1, dtype=torch.int32)
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(3))
    ours = logits.clone()
    params = [prepare_logits_params(PROMPT, wishes) for wishes in (LogitsParams(), LogitsParams(timestamps=RULES))]
    process_logits(ours, params, np.arange(2), np.array([PROMPT, PROMPT]), table)
    assert torch.equal(ours[0], logits[0])
    assert (ours[1, : RULES.begin] == -torch.inf).all()

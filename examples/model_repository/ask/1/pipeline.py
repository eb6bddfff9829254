"""Answers questions about Python from the pages beside this file: finds passages, quotes the best, lets the demo model
go on from there, and lists what was cited."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from charonia.ensembles import InvalidArgument, Lookup, NamedTensors

from .citations import Citations
from .passages import Passage, read_passages
from .search import WordIndex, fuse

PASSAGES = read_passages(Path(__file__).parent)
WORDS = WordIndex([passage.long_text for passage in PASSAGES])
ENTRIES = [(place, text) for place, each in enumerate(PASSAGES) for text in (each.text, each.title, *each.questions)]
CANDIDATES, CITED = 16, 3
ASIDE = "\n\nThe demo model goes on, which knows the shape of Python and not its meaning:\n\n"
PROMPT = "{passages}\n\n{question} Write it as a Python function."
SAMPLING = {"max_tokens": 64, "temperature": 0.5, "repetition_penalty": 1.2}

_vectors: list[np.ndarray] = []
_making = asyncio.Lock()


async def run(request: NamedTensors, lookup: Lookup) -> AsyncIterator[dict[str, object]]:
    question = request.text("text_input").strip()
    if not question:
        raise InvalidArgument("text_input is empty: ask a question", field="text_input")
    sources = await find(question, lookup)
    titles = [f"{passage.title} ({passage.page})" for passage, _ in sources]
    found = {"sources": titles, "scores": [score for _, score in sources]}
    citations = Citations(titles)
    quote = citations.add(f"{sources[0][0].body} [1]{ASIDE}")
    asked = prompt(question, sources, request)
    if request.item("stream", False):
        yield {"text_output": quote}
        async for answer in lookup("demo").stream(asked):
            if text := citations.add(answer.text("text_output")):
                yield {"text_output": text}
        yield {"text_output": citations.end(), **found}
    else:
        answer = await lookup("demo").infer(asked)
        yield {"text_output": quote + citations.add(answer.text("text_output")) + citations.end(), **found}


async def find(question: str, lookup: Lookup) -> list[tuple[Passage, float]]:
    """The best passages: by words and by vectors, and then by a model that reads each with the question."""
    words, vectors = WORDS.rank(question), await nearest(question, lookup)
    places = list(fuse([(1, words), (1, vectors)]))[:CANDIDATES]
    pairs = {"text_input": [[question]] * len(places), "text_pair": [[PASSAGES[place].long_text] for place in places]}
    ranked = await lookup("reranker", inherit=False).infer(pairs)
    read = [places[each] for each in np.argsort(-ranked["score"].ravel())]
    words, vectors = ([place for place in ranking if place in places] for ranking in (words, vectors))
    fused = fuse([(2, words), (1, vectors), (2, read)])
    return [(PASSAGES[place], score) for place, score in fused.items()][:CITED]


async def nearest(question: str, lookup: Lookup) -> list[int]:
    """The passages by the vector of theirs that is nearest to the question's; their vectors are made once."""
    embedder = lookup("embedder", inherit=False)
    async with _making:
        if not _vectors:
            texts = [[text] for _, text in ENTRIES]
            starts = range(0, len(texts), 128)
            parts = [await embedder.infer({"text_input": texts[start : start + 128]}) for start in starts]
            _vectors.append(np.concatenate([part["embedding"] for part in parts]))
    asked = await embedder.infer({"text_input": question})
    order = np.argsort(-(_vectors[0] @ asked["embedding"][0]))
    return list(dict.fromkeys(ENTRIES[each][0] for each in order))


def prompt(question: str, sources: list[tuple[Passage, float]], request: NamedTensors) -> dict[str, object]:
    """What the demo model is asked: a chat about the passages, sampled as the request says."""
    passages = "\n".join(f"[{number}] {passage.body}" for number, (passage, _) in enumerate(sources, 1))
    asked = PROMPT.format(passages=passages, question=question)
    usual = {name: value for name, value in SAMPLING.items() if name not in request.parameters}
    return {"text_input": f"<|user|>{asked}<|end|><|assistant|>", **usual, **sampling(request)}


def sampling(request: NamedTensors) -> dict[str, object]:
    """The parameters that stand in a tensor; OpenAI's endpoints put them there."""
    try:
        return dict(json.loads(request.text("sampling_parameters", "{}")))
    except (ValueError, TypeError):
        raise InvalidArgument("sampling_parameters is no JSON object", field="sampling_parameters") from None

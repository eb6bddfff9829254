"""Models for a repository, written as a user writes them."""

import shutil
from pathlib import Path

FAKE = {"executor": "fake", "fake_vocab_size": 384}
"""Parameters of a language model that counts: it needs a tokenizer alone."""

HERMES = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}
{% endfor %}assistant:"""
"""A chat template short enough for the tiny model, by which it knows of tools."""

LABELLED = """
name: "{name}"
backend: "identity"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
input {{ name: "INPUT1" data_type: TYPE_STRING dims: [ -1 ] optional: true }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] label_filename: "labels.txt" }}
output {{ name: "OUTPUT1" data_type: TYPE_STRING dims: [ -1 ] }}
"""


def write_config(repository: Path, name: str, config: str, version: str = "1") -> Path:
    """A model directory with this config and a version that is empty so far; returns the version's."""
    (repository / name / version).mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(config)
    return repository / name / version


def write_model(repository: Path, name: str, checkpoint: Path, **parameters: object) -> None:
    """A language model whose version 1 is a copy of `checkpoint`."""
    lines = [f'name: "{name}"', 'backend: "charonia"']
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    shutil.copytree(checkpoint, write_config(repository, name, "\n".join(lines)), dirs_exist_ok=True)


def write_labelled(repository: Path, *names: str) -> None:
    """Models that give back what they get: 16 numbers, of which the first two have labels, and texts."""
    for name in names:
        write_config(repository, name, LABELLED.format(name=name))
        (repository / name / "labels.txt").write_text("zero\none\n")

"""A model's text to reasoning, content and tool calls: the inverse of its chat template.

A reader (`answer_reader.py`) takes text in pieces. Each format is a class or a line of a table (`answer_formats.py`),
made of the steps in `answer_text.py` and `literals.py`.
"""

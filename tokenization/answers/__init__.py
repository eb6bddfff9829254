"""A model's text to reasoning, content and calls of tools: the inverse of its chat template.

A reader (`answer_reader.py`) takes text in pieces of any length. How a model writes its calls and its reasoning is a
class or a line of a table (`answer_formats.py`); what they are all made of is in `answer_text.py` and `literals.py`.
"""

"""A model's text to reasoning, content and tool calls: the inverse of its chat template. Formats are classes or lines
of a table (`answer_formats.py`), made of the steps in `answer_text.py` and `literals.py`."""

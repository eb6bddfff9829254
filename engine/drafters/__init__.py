"""Drafters: what guesses the next tokens of sequences (`Drafter` in scheduler/drafts/speculation.py). A wrong guess
costs time and nothing else. They see token ids; no text, no model, no tensors."""

"""What steps take, learnt from those that were timed: the budget for prompts has no model of it before."""

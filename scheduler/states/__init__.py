"""Recurrent states: which of them a step keeps, and which rows go back to one. The running set asks one object, if
there is one."""

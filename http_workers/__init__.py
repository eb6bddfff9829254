"""Several workers over one hub: processes that own only sockets and text, and the process that owns everything else.

Used where `charonia serve --frontends` is more than 1, and nowhere else. What crosses between the two is in
`messages.py`, how in `link.py`.
"""

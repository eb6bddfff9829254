"""Load for a server: senders for every endpoint, arrival plans, worker processes, figures."""

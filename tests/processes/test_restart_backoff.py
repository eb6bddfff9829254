"""How long a process that keeps dying waits for its next start."""

from charonia.processes.restart_backoff import RestartBackoff


def test_each_loss_doubles_the_delay_up_to_the_longest() -> None:
    backoff = RestartBackoff(0.5, 30.0, stable=5.0)
    assert [backoff.next_delay() for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert [backoff.next_delay(4.9), backoff.next_delay(5.0), backoff.next_delay(1.0)] == [30.0, 0.5, 1.0]


def test_it_never_ends() -> None:
    backoff = RestartBackoff(0.1, 30.0, stable=5.0)
    assert [backoff.next_delay() for _ in range(5000)][-1] == 30.0

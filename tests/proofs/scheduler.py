"""Two million random calls of the scheduler, checked after each: `python -m tests.proofs.scheduler`.

The trials of the tests, longer and more of them. A failure prints the seed that repeats it.
"""

from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from os import cpu_count
from random import Random
from typing import NamedTuple

from cyclopts import App
from rich.progress import Progress

from ..fuzz.scheduler_trial import SchedulerTrial, SchedulerWorld

PER_SEED = 10_000
PER_TRIAL = 2_000

app = App(name="python -m tests.proofs.scheduler", help=__doc__)


class SchedulerResult(NamedTuple):
    """`longest_wait`: the largest share of its allowed wait that a sequence needed."""

    operations: int
    longest_wait: float


def run_trials(seed: int) -> SchedulerResult:
    """At least PER_SEED calls, in worlds drawn from the seed.

    Raises:
        RuntimeError: a check failed; names the seed and the world.
    """
    random, operations, longest_wait = Random(seed), 0, 0.0
    while operations < PER_SEED:
        world = SchedulerWorld.drawn(random)
        trial = SchedulerTrial(world, seed)
        try:
            drive_randomly(trial, random, PER_TRIAL)
        except Exception as broken:
            raise RuntimeError(f"seed {seed}, call {operations + trial.operations}, {world}: {broken!r}") from broken
        operations += trial.operations
        longest_wait = max(longest_wait, trial.longest_wait)
    return SchedulerResult(operations, longest_wait)


@app.default
def main(operations: int = 2_000_000, first_seed: int = 0) -> None:
    """Run the seeds; stops at the first failure."""
    seeds = range(first_seed, first_seed - (-operations // PER_SEED))
    total, longest_wait = 0, 0.0
    with Progress() as progress, ProcessPoolExecutor(cpu_count(), get_context("spawn")) as pool:
        task = progress.add_task("calls, each checked", total=operations)
        try:
            for done in as_completed([pool.submit(run_trials, seed) for seed in seeds]):
                proved = done.result()
                total += proved.operations
                longest_wait = max(longest_wait, proved.longest_wait)
                progress.update(task, completed=total)
        except RuntimeError:
            pool.shutdown(cancel_futures=True)
            raise
    print(f"{total:,} calls, nothing leaked, nobody starved (longest wait {longest_wait:.0%} of the bound)")


def drive_randomly(trial: SchedulerTrial, random: Random, operations: int) -> None:
    """Make random calls until there were `operations` of them, then drain. Busy phases alternate with quiet ones."""
    longest = trial.longest()
    while trial.operations < operations:
        rush = 0.4 if trial.operations // 200 % 2 else 0.05
        dice = random.random()
        if dice < rush and not trial.crowded:
            _arrive(trial, random, longest)
        elif dice > 0.98 and trial.expected:
            trial.leave(random.choice(list(trial.expected)))
        elif random.random() < 0.5:
            trial.schedule()
        else:
            trial.apply()
    trial.drain()


def _arrive(trial: SchedulerTrial, random: Random, longest: int) -> None:
    long = random.random() < trial.world.long_prompts
    prompt = random.randint(1, longest - 1 if long else min(12, longest - 1))
    new = random.randint(0, min(longest - prompt, trial.world.outputs))
    stop = random.randint(1, new + 2) if random.random() < 0.3 else None
    scored = random.random() < 0.2
    family, priority = random.randrange(3), random.choice((0, 0, 1, 2))
    tenant = random.randrange(trial.world.tenants)
    constrained = random.random() < 0.2
    trial.arrive(
        family=family,
        prompt=prompt,
        new=new,
        priority=priority,
        stop=stop,
        tenant=tenant,
        scored=scored,
        constrained=constrained,
        drafts_wanted=random.choice((None, None, 0, 1, 9)),
        adapter=random.randint(0, trial.world.adapters),
    )


if __name__ == "__main__":
    app()

"""Random calls for a scheduler trial: arrivals, aborts, planned steps and their results."""

from random import Random

from .scheduler_trial import SchedulerTrial


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
    guided = random.random() < 0.2
    trial.arrive(
        family=family,
        prompt=prompt,
        new=new,
        priority=priority,
        stop=stop,
        tenant=tenant,
        scored=scored,
        guided=guided,
        drafts_wanted=random.choice((None, None, 0, 1, 9)),
        adapter=random.randint(0, trial.world.adapters),
    )

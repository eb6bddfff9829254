"""One-sided exact tests of counts: how likely chance alone makes as many as were seen, or more."""

from math import exp, lgamma, log, log1p

_NEGLIGIBLE = 1e-16


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """The probability of at least that many successes: of the exact binomial test (Clopper and Pearson, Biometrika 26,
    1934). 1 for no more than the mean, where there is nothing to test."""
    if successes <= trials * probability:
        return 1.0
    if probability <= 0:
        return 0.0
    failures = trials - successes
    chance = exp(_log_choose(trials, successes) + successes * log(probability) + failures * log1p(-probability))
    odds = probability / (1 - probability)
    total = 0.0
    for number in range(successes, trials + 1):
        total += chance
        if chance <= total * _NEGLIGIBLE:
            break
        chance *= (trials - number) / (number + 1) * odds
    return total


def hypergeometric_tail(marked: int, drawn: int, others_marked: int, others: int) -> float:
    """The probability that of all marked ones at least `marked` are among the `drawn`, where `others` are not drawn and
    `others_marked` of them are marked: of Fisher's exact test ("The Design of Experiments", 1935). 1 for no more than
    the mean."""
    all_marked = marked + others_marked
    if marked * (drawn + others) <= all_marked * drawn:
        return 1.0
    ways = _log_choose(drawn, marked) + _log_choose(others, others_marked)
    chance = exp(ways - _log_choose(drawn + others, all_marked))
    total = 0.0
    for number in range(marked, min(drawn, all_marked) + 1):
        total += chance
        if chance <= total * _NEGLIGIBLE:
            break
        left = all_marked - number
        chance *= (drawn - number) * left / ((number + 1) * (others - left + 1))
    return total


def _log_choose(all_: int, some: int) -> float:
    return lgamma(all_ + 1) - lgamma(some + 1) - lgamma(all_ - some + 1)

"""The policy that `PrefillBudget` had before it saw the line, to be compared with."""

from ...scheduler.prefill_budget import (
    IDLE_STEP_SECONDS,
    PrefillBudget,
    PrefillLane,
    StepDemand,
    StepPace,
    StepWork,
)

_LONG_PROMPT_SECONDS, _LONG_PROMPT_SLOWDOWN = 0.5, 1.6
_SHORT_PROMPT_STEP_SECONDS = 0.25


class FormerPace(StepPace):
    """Short prompts make a step a quarter of a second long; long ones, whoever waits, 1.6 times what it is without."""

    def short_prompt_lane(self, tokens: int) -> PrefillLane:
        decoding = self.demand.decoding
        alone = self.model.step_seconds(decoding)
        least = (_LONG_PROMPT_SLOWDOWN - 1) * alone if decoding.decode_tokens else 0.0
        return PrefillLane(self.model, tokens, max(_SHORT_PROMPT_STEP_SECONDS - alone, least))

    def long_prompt_lane(self, work: StepWork, tokens: int) -> PrefillLane:
        others = self.demand.decoding if self.demand.decoding.decode_tokens else work
        alone = self.model.step_seconds(others)
        idle = not (others.decode_tokens or others.prefill_tokens)
        seconds = IDLE_STEP_SECONDS - alone if idle else (_LONG_PROMPT_SLOWDOWN - 1) * alone
        return PrefillLane(self.model, tokens, seconds)


class FormerBudget(PrefillBudget):
    def is_long_prompt(self, tokens: int, context: int) -> bool:
        return self.bounded and self.time_model.prompt_seconds(tokens, context) > _LONG_PROMPT_SECONDS

    def pace(self, demand: StepDemand) -> StepPace:
        return FormerPace(self.time_model, demand) if self.bounded else super().pace(demand)
